"""The batched prediction core: select a model, open it, answer texts in batches.

``predict``, ``serve`` and :func:`predict` of the Python API run the same :class:`Predictor`, and ``evaluate`` and
``exits`` open the same :class:`OpenableModel` for labelled rows.
Importing this module loads neither torch nor onnxruntime.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest, ExitGuarantee
from edgeformer.bundle import Bundle
from edgeformer.data.encoding import require_unicode
from edgeformer.data.rows import Text, text_parts
from edgeformer.run import TORCH, Location, Run, is_torch_provider
from edgeformer.runtimes import ALL_RUNTIMES, OpenOptions, cannot_run, requested_providers
from edgeformer.runtimes.session import Session
from edgeformer.tasks import TextReader
from edgeformer.tasks.arrays import Arrays
from edgeformer.tasks.scoring import TextPredictor, max_batch_rows
from edgeformer.tasks.task import Answer

NAME_ONE_RUNTIME = f"--runtime {ALL_RUNTIMES}: this command uses one runtime; give its name, e.g. onnxruntime"
"""Message for commands that use a single session and get ``--runtime all``."""

Confidence = float | Literal["auto"] | None
"""Value of ``--confidence``: a top probability, or ``auto`` for the thresholds of the artifact's guarantee."""


@dataclass(frozen=True)
class OpenableModel:
    """A model that can be opened: an artifact of a bundle, or (``artifact`` None) a run's own weights, with a provider.

    ``provider`` None is the default of the artifact's format, or of torch.
    """

    owner: Bundle | Run
    artifact: ArtifactManifest | None = None
    provider: str | None = None

    @property
    def id(self) -> str:
        """The artifact's id, or ``torch``."""
        return TORCH if self.artifact is None else self.artifact.id

    @property
    def exits(self) -> tuple[int, ...]:
        """Loops that it can answer after, in rising order; empty: it has one answer, after an unknown loop."""
        if isinstance(self.owner, Run):
            return self.owner.exits
        assert self.artifact is not None
        return self.owner.exits(self.artifact)

    @property
    def answers_with_losses(self) -> bool:
        """Whether it returns the losses of all exits at once, because their logits do not fit into memory."""
        return isinstance(self.owner, Run) and self.owner.answers_with_losses

    @property
    def can_exit_early(self) -> bool:
        """Whether it answers at several exits with a confidence, so that rows or tokens can leave at each of them."""
        return len(self.exits) > 1 and self.owner.task.confidence is not None

    @property
    def max_rows(self) -> int | None:
        return max_batch_rows(self.artifact) if self.artifact is not None else None

    @property
    def depends_on_batch(self) -> bool:
        """Whether an answer depends on the other rows of the call: INT8's guarantee is of single texts."""
        return self.artifact is not None and self.artifact.precision == "int8"

    def reader(self) -> TextReader:
        """Return its tokenizer with the model's limits. Raises ArtifactError or DataError."""
        return self.owner.reader() if isinstance(self.owner, Run) else self.owner.reader(self.artifact)

    def session(self, *, every_exit: bool = False, thresholds: Mapping[int, float] | None = None) -> Session:
        """Open it to answer after each of ``exits``, or to let rows leave early; a threshold is a top probability.

        Raises InputError, ArtifactError or MissingDependencyError.
        """
        if isinstance(self.owner, Run):
            if thresholds is not None:
                raise InputError(f"--confidence: needs a step artifact; give one to --artifact instead of {TORCH}")
            return self.owner.session(every_exit=every_exit, provider=self.provider)
        assert self.artifact is not None
        options = OpenOptions(self.provider, early=thresholds, exits=self.exits if every_exit else ())
        return self.owner.session(self.artifact, options)


def select_candidates(location: Location, artifact: str | None, runtime: str | None = None) -> list[OpenableModel]:
    """Return what ``--artifact ID|torch|all`` and ``--runtime`` select. Raises InputError, ArtifactError.

    Without ``artifact``: what RUN names, else all artifacts of the bundle that run on this machine. A ``runtime`` gives
    one candidate for each of its providers; None: the default provider of the artifact's format.
    """
    name = artifact or location.artifact
    candidates: list[OpenableModel] = []
    if location.bundle is not None:
        bundle = location.open_bundle()
        # Graphs with caches take a text token by token, so they are no candidates.
        candidates = [OpenableModel(bundle, entry) for entry in bundle.built("full", "exit", "step")]
    ids = [*(candidate.id for candidate in candidates), *([TORCH] if location.run is not None else [])]
    if not ids:
        reasons = "; ".join(f"{entry.id} {entry.status}: {entry.reason}" for entry in location.open_bundle().artifacts)
        raise ArtifactError(f"{location.name}: its bundle has no usable artifact ({reasons}); export the run again")
    selected = []
    if name is None:
        selected = [each for each in candidates if each.artifact is not None and cannot_run(each.artifact) is None]
    if not selected:
        name = name or "all"
        if name not in (*ids, "all"):
            raise InputError(f"--artifact {name}: {location.name} has no such artifact; give {', '.join(ids)} or all")
        if TORCH in ids and name in (TORCH, "all"):
            candidates.append(OpenableModel(location.open_run()))
        selected = [candidate for candidate in candidates if name in (candidate.id, "all")]
    if runtime is None:
        return selected
    expanded = []
    for candidate in selected:
        providers: tuple[str, ...] = (runtime,) if is_torch_provider(runtime) else ()
        if candidate.artifact is not None:
            providers = requested_providers(candidate.artifact, runtime)
        expanded += [replace(candidate, provider=provider) for provider in providers]
    if not expanded:
        raise InputError(f"--runtime {runtime}: opens none of {', '.join(candidate.id for candidate in selected)}")
    return expanded


