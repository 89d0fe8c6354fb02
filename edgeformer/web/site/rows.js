// Rows of a report: what was measured, and of everything else why it was not.

const NO_MEMORY = "browsers do not report the memory of a model";
const NO_ENERGY = "browsers do not report energy";

// So many steps of the clock in a typical call, and its times are good to a few percent; fewer, and they are not.
const COARSE = 10;
const FINE = 40;

/** What every row of an artifact says of it. */
function about(artifact, provider, shape, phase) {
  return {
    artifact: artifact.id,
    precision: artifact.precision,
    provider: provider.name,
    where: "host",
    phase,
    batch: shape[0],
    seq: shape[1],
    memory_bytes: { status: "unavailable", reason: NO_MEMORY },
    energy_mj: { status: "unavailable", reason: NO_ENERGY },
    size_bytes: artifact.size_bytes,
  };
}

/** The first call after everything was downloaded and opened. */
export function coldRow(job, shape, latency, opened) {
  return {
    ...about(job.artifact, job.provider, shape, "cold"),
    latency_ms: latency,
    load_ms: opened.load_ms,
    threads: job.provider.counts_threads ? job.threads : null,
    conditions: opened.facts,
  };
}

/** Calls after warm-up. */
export function steadyRow(job, shape, latency, conditions) {
  return {
    ...about(job.artifact, job.provider, shape, "steady"),
    latency_ms: latency,
    throughput_per_s: latency.mean > 0 ? (shape[0] * 1000) / latency.mean : null,
    threads: job.provider.counts_threads ? job.threads : null,
    conditions,
  };
}

export function unavailableRow(job, shape, reason) {
  return {
    ...about(job.artifact, job.provider, shape, "steady"),
    latency_ms: { status: "unavailable", reason },
    threads: job.provider.counts_threads ? job.threads : null,
  };
}

/** What a coarse clock does to times: a warning, and whether it makes them useless. */
export function clockDoubt(typicalMs, stepMs, isolated) {
  if (typicalMs >= stepMs * FINE) return { warnings: [], useless: false };
  const useless = typicalMs < stepMs * COARSE;
  const steps = `the clock of the browser has steps of ${Number(stepMs.toPrecision(2))} ms`;
  const calls = `and a call takes about ${Number(typicalMs.toPrecision(2))} ms`;
  const finer = isolated ? "" : "; cross-origin isolation (COOP and COEP headers) makes it finer";
  return { warnings: [`${steps} ${calls}${finer}`], useless };
}

/** A row of which something outside of the measurement makes doubtful whether it could be had again. */
export function doubted(row, warning) {
  const latency = row.latency_ms;
  if (latency.status !== "measured" || row.phase === "cold") return row;
  return { ...row, latency_ms: { ...latency, stable: false, warnings: [...latency.warnings, warning] } };
}
