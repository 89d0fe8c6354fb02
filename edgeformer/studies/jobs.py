"""The runs of a study: each row's recipe for each seed, the data that it reads here, and the key of its results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgeformer.families import load_recipe
from edgeformer.formats.errors import EdgeformerError, InputError, RecipeError
from edgeformer.formats.manifest import DataSummary
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.study import LocalData, RunSpec, Study
from edgeformer.formats.study_result import TRAINING_REVISION
from edgeformer.studies.local_data import told, with_local_data
from edgeformer.studies.origins import Origins, told_of
from edgeformer.tasks import task_named

_DECIDES_NOTHING = ("name", "description", "target")
_SPEED_ONLY = ("log_every", "checkpoint_minutes", "checkpointing", "chunked_loss", "pinned_memory")


@dataclass(frozen=True)
class Data:
    """What the recipe's data turned out to be here.

    Attributes:
        summary: None: it cannot be read.
        reason: why not, or why something else that the weights are made of cannot; empty: all of it is known.
        origins: what else that is, see :mod:`edgeformer.studies.origins`.
    """

    summary: DataSummary | None
    reason: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One run of a study: a row and a seed.

    Attributes:
        written: the recipe as study and recipe file say, which is what its results are found by.
        recipe: the same on the data that is read here.
        sha256: of ``written``, less what decides nothing.
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
        """By which its results are found; None: its data, or what else it is made of, cannot be read here."""
        if self.data.summary is None or self.data.reason or (self.teacher is not None and self.teacher.key is None):
            return None
        return key_of(self.sha256, self.data.summary.fingerprint, self.origins)

    @property
    def origins(self) -> dict[str, str]:
        """What the weights are made of beside the texts; a row that teaches counts with its key."""
        taught = {"teacher": self.teacher.key or ""} if self.teacher is not None else {}
        return {**self.data.origins, **taught}

    @property
    def folder_name(self) -> str:
        """Of its run. Needs a key, which decides all of it: studies share a run, whatever they call its recipe."""
        return f"{self.written.task}-{self.written.model.kind}-{(self.key or '')[:8]}"

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.row}, seed {self.seed}"


@dataclass
class DataReader:
    """Reads each data set once, however many runs share it.

    Attributes:
        artifacts: the folder that holds the runs, and what is kept between them.
        folders: local files in place of the hub; none: the hub.
        mapping: which files these are.
        offline: read nothing from the hub.
    """

    artifacts: Path
    folders: Sequence[Path]
    mapping: LocalData
    progress: Progress
    offline: bool = False
    _known: dict[str, tuple[Data, Tokenizer | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._origins = Origins(self.artifacts)

    def localised(self, recipe: Recipe) -> Recipe:
        """The recipe on local files. Raises DataError."""
        return with_local_data(recipe, self.folders, self.mapping) if self.folders else recipe

    def read(self, recipe: Recipe, *, taught_by_row: bool = False) -> Data:
        """What a recipe's data is, and what else its weights are made of.

        Args:
            taught_by_row: its teacher is another row of the study.
        """
        if self.offline and any(source.kind == "hub" for sources in recipe.data.parts.values() for source in sources):
            return Data(None, "is on the hub, which is not asked without training")
        asked = {"data": recipe.data, "tokenizer": recipe.tokenizer}
        content = {name: part.model_dump(mode="json") for name, part in asked.items()}
        text = json.dumps({**content, "size": recipe.model.vocab_size, "task": recipe.task}, sort_keys=True)
        if text not in self._known:
            try:
                cache = self.artifacts / ".cache" / "tokens"
                prepared = task_named(recipe.task).prepare(recipe, cache, self.progress)
                self._known[text] = (Data(prepared.summary), prepared.tokenizer)
            except (EdgeformerError, OSError) as error:
                self._known[text] = (Data(None, str(error)), None)
        data, tokenizer = self._known[text]
        if tokenizer is None:
            return data
        try:
            return Data(data.summary, origins=self._origins.of(recipe, tokenizer, taught_by_row=taught_by_row))
        except (EdgeformerError, OSError) as error:
            return Data(data.summary, str(error))


def jobs_of(study: Study, place: Path, overrides: Sequence[str], reader: DataReader) -> list[Job]:
    """All runs of a study, rows in its order, a row's teacher made before it.

    Args:
        place: of the study's file, from which recipes are looked for first.
        overrides: ``key=value`` for every run, as ``--set`` takes them.
        reader: of their data.

    Raises:
        RecipeError: a recipe cannot be found, or an override does not fit; the message names the row.
        InputError: an override is of the seed, which would make the same run of all of a row's.
    """
    for given in overrides:
        key, _, value = given.partition("=")
        if key.strip() == "seed":
            raise InputError(f"--set {given}: a study trains a row once for each of its seeds; use --seeds {value}")
    known: dict[tuple[str, int], Job] = {}

    def make(row: str, seed: int) -> Job:
        if (row, seed) not in known:
            spec = study.runs[row]
            if spec.teacher is not None and seed not in study.runs[spec.teacher].seeds:
                raise RecipeError(f"{place}: runs.{row}: its teacher {spec.teacher} has no seed {seed}")
            teacher = make(spec.teacher, seed) if spec.teacher is not None else None
            known[row, seed] = _job(row, seed, spec, teacher, _Recipes(place, overrides, reader))
        return known[row, seed]

    return [make(row, seed) for row, spec in study.runs.items() for seed in spec.seeds]


@dataclass(frozen=True)
class _Recipes:
    place: Path
    overrides: Sequence[str]
    reader: DataReader

    def load(self, row: str, spec: RunSpec, seed: int) -> Recipe:
        beside = self.place.parent / spec.recipe
        changes = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in spec.set.items()]
        try:
            name = str(beside) if beside.is_file() else spec.recipe
            return load_recipe(name, [*changes, f"seed={seed}", *self.overrides])
        except RecipeError as error:
            raise RecipeError(f"{self.place}: runs.{row}: {error}") from None


def _job(row: str, seed: int, spec: RunSpec, teacher: Job | None, recipes: _Recipes) -> Job:
    written, reader = recipes.load(row, spec, seed), recipes.reader
    notes = told(written, reader.mapping if reader.folders else None)
    try:
        recipe = reader.localised(written)
        data = reader.read(recipe, taught_by_row=teacher is not None)
    except EdgeformerError as error:
        recipe, data = written, Data(None, str(error))
    return Job(row, seed, spec, written, recipe, recipe_sha256(written, teacher), data, notes, teacher)


def asked_together(jobs: Sequence[Job]) -> list[Job]:
    """Jobs of one key, each asking for all that any of them asks of their run: it is made once."""
    asked: dict[str, RunSpec] = {}
    for job in jobs:
        if job.key is not None:
            before, spec = asked.get(job.key, job.spec), job.spec
            graphs = tuple(dict.fromkeys((*before.export, *spec.export)))
            more = {"export": graphs, "exits": before.exits or spec.exits, "sweep": before.sweep or spec.sweep}
            asked[job.key] = before.model_copy(update=more)
    return [replace(job, spec=_asking(job.spec, asked.get(job.key or "", job.spec))) for job in jobs]


def _asking(spec: RunSpec, needs: RunSpec) -> RunSpec:
    return spec.model_copy(update={"export": needs.export, "exits": needs.exits, "sweep": needs.sweep})


def key_of(recipe_sha: str, fingerprint: str, origins: Mapping[str, str]) -> str:
    """The key of a run's results: its recipe, all that its weights are made of, the revision of the code that trains.

    Args:
        fingerprint: of the data.
        origins: what else they are made of → sha256.
    """
    text = f"{recipe_sha} {fingerprint} {TRAINING_REVISION}{told_of(origins)}"
    return hashlib.sha256(text.encode()).hexdigest()


def decisive(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe decides the weights, as far as it differs from the defaults: new keys change no old recipe."""
    content = recipe.model_dump(mode="json", exclude_defaults=True, exclude={*_DECIDES_NOTHING})
    for key in _SPEED_ONLY:
        content["training"].pop(key, None)
    content["data"].pop("expected_rows", None)
    parts = content["data"]["parts"]
    content["data"]["parts"] = {part: [_portable(source) for source in sources] for part, sources in parts.items()}
    content["tokenizer"] = _portable(content["tokenizer"])
    if (teacher := content["training"].get("teacher")) is not None:
        content["training"]["teacher"] = Path(teacher).name
    return content


def recipe_sha256(recipe: Recipe, teacher: Job | None = None) -> str:
    """sha256 of what decides the weights; a teacher counts with its own recipe, not with its folder."""
    content = decisive(recipe)
    if teacher is not None:
        content["training"]["teacher"] = teacher.sha256
        content["training"].pop("teacher_sha256", None)
    return _sha256(content)


def alike(recipe: Recipe) -> str:
    """sha256 of what decides how long a training row takes: all but seeds, epochs, rates and what they are for."""
    content = decisive(recipe)
    training = {key: content["training"].get(key) for key in ("batch_size", "accumulation", "precision", "batching")}
    parts = content["data"].pop("parts")
    for key in ("split", "split_seed", "thresholds"):  # which rows are trained on changes little of how long they are
        content["data"].pop(key, None)
    return _sha256({"training": training, "model": content["model"], "data": content["data"], "parts": parts})


def _portable(source: Mapping[str, Any]) -> dict[str, Any]:
    """A source or tokenizer without the folder that it lies in: fingerprints tell what it held."""
    return {key: Path(value).name if key == "path" else value for key, value in source.items()}


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