@dataclass(frozen=True)
class Predictor:
    """An opened model: ``answering`` reads texts and turns outputs into answers; ``guarantee`` is of early exit."""

    name: str
    id: str
    provider: str
    answering: TextPredictor
    run: Callable[[Arrays], Arrays]
    guarantee: ExitGuarantee | None = None

    def answer(self, texts: Sequence[Text]) -> list[Answer]:
        """Return one answer per text."""
        window = self.answering.read(texts)
        return self.answering.answers(window, self.answering.run(self.run, window))

    def promised(self) -> dict[str, dict[str, object]]:
        """Return the guarantee as a JSON fragment; empty where there is none."""
        return {} if self.guarantee is None else {"guarantee": self.guarantee.model_dump(mode="json")}

    def notes(self) -> tuple[str, ...]:
        """Return notes for the reader: the provider of a run's own weights, and what early exit guarantees."""
        if self.id == TORCH:
            return (f"{self.id}: the weights of the run, computed by {self.provider}",)
        if self.guarantee is None:
            return ()
        from edgeformer.report.sentences import exit_guarantee, exit_time  # most predictions have no guarantee

        listed = ", ".join(f"{value:g} after loop {loop}" for loop, value in self.guarantee.thresholds.items())
        notes = [f"{self.id}: texts exit early at probability {listed}: {exit_guarantee(self.guarantee)}"]
        if not self.guarantee.time.pays:
            notes.append(f"{self.id}: {exit_time(self.guarantee.time)}")
        if self.guarantee.time.provider != self.provider:
            notes.append(f"the guarantee was made with {self.guarantee.time.provider}, and this is {self.provider}")
        return tuple(notes)


def predict(
    location: Location, texts: Sequence[Text], artifact: str | None = None, confidence: Confidence = None,
    runtime: str | None = None,
) -> tuple[str, list[Answer]]:  # fmt: skip
    """Answer raw texts, or pairs of them; return the artifact's id, and one answer per text.

    An empty text, and one whose logits are not finite, has an :class:`~edgeformer.tasks.task.Unanswered`. Without
    ``artifact``, the one that RUN names, or the bundle's first that runs here. A step artifact stops looping for a text
    at the top probability ``confidence``, or (``auto``) at the thresholds of its guarantee. Raises InputError: no text,
    an unknown artifact, a model that does not answer such texts, or no step artifact or guarantee that is needed.
    """
    with open_predictor(location, artifact, confidence, runtime, texts=texts) as model:
        return model.id, model.answer(texts)


@contextmanager
def open_predictor(
    location: Location, artifact: str | None = None, confidence: Confidence = None, runtime: str | None = None,
    *, texts: Sequence[Text] | None = None,
) -> Iterator[Predictor]:  # fmt: skip
    """Open a model for ``texts``, or one that passed :func:`check_answerable`. See :func:`predict`."""
    if texts is not None:
        if not texts:
            raise InputError("there is no text; give it as an argument, or as lines on standard input")
        for text in texts:
            for part in text_parts(text):
                require_unicode("a text", part)
        check_answerable(location, confidence, pairs=not all(isinstance(text, str) for text in texts))
    if confidence is not None and artifact is None and location.artifact is None:
        steps = location.open_bundle().built("step") if location.bundle is not None else ()
        if not steps:
            raise InputError(
                f"--confidence: {location.name} has no step artifact; write it with: {location.step_command}"
            )
        with_guarantee = [step for step in steps if confidence == "auto" and step.guarantee is not None]
        artifact = (with_guarantee or steps)[0].id
    if runtime == ALL_RUNTIMES:
        raise InputError(NAME_ONE_RUNTIME)
    candidate = select_candidates(location, artifact, runtime)[0]
    owner, guarantee, thresholds = candidate.owner, None, None
    if confidence == "auto":
        guarantee = candidate.artifact.guarantee if candidate.artifact is not None else None
        if guarantee is None:
            raise InputError(
                f"--confidence auto: {candidate.id} has no thresholds yet; choose them with: edgeformer exits "
                f"{location.argument} --max-drop 1%, or give one, e.g. --confidence 0.95"
            )
        thresholds = {int(loop): threshold for loop, threshold in guarantee.thresholds.items()}
    elif confidence is not None:
        thresholds = dict.fromkeys(candidate.exits[:-1], float(confidence))
    max_rows = 1 if guarantee is not None and candidate.depends_on_batch else candidate.max_rows
    answering = owner.task.answerer.predictor(candidate.reader(), owner.data, max_rows)
    with candidate.session(thresholds=thresholds) as session:
        yield Predictor(owner.name, candidate.id, session.provider, answering, session.run, guarantee)


def check_answerable(location: Location, confidence: Confidence, *, pairs: bool | None) -> None:
    """Raise InputError if the model cannot answer pairs of texts, or single texts (None: not yet known)."""
    owner = location.open_model()
    name, task = location.name, owner.task
    if not task.can_answer:
        raise InputError(f"{name}: is a {task.noun}, which has no labels; use edgeformer {task.use}")
    if confidence is not None and task.confidence is None:
        raise InputError(f"--confidence: {name} is a {task.noun}, which gives no single probability; leave it out")
    problem = None if pairs is None else task.answerer.pairs_problem(owner.data, pairs=pairs)
    if problem is not None:
        raise InputError(f"--pair: {name}: {problem}")
