"""predict: label and probability of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from edgeformer.data.encoding import encode
from edgeformer.schema.errors import InputError
from edgeformer.schema.language_recipe import TextConfig
from edgeformer.schema.workspace import Location
from edgeformer.stages.evaluating.subject import open_subject
from edgeformer.tasks.classification import softmax
from edgeformer.tasks.scoring import run_rows

_BATCH = 32


@dataclass(frozen=True)
class Prediction:
    """The most likely label of one text."""

    text: str
    label: str
    probability: float
    probabilities: dict[str, float]
    truncated: bool

    def as_dict(self) -> dict[str, object]:
        """For JSON output."""
        return asdict(self)


def predict(location: Location, texts: Sequence[str], artifact: str | None = None) -> tuple[str, list[Prediction]]:
    """Classify raw texts (the tokenizer cleans them). Returns the artifact's id and one prediction per text.

    Raises:
        InputError: no text, an unknown artifact, or a language model.
    """
    if not texts:
        raise InputError("no text given; pass it as an argument, or lines on standard input")
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"a text is not valid Unicode: {text.encode('utf-8', 'replace').decode()[:60]!r}")
    subject = open_subject(location)
    data = subject.data
    if isinstance(data, TextConfig):
        raise InputError(f"{location.name}: is a language model, which has no labels; use edgeformer generate")
    chosen = subject.choose(artifact)[0]
    subject = subject.reading(chosen)
    labels = np.zeros(len(texts), dtype=np.int64)
    encoded = encode(subject.tokenizer, texts, labels, data.max_length)
    with subject.open(chosen) as session:
        logits, _ = run_rows(session.run, encoded, subject.pad, _BATCH)
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
            )
        )
    return chosen, predictions
