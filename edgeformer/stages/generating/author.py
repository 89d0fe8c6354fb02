"""What writes: a step or decode artifact of a bundle, without torch, or the run's own weights in torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from edgeformer.backends import ALL_RUNTIMES, OpenOptions, providers_asked
from edgeformer.backends.decoder import Decoder
from edgeformer.bundle import Bundle
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.own_weights import computed_by
from edgeformer.run import TORCH, Location, Run

_PRECISIONS = ("fp32", "fp16", "int8", "int4")
_WRITING = ("decode", "step")


@dataclass(frozen=True)
class Author:
    """A language model that can write, before anything heavy of it is opened.

    Attributes:
        location: what was asked for.
        model: the bundle, or the run.
        exits: loops after which it can answer; the last one is the last loop.
        max_positions: the longest text it takes.
        trained_length: tokens that it read at once in training.
        wanted: the artifact that was asked for; None: the best of those that fit.
        runtime: what ``--runtime`` names; None: the artifact's usual one, or for a run's weights torch.
    """

    location: Location
    model: Bundle | Run
    exits: tuple[int, ...]
    max_positions: int
    trained_length: int
    wanted: str | None = None
    runtime: str | None = None

    def open(self, exits: Collection[int]) -> tuple[str, Decoder[Any]]:
        """The id of what writes, and a text that answers after those loops.

        Raises:
            InputError: the artifact that was asked for cannot answer there.
            ArtifactError: nothing that can was exported, or it is damaged.
            MissingDependencyError: what it needs is not installed.
        """
        if isinstance(self.model, Run):
            if self.runtime is not None and not computed_by(self.runtime):
                raise InputError(f"--runtime {self.runtime}: computes no run's own weights; that is torch")
            return TORCH, self.model.decoder(self.runtime)
        chosen = self._pick(self.model, all_loops=set(exits) == {self.exits[-1]})
        return chosen.id, self.model.decoder(chosen, exits, OpenOptions(self._provider(chosen)))

    def _provider(self, chosen: ArtifactManifest) -> str | None:
        if self.runtime is None:
            return None
        if self.runtime == ALL_RUNTIMES:
            raise InputError(f"--runtime {self.runtime}: one of them writes; name it")
        providers = providers_asked(chosen, self.runtime)
        if not providers:
            raise InputError(f"--runtime {self.runtime}: does not open {chosen.id}")
        return providers[0]

    def _pick(self, bundle: Bundle, *, all_loops: bool) -> ArtifactManifest:
        """The artifact that was asked for, or the best that answers after all loops (or after others too)."""
        name, with_run, command = bundle.name, self.location.run is not None, _command(self.location)
        able = writing(bundle)
        if self.wanted is None:
            for artifact in able:
                if all_loops or artifact.role == "step":
                    return artifact
            instead = f", or write with --artifact {TORCH}" if with_run else ""
            raise ArtifactError(
                f"{name}: --exit and --confidence need the step graphs, which its bundle does not hold; make them "
                f"with: {command}{instead}"
            )
        # Engines write where they are asked for: they do not run everywhere.
        engines = [artifact for artifact in bundle.built(*_WRITING) if not artifact.is_graph]
        listed = ", ".join([*(one.id for one in (*able, *engines)), *([TORCH] if with_run else [])]) or "nothing"
        chosen = next((artifact for artifact in bundle.artifacts if artifact.id == self.wanted), None)
        if chosen is None:
            raise InputError(f"--artifact {self.wanted}: {name} writes with {listed}")
        if chosen.role not in _WRITING:
            raise InputError(
                f"--artifact {self.wanted}: reads whole texts and keeps nothing of earlier tokens; {name} writes "
                f"with {listed}; missing ones are made with: {command}"
            )
        if chosen.role == "decode" and not all_loops:
            raise InputError(
                f"--artifact {self.wanted}: takes all loops for every token; --exit and --confidence need a step "
                f"artifact ({name} writes with {listed}; missing ones are made with: {command})"
            )
        return chosen


def find_author(location: Location, artifact: str | None = None, runtime: str | None = None) -> Author:
    """The bundle where it holds graphs that write (or ``artifact`` is one of it), else the run.

    Args:
        location: the run, the bundle, or both.
        artifact: an artifact's id, or ``torch``; None: the one that ``location`` names, else FP32 before FP16.
        runtime: what shall compute it, as ``--runtime`` names it.

    Raises:
        InputError: not a language model, one that sees later tokens, or there is no such artifact.
        ArtifactError: an unfinished or damaged run, or a bundle by itself whose graphs cannot write.
    """
    wanted = artifact or location.artifact
    if wanted != TORCH and location.bundle is not None:
        bundle = location.open_bundle()
        _require_writer(location, bundle)
        if wanted is not None or writing(bundle):
            manifest = bundle.manifest
            most = manifest.max_positions or manifest.max_length
            return Author(location, bundle, manifest.exits, most, manifest.max_length, wanted, runtime)
    if wanted not in (None, TORCH):
        raise InputError(f"--artifact {wanted}: {location.name} has no bundle; make one with: {_command(location)}")
    if location.run is None:
        raise ArtifactError(
            f"{location.bundle}: holds no graphs that write text; export its run again with: {_command(location)}"
        )
    run = location.open_run()
    _require_writer(location, run)
    run.require_finished()
    recipe = run.recipe
    return Author(location, run, run.exits, recipe.model.max_positions, recipe.data.tokens_at_once, None, runtime)


def writing(bundle: Bundle) -> list[ArtifactManifest]:
    """Artifacts that keep what they computed for earlier tokens, those to prefer first: FP32, then the faster."""
    found = [artifact for artifact in bundle.built(*_WRITING) if artifact.is_graph and not artifact.trimmed]
    return sorted(found, key=lambda a: (_PRECISIONS.index(a.precision), _WRITING.index(a.role)))


def _require_writer(location: Location, model: Bundle | Run) -> None:
    if not model.task.writes_text:
        name = location.name
        text = " TEXT" if model.task.reads_text else ""
        raise InputError(
            f"{name}: is a {model.task.noun} and writes no text; use: edgeformer {model.task.use} {name}{text}"
        )
    if model.leaks:
        raise InputError(
            f"{location.name}: leaks future tokens, so it cannot write: a token's state depends on the tokens after "
            "it, which are not there yet, and nothing computed for it could be kept. Train it with model.causal: true"
        )


def _command(location: Location) -> str:
    return f"edgeformer export {location.argument} --exit all"
