"""What can be scored: an artifact of a bundle, or the run's own weights in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edgeformer.backends import ALL_RUNTIMES, OpenOptions, providers_asked
from edgeformer.backends.session import Session
from edgeformer.bundle import Bundle
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.own_weights import computed_by
from edgeformer.run import TORCH, Location, Run
from edgeformer.runtime_choice import fastest_here
from edgeformer.tasks import TextReader
from edgeformer.tasks.validation import most_rows

_WHOLE_TEXTS = ("full", "exit", "step")
"""Roles of what can be scored: not the graphs with caches, which take a text token by token."""


ONE_ANSWERS = f"--runtime {ALL_RUNTIMES}: one of them answers; name it"
"""Why not all of them are taken for what one session does."""


@dataclass(frozen=True)
class Choice:
    """One of them; nothing is opened yet.

    Attributes:
        owner: the bundle, or the run.
        artifact: of the bundle; None: the run's own weights.
        provider: what shall compute it; None: its format's runtime decides, or for a run's weights torch.
    """

    owner: Bundle | Run
    artifact: ArtifactManifest | None = None
    provider: str | None = None

    @property
    def id(self) -> str:
        """The artifact's, or ``torch``."""
        return TORCH if self.artifact is None else self.artifact.id

    @property
    def exits(self) -> tuple[int, ...]:
        """Loops that it can answer after, the last one last; empty: it has one answer, after whatever loop."""
        if isinstance(self.owner, Run):
            return self.owner.exits
        return self.owner.exits(self._entry)

    @property
    def answers_with_losses(self) -> bool:
        """It answers with the losses of all exits at once: their logits would not fit."""
        return isinstance(self.owner, Run) and self.owner.answers_with_losses

    @property
    def leaves_early(self) -> bool:
        """What it answers at several exits says how sure it is, so that a row or token could leave at any of them."""
        return len(self.exits) > 1 and self.owner.task.has_confidence

    @property
    def most_rows(self) -> int | None:
        """Rows that one call takes; None: any number."""
        return most_rows(self.artifact) if self.artifact is not None else None

    @property
    def heeds_neighbours(self) -> bool:
        """INT8 scales activations by the whole call: what a text answers depends on those beside it, and on padding.

        So what is promised of early exit is shown by single texts, and holds for single texts.
        """
        return self.artifact is not None and self.artifact.precision == "int8"

    def reader(self) -> TextReader:
        """How it reads text. Raises ArtifactError or DataError."""
        return self.owner.reader() if isinstance(self.owner, Run) else self.owner.reader(self._entry)

    def session(self, *, every_exit: bool = False, early: Mapping[int, float] | None = None) -> Session:
        """Open it.

        Args:
            every_exit: to answer after each of ``exits``.
            early: to let rows leave when it is sure of them.

        Raises:
            InputError: rows cannot leave it early.
            ArtifactError: a file is missing, changed or not runnable.
            MissingDependencyError: what it needs is not installed.
        """
        if not isinstance(self.owner, Run):
            exits = self.exits if every_exit else ()
            return self.owner.session(self._entry, OpenOptions(self.provider, early=early, exits=exits))
        if early is not None:
            raise InputError(f"--confidence: needs a step artifact of a bundle, not {TORCH}")
        return self.owner.session(every_exit=every_exit, provider=self.provider)

    @property
    def _entry(self) -> ArtifactManifest:
        assert self.artifact is not None
        return self.artifact


def choose(location: Location, wanted: str | None, runtime: str | None = None) -> list[Choice]:
    """What ``--artifact ID|all`` stands for; None: the one that RUN names, else all of the bundle that run here.

    Args:
        location: the run, the bundle, or both.
        wanted: an artifact's id, ``torch`` or ``all``.
        runtime: what ``--runtime`` names: a choice for each of its providers; None: what a search found fastest here.

    Raises:
        InputError: no such artifact, or a runtime that opens none of them.
        ArtifactError: none at all, or a damaged run or bundle.
    """
    chosen = _artifacts(location, wanted)
    if runtime is None:
        known = fastest_here(location) if location.bundle is not None else {}
        return [replace(one, provider=known.get(one.id)) for one in chosen]
    found = [replace(one, provider=provider) for one in chosen for provider in _asked(one, runtime)]
    if not found:
        raise InputError(f"--runtime {runtime}: opens none of {', '.join(one.id for one in chosen)}")
    return found


def _asked(one: Choice, runtime: str) -> tuple[str, ...]:
    """Providers of a named runtime that compute it; empty: none. Raises InputError: no such runtime."""
    if one.artifact is not None:
        return providers_asked(one.artifact, runtime)
    return (runtime,) if computed_by(runtime) else ()


def _artifacts(location: Location, wanted: str | None) -> list[Choice]:
    bundle = location.open_bundle() if location.bundle is not None else None
    built = [Choice(bundle, artifact) for artifact in bundle.built(*_WHOLE_TEXTS)] if bundle is not None else []
    ids = [*(choice.id for choice in built), *([TORCH] if location.run is not None else [])]
    if not ids:
        entries = bundle.artifacts if bundle is not None else ()
        why = "; ".join(f"{entry.id} {entry.status}: {entry.reason}" for entry in entries)
        raise ArtifactError(f"{location.name}: the bundle holds no usable artifact ({why})")
    if wanted is None and location.artifact is None:
        here = [one for one in built if one.artifact is not None and bundle and bundle.cannot_run(one.artifact) is None]
        if here:
            return here
    name = wanted or location.artifact or "all"
    if name not in (*ids, "all"):
        raise InputError(f"--artifact {name}: {location.name} has {', '.join(ids)}, or all")
    own = [Choice(location.open_run())] if TORCH in ids and name in (TORCH, "all") else []
    return [one for one in (*built, *own) if name in (one.id, "all")]
