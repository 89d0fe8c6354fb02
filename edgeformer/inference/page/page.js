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

function show(prediction) {
  const row = table.tBodies[0].insertRow();
  if (prediction.error) cell(row, prediction.error, "error");
  else if (prediction.vector) cell(row, `vector of ${prediction.vector.length}: ${prediction.vector.slice(0, 3).map((x) => x.toFixed(3))}, …`);
  else cell(row, prediction.label ?? JSON.stringify(prediction));
  const probability = prediction.probability ?? null;
  if (probability === null) cell(row, "–");
  else {
    const meter = document.createElement("meter");
    meter.value = probability;
    const shown = document.createElement("div");
    shown.append(probability.toFixed(3), meter);
    cell(row, shown);
  }
  cell(row, prediction.text + (prediction.truncated ? " (cut to the model's length)" : ""));
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
    say(`${lines.length} in ${(performance.now() - started).toFixed(0)} ms, with the way there and back`);
  } catch (error) {
    say(error.message, true);
  } finally {
    send.disabled = false;
  }
});
if (new URLSearchParams(location.search).has("try")) form.requestSubmit();
