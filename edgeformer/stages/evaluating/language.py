"""Scoring a language model: loss per predicted token, of an artifact's last exit or of every exit of the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.batching import ordered_batches
from edgeformer.data.language import TextRows, encode_text_file, prepare_text_set, text_batch
from edgeformer.data.language_rows import IGNORED
from edgeformer.runtime.session import Array, Session
from edgeformer.schema.evaluation import EvaluationRow, rows_of
from edgeformer.schema.host import cpu_name
from edgeformer.schema.language_recipe import TextConfig
from edgeformer.schema.progress import Progress
from edgeformer.stages.evaluating.subject import TORCH, Subject
from edgeformer.tasks.language_modeling import LanguageMeter, token_losses

Int64s = NDArray[np.int64]

LOGITS_BYTES = 256 * 10**6
"""Logits that one call may return: of 50,257 words, those of 1,273 tokens."""

_TORCH_TOKENS = 8192


@dataclass
class Texts:
    """The set that a model is scored on, as rows of tokens; read when they are asked for, and once."""

    subject: Subject
    config: TextConfig
    split: str = "test"
    file: Path | None = None
    cache: Path | None = None
    _known: dict[str, TextRows] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The set's own name: ``test`` is the set of that name, else the first test set, else validation."""
        if self.file is not None:
            return self.file.name
        tests = [part for part in self.config.parts if part not in ("train", "validation")]
        if self.split == "test" and "test" not in tests:
            return tests[0] if tests else "validation"
        return self.split

    def rows(self, artifact: str) -> TextRows:
        """The rows that an artifact can read.

        Exported graphs take no positions, so that they cannot tell where in a packed row a document starts: for them
        every document is a row of its own. They predict the same tokens from the same context as the packed rows
        do, except where a document goes over the end of a packed row (which forgets the part in front of it) and
        where it is longer than the model reads (which cuts it, and leaves the rest out of ``n``).
        """
        mode = self.config.mode if artifact == TORCH else "paragraphs"
        if mode not in self._known:
            config, tokenizer = self.config.model_copy(update={"mode": mode}), self.subject.tokenizer
            if self.file is not None:
                self._known[mode] = encode_text_file(self.file, config, tokenizer)
            else:
                trained_on = self.subject.trained_on
                self._known[mode] = prepare_text_set(config, tokenizer, self.cache, self.split, trained_on)
        return self._known[mode]


def score_texts(texts: Texts, artifact: str, most: int, progress: Progress) -> list[EvaluationRow]:
    """The row of an artifact; of ``torch`` one for each exit, the last one first.

    Args:
        most: rows per batch at the most.
    """
    subject, rows = texts.subject, texts.rows(artifact)
    exits = subject.exits if artifact == TORCH else subject.exits[-1:]
    tokens = _TORCH_TOKENS if artifact == TORCH else LOGITS_BYTES // (4 * subject.vocabulary)
    batches = cut_batches(rows.lengths, most, max(1, tokens))
    meter = LanguageMeter(exits)
    progress.start(f"Scoring {artifact} on {texts.name}", len(rows), "rows")
    try:
        with subject.open(artifact) as session:
            if artifact != TORCH:
                session.run(text_batch(rows, batches[0], subject.pad))  # untimed: it pays for every allocation
            seconds = _read_all(session, rows, batches, meter, (exits, subject.pad, progress))
            provider = session.provider
    finally:
        progress.finish()
    score = meter.score(None if rows.truncated else rows.words)
    found = rows_of(artifact, texts.name, score, leaks=subject.leaks)
    if artifact == TORCH:  # its time would be that of every exit's head, and of the losses
        return found
    timed = {
        "ms_per_sample": 1000 * seconds / len(rows),
        "batch": max(map(len, batches)),
        "provider": provider,
        "host": cpu_name(),
    }
    return [row.model_copy(update=timed) for row in found]


def cut_batches(lengths: Int64s, most: int, tokens: int) -> list[Int64s]:
    """Row numbers of batches, longest rows first: up to ``most`` rows and ``tokens`` padded tokens, at least a row."""
    (order,) = ordered_batches(lengths, max(1, len(lengths)))
    batches = []
    while len(order):
        count = max(1, min(most, tokens // int(lengths[order[0]])))
        batches.append(order[:count])
        order = order[count:]
    return batches


def _read_all(
    session: Session,
    rows: TextRows,
    batches: Sequence[Int64s],
    meter: LanguageMeter,
    context: tuple[tuple[int, ...], int, Progress],
) -> float:
    """Add the losses of all rows to ``meter``; returns the seconds spent in the model."""
    exits, boundary, progress = context
    seconds = 0.0
    for numbers in batches:
        batch = text_batch(rows, numbers, boundary)
        started = time.perf_counter()
        outputs = session.run(batch)
        seconds += time.perf_counter() - started
        meter.add(_losses(outputs, batch["targets"], exits))
        progress.advance(len(numbers))
    return seconds


def _losses(outputs: dict[str, Array], targets: Int64s, exits: Sequence[int]) -> dict[int, NDArray[np.float64]]:
    """Loop → loss of every predicted token, from logits [B, S, V] of the last loop or from losses [B, S] of each."""
    counted = targets != IGNORED
    if "logits" not in outputs:
        return {loop: outputs[f"loss_exit{loop}"][counted].astype(np.float64) for loop in exits}
    pieces = [
        token_losses(logits[there], wanted[there])
        for logits, wanted, there in zip(outputs["logits"], targets, counted, strict=True)
    ]
    return {exits[-1]: np.concatenate(pieces)}
