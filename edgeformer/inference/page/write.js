"use strict";
const [form, text, note, send, written] = ["form", "text", "note", "send", "written"].map((id) => document.getElementById(id));
let chat = false;
let running = null;

fetch("healthz")
  .then((response) => response.json())
  .then((facts) => {
    document.getElementById("model").textContent = document.title = `${facts.run} · ${facts.artifact}`;
    chat = facts.chat;
    if (!chat) return;
    document.getElementById("label").textContent = "Message";
    text.value = "What is the capital of France?";
  })
  .catch(() => say("the server does not answer", true));

function say(content, wrong = false) {
  note.textContent = content;
  note.className = wrong ? "error" : "";
}

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
  const question = chat ? { messages: [{ role: "user", content: text.value }] } : { prompt: text.value };
  const response = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...question, ...settings }), signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let started = 0;
  for await (const { choices: [choice], usage, error } of documentsOf(response)) {
    if (error) throw new Error(error.message);
    started ||= performance.now();
    if (choice) written.append(choice.text ?? choice.delta.content ?? "");
    if (usage) {
      const speed = (usage.completion_tokens - 1) / ((performance.now() - started) / 1000);
      say(`${usage.completion_tokens} tokens${usage.completion_tokens > 1 ? `, ${speed.toFixed(1)} per second` : ""}`);
    }
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return running.abort();
  running = new AbortController();
  send.textContent = "Stop";
  written.replaceChildren();
  if (!chat) written.append(Object.assign(document.createElement("b"), { textContent: text.value }));
  say("…");
  try {
    await write(running.signal);
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  }
  running = null;
  send.textContent = "Write";
});
