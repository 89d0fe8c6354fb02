"""The runs of a study: each row's recipe for each seed, its data (the hub's or local files), the key of its results."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from benchmarks.studies.specification import FOLDER, RunSpec, Several, Study
from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import FileTokenizer
from edgeformer.artifacts.documents import read_yaml, validate
from edgeformer.artifacts.errors import ArtifactError, DataError, EdgeformerError, RecipeError
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.tokenization import fingerprint
from edgeformer.models import load_recipe, model_spec_of
from edgeformer.models.pretrained.source import open_source, weights_sha256
from edgeformer.tasks import get_task

TRAINING_REVISION = 1
"""Counted up when the same recipe on the same data trains to other weights: older results are no longer used."""
_DECIDES_NOTHING = {"name", "description", "target"}
_SPEED_ONLY = ("log_every", "checkpoint_minutes", "checkpointing", "chunked_loss", "pinned_memory")
MAPPING = FOLDER / "local" / "data.yaml"
_HUB_KEYS = {"kind", "name", "config", "split", "revision", "text", "text_pair", "label"}
"""Keys of a hub source that its files replace; other keys of the source, such as ``rows``, are kept."""


class LocalSource(Frozen):
    """Files that replace a split of a hub data set."""

    hub: str
    config: str | None = None
    split: str = "train"
    files: Annotated[Several[dict[str, Any]], Field(min_length=1)]  # file sources as in a recipe, below ``--data``
    all_rows: bool = False  # fewer rows than recipes ask for: a source's ``rows`` is left out
    note: str = ""  # how they differ from the hub's split


class LocalData(Frozen):
    """Files below ``--data DIR`` by what they replace; of tokenizers and models, hub name → path."""

    sources: Several[LocalSource] = ()
    tokenizers: dict[str, str] = Field(default_factory=dict)
    models: dict[str, str] = Field(default_factory=dict)

    def stand_in(self, source: Mapping[str, Any]) -> LocalSource | None:
        split = (source.get("split") or "").partition("[")[0]  # train[:1000] is a part of train
        hub = (source["name"], source.get("config"), split)
        return next((local for local in self.sources if (local.hub, local.config, local.split) == hub), None)


@cache
def load_local_data() -> LocalData:
    """Read and validate local/data.yaml. Raises RecipeError."""
    return validate(LocalData, read_yaml(MAPPING))


def with_local_data(recipe: Recipe, folders: Sequence[Path], mapping: LocalData) -> Recipe:
    """Return the recipe on the files below ``folders``, each from the first folder that has it. Raises DataError."""

    def local_path(path: str, hub: str) -> str:
        for folder in folders:
            if (folder / path).exists():
                return str((folder / path).resolve())
        reads = "" if path == hub else f", which replaces the hub's {hub},"
        raise DataError(f"--data: no {path}{reads} in {' or '.join(map(str, folders))}")

    def local_sources(source: dict[str, Any], *, is_labelled: bool = True) -> list[dict[str, Any]]:
        if source["kind"] == "file" and not Path(source["path"]).is_file():
            below = os.path.relpath(source["path"])  # a recipe's relative path was resolved against this folder
            return [{**source, "path": local_path(below, below)}]
        if source["kind"] != "hub":
            return [source]
        local, name = mapping.stand_in(source), _hub_name(source)
        reads = f"--data: {recipe.name} reads {name} from the hub"
        if local is None:
            raise DataError(f"{reads}, for which no local file is known; add it to {MAPPING}")
        if "[" in (source.get("split") or "") and not local.all_rows:
            raise DataError(f"{reads}, a part of a split; give the number of rows with the source's rows: instead")
        dropped = _HUB_KEYS | ({"rows"} if local.all_rows and is_labelled else set())
        kept = {key: value for key, value in source.items() if key not in dropped}
        if not is_labelled and type(rows := kept.get("rows")) is int:  # of all files together
            kept["rows"] = rows // len(local.files)
        return [{"kind": "file", **kept, **file, "path": local_path(str(file["path"]), name)} for file in local.files]

    content = recipe.model_dump(mode="json")["data"]
    for part, sources in content["parts"].items():
        content["parts"][part] = [file for source in sources for file in local_sources(source)]
    if content.get("unlabelled"):
        content["unlabelled"] = [
            file for source in content["unlabelled"] for file in local_sources(source, is_labelled=False)
        ]
    changed: dict[str, Any] = {"data": type(recipe.data).model_validate(content, strict=False)}
    if recipe.tokenizer.kind == "hub" and (path := mapping.tokenizers.get(recipe.tokenizer.name)):
        changed["tokenizer"] = FileTokenizer(kind="file", path=local_path(path, recipe.tokenizer.name))
    source = getattr(recipe.model, "source", None)
    if source is not None and (path := mapping.models.get(source)):
        changed["model"] = recipe.model.model_copy(update={"source": local_path(path, source)})
    return recipe.model_copy(update=changed)


def source_notes(recipe: Recipe, mapping: LocalData | None) -> tuple[str, ...]:
    """Describe what a recipe reads, part by part. ``mapping``: None: it reads the hub."""
    lines = []
    for part, sources in {**recipe.data.parts, "unlabelled": getattr(recipe.data, "unlabelled", ())}.items():
        for source in (source.model_dump(mode="json") for source in sources):
            if source["kind"] != "hub":
                text = Path(source["path"]).name if "path" in source else f"{source['kind']}, {source.get('rows')} rows"
            elif mapping is None or (local := mapping.stand_in(source)) is None:
                text = f"{_hub_name(source)} from the hub"
            else:
                files = ", ".join(str(file["path"]) for file in local.files)
                text = f"{files} in place of the hub's {_hub_name(source)}{': ' if local.note else ''}{local.note}"
            lines.append(f"{part}: {text}")
    return tuple(dict.fromkeys(lines))


def _hub_name(source: Mapping[str, Any]) -> str:
    return " ".join(str(source[key]) for key in ("name", "config", "split") if source.get(key))


@dataclass(frozen=True)
class Job:
    """One run of a study: a row and a seed."""

    row: str
    seed: int
    spec: RunSpec
    written: Recipe  # as study and recipe file say; its results are found by it
    recipe: Recipe  # the same on the data that is read here
    sha256: str  # of ``written``, without keys that decide nothing
    summary: DataSummary | None  # of its data; None: it cannot be read
    reason: str = ""  # why it, or something else that the weights are made of, cannot be read
    origins: Mapping[str, str] = field(default_factory=dict)  # tokenizer, source, teacher → sha256 (or a row's key)
    notes: tuple[str, ...] = ()  # what is read, part by part
    teacher: Job | None = None  # whose run teaches this one

    @property
    def key(self) -> str | None:
        """By which its results are found; None: something that its weights are made of cannot be read."""
        if self.summary is None or self.reason:
            return None
        origins = "".join(f" {name}:{sha256}" for name, sha256 in sorted(self.origins.items()))
        text = f"{self.sha256} {self.summary.fingerprint} {TRAINING_REVISION}{origins}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def folder_name(self) -> str:
        return f"{self.written.task}-{self.written.model.kind}-{(self.key or '')[:8]}"

    @property
    def title(self) -> str:
        return f"{self.row}, seed {self.seed}"

    @property
    def exits(self) -> set[int]:
        """Loops of which the study needs graphs; the whole model is none of them."""
        model_spec, config = model_spec_of(self.written), self.written.model
        exits = model_spec.trained_exits(config) or range(1, model_spec.loops(config) + 1)
        return set(exits[:-1]) if self.spec.exits else set()


def jobs_of(
    study: Study, path: Path, artifacts: Path, folders: Sequence[Path] = (), progress: Progress = SILENT,
    *, offline: bool = False,
) -> list[Job]:  # fmt: skip
    """Return all runs of a study, rows in its order. ``folders``: local files in place of the hub; none: the hub.

    ``offline``: read nothing from the hub. Raises RecipeError: a recipe does not exist, or a change does not fit it.
    """
    jobs: dict[tuple[str, int], Job] = {}
    mapping = load_local_data() if folders else None
    prepared_data: dict[str, Any] = {}  # each data set is read, or refused, once

    def prepare(recipe: Recipe) -> Any:
        if offline and any(source.kind == "hub" for source in recipe.data.sources):
            raise RecipeError("is on the hub, which is not asked without training")
        content = {name: getattr(recipe, name).model_dump(mode="json") for name in ("data", "tokenizer")}
        text = json.dumps({**content, "size": recipe.model.vocab_size, "task": recipe.task}, sort_keys=True)
        if text not in prepared_data:
            try:
                cache = artifacts / ".cache" / "tokens"
                prepared_data[text] = get_task(recipe.task).rows.prepare(recipe, cache, progress)
            except (EdgeformerError, OSError) as error:
                prepared_data[text] = error
        if isinstance(prepared_data[text], Exception):
            raise prepared_data[text]
        return prepared_data[text]

    def make(row: str, seed: int) -> Job:
        if (row, seed) in jobs:
            return jobs[row, seed]
        spec = study.runs[row]
        if spec.teacher is not None and seed not in study.runs[spec.teacher].seeds:
            raise RecipeError(f"{path}: runs.{row}: its teacher {spec.teacher} has no seed {seed}; add it to its seeds")
        teacher = make(spec.teacher, seed) if spec.teacher is not None else None
        beside = path.parent / spec.recipe
        changes = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in study.changes(row).items()]
        try:
            name = str(beside) if beside.is_file() else spec.recipe
            recipe = written = load_recipe(name, [*changes, f"seed={seed}"])
        except RecipeError as error:
            raise RecipeError(f"{path}: runs.{row}: {error}") from None
        summary, reason, origins = None, "", dict[str, str]()
        try:
            recipe = with_local_data(written, folders, mapping) if mapping else written
            prepared = prepare(recipe)
            summary = prepared.summary
            if recipe.tokenizer.kind != "trained":
                origins["tokenizer"] = fingerprint(prepared.tokenizer)
            if (source := getattr(recipe.model, "source", None)) is not None:
                origins["source"] = weights_sha256(open_source(source).folder)
            if teacher is not None:
                if teacher.key is None:
                    raise ArtifactError("what its teacher is made of cannot be read")
                origins["teacher"] = teacher.key
            elif getattr(recipe.training, "teacher", None) is not None:
                raise ArtifactError("training.teacher is no row of the study; name one in the row's teacher:")
        except (EdgeformerError, OSError) as error:
            reason = str(error)
        notes = source_notes(written, mapping)
        sha256 = recipe_sha256(written, teacher)
        jobs[row, seed] = Job(row, seed, spec, written, recipe, sha256, summary, reason, origins, notes, teacher)
        return jobs[row, seed]

    return [make(row, seed) for row, spec in study.runs.items() for seed in spec.seeds]


def decisive(recipe: Recipe) -> dict[str, Any]:
    """Return what decides the weights, as far as it differs from the defaults: new keys change no old recipe."""
    content = recipe.model_dump(mode="json", exclude_defaults=True, exclude=_DECIDES_NOTHING)
    for key in _SPEED_ONLY:
        content["training"].pop(key, None)
    content["data"].pop("expected_rows", None)
    content["model"].pop("attention", None)  # its kernel

    def portable(source: Mapping[str, Any]) -> dict[str, Any]:  # a file's fingerprint counts, not its folder
        return {key: Path(value).name if key == "path" else value for key, value in source.items()}

    parts = content["data"]["parts"]
    content["data"]["parts"] = {part: [portable(source) for source in sources] for part, sources in parts.items()}
    if unlabelled := content["data"].get("unlabelled"):
        content["data"]["unlabelled"] = [portable(source) for source in unlabelled]
    content["tokenizer"] = portable(content["tokenizer"])
    if content["tokenizer"]["kind"] == "source":  # as earlier versions named the tokenizer of a pretrained source
        name = content["tokenizer"]["name"]
        is_folder = Path(name).is_dir()
        content["tokenizer"] = (
            {"kind": "file", "path": "tokenizer.json"} if is_folder else {"kind": "hub", "name": name}
        )
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
