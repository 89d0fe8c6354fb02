"""What writes: the step or decode graphs of a bundle, without torch, or the run's own weights in torch."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from edgeformer.backends.opening import check_companion, open_decoder
from edgeformer.bundle import read_bundle
from edgeformer.data.tokenization import load_language_tokenizer
from edgeformer.families import family_of, read_recipe_of
from edgeformer.formats.data_config import FileTokenizer
from edgeformer.formats.errors import ArtifactError, InputError, MissingDependencyError, install_hint
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.run import Location, read_run
from edgeformer.stages.generating.decoding import DecodingSession
from edgeformer.tasks.language_modeling.recipe import LanguageRecipe

TORCH = "torch"
"""``--artifact torch``: the run's own weights."""

_PRECISIONS = ("fp32", "fp16", "int8")
_WRITING = ("decode", "step")


@dataclass(frozen=True)
class Writer(ABC):
    """A language model that can write, before anything heavy of it is opened.

    Attributes:
        name: for messages.
        exits: loops after which it can answer; the last one is the last loop.
        max_positions: the longest text it takes.
        trained_length: tokens that it read at once in training.
    """

    name: str
    exits: tuple[int, ...]
    max_positions: int
    trained_length: int

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer it was trained with. Raises ArtifactError or DataError."""

    @abstractmethod
    def open(self, thresholds: Mapping[int, float]) -> tuple[str, DecodingSession]:
        """The id of what writes, and a text that answers after those loops.

        Raises:
            InputError: the artifact that was asked for cannot answer there.
            ArtifactError: nothing that can was exported, or it is damaged.
            MissingDependencyError: what it needs is not installed.
        """


def find_writer(location: Location, artifact: str | None = None) -> Writer:
    """The bundle where it holds graphs that write (or ``artifact`` is one of it), else the run.

    Args:
        artifact: an artifact's id, or ``torch``; None: the one that ``location`` names, else FP32 before FP16.

    Raises:
        InputError: not a language model, one that sees later tokens, or there is no such artifact.
        ArtifactError: an unfinished or damaged run, or a bundle by itself whose graphs cannot write.
    """
    wanted = artifact or location.artifact
    if wanted != TORCH and location.bundle is not None:
        writer = _bundle_writer(location, location.bundle, wanted)
        if wanted is not None or writer.writing:
            return writer
    if wanted not in (None, TORCH):
        raise InputError(f"--artifact {wanted}: {location.name} has no bundle; make one with: {_command(location)}")
    if location.run is None:
        raise ArtifactError(
            f"{location.bundle}: holds no graphs that write text; export its run again with: {_command(location)}"
        )
    return _run_writer(location, location.run)


def _command(location: Location) -> str:
    return f"edgeformer export {location.run.name if location.run is not None else 'RUN'} --exit all"


def _refuse_classifier(name: str) -> InputError:
    return InputError(f"{name}: is a classifier and writes no text; use: edgeformer predict {name} TEXT")


def _refuse_leak(name: str) -> InputError:
    return InputError(
        f"{name}: leaks future tokens, so it cannot write: a token's state depends on the tokens after it, "
        "which are not there yet, and nothing computed for it could be kept. Train it with model.causal: true"
    )


def _tokenizer(path: Path, vocabulary: int) -> Tokenizer:
    config = FileTokenizer(kind="file", path=str(path))
    return load_language_tokenizer(config, vocab_size=vocabulary, training_texts=None)


@dataclass(frozen=True)
class BundleWriter(Writer):
    """The graphs of a bundle.

    Attributes:
        wanted: the artifact that was asked for; None: the best of those that fit.
        command: what makes missing graphs.
        with_run: the run is at hand, so that torch could write too.
    """

    bundle: Path
    manifest: BundleManifest
    wanted: str | None
    command: str
    with_run: bool

    @property
    def writing(self) -> tuple[ArtifactManifest, ...]:
        """Artifacts that keep what they computed for earlier tokens, those to prefer first: FP32, then the faster."""
        built = [a for a in self.manifest.artifacts if a.is_graph and a.status == "built" and not a.trimmed]
        found = [a for a in built if a.role in _WRITING]
        return tuple(sorted(found, key=lambda a: (_PRECISIONS.index(a.precision), _WRITING.index(a.role))))

    def tokenizer(self) -> Tokenizer:
        """See :meth:`Writer.tokenizer`."""
        config = check_companion(self.bundle, self.manifest, "config.json")
        try:
            vocabulary = int(json.loads(config.read_text(encoding="utf-8"))["vocab_size"])
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{config}: damaged (vocab_size: {error}); export the run again") from None
        return _tokenizer(check_companion(self.bundle, self.manifest, "tokenizer.json"), vocabulary)

    def open(self, thresholds: Mapping[int, float]) -> tuple[str, DecodingSession]:
        """See :meth:`Writer.open`."""
        all_loops = set(thresholds) == {self.exits[-1]}
        chosen = self._first(all_loops) if self.wanted is None else self._asked_for(self.wanted, all_loops)
        return chosen.id, open_decoder(self.bundle, chosen, tuple(thresholds))

    def _first(self, all_loops: bool) -> ArtifactManifest:
        for artifact in self.writing:
            if all_loops or artifact.role == "step":
                return artifact
        instead = f", or write with --artifact {TORCH}" if self.with_run else ""
        raise ArtifactError(
            f"{self.name}: --exit and --confidence need the step graphs, which its bundle does not hold; make them "
            f"with: {self.command}{instead}"
        )

    def _asked_for(self, wanted: str, all_loops: bool) -> ArtifactManifest:
        chosen = next((a for a in self.manifest.artifacts if a.id == wanted), None)
        able = ", ".join([*(a.id for a in self.writing), *([TORCH] if self.with_run else [])]) or "nothing"
        if chosen is None:
            raise InputError(f"--artifact {wanted}: {self.name} writes with {able}")
        if chosen.role not in _WRITING:
            raise InputError(
                f"--artifact {wanted}: reads whole texts and keeps nothing of earlier tokens; {self.name} writes with "
                f"{able}; missing ones are made with: {self.command}"
            )
        if chosen.role == "decode" and not all_loops:
            raise InputError(
                f"--artifact {wanted}: takes all loops for every token; --exit and --confidence need a step artifact "
                f"({self.name} writes with {able}; missing ones are made with: {self.command})"
            )
        return chosen


def _bundle_writer(location: Location, bundle: Path, wanted: str | None) -> BundleWriter:
    manifest = read_bundle(bundle)
    if manifest.task != "language-modeling":
        raise _refuse_classifier(location.name)
    if manifest.leaks:
        raise _refuse_leak(location.name)
    return BundleWriter(
        name=manifest.run,
        exits=manifest.exits,
        max_positions=manifest.max_positions,
        trained_length=manifest.max_length,
        bundle=bundle,
        manifest=manifest,
        wanted=wanted,
        command=_command(location),
        with_run=location.run is not None,
    )


@dataclass(frozen=True)
class RunWriter(Writer):
    """The run's own weights in torch."""

    run: Path
    recipe: LanguageRecipe

    def tokenizer(self) -> Tokenizer:
        """See :meth:`Writer.tokenizer`."""
        path = self.run / "model" / "tokenizer.json"
        if not path.is_file():
            raise ArtifactError(f"{path}: missing; train the run again")
        return _tokenizer(path, self.recipe.model.vocab_size)

    def open(self, thresholds: Mapping[int, float]) -> tuple[str, DecodingSession]:
        """See :meth:`Writer.open`."""
        try:
            from edgeformer.backends.torch.decoder import torch_decoder
            from edgeformer.families.saving import load_model
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"writing with the run's own weights needs {error.name}: {install_hint('train')}; or export "
                f"the run where that is installed: edgeformer export {self.run.name} --exit all"
            ) from None
        return TORCH, torch_decoder(family_of(self.recipe).network.decoder(load_model(self.run)))


def _run_writer(location: Location, run: Path) -> RunWriter:
    manifest, recipe = read_run(run), read_recipe_of(run)
    if not isinstance(recipe, LanguageRecipe):
        raise _refuse_classifier(location.name)
    if manifest.status != "finished":
        raise ArtifactError(f"{run}: is {manifest.status}, not finished; go on with edgeformer train … --resume")
    config = recipe.model
    family = family_of(recipe)
    if manifest.leaks or family.leaks(config):
        raise _refuse_leak(location.name)
    return RunWriter(
        name=recipe.name,
        exits=family.trained_exits(config),
        max_positions=config.max_positions,
        trained_length=recipe.data.sequence_length,
        run=run,
        recipe=recipe,
    )
