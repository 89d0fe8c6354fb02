"""predict: label and probability of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.encoding import Encoded, encode
from edgeformer.formats.data_config import DataConfig
from edgeformer.formats.errors import InputError
from edgeformer.run import Location
from edgeformer.stages.evaluating.subject import Subject, open_subject
from edgeformer.tasks.classification.scoring import softmax
from edgeformer.tasks.running import run_rows

_BATCH = 32
_LOOPS = range(1, 100)
"""More than a model has; nobody is asked at those that it does not have."""


@dataclass(frozen=True)
class Prediction:
    """The most likely label of one text."""

    text: str
    label: str
    probability: float
    probabilities: dict[str, float]
    truncated: bool
    loops: int | None = None  # after which it answered; None: not asked for

    def as_dict(self) -> dict[str, object]:
        """For JSON output."""
        return asdict(self)


def predict(
    location: Location, texts: Sequence[str], artifact: str | None = None, confidence: float | None = None
) -> tuple[str, list[Prediction]]:
    """Classify raw texts (the tokenizer cleans them). Returns the artifact's id and one prediction per text.

    Args:
        confidence: a step bundle's host loop stops for a text as soon as its top softmax probability is at least this.

    Raises:
        InputError: no text, an unknown artifact, a language model, or ``confidence`` without a step artifact.
    """
    if not texts:
        raise InputError("no text given; pass it as an argument, or lines on standard input")
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"a text is not valid Unicode: {text.encode('utf-8', 'replace').decode()[:60]!r}")
    subject = open_subject(location)
    data = subject.data
    if not isinstance(data, DataConfig):
        raise InputError(f"{location.name}: is a language model, which has no labels; use edgeformer generate")
    if confidence is not None and artifact is None and location.artifact is None:
        artifact = subject.step_artifact()
    chosen = subject.choose(artifact)[0]
    subject = subject.reading(chosen)
    labels = np.zeros(len(texts), dtype=np.int64)
    encoded = encode(subject.tokenizer, texts, labels, data.max_length)
    logits, loops = _run(subject, chosen, encoded, confidence)
    names = data.labels
    lengths = [len(encoding.ids) for encoding in subject.tokenizer.encode_batch(list(texts))]
    predictions = []
    for row, text in enumerate(texts):
        probabilities = softmax(logits[row])
        best = int(probabilities.argmax())
        predictions.append(
            Prediction(
                text=text,
                label=names[best],
                probability=float(probabilities[best]),
                probabilities={name: float(p) for name, p in zip(names, probabilities, strict=True)},
                truncated=lengths[row] > data.max_length,
                loops=None if loops is None else int(loops[row]),
            )
        )
    return chosen, predictions


def _run(
    subject: Subject, chosen: str, encoded: Encoded, confidence: float | None
) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
    """Logits [n, C] and, where texts may leave early, the loop after which each did."""
    if confidence is None:
        with subject.open(chosen) as session:
            return run_rows(session.run, encoded, subject.pad, _BATCH), None
    from edgeformer.backends.session import Early

    every_loop: Mapping[int, float] = dict.fromkeys(_LOOPS, confidence)
    with subject.open(chosen, Early(every_loop, lambda answer: softmax(answer).max(-1))) as session:

        def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
            # Rows are put back into their order by whoever cuts them into batches, so the loops travel with them.
            outputs = session.run(inputs)
            return {"logits": np.column_stack([outputs["logits"], outputs["loops"].astype(np.float32)])}

        found = run_rows(run, encoded, subject.pad, _BATCH)
    return found[:, :-1], found[:, -1].astype(np.int64)
