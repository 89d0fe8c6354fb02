// What both pages of a server have: its name, a line for messages, and questions as JSON.
import { visible } from "./show.js";

const note = document.getElementById("note");

/** Shows a message in place of the last one. */
export function say(text, isError = false) {
  note.textContent = visible(text);
  note.className = isError ? "caution" : "soft";
}

/** Shows which model answers; `use` is given what /healthz says. */
export async function introduce(use = () => {}) {
  try {
    const facts = await (await fetch("healthz")).json();
    document.getElementById("model").textContent = document.title = visible(`${facts.run} · ${facts.artifact}`);
    use(facts);
  } catch {
    say("the server does not answer", true);
  }
}

/** The response to a question; an error of the server is thrown. */
export async function post(path, question, signal = undefined) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(question), signal });
  if (response.ok) return response;
  const { error } = await response.json();
  throw new Error(error.message ?? error);
}
