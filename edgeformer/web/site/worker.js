// The worker: opens one artifact with one provider, then answers texts or measures. Each measurement has a fresh one.
import { downloadJson } from "./files.js";
import { makeBuffers } from "./inputs.js";
import { clockStep, measure, summarise } from "./measure.js";
import { clockDoubt, coldRow, steadyRow, unavailableRow } from "./rows.js";
import { feeds, openArtifact, startRuntime } from "./runtime.js";
import { locate, spansOf, windowsOf } from "./spans.js";
import { encode, openReader, probabilities } from "./text.js";
import { write } from "./write.js";

let answering = null;
let stopped = 0; // the text that is to end

onmessage = async ({ data }) => {
  try {
    if (data.kind === "stop") {
      stopped = data.number;
      return;
    }
    if (data.kind === "measure") await measureAll(data);
    else if (data.kind === "write") postMessage({ kind: "answer", number: data.number, ...(await writeText(data)) });
    else if (data.kind === "answer") postMessage({ kind: "answer", number: data.number, ...(await answer(data)) });
    postMessage({ kind: "done", number: data.number });
  } catch (error) {
    postMessage({ kind: "failed", number: data.number, reason: said(error) });
  }
};

/** The opened model with its tokenizer; the first text opens them. */
function open(job) {
  answering ??= Promise.all([
    startRuntime(job.provider, job.threads, job.base).then(async (runtime) => ({
      runtime, ...(await openArtifact(runtime, job.artifact, job.base)),
    })),
    openReader(job.tokenizers, job.reader, job.base),
  ]);
  return answering;
}

/** Writes a text, and tells every piece of it. */
async function writeText(job) {
  const [{ runtime, session }, { tokenizer }] = await open(job);
  const hear = (text, tokens) => postMessage({ kind: "piece", number: job.number, text, tokens });
  return write(job, { ort: runtime.ort, session, tokenizer }, hear, () => stopped === job.number);
}

/** What the model says of one text. */
async function answer(job) {
  const [{ runtime, session }, reader] = await open(job);
  if (job.pieces !== null) return { spans: await findSpans(job, runtime, session, reader), lastRead: null };
  const read = encode(reader, job.text, job.pair);
  const outputs = await session.run(feeds(runtime.ort, job.artifact, [read.ids], read.types));
  const found = probabilities(await outputs.logits.getData(), job.several);
  return { probabilities: found, tokens: read.ids.length, total: read.total, lastRead: read.lastRead, left: reader.left };
}

/** Spans of a text of any length: a call for each of its windows. */
async function findSpans(job, runtime, session, { tokenizer, most, suffix }) {
  const ids = Array.from(tokenizer.encode(job.text).ids, Number);
  const tokens = locate(tokenizer, job.text);
  const after = ids.length - suffix;
  const before = after - tokens.length;
  const found = [];
  for (const { begin, end, from, to } of windowsOf(tokens, most - before - suffix)) {
    const row = [...ids.slice(0, before), ...ids.slice(before + begin, before + end), ...ids.slice(after)];
    const outputs = await session.run(feeds(runtime.ort, job.artifact, [row]));
    const logits = await outputs.logits.getData();
    for (let index = from; index < to; index += 1) {
      const start = (before + index - begin) * job.classes.length;
      found.push(probabilities(logits.slice(start, start + job.classes.length), false));
    }
  }
  return spansOf(job.text, tokens, found, job.classes, job.pieces);
}

/** Every shape of one artifact; one that the model refuses costs its own row. */
async function measureAll(job) {
  const tell = (text) => postMessage({ kind: "progress", text });
  tell("starting ONNX Runtime");
  const runtime = await startRuntime(job.provider, job.threads, job.base);
  tell("downloading and opening the model");
  const opened = await openArtifact(runtime, job.artifact, job.base);
  opened.facts = { ...runtime.facts, ...opened.facts };
  const golden = (await downloadJson(job.reader.golden, job.base)).rows;
  const stepMs = clockStep();
  postMessage({ kind: "clock", stepMs });
  for (const [position, shape] of job.shapes.entries()) {
    try {
      await measureShape({ job, runtime, opened, golden, stepMs, tell }, shape, position === 0);
    } catch (error) {
      postMessage({ kind: "row", row: unavailableRow(job, shape, said(error)), samples: [] });
    }
  }
}

async function measureShape(here, shape, cold) {
  const { job, runtime, opened, stepMs, tell } = here;
  const buffers = makeBuffers(here.golden, ...shape).map((rows) => feeds(runtime.ort, job.artifact, rows));
  const call = (index) => opened.session.run(buffers[index % buffers.length]);
  const began = performance.now();
  await call(0);
  const firstMs = performance.now() - began;
  if (cold) {
    const latency = summarise([firstMs], null, job.caveats, null, job.rules);
    postMessage({ kind: "row", row: coldRow(job, shape, latency, opened), samples: [] });
  }
  const size = `${shape[0]} × ${shape[1]}`;
  const sample = await measure(call, job.rules, (phase, calls) => tell(`${size}: ${phase}, ${calls} calls`));
  const { p50 } = summarise(sample.samples, null, [], null, job.rules);
  const clock = clockDoubt(p50, stepMs, self.crossOriginIsolated === true);
  const warnings = [...sample.warnings, ...clock.warnings, ...job.caveats];
  const stable = sample.stable && !clock.useless;
  const latency = summarise(sample.samples, stable, warnings, sample.reason, job.rules);
  const conditions = {
    threads: job.threads,
    buffers: buffers.length,
    warmup_calls: sample.warmup_calls,
    warmup_s: Math.round(sample.warmup_s * 1000) / 1000,
    clock_step_ms: stepMs,
    load_ms: opened.load_ms,
    ...opened.facts,
  };
  postMessage({ kind: "row", row: steadyRow(job, shape, latency, conditions), samples: sample.samples });
}

function said(error) {
  const text = error instanceof Error ? error.message : String(error);
  return text.split("\n")[0].slice(0, 500) || "it failed without a reason";
}
