// The report on the page: tables, a picture of each sample, and what else there is to say.
import { drawSample } from "./plot.js";
import { bytes, make, milliseconds, number, visible } from "./show.js";

const STEADY = [
  ["typical (p50)", (row) => milliseconds(row.latency_ms.p50)],
  ["", (row) => stateOf(row)],
  ["p90", (row) => milliseconds(row.latency_ms.p90)],
  ["p95", (row) => milliseconds(row.latency_ms.p95)],
  ["p99", (row) => milliseconds(row.latency_ms.p99)],
  ["varies by", (row) => (row.latency_ms.cv == null ? "–" : `${(row.latency_ms.cv * 100).toFixed(1)}%`)],
  ["calls", (row) => (row.latency_ms.n ? row.latency_ms.n.toLocaleString("en") : "–")],
  ["per second", (row) => number(row.throughput_per_s)],
  ["size", (row) => bytes(row.size_bytes)],
];

// In the order in which it happens; the browser may have what it downloads already.
const COLD = [
  ["get ONNX Runtime", (row) => downloaded(row, "runtime_download_ms", "runtime_bytes", "runtime_from_cache")],
  ["start it", (row) => milliseconds(row.conditions.runtime_start_ms)],
  ["get the model", (row) => downloaded(row, "download_ms", "download_bytes", "from_cache")],
  ["open it", (row) => milliseconds(row.load_ms)],
  ["first call", (row) => milliseconds(row.latency_ms.p50)],
];

/** Calls after warm-up, and what comes before the first answer. */
export function showTables(steady, cold, rows, site) {
  show(steady, STEADY, rows.filter((row) => row.phase !== "cold"), site);
  show(cold, COLD, rows.filter((row) => row.phase === "cold"), site);
}

function show(place, columns, rows, site) {
  const titles = columns.map(([title]) => make("th", { scope: "col", class: "n" }, title));
  const head = make("tr", {}, make("th", { scope: "col" }, "artifact"), ...titles);
  const body = rows.map((row) => {
    const how = make("small", {}, `${runtimeOf(row, site)}, ${row.batch} × ${row.seq}`);
    const name = make("th", { scope: "row" }, row.artifact, make("br"), how);
    const cells = columns.map(([, text]) => make("td", { class: "n" }, text(row)));
    return make("tr", { class: row.latency_ms.status }, name, ...cells);
  });
  place.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function downloaded(row, ms, size, cached) {
  const from = row.conditions[cached] ? ", cached" : "";
  return `${milliseconds(row.conditions[ms])} (${bytes(row.conditions[size])}${from})`;
}

/** One more picture, of one row's sample. */
export function addPicture(place, row, samples, site) {
  const name = `${row.artifact}, ${runtimeOf(row, site)}, ${row.batch} × ${row.seq}`;
  const latency = row.latency_ms;
  const quality = latency.stable ? "stable" : "not stable";
  const caption = `typical ${milliseconds(latency.p50)}; ${latency.n.toLocaleString("en")} calls, ${quality}`;
  const picture = drawSample(samples, latency, visible(`${name}: ${caption}`));
  const said = [...latency.warnings, ...(latency.reason ? [latency.reason] : [])];
  const list = said.length ? [make("ul", {}, ...said.map((text) => make("li", {}, text)))] : [];
  place.append(make("figure", {}, make("h3", {}, name), picture, make("figcaption", {}, caption, ...list)));
}

/** What holds for all rows, and why some were not measured; what belongs to one sample stands below its picture. */
export function showNotes(place, report, site) {
  const lines = new Set(report.notes);
  for (const row of report.rows) {
    const name = `${row.artifact}, ${runtimeOf(row, site)}, ${row.batch} × ${row.seq}`;
    if (row.latency_ms.status === "unavailable") lines.add(`${name}: not measured: ${row.latency_ms.reason}`);
    lines.add(`memory not measured: ${row.memory_bytes.reason}`);
    lines.add(`energy not measured: ${row.energy_mj.reason}`);
  }
  place.replaceChildren(...[...lines].map((text) => make("li", {}, text)));
}

/** Name and value of everything that the browser tells, and the names of what it does not. */
export function showFacts(place, facts) {
  const names = { device_memory_gib: "memory (GiB, rounded by the browser)", cores: "logical processors", gpu: "graphics" };
  const named = Object.entries(facts).map(([name, value]) => [names[name] ?? name.replaceAll("_", " "), value]);
  const told = named.filter(([, value]) => value !== null);
  const shown = (value) => (value === true ? "yes" : value === false ? "no" : String(value));
  const lines = told.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, shown(value))]);
  const hidden = named.filter(([, value]) => value === null).map(([name]) => name);
  if (hidden.length) lines.push(make("dt", {}, "not available"), make("dd", {}, hidden.join(", ")));
  place.replaceChildren(...lines);
}

function runtimeOf(row, site) {
  const short = site.providers.find((one) => one.name === row.provider)?.short ?? row.provider;
  const threads = row.threads ? `, ${row.threads} ${row.threads === 1 ? "thread" : "threads"}` : "";
  return `${short}${threads}`;
}

function stateOf(row) {
  if (row.latency_ms.status === "unavailable") return "unavailable";
  return row.latency_ms.stable === false ? "unstable" : "";
}
