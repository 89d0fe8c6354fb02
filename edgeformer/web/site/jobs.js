// Workers: one for answers, and a fresh one for every measurement.

/** Address of the page's folder. */
export const BASE = new URL(".", import.meta.url).href;

/**
 * A worker under the page's own content security policy: it gets the policy of whoever made its first script, which a
 * file from a server that sends no headers would not have.
 */
function startWorker() {
  const script = `import ${JSON.stringify(new URL("worker.js", BASE).href)};`;
  const address = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  return new Worker(address, { type: "module" });
}

/**
 * Measure one artifact with one provider in a fresh worker.
 * @param {object} job what the worker is told
 * @param {(message: object) => void} hear is given what it tells: progress, clock, row
 * @returns {{done: Promise<string | null>, stop: () => void}} `done`: why it failed, or null
 */
export function startMeasuring(job, hear) {
  const worker = startWorker();
  let settle;
  const done = new Promise((resolve) => { settle = resolve; });
  const end = (reason) => {
    worker.terminate();
    settle(reason);
  };
  worker.onmessage = ({ data }) => {
    if (data.kind === "done") end(null);
    else if (data.kind === "failed") end(data.reason);
    else hear(data);
  };
  worker.onerror = (event) => end(event.message || "the browser ended the worker");
  worker.postMessage({ ...job, kind: "measure", base: BASE });
  return { done, stop: () => end("stopped") };
}

/** A worker that keeps one artifact open and answers texts, one after the other. */
export class Answerer {
  #worker = startWorker();
  #job;
  #asked = new Map();
  #count = 0;

  constructor(job) {
    this.#job = job;
    this.#worker.onmessage = ({ data }) => {
      if (data.kind === "piece") {
        this.#asked.get(data.number)?.hear(data);
        return;
      }
      if (data.kind === "answer") this.#asked.get(data.number)?.resolve(data);
      if (data.kind === "failed") this.#asked.get(data.number)?.reject(new Error(data.reason));
      this.#asked.delete(data.number);
    };
    this.#worker.onerror = (event) => {
      for (const { reject } of this.#asked.values()) reject(new Error(event.message || "the browser ended the worker"));
      this.#asked.clear();
    };
  }

  /** What the model says of a text, or of two that it reads together. */
  answer(text, pair = null) {
    return this.#ask({ kind: "answer", text, pair });
  }

  /** Continues a text; `hear` is given the pieces. The promise has counts and times. */
  write(text, settings, hear) {
    return this.#ask({ kind: "write", text, ...settings }, hear);
  }

  /** Ends the text that is being written. */
  stop() {
    this.#worker.postMessage({ kind: "stop", number: this.#count });
  }

  #ask(what, hear = () => {}) {
    const number = (this.#count += 1);
    return new Promise((resolve, reject) => {
      this.#asked.set(number, { resolve, reject, hear });
      this.#worker.postMessage({ ...this.#job, ...what, number, base: BASE });
    });
  }

  close() {
    this.#worker.terminate();
  }
}
