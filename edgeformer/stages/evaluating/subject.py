"""Opening what is to be scored: an artifact of a bundle, or the run's own weights in torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from edgeformer.data.tokenization import SpecialIds, load_tokenizer, special_ids
from edgeformer.runtime.opening import check_companion, open_artifact
from edgeformer.runtime.session import Session
from edgeformer.schema.errors import ArtifactError, InputError, MissingDependencyError
from edgeformer.schema.manifest import ArtifactManifest, BundleManifest
from edgeformer.schema.recipe import DataConfig, FileTokenizer
from edgeformer.schema.shipped import load_recipe
from edgeformer.schema.workspace import RECIPE_FILE, Location, read_bundle, read_run

TORCH = "torch"


@dataclass(frozen=True)
class Subject:
    """A trained model whose artifacts can be opened by id."""

    location: Location
    manifest: BundleManifest | None
    tokenizer: Tokenizer
    special: SpecialIds
    data: DataConfig
    trained_on: Mapping[str, str]

    @property
    def artifact_ids(self) -> list[str]:
        """Artifacts that were built, then ``torch`` where the run's weights are at hand."""
        built = [a.id for a in self.manifest.artifacts if a.status == "built"] if self.manifest else []
        return [*built, *([TORCH] if self.location.run is not None else [])]

    def choose(self, wanted: str | None) -> list[str]:
        """Artifact ids for ``--artifact ID|all``; None: the one that RUN names, else all that were built.

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
            return [known for known in ids if known != TORCH] or ids
        if wanted == "all":
            return ids
        if wanted not in ids:
            raise InputError(f"--artifact {wanted}: {self.location.name} has {', '.join(ids) or 'none'}, or all")
        return [wanted]

    def open(self, artifact: str) -> Session:
        """A session for one of :attr:`artifact_ids`. Raises ArtifactError or MissingDependencyError."""
        if artifact == TORCH:
            return _open_torch(self.location.require_run())
        return open_artifact(self.location.require_bundle(), self._manifest_of(artifact))

    def _manifest_of(self, artifact: str) -> ArtifactManifest:
        assert self.manifest is not None
        return next(a for a in self.manifest.artifacts if a.id == artifact)


def open_subject(location: Location) -> Subject:
    """Read manifest, tokenizer and data configuration of a bundle, or of a run without one."""
    if location.bundle is not None:
        manifest = read_bundle(location.bundle)
        tokenizer_path = check_companion(location.bundle, manifest, "tokenizer.json")
        config_path = check_companion(location.bundle, manifest, "config.json")
        data, trained_on = manifest.data, manifest.data_fingerprints
        vocabulary = int(json.loads(config_path.read_text(encoding="utf-8"))["vocab_size"])
    else:
        run = location.require_run()
        manifest, tokenizer_path = None, run / "model" / "tokenizer.json"
        if not tokenizer_path.is_file():
            raise ArtifactError(f"{run}: holds no trained model; finish its training first")
        recipe = load_recipe(str(run / RECIPE_FILE))
        data, vocabulary = recipe.data, recipe.model.vocab_size
        trained_on = read_run(run).data.fingerprints
    tokenizer = load_tokenizer(
        FileTokenizer(kind="file", path=str(tokenizer_path)),
        cleaning=data.cleaning,
        vocab_size=vocabulary,
        training_texts=None,
    )
    return Subject(location, manifest, tokenizer, special_ids(tokenizer), data, trained_on)


def _open_torch(run: Path) -> Session:
    try:
        from edgeformer.models.build import load_encoder
        from edgeformer.runtime.torch_session import TorchSession
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"scoring the run's own weights needs {error.name}: pip install 'edgeformer[train]', "
            "or choose an exported artifact with --artifact"
        ) from None
    recipe = load_recipe(str(run / RECIPE_FILE))
    return TorchSession(load_encoder(recipe.model, recipe.classes, run / "model" / "model.safetensors"))
