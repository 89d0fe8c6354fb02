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
  const { max_tokens: most, suffix, types } = reader;
  const left = tokenizer.truncation?.direction === "Left";
  return { tokenizer: new Tokenizer(tokenizer, config), most, suffix, types, left };
}

/**
 * Special tokens around a text are kept where the text is cut, on the side that the tokenizer states. Pairs are not cut
 * here.
 * @param {string | null} pair the second text
 * @returns {{ids: number[], types: number[] | undefined, total: number, lastRead: string | null}} `types`: as the
 *   tokenizer states them; `lastRead`: the end of a cut text, or its beginning where the left side is cut, as the model
 *   reads it
 */
export function encode(reader, text, pair = null) {
  // Python's library alone says whether there are types: this one gives RobertaProcessing others.
  const options = { return_token_type_ids: reader.types, ...(pair === null ? {} : { text_pair: pair }) };
  const { ids: read, token_type_ids: types } = reader.tokenizer.encode(text, options);
  const all = Array.from(read, Number);
  if (all.length <= reader.most) return { ids: all, types, total: all.length, lastRead: null };
  if (pair !== null) {
    throw new Error(`Together the texts have ${all.length} tokens, and the model reads ${reader.most}. Shorten them.`);
  }
  const prefix = reader.left ? Array.from(reader.tokenizer.encode("").ids).length - reader.suffix : reader.most - reader.suffix;
  const suffix = reader.most - prefix;
  const cut = (values) => [...values.slice(0, prefix), ...values.slice(values.length - suffix)];
  const edge = reader.left ? all.slice(all.length - suffix).slice(0, 6) : all.slice(0, prefix).slice(-6);
  return { ids: cut(all), types: types && cut(types), total: all.length, lastRead: reader.tokenizer.decode(edge) };
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
