"""The runs of a study: each row's recipe for each seed, the data that it reads, and the key of its results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.studies.local_data import LocalData, load_local_data, source_notes, with_local_data
from benchmarks.studies.results import TRAINING_REVISION
from benchmarks.studies.specification import RunSpec, Study
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, RecipeError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import MODEL_FOLDER
from edgeformer.data.tokenization import fingerprint
from edgeformer.models import load_recipe, model_spec_of
from edgeformer.models.pretrained.source import WEIGHTS, open_source
from edgeformer.run import locate
from edgeformer.tasks import get_task

_DECIDES_NOTHING = {"name", "description", "target"}
_SPEED_ONLY = ("log_every", "checkpoint_minutes", "checkpointing", "chunked_loss", "pinned_memory")


@dataclass(frozen=True)
class Data:
    """A recipe's data.

    Attributes:
        summary: None: it cannot be read.
        reason: why it, or something else that the weights are made of, cannot be read; empty: all of it can.
        origins: what else the weights are made of → sha256: tokenizer, source, teacher.
    """

    summary: DataSummary | None
    reason: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One run of a study: a row and a seed.

    Attributes:
        written: the recipe as study and recipe file say; its results are found by it.
        recipe: the same on the data that is read here.
        sha256: of ``written``, without keys that decide nothing.
        notes: what is read, part by part.
        teacher: the job whose run teaches this one.
    """

    row: str
    seed: int
    spec: RunSpec
    written: Recipe
    recipe: Recipe
    sha256: str
    data: Data
    notes: tuple[str, ...]
    teacher: Job | None = None

    @property
    def key(self) -> str | None:
        """By which its results are found; None: something that its weights are made of cannot be read."""
        if self.data.summary is None or self.data.reason or (self.teacher is not None and self.teacher.key is None):
            return None
        origins = "".join(f" {name}:{sha256}" for name, sha256 in sorted(self.origins.items()))
        text = f"{self.sha256} {self.data.summary.fingerprint} {TRAINING_REVISION}{origins}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def origins(self) -> dict[str, str]:
        """What the weights are made of beside the texts; a row that teaches counts with its key."""
        return {**self.data.origins, **({"teacher": self.teacher.key or ""} if self.teacher is not None else {})}

    @property
    def folder_name(self) -> str:
        """Of its run: studies that need the same run share it."""
        return f"{self.written.task}-{self.written.model.kind}-{(self.key or '')[:8]}"

    @property
    def title(self) -> str:
        """Row and seed, for messages."""
        return f"{self.row}, seed {self.seed}"

    @property
    def exits(self) -> set[int]:
        """Loops of which the study needs graphs; the whole model is none of them."""
        model_spec, config = model_spec_of(self.written), self.written.model
        exits = model_spec.trained_exits(config) or range(1, model_spec.loops(config) + 1)
        return set(exits[:-1]) if self.spec.exits else set()


@dataclass
class DataReader:
    """Reads the data of recipes, each data set once.

    Attributes:
        artifacts: the folder that holds the runs and the cache.
        folders: local files in place of the hub; none: the hub.
        offline: read nothing from the hub.
    """

    artifacts: Path
    folders: Sequence[Path]
    progress: Progress
    offline: bool = False
    _cache: dict[str, Any] = field(default_factory=dict)

    @property
    def mapping(self) -> LocalData | None:
        """Local files by what they replace; None: recipes read the hub. Raises RecipeError."""
        return load_local_data() if self.folders else None

    def read(self, recipe: Recipe, *, taught_by_row: bool = False) -> Data:
        """Return what a recipe's data is; ``taught_by_row``: its teacher is another row, which has its own key."""
        if self.offline and any(source.kind == "hub" for sources in recipe.data.parts.values() for source in sources):
            return Data(None, "is on the hub, which is not asked without training")
        content = {name: getattr(recipe, name).model_dump(mode="json") for name in ("data", "tokenizer")}
        text = json.dumps({**content, "size": recipe.model.vocab_size, "task": recipe.task}, sort_keys=True)
        if text not in self._cache:
            try:
                cache = self.artifacts / ".cache" / "tokens"
                self._cache[text] = get_task(recipe.task).prepare(recipe, cache, self.progress)
            except (EdgeformerError, OSError) as error:
                self._cache[text] = error
        prepared = self._cache[text]
        if isinstance(prepared, Exception):
            return Data(None, str(prepared))
        origins = {} if recipe.tokenizer.kind == "trained" else {"tokenizer": fingerprint(prepared.tokenizer)}
        try:
            if (source := getattr(recipe.model, "source", None)) is not None:
                if (name := f"source {source}") not in self._cache:
                    self._cache[name] = open_source(source).weights_sha256()
                origins["source"] = self._cache[name]
            if (teacher := getattr(recipe.training, "teacher", None)) is not None and not taught_by_row:
                weights = locate(teacher, self.artifacts).require_run() / MODEL_FOLDER / WEIGHTS
                if not weights.is_file():
                    raise ArtifactError(f"training.teacher: {teacher}: has no weights ({weights})")
                origins["teacher"] = sha256_of(weights)
        except (EdgeformerError, OSError) as error:
            return Data(prepared.summary, str(error))
        return Data(prepared.summary, origins=origins)


