// ONNX Runtime in this worker: started once for one provider, then asked to open graphs.
import { asModule, download } from "./files.js";

// x → y, Identity, one float: opened once, so that starting the runtime does not count as loading the model.
const NOTHING = "CAgSADo3ChAKAXgSAXkiCElkZW50aXR5EgFnWg8KAXgSCgoICAESBAoCCAFiDwoBeRIKCggIARIECgIIAUIECgAQDQ==";

/**
 * Download and start ONNX Runtime.
 * @param {object} provider of site.json
 * @param {number} threads of one operator
 * @param {string} base address of the page's folder
 */
export async function startRuntime(provider, threads, base) {
  const files = await Promise.all([provider.script, provider.glue, provider.binary].map((file) => download(file, base)));
  const [script, glue, binary] = files;
  const began = performance.now();
  const ort = await import(asModule(script.bytes));
  ort.env.logLevel = "error";
  ort.env.wasm.numThreads = threads;
  ort.env.wasm.wasmBinary = binary.bytes.buffer;
  ort.env.wasm.wasmPaths = { mjs: asModule(glue.bytes) };
  const executionProviders = [provider.name];
  const nothing = Uint8Array.from(atob(NOTHING), (character) => character.charCodeAt(0));
  const session = await ort.InferenceSession.create(nothing, { executionProviders });
  await session.release();
  return {
    ort,
    executionProviders,
    facts: {
      runtime_download_ms: Math.max(...files.map((file) => file.ms)), // at the same time
      runtime_bytes: files.reduce((sum, file) => sum + file.bytes.length, 0),
      runtime_start_ms: performance.now() - began,
      runtime_from_cache: everyCached(files),
    },
  };
}

/**
 * Download an artifact, open it, and say what each took.
 * @param {object} runtime from `startRuntime`
 * @param {object} artifact of site.json
 * @param {string} base address of the page's folder
 */
export async function openArtifact(runtime, artifact, base) {
  const files = await Promise.all([artifact.graph, ...artifact.weights.map((one) => one.file)].map((file) => download(file, base)));
  const [graph, ...weights] = files;
  const options = { executionProviders: runtime.executionProviders };
  if (weights.length) {
    options.externalData = artifact.weights.map((one, index) => ({ path: one.name, data: weights[index].bytes }));
  }
  const began = performance.now();
  const session = await runtime.ort.InferenceSession.create(graph.bytes, options);
  return {
    session,
    load_ms: performance.now() - began,
    facts: {
      download_ms: Math.max(...files.map((file) => file.ms)),
      download_bytes: files.reduce((sum, file) => sum + file.bytes.length, 0),
      from_cache: everyCached(files),
    },
  };
}

/**
 * Rows of token ids, all of one length, as what the graph takes.
 * @param {number[] | undefined} types of the tokens of all rows; undefined: zeros
 */
export function feeds(ort, artifact, rows, types) {
  const shape = [rows.length, rows[0].length];
  const tensor = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);
  const ids = rows.flat();
  const mask = artifact.masked ? { attention_mask: tensor(ids.map(() => 1)) } : {};
  const typed = artifact.typed ? { token_type_ids: tensor(types ?? ids.map(() => 0)) } : {};
  return { input_ids: tensor(ids), ...mask, ...typed };
}

function everyCached(files) {
  const known = files.map((file) => file.cached);
  return known.includes(null) ? null : known.every(Boolean);
}
