"""predict: label and probability of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from edgeformer.data.encoding import encode_texts, require_unicode
from edgeformer.formats.errors import InputError
from edgeformer.run import Location
from edgeformer.stages.evaluating.choice import choose
from edgeformer.tasks.classification.scoring import softmax
from edgeformer.tasks.running import answer_rows

_BATCH = 32


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
        location: the run, the bundle, or both.
        texts: one or more.
        artifact: an artifact's id, or ``torch``; None: the one that RUN names, else the bundle's first that runs here.
        confidence: a step bundle's host loop stops for a text as soon as its top softmax probability is at least this.

    Raises:
        InputError: no text, an unknown artifact, a language model, or ``confidence`` without a step artifact.
    """
    if not texts:
        raise InputError("no text given; pass it as an argument, or lines on standard input")
    for text in texts:
        require_unicode("a text", text)
    if confidence is not None and artifact is None and location.artifact is None:
        steps = location.open_bundle().built("step") if location.bundle is not None else ()
        if not steps:
            raise InputError(
                f"{location.name}: has no step bundle; write one: edgeformer export {location.argument} --exit all"
            )
        artifact = steps[0].id
    chosen = choose(location, artifact)[0]
    data = chosen.owner.data
    labels: Sequence[str] | None = getattr(data, "labels", None)
    if labels is None:
        task = chosen.owner.task
        raise InputError(f"{location.name}: is a {task.noun}, which has no labels; use edgeformer {task.use}")
    reader = chosen.reader()
    encoded, cut = encode_texts(reader.tokenizer, texts, data.tokens_at_once)
    early = dict.fromkeys(chosen.exits[:-1], confidence) if confidence is not None else None
    with chosen.session(early=early) as session:
        answers = answer_rows(session.run, encoded, reader.pad, _BATCH)
    probabilities = softmax(answers["logits"]).tolist()
    loops = answers["loops"].tolist() if "loops" in answers else [None] * len(texts)
    predictions = []
    for text, found, truncated, after in zip(texts, probabilities, cut.tolist(), loops, strict=True):
        by_label = dict(zip(labels, found, strict=True))
        best = max(by_label, key=by_label.__getitem__)
        predictions.append(Prediction(text, best, by_label[best], by_label, truncated, after))
    return chosen.id, predictions
