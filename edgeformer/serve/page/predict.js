// Texts, one per line, and the model's answers in a table.
import { introduce, post, say } from "./server.js";
import { make, markSpans, meter } from "./show.js";

const [form, texts, send, table] = ["form", "texts", "send", "answers"].map((id) => document.getElementById(id));

function answerOf({ error, vector, spans, label, score, ...others }) {
  if (error) return make("span", { class: "caution" }, error);
  if (vector) return `vector of ${vector.length}: ${vector.slice(0, 3).map((value) => value.toFixed(3))}, …`;
  if (spans) return [...new Set(spans.map((span) => span.label))].join(", ") || "no span";
  return label ?? score?.toFixed(4) ?? JSON.stringify(others);
}

function show(prediction) {
  const { text, spans, truncated, probability } = prediction;
  const cells = [
    [answerOf(prediction)],
    probability === undefined ? ["–"] : meter(probability, prediction.label ?? ""),
    [spans ? markSpans(text, spans) : text + (truncated ? " (cut to the model's length)" : "")],
  ];
  table.tBodies[0].append(make("tr", {}, ...cells.map((content) => make("td", {}, ...content))));
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const lines = texts.value.split("\n").filter((line) => line.trim());
  if (!lines.length) return say("type a text", true);
  send.disabled = true;
  say("…");
  const started = performance.now();
  try {
    const { predictions } = await (await post("predict", { texts: lines })).json();
    table.tBodies[0].replaceChildren();
    predictions.forEach(show);
    table.hidden = false;
    const count = `${lines.length} ${lines.length === 1 ? "text" : "texts"}`;
    say(`${count} in ${(performance.now() - started).toFixed(0)} ms, network included`);
  } catch (error) {
    say(error.message, true);
  } finally {
    send.disabled = false;
  }
});
introduce();
if (new URLSearchParams(location.search).has("try")) form.requestSubmit();
