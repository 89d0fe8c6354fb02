"""predict: what a model answers to texts: label and probability, or a vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import ExitGuarantee
from edgeformer.bundle import Bundle
from edgeformer.data.encoding import require_unicode
from edgeformer.data.rows import Text
from edgeformer.inference.evaluate import ONE_ANSWERS, Choice, choose
from edgeformer.run import TORCH, Location, Run
from edgeformer.runtimes import ALL_RUNTIMES
from edgeformer.tasks import task as calls
from edgeformer.tasks.task import Answer
from edgeformer.tasks.text_answers import Answering, pairs_problem


def predicts_vectors(location: Location) -> bool:
    """Whether it is an embedding model. Raises ArtifactError for a damaged run or bundle."""
    return _owner_of(location).task.predicts == "vectors"


def _owner_of(location: Location) -> Bundle | Run:
    return location.open_bundle() if location.bundle is not None else location.open_run()


Confidence = float | Literal["auto"] | None
"""The top probability that lets a text leave; ``auto``: the thresholds that the bundle promises something of."""


@dataclass(frozen=True)
class Model:
    """An opened model.

    Attributes:
        id: of the artifact, or ``torch``.
        provider: what computes.
        answering: how it answers.
        run: its session's.
        guarantee: what early exit was promised to cost; None: no text leaves early, or not by those thresholds.
    """

    id: str
    provider: str
    answering: Answering
    run: calls.Run
    guarantee: ExitGuarantee | None = None

    def promised(self) -> dict[str, dict[str, object]]:
        """The guarantee as JSON documents have it; empty where there is none."""
        return {} if self.guarantee is None else {"guarantee": self.guarantee.model_dump(mode="json")}

    def notes(self) -> tuple[str, ...]:
        """What its reader must know: where the run's own weights are computed, what early exit promises."""
        if self.id == TORCH:
            return (f"{self.id}: the run's own weights are computed by {self.provider}",)
        if self.guarantee is None:
            return ()
        least = ", ".join(f"{value:g} after loop {loop}" for loop, value in self.guarantee.thresholds.items())
        note = f"{self.id}: texts leave early at probability {least}: {self.guarantee.sentence()}"
        time = self.guarantee.time
        notes = [note] if time.pays else [note, f"{self.id}: {time.sentence()}"]
        if time.provider == self.provider:
            return tuple(notes)
        return *notes, f"that was shown with {time.provider}, and this is {self.provider}"


def predict(
    location: Location,
    texts: Sequence[Text],
    artifact: str | None = None,
    confidence: Confidence = None,
    runtime: str | None = None,
) -> tuple[str, list[Answer]]:
    """Answer raw texts (the tokenizer cleans them). Returns the artifact's id and one answer per text.

    An empty text, and one to which the model answers with what is no number, have an
    :class:`~edgeformer.tasks.task.Unanswered` in place of a prediction.

    Args:
        location: the run, the bundle, or both.
        texts: one or more; of a classifier also pairs of texts.
        artifact: an artifact's id, or ``torch``; None: the one that RUN names, else the bundle's first that runs here.
        runtime: what ``--runtime`` names; None: what ``profile --search`` found fastest here, else the usual one.
        confidence: a step bundle's host loop stops for a text as soon as its top softmax probability is at least this;
            ``auto``: at least what `edgeformer exits` found for that loop.

    Raises:
        InputError: no text, an unknown artifact, a language model, ``confidence`` without a step artifact, or either
            of ``confidence`` and pairs for an embedding model; pairs for a model of single texts, or these for one of
            pairs; ``auto`` where nothing was promised.
    """
    with opened_for(location, texts, artifact, confidence, runtime) as model:
        window = model.answering.read(texts)
        return model.id, model.answering.answers(window, model.answering.run(model.run, window))


@contextmanager
def opened_for(
    location: Location,
    texts: Sequence[Text],
    artifact: str | None = None,
    confidence: Confidence = None,
    runtime: str | None = None,
) -> Iterator[Model]:
    """Open a model to answer these texts. Arguments and errors are those of :func:`predict`."""
    if not texts:
        raise InputError("no text given; pass it as an argument, or lines on standard input")
    for text in texts:
        for part in (text,) if isinstance(text, str) else text:
            require_unicode("a text", part)
    check(location, confidence, pairs=not all(isinstance(text, str) for text in texts))
    with opened(location, artifact, confidence, runtime) as model:
        yield model


@contextmanager
def opened(
    location: Location, artifact: str | None = None, confidence: Confidence = None, runtime: str | None = None
) -> Iterator[Model]:
    """Open a model that :func:`check` let pass, to answer texts. Arguments and errors are those of :func:`predict`."""
    if confidence is not None and artifact is None and location.artifact is None:
        artifact = _step(location, promised=confidence == "auto")
    if runtime == ALL_RUNTIMES:
        raise InputError(ONE_ANSWERS)
    chosen = choose(location, artifact, runtime)[0]
    owner = chosen.owner
    guarantee = _guarantee(chosen, location) if confidence == "auto" else None
    early: dict[int, float] | None = None
    if guarantee is not None:
        early = {int(loop): threshold for loop, threshold in guarantee.thresholds.items()}
    elif confidence is not None:
        early = dict.fromkeys(chosen.exits[:-1], float(confidence))
    most_rows = 1 if guarantee is not None and chosen.heeds_neighbours else chosen.most_rows
    answering = Answering(owner.task, chosen.reader(), owner.data, most_rows)
    with chosen.session(early=early) as session:
        yield Model(chosen.id, session.provider, answering, session.run, guarantee)


def _step(location: Location, *, promised: bool) -> str:
    """The first step artifact; with ``promised`` of those that have a guarantee, if any has. Raises InputError."""
    steps = location.open_bundle().built("step") if location.bundle is not None else ()
    if not steps:
        raise InputError(
            f"{location.name}: has no step bundle; write one: edgeformer export {location.argument} --exit all"
        )
    return next((step.id for step in steps if promised and step.guarantee is not None), steps[0].id)


def _guarantee(chosen: Choice, location: Location) -> ExitGuarantee:
    found = chosen.artifact.guarantee if chosen.artifact is not None else None
    if found is None:
        step = chosen.artifact is not None and chosen.artifact.role == "step"
        why = "no thresholds were promised anything of" if step else "all texts go through all of it"
        raise InputError(
            f"--confidence auto: {chosen.id}: {why}; let held-out rows choose them: edgeformer exits "
            f"{location.argument} --max-drop 1%, or name one: --confidence 0.95"
        )
    return found


def check(location: Location, confidence: Confidence, *, pairs: bool | None) -> None:
    """Raises InputError for what such a model does not answer; ``pairs``: or else single texts; None: not known yet."""
    owner = _owner_of(location)
    name, task = location.name, owner.task
    if task.predicts is None:
        raise InputError(f"{name}: is a {task.noun}, which has no labels; use edgeformer {task.use}")
    if confidence is not None and not task.has_confidence:
        raise InputError(f"--confidence: {name} is a {task.noun}; its answers have no one probability to stop at")
    problem = None if pairs is None else pairs_problem(task, owner.data, pairs=pairs)
    if problem is not None:
        raise InputError(f"--pair: {name}: {problem}")
