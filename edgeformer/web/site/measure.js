// The measuring loop, and what its times can honestly say. As edgeformer/benchmark/measure.py does it: the
// tests compare both. Every number of the rules comes from site.json.

/**
 * Warm up until it settles, then time single calls.
 * @param {(index: number) => Promise<unknown>} call runs the model once; the number rotates its inputs
 * @param {object} rules of site.json
 * @param {(phase: string, calls: number) => void} tell is called once per window of calls
 */
export async function measure(call, rules, tell = () => {}) {
  const warmup = await warmUp(call, rules, tell);
  const samples = await take(call, rules, warmup.times.length, tell);
  const drift = drifted(samples, rules);
  const seconds = sum(samples) / 1000;
  const cut = samples.length < rules.min_calls
    ? `only ${samples.length} of ${rules.min_calls} calls in the time limit of ${seconds.toFixed(0)} s`
    : null;
  return {
    samples,
    stable: warmup.settled && drift === null,
    warmup_calls: warmup.times.length,
    warmup_s: sum(warmup.times) / 1000,
    reason: cut,
    warnings: [warmup.settled ? null : unsettled(warmup.times, rules), drift].filter((text) => text !== null),
  };
}

async function warmUp(call, rules, tell) {
  const times = [];
  const began = performance.now();
  for (;;) {
    times.push(await timeOne(call, times.length));
    const seconds = (performance.now() - began) / 1000;
    const enough = seconds >= rules.warmup_min_s && times.length >= rules.warmup_min_calls;
    const window = times.length % rules.window_calls === 0;
    if (window) tell("warming up", times.length);
    if (enough && window && windowsAgree(times, rules)) return { times, settled: true };
    if (seconds >= rules.warmup_max_s) return { times, settled: false };
  }
}

async function take(call, rules, first, tell) {
  const times = [];
  const began = performance.now();
  for (;;) {
    times.push(await timeOne(call, first + times.length));
    const seconds = (performance.now() - began) / 1000;
    if (times.length % rules.window_calls === 0) tell("measuring", times.length);
    if (seconds >= rules.min_s && times.length >= rules.min_calls) return times;
    if (seconds >= rules.max_s) return times;
  }
}

async function timeOne(call, index) {
  const began = performance.now();
  await call(index);
  return performance.now() - began;
}

/** Whether the medians of the last windows lie within the tolerance of the smallest. */
export function windowsAgree(times, rules) {
  const { window_calls: size, windows: count } = rules;
  if (times.length < size * count) return false;
  const recent = times.slice(-size * count);
  const medians = Array.from({ length: count }, (_, part) => median(recent.slice(part * size, (part + 1) * size)));
  return Math.max(...medians) <= Math.min(...medians) * (1 + rules.window_tolerance);
}

/** Says so when parts of the sample disagree: a clock that throttles, or other work that comes and goes. */
export function drifted(samples, rules) {
  if (samples.length < rules.drift_fewest_calls) return null;
  const count = Math.max(2, Math.min(rules.drift_parts, Math.floor(samples.length / rules.drift_part_calls)));
  const medians = split(samples, count).map(median);
  const low = Math.min(...medians);
  const high = Math.max(...medians);
  if (high <= low * (1 + rules.window_tolerance)) return null;
  const ends = `median ${short(medians[0])} ms at first, ${short(medians.at(-1))} ms at the end`;
  return `drifted: ${ends}, ${short(low)} to ${short(high)} ms over ${count} parts of the sample`;
}

/**
 * The times of single calls as `latency_ms` of a report.
 * @param {number[]} samples milliseconds, at least one
 * @param {boolean | null} stable null for a single call
 * @param {string[]} warnings what was noticed
 * @param {string | null} reason why the sample is smaller than the rules ask for
 * @param {object} rules of site.json
 */
export function summarise(samples, stable, warnings, reason, rules) {
  const sorted = [...samples].sort((a, b) => a - b);
  const n = sorted.length;
  const mean = sum(sorted) / n;
  const squares = sum(sorted.map((value) => (value - mean) ** 2));
  const cv = n > 1 && mean > 0 ? Math.sqrt(squares / (n - 1)) / mean : null;
  const needs = Object.entries(rules.percentile_needs);
  const found = Object.fromEntries(needs.map(([p, needed]) => [`p${p}`, n >= needed ? quantile(sorted, p / 100) : null]));
  const absent = needs.filter(([, needed]) => n < needed).map(([p, needed]) => `p${p} needs ${needed}`);
  const missing = absent.length ? `${n} ${n === 1 ? "call" : "calls"}: ${absent.join(", ")}` : null;
  const noisy = cv !== null && cv > rules.noisy_cv
    ? [`noisy: the calls have a coefficient of variation of ${percent(cv)}, above ${percent(rules.noisy_cv)}`]
    : [];
  const points = Array.from({ length: rules.quantiles }, (_, index) => quantile(sorted, index / (rules.quantiles - 1)));
  return {
    status: "measured",
    p50: quantile(sorted, 0.5),
    p90: null,
    p95: null,
    p99: null,
    ...found,
    mean,
    min: sorted[0],
    cv,
    n,
    stable,
    reason: [reason, missing].filter(Boolean).join("; ") || null,
    warnings: [...warnings, ...noisy],
    quantiles_ms: n > 1 ? points.map((value) => Math.round(value * 1e6) / 1e6) : [],
  };
}

/** Between the two nearest values, as numpy does it. */
export function quantile(sorted, share) {
  const place = (sorted.length - 1) * share;
  const below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (place - below);
}

/** The clock's smallest step in milliseconds: browsers make it coarse, so that pages cannot spy on each other. */
export function clockStep(lookMs = 30) {
  const began = performance.now();
  let smallest = Infinity;
  for (let last = began; last - began < lookMs;) {
    const now = performance.now();
    if (now > last) {
      smallest = Math.min(smallest, now - last);
      last = now;
    }
  }
  return smallest;
}

function unsettled(times, rules) {
  const seconds = (sum(times) / 1000).toFixed(1);
  if (times.length < rules.windows * rules.window_calls) {
    return `warm-up was too short to judge: only ${times.length} calls in ${seconds} s`;
  }
  return `did not settle: after ${seconds} s of warm-up (${times.length} calls), the medians of the last ${rules.windows} `
    + `windows of ${rules.window_calls} calls differ by more than ${(rules.window_tolerance * 100).toFixed(0)}%`;
}

function median(values) {
  return quantile([...values].sort((a, b) => a - b), 0.5);
}

/** Parts whose lengths differ by one at most, the longer ones first. */
function split(values, count) {
  const [least, more] = [Math.floor(values.length / count), values.length % count];
  let start = 0;
  return Array.from({ length: count }, (_, part) => values.slice(start, (start += least + (part < more ? 1 : 0))));
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function short(value) {
  return String(Number(value.toPrecision(3)));
}

function percent(share) {
  return `${(share * 100).toFixed(1)}%`;
}
