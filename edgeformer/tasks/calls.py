"""What a measuring process gives a model that reads text: real inputs at a stated shape.

They are the bundle's golden rows, cut or repeated. Never zeros, never random tokens, which would falsify
confidence exits and lookups.
"""

from __future__ import annotations

import numpy as np

from edgeformer.formats.golden import Golden, Tokens


def fit_row(row: Tokens, seq: int) -> Tokens:
    """One row cut or repeated: the first token (such as [CLS]) stays first, those after it repeat.

    Args:
        row: token ids, int64 [k].
        seq: tokens of the result.
    """
    if row.size >= seq:
        return row[:seq]
    body = row[1:] if row.size > 1 else row
    return np.concatenate([row[:1], np.resize(body, seq - 1)])


def make_buffers(golden: Golden, batch: int, seq: int, count: int = 8) -> list[dict[str, Tokens]]:
    """Different inputs of shape [batch, seq], nothing padded, the golden rows used in turn.

    Several buffers in rotation keep a cache from answering instead of the artifact.

    Args:
        golden: of the bundle; the model takes an attention mask where it has one (classifiers).
        batch: rows of an input.
        seq: tokens of each row.
        count: how many inputs.
    """
    buffers: list[dict[str, Tokens]] = []
    rows = golden.texts()
    for number in range(count):
        picked = [rows[(number * batch + offset) % len(rows)] for offset in range(batch)]
        ids = np.ascontiguousarray(np.stack([fit_row(row, seq) for row in picked]), dtype=np.int64)
        mask = {"attention_mask": np.ones_like(ids)} if golden.padded else {}
        buffers.append({"input_ids": ids, **mask})
    return buffers
