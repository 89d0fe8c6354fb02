"""predict: what a model answers to texts: label and probability, or a vector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from edgeformer.backends import ALL_RUNTIMES
from edgeformer.bundle import Bundle
from edgeformer.data.encoding import require_unicode
from edgeformer.data.rows import Text
from edgeformer.formats.errors import InputError
from edgeformer.run import TORCH, Location, Run
from edgeformer.stages.evaluating.choice import choose
from edgeformer.tasks import calls
from edgeformer.tasks.answering import Answering, pairs_problem
from edgeformer.tasks.prediction import Answer


def predicts_vectors(location: Location) -> bool:
    """Whether it is an embedding model. Raises ArtifactError for a damaged run or bundle."""
    return _owner_of(location).task.predicts == "vectors"


def _owner_of(location: Location) -> Bundle | Run:
    return location.open_bundle() if location.bundle is not None else location.open_run()


@dataclass(frozen=True)
class Model:
    """An opened model.

    Attributes:
        id: of the artifact, or ``torch``.
        provider: what computes.
        answering: how it answers.
        run: its session's.
    """

    id: str
    provider: str
    answering: Answering
    run: calls.Run

    def tell(self, say: Callable[[str], None]) -> None:
        """Say where the run's own weights are computed: that depends on the machine."""
        if self.id == TORCH:
            say(f"{self.id}: the run's own weights are computed by {self.provider}")


def predict(
    location: Location,
    texts: Sequence[Text],
    artifact: str | None = None,
    confidence: float | None = None,
    runtime: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[str, list[Answer]]:
    """Answer raw texts (the tokenizer cleans them). Returns the artifact's id and one answer per text.

    An empty text has an :class:`~edgeformer.tasks.prediction.Unanswered` in place of a prediction.

    Args:
        location: the run, the bundle, or both.
        texts: one or more; of a classifier also pairs of texts.
        artifact: an artifact's id, or ``torch``; None: the one that RUN names, else the bundle's first that runs here.
        runtime: what ``--runtime`` names; None: what ``profile --search`` found fastest here, else the usual one.
        confidence: a step bundle's host loop stops for a text as soon as its top softmax probability is at least this.
        say: is told where the run's own weights are computed.

    Raises:
        InputError: no text, an unknown artifact, a language model, ``confidence`` without a step artifact, or either
            of ``confidence`` and pairs for an embedding model; pairs for a model of single texts, or these for one of
            pairs.
    """
    if not texts:
        raise InputError("no text given; pass it as an argument, or lines on standard input")
    for text in texts:
        for part in (text,) if isinstance(text, str) else text:
            require_unicode("a text", part)
    check(location, confidence, pairs=not all(isinstance(text, str) for text in texts))
    with opened(location, artifact, confidence, runtime) as model:
        model.tell(say)
        window = model.answering.read(texts)
        return model.id, model.answering.answers(window, model.answering.run(model.run, window))


@contextmanager
def opened(
    location: Location, artifact: str | None = None, confidence: float | None = None, runtime: str | None = None
) -> Iterator[Model]:
    """Open a model that :func:`check` let pass, to answer texts. Arguments and errors are those of :func:`predict`."""
    if confidence is not None and artifact is None and location.artifact is None:
        steps = location.open_bundle().built("step") if location.bundle is not None else ()
        if not steps:
            raise InputError(
                f"{location.name}: has no step bundle; write one: edgeformer export {location.argument} --exit all"
            )
        artifact = steps[0].id
    if runtime == ALL_RUNTIMES:
        raise InputError("--runtime all: one of them answers; name it")
    chosen = choose(location, artifact, runtime)[0]
    owner = chosen.owner
    early = dict.fromkeys(chosen.exits[:-1], confidence) if confidence is not None else None
    answering = Answering(owner.task, chosen.reader(), owner.data)
    with chosen.session(early=early) as session:
        yield Model(chosen.id, session.provider, answering, session.run)


def check(location: Location, confidence: float | None, *, pairs: bool | None) -> None:
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
