// Labelled spans in a text: where its tokens are, windows of a long text, and spans from the classes of tokens.
// The same as edgeformer/data/spans.py; offsets here are those of JavaScript strings.

const MARKERS = /^[\u2581\u0120]/; // a space at the start of a word, as SentencePiece and byte-level BPE write it
const INSIDE = { L: "E", U: "S" }; // BILOU's names
const MARK = /[\p{P}$+<=>^`|~]/u; // a punctuation mark is a word
const OVERLAP = 4; // windows share one token in this many with the next one

/**
 * Characters of every token of a text, without white space, and whether it is the first of a word.
 * @returns {{start: number, end: number, first: boolean}[]}
 */
export function locate(tokenizer, text) {
  const { normalizer, pre_tokenizer: splitter, model } = tokenizer;
  const normalize = (part) => (normalizer === null ? part : normalizer(part));
  const split = (part) => (splitter === null ? [part] : splitter(part, { section_index: 0 }));
  // What the model reads of every character with its accents, and where that character is.
  let read = "";
  const places = [];
  for (const { 0: character, index } of text.matchAll(/[^]\p{M}*/gu)) {
    const normal = normalize(character);
    let piece = split(normal).join("");
    if (!normal.startsWith(" ")) piece = piece.replace(MARKERS, "");
    read += piece;
    places.push(...Array.from({ length: piece.length }, () => ({ start: index, end: index + character.length, white: !character.trim() })));
  }
  const at = (position, piece) => (MARKERS.test(piece) && !read.startsWith(piece[0], position) ? piece.slice(1) : piece);
  // Special tokens that are written out in the text are words of their own.
  const added = new Map([...tokenizer.get_added_tokens_decoder().values()].map(({ content }) => [content, split(normalize(content)).join("").replace(MARKERS, "")]));
  const special = [...added.keys()].map((name) => name.replace(/[\\^$.*+?()[\]{}|/]/gu, "\\$&")).join("|");
  const parts = added.size ? text.split(new RegExp(`(${special})`, "u")) : [text];
  const words = parts.flatMap((part) => (added.has(part) ? [added.get(part)] : split(normalize(part)).flatMap((word) => word.split(/(?=\u2581)/u))));
  const wordStarts = new Set();
  let position = 0;
  for (const word of words) {
    const piece = at(position, word);
    if (!read.startsWith(piece, position)) throw new Error(NOT_FOUND);
    wordStarts.add(position);
    position += piece.length;
  }
  const ends = [...wordStarts, read.length];
  position = 0;
  let last = 0; // where the last token ends
  return tokenizer.tokenize(text).map((token) => {
    const continues = model.config.continuing_subword_prefix;
    const written = position > 0 && continues && token.startsWith(continues) ? token.slice(continues.length) : token;
    let piece = added.get(token) ?? at(position, written);
    const begin = position;
    if (token === model.unk_token) piece = read.slice(begin, ends.find((end) => end > begin));
    if (!read.startsWith(piece, begin)) throw new Error(NOT_FOUND);
    position += piece.length;
    const inked = places.slice(begin, position).filter((place) => !place.white);
    const { start, end } = inked.length ? { start: inked[0].start, end: inked.at(-1).end } : { start: 0, end: 0 };
    const between = text.slice(last, start);
    const touches = start === last && start > 0 && (MARK.test(text[start - 1]) || MARK.test(text[start]));
    const parts = start < end && (touches || (between !== "" && !between.trim()));
    if (start < end) last = end;
    return { start, end, first: wordStarts.has(begin) || parts };
  });
}

const NOT_FOUND = "This page cannot find out where the model's tokens are in this text; edgeformer predict and serve can.";

/**
 * Windows of a text of `count` tokens: tokens from `begin` to `end`, of which those from `from` to `to` count.
 * @param {number} capacity tokens of a window, without special ones
 */
export function windowsOf(tokens, capacity) {
  const overlap = Math.floor(capacity / OVERLAP);
  const windows = [];
  for (let begin = 0, from = 0; begin === 0 || begin < tokens.length - overlap; begin += capacity - overlap) {
    const end = Math.min(begin + capacity, tokens.length);
    const next = begin + capacity - overlap;
    let to = tokens.length;
    if (next < tokens.length - overlap) { // in the middle of the overlap, and not inside a word
      const middle = next + Math.floor(overlap / 2);
      const word = tokens.slice(middle, end).findIndex((token) => token.first);
      to = middle + Math.max(0, word);
    }
    windows.push({ begin, end, from, to });
    from = to;
  }
  return windows;
}

/**
 * Spans from the probabilities [tokens][classes] of a text's tokens.
 * @param {string} pieces `first`: the first token of a word decides for all of it
 * @returns {{start: number, end: number, label: string, probability: number}[]}
 */
export function spansOf(text, tokens, probabilities, classes, pieces) {
  const units = [];
  for (const [index, token] of tokens.entries()) {
    if (pieces === "first" && !token.first && units.length) {
      const word = units.at(-1);
      if (word.start === word.end) word.start = token.start;
      word.end = Math.max(word.end, token.end);
    } else {
      const best = probabilities[index].indexOf(Math.max(...probabilities[index]));
      units.push({ ...token, ...parseTag(classes[best]), probability: probabilities[index][best] });
    }
  }
  const spans = [];
  let last = parseTag("O");
  for (const unit of units.filter(({ start, end }) => start < end)) {
    const { position, label } = unit;
    if (position !== "O" && ("BS".includes(position) || "OES".includes(last.position) || label !== last.label)) {
      spans.push({ start: unit.start, end: unit.end, label, all: [unit.probability] });
    } else if (position !== "O") {
      spans.at(-1).end = Math.max(spans.at(-1).end, unit.end);
      spans.at(-1).all.push(unit.probability);
    }
    last = unit;
  }
  return spans.map(({ start, end, label, all }) => {
    const accents = /^\p{M}+/u.exec(text.slice(end))?.[0].length ?? 0;
    return { start, end: end + accents, label, probability: all.reduce((sum, one) => sum + one, 0) / all.length };
  });
}

function parseTag(name) {
  if (name === "O") return { position: "O", label: "" };
  const match = /^([BIESLU])-(.+)$/u.exec(name);
  return match === null ? { position: "I", label: name } : { position: INSIDE[match[1]] ?? match[1], label: match[2] };
}