def jobs_of(study: Study, path: Path, reader: DataReader) -> list[Job]:
    """Return all runs of a study, rows in its order.

    Args:
        study: with the rows and seeds to make.
        path: of the study's file, beside which recipes are looked for first.
        reader: of their data.

    Raises:
        RecipeError: a recipe does not exist, or a change does not fit it.
    """
    jobs: dict[tuple[str, int], Job] = {}

    def make(row: str, seed: int) -> Job:
        if (row, seed) in jobs:
            return jobs[row, seed]
        spec = study.runs[row]
        if spec.teacher is not None and seed not in study.runs[spec.teacher].seeds:
            raise RecipeError(f"{path}: runs.{row}: its teacher {spec.teacher} has no seed {seed}; add it to its seeds")
        teacher = make(spec.teacher, seed) if spec.teacher is not None else None
        placement = path.parent / spec.recipe
        changes = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in spec.set.items()]
        try:
            name = str(placement) if placement.is_file() else spec.recipe
            written = load_recipe(name, [*changes, f"seed={seed}"])
        except RecipeError as error:
            raise RecipeError(f"{path}: runs.{row}: {error}") from None
        try:
            recipe = with_local_data(written, reader.folders, reader.mapping) if reader.mapping else written
            data = reader.read(recipe, taught_by_row=teacher is not None)
        except EdgeformerError as error:
            recipe, data = written, Data(None, str(error))
        notes = source_notes(written, reader.mapping)
        jobs[row, seed] = Job(row, seed, spec, written, recipe, recipe_sha256(written, teacher), data, notes, teacher)
        return jobs[row, seed]

    for row, spec in study.runs.items():
        for seed in spec.seeds:
            make(row, seed)
    return [jobs[row, seed] for row, spec in study.runs.items() for seed in spec.seeds]


def decisive(recipe: Recipe) -> dict[str, Any]:
    """Return what decides the weights, as far as it differs from the defaults: new keys change no old recipe."""
    content = recipe.model_dump(mode="json", exclude_defaults=True, exclude=_DECIDES_NOTHING)
    for key in _SPEED_ONLY:
        content["training"].pop(key, None)
    content["data"].pop("expected_rows", None)

    def portable(source: Mapping[str, Any]) -> dict[str, Any]:  # a file's fingerprint counts, not its folder
        return {key: Path(value).name if key == "path" else value for key, value in source.items()}

    parts = content["data"]["parts"]
    content["data"]["parts"] = {part: [portable(source) for source in sources] for part, sources in parts.items()}
    content["tokenizer"] = portable(content["tokenizer"])
    if (teacher := content["training"].get("teacher")) is not None:
        content["training"]["teacher"] = Path(teacher).name
    return content


def recipe_sha256(recipe: Recipe, teacher: Job | None = None) -> str:
    """Return the sha256 of what decides the weights; a teacher counts with its own recipe, not with its folder."""
    content = decisive(recipe)
    if teacher is not None:
        content["training"]["teacher"] = teacher.sha256
        content["training"].pop("teacher_sha256", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def speed_sha256(recipe: Recipe) -> str:
    """Return the sha256 of what decides how long a training row takes: not seeds, epochs, rates or which rows."""
    content = decisive(recipe)
    training = {key: content["training"].get(key) for key in ("batch_size", "accumulation", "precision", "batching")}
    parts = content["data"].pop("parts")
    for key in ("split", "split_seed", "thresholds"):
        content["data"].pop(key, None)
    kind = {"training": training, "model": content["model"], "data": content["data"], "parts": parts}
    return hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()
