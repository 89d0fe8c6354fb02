// A language model writes: the decode graph is called for the prompt, then once per token with the caches of the last call.

const INCOMPLETE = "\ufffd"; // what the tokenizer makes of bytes that are no whole character (yet)
const CONTEXT = 8; // earlier tokens that are decoded with new ones: the bytes of a character, the space before a word

/** Decodes tokens piece by piece, and never returns a part of a character. */
class TextStream {
  constructor(tokenizer, prompt) {
    this.tokenizer = tokenizer;
    this.ids = [...prompt];
    this.decoded = prompt.length;
    this.start = Math.max(0, this.decoded - CONTEXT);
  }

  push(token) {
    this.ids.push(token);
    const decode = (end) => this.tokenizer.decode(this.ids.slice(this.start, end), { skip_special_tokens: true });
    const [previous, text] = [decode(this.decoded), decode(this.ids.length)];
    if (text.endsWith(INCOMPLETE)) return "";
    this.decoded = this.ids.length;
    this.start = Math.max(this.start, this.decoded - CONTEXT);
    return text.slice(previous.length);
  }
}

/** The likeliest token, or one drawn with its probability at this temperature. */
export function pick(logits, temperature) {
  let best = 0;
  for (let index = 1; index < logits.length; index += 1) if (logits[index] > logits[best]) best = index;
  if (!Number.isFinite(logits[best])) throw new Error("the model's answer is not a number (overflow)");
  if (temperature === 0) return best;
  const powers = Array.from(logits, (logit) => Math.exp((logit - logits[best]) / temperature));
  let rest = Math.random() * powers.reduce((total, power) => total + power, 0);
  return Math.max(0, powers.findIndex((power) => (rest -= power) < 0));
}

/** Lets messages arrive: setTimeout would wait four milliseconds. */
function turn() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => { port1.close(); resolve(); };
    port2.postMessage(null);
  });
}

/**
 * @param {object} job of `Answerer.write`
 * @param {(text: string, tokens: number) => void} hear is given each piece of the text
 * @param {() => boolean} isStopped
 * @returns {Promise<object>} counts and times
 */
export async function write(job, { ort, session, tokenizer }, hear, isStopped) {
  const { artifact, writing, longest } = job;
  const prompt = [...writing.begin, ...Array.from(tokenizer.encode(job.text, { add_special_tokens: false }).ids, Number)];
  if (!prompt.length) prompt.push(writing.boundary);
  if (prompt.length > longest) throw new Error(`The text has ${prompt.length} tokens, and the model takes ${longest}. Shorten it.`);
  const most = Math.min(job.tokens, longest - prompt.length + 1);
  const arrays = { float32: Float32Array, float16: globalThis.Float16Array ?? Uint16Array };
  const integers = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
  let caches = Object.fromEntries(artifact.caches.map(({ input, type, shape }) =>
    [input, new ort.Tensor(type, new arrays[type](shape.reduce((size, axis) => size * axis, 1)), shape)]));
  const stream = new TextStream(tokenizer, prompt);
  const began = performance.now();
  let [unread, position, tokens, firstMs] = [prompt, 0, 0, 0];
  while (tokens < most) {
    const positions = artifact.positions ? { position_ids: integers(unread.map((_, index) => position + index)) } : {};
    const outputs = await session.run({ input_ids: integers(unread), ...positions, ...caches });
    caches = Object.fromEntries(artifact.caches.map(({ input, output }) => [input, outputs[output]]));
    position += unread.length;
    const token = pick(await outputs.logits.getData(), job.temperature);
    tokens += 1;
    firstMs ||= performance.now() - began;
    if (writing.ends.includes(token)) break;
    hear(stream.push(token), tokens);
    unread = [token];
    await turn();
    if (isStopped()) break;
  }
  return { prompt: prompt.length, tokens, firstMs, ms: performance.now() - began };
}
