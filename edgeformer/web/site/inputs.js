// Real inputs of a stated shape: the bundle's golden rows, cut or repeated, several in rotation. Never zeros.

const BUFFERS = 8;

/** One row cut or repeated: the first token (such as [CLS]) stays first, those after it repeat. */
export function fitRow(row, seq) {
  if (row.length >= seq) return row.slice(0, seq);
  const body = row.length > 1 ? row.slice(1) : row;
  return [row[0], ...Array.from({ length: seq - 1 }, (_, index) => body[index % body.length])];
}

/** Different inputs of `batch` rows of `seq` tokens, the golden rows used in turn. */
export function makeBuffers(golden, batch, seq, count = BUFFERS) {
  return Array.from({ length: count }, (_, number) =>
    Array.from({ length: batch }, (_, offset) => fitRow(golden[(number * batch + offset) % golden.length], seq)),
  );
}
