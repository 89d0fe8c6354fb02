// A text that the model continues, or a message that it answers; the pieces are shown as they arrive.
import { introduce, post, say } from "./server.js";
import { make, startOrStop, visible } from "./show.js";

const [form, text, send, written] = ["form", "text", "send", "written"].map((id) => document.getElementById(id));
let isChat = false;
let running;

/** Documents of a stream of server-sent events. */
async function* documentsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the server ended the stream");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function write(signal) {
  const settings = {
    max_tokens: document.getElementById("tokens").valueAsNumber,
    temperature: document.getElementById("temperature").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true },
  };
  const question = isChat ? { messages: [{ role: "user", content: text.value }] } : { prompt: text.value };
  const response = await post(isChat ? "v1/chat/completions" : "v1/completions", { ...question, ...settings }, signal);
  let started = 0;
  for await (const { choices: [choice], usage, error } of documentsOf(response)) {
    if (error) throw new Error(error.message);
    started ||= performance.now();
    if (choice) written.append(visible(choice.text ?? choice.delta.content ?? ""));
    if (usage) {
      const speed = (usage.completion_tokens - 1) / ((performance.now() - started) / 1000);
      say(`${usage.completion_tokens} tokens${usage.completion_tokens > 1 ? `, ${speed.toFixed(1)} per second` : ""}`);
    }
  }
}

startOrStop(form, send, async () => {
  running = new AbortController();
  written.replaceChildren(...(isChat ? [] : [make("strong", {}, text.value)]));
  say("…");
  try {
    await write(running.signal);
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  }
}, () => running.abort());

introduce(({ chat }) => {
  isChat = chat;
  if (!isChat) return;
  document.getElementById("label").textContent = "Message";
  text.value = "What is the capital of France?";
});
