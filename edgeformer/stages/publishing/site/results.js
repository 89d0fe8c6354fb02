// The report on the page: a table, a picture of each sample, and what else there is to say.
import { drawSample } from "./plot.js";
import { bytes, make, milliseconds, number, visible } from "./show.js";

const COLUMNS = [
  ["artifact", false, (row) => row.artifact],
  ["runtime", false, (row, site) => runtimeOf(row, site)],
  ["batch × tokens", true, (row) => `${row.batch} × ${row.seq}`],
  ["first call", true, (row, site, first) => milliseconds(first)],
  ["typical (p50)", true, (row) => milliseconds(row.latency_ms.p50)],
  ["p90", true, (row) => milliseconds(row.latency_ms.p90)],
  ["p95", true, (row) => milliseconds(row.latency_ms.p95)],
  ["p99", true, (row) => milliseconds(row.latency_ms.p99)],
  ["varies by", true, (row) => (row.latency_ms.cv == null ? "–" : `${(row.latency_ms.cv * 100).toFixed(1)}%`)],
  ["calls", true, (row) => (row.latency_ms.n ? row.latency_ms.n.toLocaleString("en") : "–")],
  ["per second", true, (row) => number(row.throughput_per_s)],
  ["size", true, (row) => bytes(row.size_bytes)],
  ["", false, (row) => stateOf(row)],
];

/** The rows as a table. Cold rows stand in the column `first call` of the steady row after them. */
export function showTable(place, rows, site) {
  const head = make("tr", {}, ...COLUMNS.map(([title, right]) => make("th", { scope: "col", class: right && "n" }, title)));
  const body = make("tbody");
  let first = null;
  for (const row of rows) {
    if (row.phase === "cold") {
      first = row.latency_ms.p50;
      continue;
    }
    const cells = COLUMNS.map(([title, right, text], index) =>
      make(index ? "td" : "th", { scope: index ? null : "row", class: right && "n" }, text(row, site, first)));
    body.append(make("tr", { class: row.latency_ms.status }, ...cells));
    first = null;
  }
  place.replaceChildren(make("table", {}, make("thead", {}, head), body));
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

/** Name and value of everything that the browser tells. */
export function showFacts(place, facts) {
  const names = { device_memory_gib: "memory (GiB, rounded by the browser)", cores: "logical processors", gpu: "graphics" };
  const lines = Object.entries(facts).flatMap(([name, value]) => [
    make("dt", {}, names[name] ?? name.replaceAll("_", " ")),
    make("dd", {}, value === null ? "not told" : value === true ? "yes" : value === false ? "no" : String(value)),
  ]);
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
