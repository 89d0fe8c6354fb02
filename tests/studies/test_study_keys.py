"""A run's results are found by all that decides them, and by nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeformer.families import load_recipe
from edgeformer.formats.errors import InputError
from edgeformer.formats.progress import SILENT
from edgeformer.formats.study import load_study
from edgeformer.studies.jobs import Job, jobs_of, recipe_sha256
from edgeformer.studies.study import StudyOptions, plan_study, reader_of
from edgeformer.tasks import task_named
from tests.studies.tiny_study import TINY, run, study, write

TRAINED = {"tokenizer": {"kind": "trained"}}


def tokenizer(folder: Path, *, swapped: bool) -> dict[str, Any]:
    """A tokenizer of the tiny runs as a file; ``swapped``: two of its words have each other's numbers."""
    changes = [f"{key}={json.dumps(value)}" for key, value in TINY.items()]
    prepared = task_named("classification").prepare(load_recipe("quickstart", changes), folder / "cache", SILENT)
    content = json.loads(prepared.tokenizer.to_str())
    if swapped:
        words = content["model"]["vocab"]
        one, other = [*words][-2:]
        words[one], words[other] = words[other], words[one]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return {"kind": "file", "path": str(folder / "tokenizer.json")}


def jobs(path: str, artifacts: Path) -> list[Job]:
    found, place = load_study(path)
    options = StudyOptions(artifacts)
    return jobs_of(found, place, (), reader_of(options, SILENT))


def test_tokenizers_of_one_name_are_told_apart_by_what_they_are(tmp_path: Path) -> None:
    rows = {name: run(name, tokenizer=tokenizer(tmp_path / name, swapped=name == "b")) for name in ("a", "b", "c")}
    path = write(tmp_path, study("tokenizers", rows))
    first, other, same = jobs(path, tmp_path / "artifacts")
    assert first.key is not None and first.sha256 == other.sha256
    assert first.key != other.key and first.folder_name != other.folder_name
    assert (first.key, first.folder_name) == (same.key, same.folder_name), "a folder's name decides nothing"
    tokenizer(tmp_path / "a", swapped=True)
    assert jobs(path, tmp_path / "artifacts")[0].key == other.key


def test_a_teacher_that_is_no_row_counts_with_its_weights(tmp_path: Path) -> None:
    weights = tmp_path / "artifacts" / "elder" / "model" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    taught = run("Taught", training__teacher="elder", training__distillation={"weight": 0.5})
    path, keys = write(tmp_path, study("taught", {"taught": taught})), []
    (job,) = jobs(path, tmp_path / "artifacts")
    assert job.key is None and "elder" in job.data.reason, "it is not there"
    (tmp_path / "artifacts" / "elder" / "run.json").write_text("{}", encoding="utf-8")
    for content in (b"one", b"two"):
        weights.write_bytes(content)
        keys.append(jobs(path, tmp_path / "artifacts")[0].key)
    assert None not in keys and keys[0] != keys[1]


def test_stated_thresholds_are_part_of_the_recipe() -> None:
    changes = ["task=multi-label-classification", "data.split=given", 'data.parts={"train": [{"kind": "file", "path": "a.csv"}], '
               '"test": [{"kind": "file", "path": "b.csv"}]}']  # fmt: skip
    labels = load_recipe("quickstart").data.labels  # type: ignore[attr-defined]
    stated = [load_recipe("quickstart", [*changes, f"data.thresholds={json.dumps(dict.fromkeys(labels, at))}"])
              for at in (0.3, 0.6)]  # fmt: skip
    assert len({recipe_sha256(recipe) for recipe in (load_recipe("quickstart", changes), *stated)}) == 3


def test_a_seed_is_not_overridden(tmp_path: Path) -> None:
    path = write(tmp_path, study("seeds", {"a": run("A", seeds=(1, 2, 3))}))
    with pytest.raises(InputError, match=r"--set seed=7: .*use --seeds 7"):
        plan_study(path, StudyOptions(tmp_path / "artifacts", overrides=("seed=7",)))


def test_studies_that_show_one_run_know_it_by_one_key() -> None:
    shown: dict[str, set[str]] = {}
    for name in ("table6", "table7", "table13"):
        found, _ = load_study(name)
        for row in ("baseline", "wider", "light"):
            changes = [f"{key}={json.dumps(value)}" for key, value in found.runs[row].set.items()]
            recipe = load_recipe(found.runs[row].recipe, changes)
            shown.setdefault(row, set()).update((recipe_sha256(recipe), recipe.name))
    assert all(len(found) == 2 for found in shown.values()), "one hash and one recipe each"
