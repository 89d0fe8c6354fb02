// The box to try a text.
import { Answerer } from "./jobs.js";
import { make, markSpans, meter, milliseconds, number, startOrStop, visible } from "./show.js";

/** The worker of the artifact that was chosen last. */
class Opened {
  constructor(jobFor) {
    this.jobFor = jobFor;
    this.id = null;
  }

  /** `say` is told of a download. */
  open(artifact, say) {
    if (this.id !== artifact.id) {
      this.answerer?.close();
      this.answerer = new Answerer(this.jobFor(artifact));
      this.id = artifact.id;
      say("Downloading and opening the model …");
    }
    return this.answerer;
  }
}

/**
 * @param {object} site site.json
 * @param {(artifact: object) => object} jobFor what a worker is told to open an artifact
 */
export function setUpTrying(site, jobFor) {
  const section = document.getElementById("try");
  if (site.writing !== null) {
    setUpWriting(section.querySelector("form"), site, jobFor);
    return;
  }
  if (site.labels === null) {
    section.querySelector("form").remove();
    section.append(make("p", { class: "soft" }, site.silent));
    return;
  }
  const form = section.querySelector("form");
  document.getElementById("second").hidden = !site.pairs;
  form.artifact.append(...site.artifacts.map((one) => make("option", { value: one.id }, one.id)));
  const opened = new Opened(jobFor);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const place = document.getElementById("answer");
    const text = form.text.value;
    const pair = site.pairs ? form.pair.value : null;
    if (!text.trim() || (pair !== null && !pair.trim())) {
      place.replaceChildren(make("p", { class: "caution" }, "An empty text has no label. Write something first."));
      return;
    }
    const artifact = site.artifacts.find((one) => one.id === form.artifact.value);
    const answerer = opened.open(artifact, (news) => place.replaceChildren(make("p", { class: "soft" }, news)));
    form.send.disabled = true;
    try {
      const answer = await answerer.answer(text, pair);
      if (answer.spans) showSpans(place, text, answer.spans);
      else showAnswer(place, answer, site);
    } catch (error) {
      opened.id = null; // what failed is opened anew
      place.replaceChildren(make("p", { class: "caution" }, error.message));
    }
    form.send.disabled = false;
  });
}

/** A language model continues the text; the button stops it. */
function setUpWriting(form, site, jobFor) {
  const place = document.getElementById("answer");
  const writers = site.artifacts.filter(({ role }) => role === "decode");
  const say = (text, kind = "soft") => place.lastElementChild.replaceWith(make("p", { class: kind }, text));
  const counted = (count) => `${count} ${count === 1 ? "token" : "tokens"}`;
  const opened = new Opened(jobFor);
  form.querySelector("label").textContent = "Text to continue";
  document.getElementById("writing").hidden = false;
  form.artifact.append(...writers.map((one) => make("option", { value: one.id }, one.id)));
  form.send.textContent = "Write";
  startOrStop(form, form.send, async () => {
    const artifact = writers.find((one) => one.id === form.artifact.value);
    const text = form.text.value;
    const line = make("p", { class: "written" }, make("strong", {}, text));
    place.replaceChildren(line, make("p", {}));
    const answerer = opened.open(artifact, say);
    const settings = { tokens: form.tokens.valueAsNumber, temperature: form.temperature.valueAsNumber };
    try {
      const { tokens, firstMs, ms, prompt } = await answerer.write(text, settings, (piece) => {
        line.append(visible(piece.text));
        say(`${counted(piece.tokens)} …`);
      });
      const speed = tokens > 1 ? `, then ${number((tokens - 1) / ((ms - firstMs) / 1000))} tokens per second` : "";
      say(`${counted(tokens)}; ${counted(prompt)} read in ${milliseconds(firstMs)}${speed}`);
      place.dataset.state = "done";
    } catch (error) {
      opened.id = null; // what failed is opened anew
      say(error.message, "caution");
    }
  }, () => opened.answerer.stop());
}

/** Offsets in a JavaScript string become those of code points. */
function showSpans(place, text, spans) {
  const count = (end) => Array.from(text.slice(0, end)).length;
  const line = markSpans(text, spans.map((span) => ({ ...span, start: count(span.start), end: count(span.end) })));
  const none = spans.length ? [] : [make("p", { class: "soft" }, "No span found.")];
  place.replaceChildren(line, ...none);
}

function showAnswer(place, answer, site) {
  const found = site.labels.map((label, index) => ({ label, probability: answer.probabilities[index] }));
  found.sort((a, b) => b.probability - a.probability);
  const given = found.filter(({ label, probability }, place) => (site.thresholds ? probability >= site.thresholds[label] : place === 0));
  const list = make("dl", { class: "answers" }, ...found.flatMap(({ label, probability }) => [
    make("dt", { class: given.some((one) => one.label === label) && "given" }, label),
    make("dd", { "data-probability": String(probability) }, ...meter(probability, label)),
  ]));
  const read = answer.lastRead === null
    ? make("p", { class: "soft" }, `${answer.tokens} tokens read`)
    : make("p", { class: "caution" }, `Cut: the model read ${answer.tokens} of ${answer.total} tokens, ${answer.left ? `from “${answer.lastRead} …” on` : `up to “… ${answer.lastRead}”`}. The rest did not count.`);
  const none = given.length ? [] : [make("p", {}, "No label reaches its threshold.")];
  place.replaceChildren(list, ...none, read);
  place.dataset.label = given.map((one) => one.label).join(", ");
}
