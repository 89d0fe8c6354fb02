// The page: reads site.json, lets people try and measure, and offers the report. It sends nothing anywhere.
import { describeBrowser, threadLimit, whyNoWebGpu } from "./browser.js";
import { startMeasuring } from "./jobs.js";
import { buildReport, changedRules, notesOf } from "./report.js";
import { addPicture, showFacts, showNotes, showTables } from "./results.js";
import { doubted, unavailableRow } from "./rows.js";
import { bytes, checkbox, make } from "./show.js";
import { setUpTrying } from "./try.js";

const byId = (id) => document.getElementById(id);
const MIXED = "WebAssembly computes the operators that WebGPU lacks; ONNX Runtime does not report which";
const SOFTWARE = "the processor computes WebGPU here, because the browser has only a software adapter";

class Page {
  constructor(site, facts) {
    this.site = site;
    this.facts = facts;
    this.form = byId("measure").querySelector("form");
    this.running = null;
    this.address = URL.createObjectURL(new Blob());
  }

  show() {
    const { site, facts, form } = this;
    byId("facts").textContent = `${site.parameters.toLocaleString("en")} parameters · ${site.noun} · made ${site.created.slice(0, 10)}`;
    byId("cautions").append(...site.cautions.map((text) => make("p", { class: "caution" }, make("strong", {}, text))));
    this.measured = site.artifacts.filter(({ role }) => role !== "decode");
    byId("measure").hidden = !this.measured.length;
    byId("artifacts").append(...this.measured.map((one, index) =>
      checkbox("artifact", one.id, one.id, { checked: index === 0 || one.precision === "int8", hint: bytes(one.size_bytes) })));
    byId("providers").append(...site.providers.map((one) => {
      const why = one.counts_threads ? null : whyNoWebGpu(facts);
      return checkbox("provider", one.name, one.label, { checked: one.counts_threads, disabled: why !== null, hint: why });
    }));
    const most = threadLimit(facts);
    form.threads.max = most;
    form.threads.value = Math.max(1, Math.min(4, Math.ceil(most / 2)));
    if (most === 1) byId("threads-hint").textContent = "several threads need a server that sends COOP and COEP headers";
    form.batch.value = [...new Set(site.shapes.map(([batch]) => batch))].join(", ");
    form.seq.value = [...new Set(site.shapes.map(([, seq]) => seq))].join(", ");
    form.elements.title.placeholder = facts.model ?? "";
    showFacts(byId("browser"), facts);
    const left = site.left_out.map((one) => make("li", {}, `${one.artifact}: ${one.reason}`));
    if (left.length) byId("left-out").replaceChildren(make("p", {}, "Not in this page:"), make("ul", {}, ...left));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.measure();
    });
    setUpTrying(site, (artifact) => this.jobOf(artifact, site.providers[0], Number(form.threads.value)));
  }

  jobOf(artifact, provider, threads) {
    const { tokenizers, readers, writing } = this.site;
    const longest = this.site.max_positions ?? Infinity;
    const caveats = provider.counts_threads ? [] : [MIXED, ...(this.facts.gpu_in_software ? [SOFTWARE] : [])];
    const { thresholds, pieces, labels: classes } = this.site;
    return { artifact, provider, threads, tokenizers, reader: readers[artifact.reader], several: thresholds !== null, pieces, classes, writing, longest, caveats };
  }

  /** What the form says; throws with what is wrong. */
  asked() {
    const { site, form } = this;
    const chosen = (name) => new Set(new FormData(form).getAll(name));
    const [artifacts, providers] = [chosen("artifact"), chosen("provider")];
    const [batches, seqs] = [wholeNumbers(form.batch.value, "batch sizes"), wholeNumbers(form.seq.value, "tokens")];
    const longest = site.max_positions ?? Infinity;
    if (!artifacts.size || !providers.size) throw new Error("Choose at least one artifact and one runtime.");
    if (Math.max(...seqs) > longest) throw new Error(`The model takes at most ${longest} tokens.`);
    const shapes = batches.flatMap((batch) => seqs.map((seq) => [batch, seq]));
    const pairs = this.measured.filter((one) => artifacts.has(one.id)).flatMap((artifact) =>
      site.providers.filter((one) => providers.has(one.name)).map((provider) => [artifact, provider]));
    return { shapes, pairs, threads: Number(form.threads.value) || 1, title: form.elements.title.value, strict: form.strict.checked };
  }

  async measure() {
    let asked;
    try {
      asked = this.asked();
    } catch (error) {
      byId("progress").textContent = error.message;
      return;
    }
    const { site, facts, form } = this;
    const usual = { ...site.rules, ...(asked.strict ? site.rules.strict : {}) };
    const rules = { ...usual, ...changesInAddress(usual) };
    const changed = changedRules(rules, usual);
    const about = { title: asked.title, threads: asked.threads, stepMs: null, notes: notesOf(facts, changed) };
    const rows = [];
    byId("pictures").replaceChildren();
    byId("report").hidden = true;
    form.go.textContent = "Stop";
    byId("try").inert = true; // an answer in between would be measured, too
    this.running = { stop: () => {} };
    const keepsAwake = await navigator.wakeLock?.request("screen").catch(() => null);
    for (const [artifact, provider] of asked.pairs) {
      if (!this.running) break;
      const job = { ...this.jobOf(artifact, provider, provider.counts_threads ? asked.threads : 1), shapes: asked.shapes, rules };
      await this.measureOne(job, rows, about, changed);
      this.publish(rows, about);
    }
    keepsAwake?.release();
    const finished = this.running !== null;
    this.running = null;
    form.go.textContent = "Measure";
    byId("try").inert = false;
    byId("progress").textContent = finished ? "Done." : "Stopped. The finished rows are in the report.";
    byId("progress").dataset.state = finished ? "done" : "stopped";
  }

  /** One artifact with one provider, in a fresh worker. */
  async measureOne(job, rows, about, changed) {
    const measured = new Set();
    let hidden = document.hidden;
    const watch = () => { hidden ||= document.hidden; };
    document.addEventListener("visibilitychange", watch);
    const work = startMeasuring(job, (message) => {
      if (message.kind === "progress") byId("progress").textContent = `${job.artifact.id}, ${job.provider.label}: ${message.text}`;
      if (message.kind === "clock") about.stepMs = message.stepMs;
      if (message.kind !== "row") return;
      let { row } = message;
      if (hidden) row = doubted(row, "the page was in the background during the measurement");
      if (changed !== null) row = doubted(row, changed);
      rows.push(row);
      if (row.phase === "steady") measured.add(String([row.batch, row.seq]));
      if (message.samples.length) addPicture(byId("pictures"), row, message.samples, this.site);
      this.publish(rows, about);
      hidden = document.hidden;
    });
    this.running = work;
    const reason = await work.done;
    document.removeEventListener("visibilitychange", watch);
    if (reason === null || this.running === null) return;
    for (const shape of job.shapes.filter((one) => !measured.has(String(one)))) rows.push(unavailableRow(job, shape, reason));
  }

  stop() {
    const { running } = this;
    this.running = null;
    running.stop();
  }

  /** Table, notes and the file, as far as it is measured. */
  publish(rows, about) {
    byId("report").hidden = !rows.length;
    const report = buildReport(this.site, this.facts, rows, about);
    showTables(byId("table"), byId("cold"), rows, this.site);
    showNotes(byId("notes"), report, this.site);
    URL.revokeObjectURL(this.address);
    this.address = URL.createObjectURL(new Blob([`${JSON.stringify(report, null, 2)}\n`], { type: "application/json" }));
    byId("download").href = this.address;
  }
}

/** `?min_s=0.5`: rules that are changed on purpose; the report says so. */
function changesInAddress(usual) {
  const given = [...new URLSearchParams(location.search)].map(([name, value]) => [name, Number(value)]);
  return Object.fromEntries(given.filter(([name, value]) => typeof usual[name] === "number" && Number.isFinite(value)));
}

function wholeNumbers(text, what) {
  const numbers = text.split(",").map((part) => Number(part.trim()));
  if (numbers.some((one) => !Number.isInteger(one) || one < 1 || one > 65536)) {
    throw new Error(`Write ${what} as integers separated by commas, for instance 1, 16.`);
  }
  return [...new Set(numbers)];
}

async function start() {
  try {
    const response = await fetch(new URL("site.json", import.meta.url));
    if (!response.ok) throw new Error(`site.json: the server answered ${response.status}`);
    const page = new Page(await response.json(), await describeBrowser());
    page.show();
    byId("starting").remove();
    byId("main").hidden = false;
  } catch (error) {
    byId("starting").textContent = `This page cannot start: ${error.message}`;
  }
}

await start();
