"use strict";
const [form, texts, note, send, table] = ["form", "texts", "note", "send", "answers"].map((id) => document.getElementById(id));

fetch("healthz")
  .then((response) => response.json())
  .then(({ run, artifact }) => {
    document.getElementById("model").textContent = document.title = `${run} · ${artifact}`;
  })
  .catch(() => say("the server does not answer", true));

function say(text, wrong = false) {
  note.textContent = text;
  note.className = wrong ? "error" : "";
}

function cell(row, content, kind = "") {
  const made = row.insertCell();
  made.append(content);
  made.className = kind;
}

/** The text with its spans marked. Offsets count code points, which are up to two characters of a string. */
function marked({ text, spans }) {
  const characters = Array.from(text);
  const line = document.createDocumentFragment();
  let written = 0;
  for (const { start, end, label, probability } of spans) {
    const mark = document.createElement("mark");
    mark.title = `${label} ${probability.toFixed(3)}`;
    mark.append(characters.slice(start, end).join(""));
    line.append(characters.slice(written, start).join(""), mark);
    written = end;
  }
  line.append(characters.slice(written).join(""));
  return line;
}

function show(prediction) {
  const row = table.tBodies[0].insertRow();
  if (prediction.error) cell(row, prediction.error, "error");
  else if (prediction.vector) cell(row, `vector of ${prediction.vector.length}: ${prediction.vector.slice(0, 3).map((x) => x.toFixed(3))}, …`);
  else if (prediction.spans) cell(row, [...new Set(prediction.spans.map(({ label }) => label))].join(", ") || "no span");
  else cell(row, prediction.label ?? prediction.score?.toFixed(4) ?? JSON.stringify(prediction));
  const probability = prediction.probability ?? null;
  if (probability === null) cell(row, "–");
  else {
    const meter = document.createElement("meter");
    meter.value = probability;
    const shown = document.createElement("div");
    shown.append(probability.toFixed(3), meter);
    cell(row, shown);
  }
  cell(row, prediction.spans ? marked(prediction) : prediction.text + (prediction.truncated ? " (cut to the model's length)" : ""));
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const lines = texts.value.split("\n").filter((line) => line.trim());
  if (!lines.length) return say("type a text", true);
  send.disabled = true;
  say("…");
  const started = performance.now();
  try {
    const body = JSON.stringify({ texts: lines });
    const response = await fetch("predict", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    table.tBodies[0].replaceChildren();
    answer.predictions.forEach(show);
    table.hidden = false;
    const count = `${lines.length} ${lines.length === 1 ? "text" : "texts"}`;
    say(`${count} in ${(performance.now() - started).toFixed(0)} ms, network included`);
  } catch (error) {
    say(error.message, true);
  } finally {
    send.disabled = false;
  }
});
if (new URLSearchParams(location.search).has("try")) form.requestSubmit();
