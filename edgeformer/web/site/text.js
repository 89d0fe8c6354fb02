// A text as tokens, cut as edgeformer cuts it; and logits as probabilities.
import { asModule, download, downloadJson } from "./files.js";

/**
 * @param {object} library the file of site.json that makes tokens
 * @param {object} reader of site.json
 * @param {string} base address of the page's folder
 */
export async function openReader(library, reader, base) {
  const [script, tokenizer, config] = await Promise.all([
    download(library, base), downloadJson(reader.tokenizer, base), downloadJson(reader.config, base),
  ]);
  const { Tokenizer } = await import(asModule(script.bytes));
  const left = tokenizer.truncation?.direction === "Left";
  return { tokenizer: new Tokenizer(tokenizer, config), most: reader.max_tokens, suffix: reader.suffix, left };
}

/**
 * Special tokens around a text are kept where the text is cut, on the side that the tokenizer states. Pairs are not cut
 * here.
 * @param {string | null} pair the second text
 * @returns {{ids: number[], total: number, lastRead: string | null}} `lastRead`: the end of a cut text, or its beginning
 * where the left side is cut, as the model reads it
 */
export function encode(reader, text, pair = null) {
  const options = pair === null ? {} : { text_pair: pair };
  const all = Array.from(reader.tokenizer.encode(text, options).ids, Number);
  if (all.length <= reader.most) return { ids: all, total: all.length, lastRead: null };
  if (pair !== null) {
    throw new Error(`Together the texts have ${all.length} tokens, and the model reads ${reader.most}. Shorten them.`);
  }
  if (reader.left) {
    const prefix = Array.from(reader.tokenizer.encode("").ids).length - reader.suffix;
    const kept = all.slice(all.length - reader.most + prefix);
    return { ids: [...all.slice(0, prefix), ...kept], total: all.length, lastRead: reader.tokenizer.decode(kept.slice(0, 6)) };
  }
  const kept = all.slice(0, reader.most - reader.suffix);
  const ids = [...kept, ...all.slice(all.length - reader.suffix)];
  return { ids, total: all.length, lastRead: reader.tokenizer.decode(kept.slice(-6)) };
}

/** As `edgeformer predict` and `serve` say it. */
const NO_NUMBER = "the model's answer is not a number (overflow)";

/**
 * Logits of one text as probabilities; throws where one of them is no number.
 * @param {boolean} several each label is there or not by itself; else exactly one is
 */
export function probabilities(logits, several) {
  if (!Array.from(logits).every(Number.isFinite)) throw new Error(NO_NUMBER);
  if (several) return Array.from(logits, (logit) => 1 / (1 + Math.exp(-logit)));
  const highest = Math.max(...logits);
  const powers = Array.from(logits, (logit) => Math.exp(logit - highest));
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
}
