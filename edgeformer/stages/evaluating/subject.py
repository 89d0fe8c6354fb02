"""Opening what is to be scored: an artifact of a bundle, or the run's own weights in torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from edgeformer.backends.opening import cannot_run, check_companion, open_artifact
from edgeformer.backends.session import Session
from edgeformer.bundle import read_bundle
from edgeformer.data.tokenization import boundary_id, load_language_tokenizer, load_tokenizer, special_ids
from edgeformer.families import family_of, read_recipe_of
from edgeformer.formats.data_config import DataConfig, DataSection, FileTokenizer, TextConfig
from edgeformer.formats.errors import ArtifactError, InputError, MissingDependencyError, install_hint
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.run import Location, read_run

if TYPE_CHECKING:
    from edgeformer.backends.session import Early

TORCH = "torch"


@dataclass(frozen=True)
class Subject:
    """A trained model whose artifacts can be opened by id.

    Attributes:
        pad: the token that fills up a row; of a language model the one between documents.
        vocabulary: tokens that the model knows.
        exits: of a language model: loops with a head, the last one among them.
        leaks: a language model that sees what it is asked to predict.
    """

    location: Location
    manifest: BundleManifest | None
    tokenizer: Tokenizer
    pad: int
    vocabulary: int
    data: DataSection
    trained_on: Mapping[str, str]
    exits: tuple[int, ...] = ()
    leaks: bool = False

    @property
    def artifact_ids(self) -> list[str]:
        """Artifacts that were built, then ``torch`` where the run's weights are at hand."""
        return [*(a.id for a in self._built), *([TORCH] if self.location.run is not None else [])]

    @property
    def _built(self) -> list[ArtifactManifest]:
        """What can be scored: not the graphs with caches, which take a text token by token."""
        artifacts = self.manifest.artifacts if self.manifest else ()
        return [a for a in artifacts if a.status == "built" and a.role != "decode"]

    def choose(self, wanted: str | None) -> list[str]:
        """Artifact ids for ``--artifact ID|all``; None: the one that RUN names, else all that run here.

        Raises:
            InputError: no such artifact.
        """
        ids = self.artifact_ids
        if not ids:
            why = "; ".join(f"{a.id} {a.status}: {a.reason}" for a in self.manifest.artifacts) if self.manifest else ""
            raise ArtifactError(f"{self.location.name}: the bundle holds no usable artifact ({why})")
        if wanted is None:
            if self.location.artifact is not None:
                return [self.location.artifact]
            return [a.id for a in self._built if cannot_run(a) is None] or ids
        if wanted == "all":
            return ids
        if wanted not in ids:
            raise InputError(f"--artifact {wanted}: {self.location.name} has {', '.join(ids) or 'none'}, or all")
        return [wanted]

    def loop_of(self, artifact: str) -> int:
        """The exit that an artifact of a language model answers at."""
        return self._manifest_of(artifact).exit or self.exits[-1]

    def reading(self, artifact: str) -> Subject:
        """This subject with the tokenizer of an artifact, which is another one where its vocabulary is trimmed."""
        if artifact == TORCH or self.manifest is None or not self._manifest_of(artifact).trimmed:
            return self
        companions = self._manifest_of(artifact).companions
        tokenizer, pad, vocabulary = _companions(self.location.require_bundle(), self.manifest, companions)
        return replace(self, tokenizer=tokenizer, pad=pad, vocabulary=vocabulary)

    def step_artifact(self) -> str:
        """The first step bundle that was built, from which rows can leave early. Raises InputError."""
        found = next((a.id for a in self._built if a.role == "step"), None)
        if found is None:
            raise InputError(f"{self.location.name}: has no step bundle; write one: edgeformer export --exit all")
        return found

    def open(self, artifact: str, early: Early | None = None) -> Session:
        """A session for one of :attr:`artifact_ids`. Raises ArtifactError or MissingDependencyError.

        A language model's ``torch`` answers with the losses of every exit, everything else with logits.
        """
        if artifact == TORCH:
            if early is not None:
                raise InputError("--confidence: needs a step artifact of a bundle, not torch")
            return _open_torch(self.location.require_run())
        return open_artifact(self.location.require_bundle(), self._manifest_of(artifact), early=early)

    def _manifest_of(self, artifact: str) -> ArtifactManifest:
        assert self.manifest is not None
        return next(a for a in self.manifest.artifacts if a.id == artifact)


def open_subject(location: Location) -> Subject:
    """Read manifest, tokenizer and data configuration of a bundle, or of a run without one."""
    return _of_bundle(location, location.bundle) if location.bundle is not None else _of_run(location)


def _of_bundle(location: Location, folder: Path) -> Subject:
    manifest = read_bundle(folder)
    tokenizer, pad, vocabulary = _companions(folder, manifest, ".")
    return Subject(
        location=location,
        manifest=manifest,
        tokenizer=tokenizer,
        pad=pad,
        vocabulary=vocabulary,
        data=manifest.data,
        trained_on=manifest.data_fingerprints,
        exits=manifest.exits,
        leaks=manifest.leaks,
    )


def _companions(folder: Path, manifest: BundleManifest, where: str) -> tuple[Tokenizer, int, int]:
    """Tokenizer, the token that fills up rows, and how many tokens the model knows."""
    place = Path(where)
    tokenizer_path = check_companion(folder, manifest, (place / "tokenizer.json").as_posix())
    config_path = check_companion(folder, manifest, (place / "config.json").as_posix())
    vocabulary = int(json.loads(config_path.read_text(encoding="utf-8"))["vocab_size"])
    tokenizer, pad = _tokenizer(tokenizer_path, manifest.data, vocabulary)
    return tokenizer, pad, vocabulary


def _of_run(location: Location) -> Subject:
    run = location.require_run()
    tokenizer_path = run / "model" / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ArtifactError(f"{run}: holds no trained model; finish its training first")
    recipe, manifest = read_recipe_of(run), read_run(run)
    tokenizer, pad = _tokenizer(tokenizer_path, recipe.data, recipe.model.vocab_size)
    return Subject(
        location=location,
        manifest=None,
        tokenizer=tokenizer,
        pad=pad,
        vocabulary=recipe.model.vocab_size,
        data=recipe.data,
        trained_on=manifest.data.fingerprints,
        exits=family_of(recipe).trained_exits(recipe.model),
        leaks=manifest.leaks,
    )


def _tokenizer(path: Path, data: DataSection, vocabulary: int) -> tuple[Tokenizer, int]:
    config = FileTokenizer(kind="file", path=str(path))
    if isinstance(data, TextConfig):
        tokenizer = load_language_tokenizer(config, vocab_size=vocabulary, training_texts=None)
        return tokenizer, boundary_id(tokenizer)
    assert isinstance(data, DataConfig)
    tokenizer = load_tokenizer(config, cleaning=data.cleaning, vocab_size=vocabulary, training_texts=None)
    return tokenizer, special_ids(tokenizer).pad


def _open_torch(run: Path) -> Session:
    try:
        from edgeformer.backends.torch.session import TorchSession
        from edgeformer.families.saving import load_model
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"scoring the run's own weights needs {error.name}: {install_hint('train')}; "
            "or choose an exported artifact with --artifact"
        ) from None
    scorer: Any = family_of(read_recipe_of(run)).network.scorer(load_model(run))
    return TorchSession(scorer, scorer.inputs, scorer.optional)
