// A small picture of a sample: every call in its order, the typical one as a line. No library, no inline style.

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [420, 150, 46, 22, 10];
const MOST_POINTS = 600;

/**
 * @param {number[]} samples milliseconds, in the order of the calls
 * @param {object} latency of the report
 * @param {string} title for those who do not see it
 */
export function drawSample(samples, latency, title) {
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "plot" });
  element("title", {}, svg).textContent = title;
  const sorted = [...samples].sort((a, b) => a - b);
  // Calls above the picture are drawn at its upper edge: a pause of the system must not flatten all the others.
  const top = Math.max(sorted[Math.floor((sorted.length - 1) * 0.95)] * 1.25, latency.p50 * 1.5) || 1;
  const x = (index) => LEFT + ((WIDTH - LEFT - 6) * index) / Math.max(1, samples.length - 1);
  const y = (ms) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(ms, top) / top);
  for (const ms of ticks(top)) {
    element("line", { x1: LEFT, x2: WIDTH - 6, y1: y(ms), y2: y(ms), class: "grid" }, svg);
    text(svg, { x: LEFT - 6, y: y(ms) + 4, "text-anchor": "end" }, String(ms));
  }
  const every = Math.max(1, Math.ceil(samples.length / MOST_POINTS));
  const dots = samples.flatMap((ms, index) => (index % every === 0 ? [`M${x(index).toFixed(1)} ${y(ms).toFixed(1)}h0`] : []));
  element("path", { d: dots.join(""), class: "dots" }, svg);
  element("line", { x1: LEFT, x2: WIDTH - 6, y1: y(latency.p50), y2: y(latency.p50), class: "typical" }, svg);
  text(svg, { x: LEFT, y: HEIGHT - 5 }, "call 1");
  text(svg, { x: WIDTH - 6, y: HEIGHT - 5, "text-anchor": "end" }, samples.length.toLocaleString("en"));
  text(svg, { x: (LEFT + WIDTH) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, "ms per call");
  return svg;
}

function ticks(top) {
  const rough = top / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let count = 0; count * step <= top; count += 1) found.push(Number((count * step).toPrecision(6)));
  return found;
}

function text(parent, attributes, content) {
  element("text", attributes, parent).textContent = content;
}

function element(name, attributes, parent = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}
