// Making elements. Whatever comes from the bundle becomes text, never markup; characters that act instead of being
// seen become U+FFFD.

// eslint-disable-next-line no-control-regex
const HIDDEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]/g;

export const visible = (text) => String(text).replace(HIDDEN, "\ufffd");

/** An element with attributes and children; strings among them become text. */
export function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : visible(child))));
  return made;
}

/** A form's button starts work, and stops it while it runs. */
export function startOrStop(form, button, start, stop) {
  const name = button.textContent;
  let isRunning = false;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (isRunning) return stop();
    isRunning = true;
    button.textContent = "Stop";
    await start();
    isRunning = false;
    button.textContent = name;
  });
}

/** A box to tick, with its label. */
export function checkbox(name, value, label, { checked = false, disabled = false, hint = null } = {}) {
  const box = make("input", { type: "checkbox", name, value, checked, disabled });
  const words = make("span", {}, label, ...(hint === null ? [] : [" ", make("small", {}, hint)]));
  return make("label", { class: "choice" }, box, words);
}

/** 1.23, 12.3, 123: three digits. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

export const milliseconds = (value) => (value === null || value === undefined ? "–" : `${number(value)} ms`);

export function bytes(value) {
  const [amount, unit] = value >= 2 ** 20 ? [value / 2 ** 20, "MiB"] : [value / 2 ** 10, "KiB"];
  return `${amount.toFixed(1)} ${unit}`;
}

/** A probability as a bar and as a percentage. */
export function meter(probability, label) {
  return [
    make("meter", { min: "0", max: "1", value: String(probability), "aria-label": visible(label) }),
    make("span", { class: "n" }, `${(probability * 100).toFixed(2)}%`),
  ];
}

/** The text with its spans marked; offsets count code points. A screen reader and a mouse tell label and probability. */
export function markSpans(text, spans) {
  const characters = Array.from(text);
  const line = make("p", { class: "spans" });
  let written = 0;
  for (const { start, end, label, probability } of spans) {
    const title = `${label} ${(probability * 100).toFixed(2)}%`;
    const attributes = { title, "data-start": start, "data-end": end, "data-label": label };
    line.append(visible(characters.slice(written, start).join("")),
      make("mark", attributes, characters.slice(start, end).join(""), make("small", {}, ` ${label}`)));
    written = end;
  }
  line.append(visible(characters.slice(written).join("")));
  return line;
}
