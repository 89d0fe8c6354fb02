"""A run's results are found by all that decides them, and by nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edgeformer.formats.study import Timing, load_study
from edgeformer.formats.study_result import StudyTimes
from edgeformer.studies.jobs import Data, Job, alike, asked_together, decisive, jobs_of, recipe_sha256
from edgeformer.studies.results import COMMITTED, Results
from edgeformer.studies.study import StudyOptions, plan_study, reader_of, run_study
from edgeformer.studies.timing import taken_as_here, times_key

from edgeformer.backends import library_versions
from edgeformer.families import load_recipe
from edgeformer.formats.errors import InputError
from edgeformer.formats.files import write_json
from edgeformer.formats.progress import SILENT
from edgeformer.machine.host import cpu_name, default_threads
from edgeformer.tasks import task_named
from tests.studies.test_study_tables import SUMMARY, graph, made
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
    parts = {"train": [{"kind": "file", "path": "a.csv"}], "test": [{"kind": "file", "path": "b.csv"}]}
    changes = ["task=multi-label-classification", "data.split=given", f"data.parts={json.dumps(parts)}"]
    changes += ["data.label_separator=';'", "training.select_by=f1"]
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


def test_rows_of_one_run_ask_for_it_together(tmp_path: Path) -> None:
    rows = {"few": {**run("Few"), "export": ["fp32"]}, "many": {**run("Many"), "export": ["int8"], "exits": True}}
    rows["other"] = run("Other", training__epochs=3)
    few, many, other = asked_together(jobs(write(tmp_path, study("shared", rows)), tmp_path / "artifacts"))
    assert few.key == many.key != other.key
    assert few.spec.export == many.spec.export == ("fp32", "int8") and few.spec.exits and many.spec.exits
    assert few.spec.label == "Few" and not other.spec.export


HUB = {"kind": "hub", "name": "somebody/reviews"}


def unread(folder: Path) -> tuple[Job, Job]:
    """Two seeds of a row whose data is on the hub, which is not asked."""
    rows = {"far": {**run("Far", seeds=(1, 2)), "set": {"data.parts": {"train": [HUB]}}}}
    found, place = load_study(write(folder, study("far", rows)))
    one, other = jobs_of(found, place, (), reader_of(StudyOptions(folder / "artifacts", train=False), SILENT))
    assert one.key is None and other.key is None
    return one, other


def test_results_of_different_data_are_not_mixed_where_it_cannot_be_read(tmp_path: Path) -> None:
    one, other = unread(tmp_path)
    small = SUMMARY.model_copy(update={"fingerprint": "5a5a5a5a", "rows": {"train": 20}})
    results = Results(tmp_path / "artifacts", ())
    results.keep(made("k1", recipe_sha256=one.sha256))
    results.settle([one, other])
    assert results.of(one) is not None and results.doubt(one) == ""
    results.keep(made("k2", recipe_sha256=other.sha256, data=small))  # of another seed, in a trial of 20 rows
    results.settle([one, other])
    assert results.of(one) is None and results.of(other) is None
    assert "5a5a5a5a with 20 rows (trained here)" in results.doubt(one) and "--data" in results.doubt(other)


def test_the_richer_results_of_a_run_are_taken(tmp_path: Path) -> None:
    (job,) = jobs(write(tmp_path, study("rich", {"a": run("A")})), tmp_path / "artifacts")
    poor = made(job.key or "", artifacts=(graph("fp32"),))
    rich = made(job.key or "", artifacts=(graph("fp32"), graph("int8")))
    for folder, known in (("one", poor), ("two", rich)):
        write_json(tmp_path / folder / f"{job.key}.json", known)
    found = Results(tmp_path / "artifacts", (tmp_path / "one", tmp_path / "two")).of(job)
    assert found is not None and found.origin == "results in two"


def test_fresh_takes_no_results_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeformer.studies.results._SOURCE", tmp_path / "clone")
    path = write(tmp_path, study("rich", {"a": run("A")}))
    (job,) = jobs(path, tmp_path / "artifacts")
    (tmp_path / "clone" / "recipes" / "studies").mkdir(parents=True)
    write_json(tmp_path / "clone" / COMMITTED / f"{job.key}.json", made(job.key or ""))
    for fresh, state in ((False, "done"), (True, "missing")):
        plan = plan_study(path, StudyOptions(tmp_path / "artifacts", fresh=fresh))
        assert [estimate.state for estimate in plan.estimates] == [state]


def test_an_installed_package_takes_the_results_of_the_clone_it_is_run_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeformer.studies.results._SOURCE", tmp_path / "site-packages")
    path = write(tmp_path, study("rich", {"a": run("A")}))
    (job,) = jobs(path, tmp_path / "artifacts")
    clone = tmp_path / "clone"
    write_json(clone / COMMITTED / f"{job.key}.json", made(job.key or ""))
    options = StudyOptions(tmp_path / "artifacts", train=False)
    monkeypatch.chdir(clone)
    assert plan_study(path, options).estimates[0].state == "unavailable", "the folder is no clone"
    (clone / "recipes" / "studies").mkdir(parents=True)
    assert plan_study(path, options).estimates[0].state == "done"
    monkeypatch.chdir(tmp_path)
    assert "--results CLONE/benchmarks/results/studies" in plan_study(path, options).estimates[0].basis


def test_a_row_that_is_asked_for_brings_its_teacher_and_that_ones(tmp_path: Path) -> None:
    taught = {name: {**run(name.title()), "teacher": teacher} for name, teacher in (("b", "c"), ("a", "b"))}
    path = write(tmp_path, study("chain", {**taught, "c": run("C"), "d": run("D")}))
    plan = plan_study(path, StudyOptions(tmp_path / "artifacts", only=("a",), train=False))
    assert {job.row for job in plan.jobs} == {"a", "b", "c"}


def test_times_are_of_the_same_graphs_of_the_same_trainings() -> None:
    timing = Timing(against="a/fp32")
    one = made("k", artifacts=(graph("fp32", size_bytes=1000),))
    same, other = times_key([one], timing), one.model_copy(update={"artifacts": (graph("fp32", size_bytes=1001),)})
    assert times_key([one.model_copy()], timing) == same != times_key([other], timing)
    assert times_key([one.model_copy(update={"started": "later"})], timing) != same
    facts: dict[str, Any] = {
        "key": same, "batch": 1, "seq": 8, "threads": default_threads(), "entries": (), "host": {"cpu": cpu_name()},
        "versions": library_versions(), "code_version": "0", "started": "now", "seconds": 1.0,
    }  # fmt: skip
    assert taken_as_here(StudyTimes(**facts))
    for change in ({"host": {"cpu": "another"}}, {"threads": 99}, {"versions": {"onnxruntime": "0.1"}}):
        assert not taken_as_here(StudyTimes(**{**facts, **change}))


def test_what_data_is_is_written_by_no_plan_and_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path, study("labels", {"a": run("A")}, table={"rows": "labels", "columns": ["rows"]}))
    options = StudyOptions(tmp_path / "artifacts")
    folder = tmp_path / "artifacts" / "studies" / "runs"
    plan = plan_study(path, options)
    assert not folder.exists(), "a plan writes nothing"
    assert run_study(plan, options).rows[0].missing is None
    (kept,) = folder.glob("data-*.json")
    (job,) = plan.jobs
    assert job.data.summary is not None and job.data.summary.fingerprint[:16] in kept.name
    far = replace(job, data=Data(None, "is far away"))
    assert plan.results.data_of(far) is not None
    other = job.data.summary.model_copy(update={"fingerprint": "another"})
    plan.results.keep_data(replace(job, data=Data(other)))
    assert plan.results.data_of(far) is None and "different data" in plan.results.doubt(far)


def test_a_teacher_without_weights_is_trained_again_for_the_row_that_needs_it(tmp_path: Path) -> None:
    taught = {**run("Taught", training__teacher="elder-001"), "teacher": "elder"}
    path = write(tmp_path, study("taught", {"elder": run("Elder"), "taught": taught}))
    artifacts = tmp_path / "artifacts"
    elder, _ = jobs(path, artifacts)
    told = {"alike": alike(elder.written), "recipe": decisive(elder.written), "host": {"cpu": cpu_name()}}
    measured = made(elder.key or "", **told, overhead_s=1.0)
    Results(artifacts, ()).keep(measured)
    plan = plan_study(path, StudyOptions(artifacts))
    assert [estimate.state for estimate in plan.estimates] == ["missing", "missing"]
    alone = plan_study(path, StudyOptions(artifacts, only=("elder",)))
    assert [estimate.state for estimate in alone.estimates] == ["done"]
