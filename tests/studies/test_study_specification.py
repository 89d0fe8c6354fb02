"""A study's file and its options are checked before training; results are found by what decides the weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import jobs as study_jobs
from benchmarks.studies.jobs import decisive, load_local_data, recipe_sha256, with_local_data
from benchmarks.studies.results import Results, StudyRow, StudyTable, kept_documents
from benchmarks.studies.specification import load_study, study_names
from benchmarks.studies.study import main
from benchmarks.studies.train import missing_steps
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.scores import Evaluation
from edgeformer.models import load_recipe
from tests.studies.tiny_study import SUMMARY, graph, job_of, results_of, run, scores, study, table_of, write


def recipes_of(name: str) -> list[Any]:
    loaded, _ = load_study(name)
    assert loaded.name == name
    changes = {row: [f"{key}={json.dumps(value)}" for key, value in loaded.changes(row).items()] for row in loaded.runs}
    return [load_recipe(spec.recipe, changes[row]) for row, spec in loaded.runs.items()]


@pytest.mark.parametrize("name", study_names())
def test_a_study_is_named_like_its_file_and_its_recipes_are_valid(name: str) -> None:
    assert all(recipe.to_yaml() for recipe in recipes_of(name))


@pytest.mark.data
@pytest.mark.parametrize("name", study_names())
def test_every_recipe_has_local_data(name: str, data_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "models" / "all-MiniLM-L6-v2").mkdir(parents=True)
    (tmp_path / "models" / "all-MiniLM-L6-v2" / "tokenizer.json").touch()
    for recipe in recipes_of(name):
        local: Any = with_local_data(recipe, [data_folder, tmp_path], load_local_data())
        paths = [Path(source.path) for sources in local.data.parts.values() for source in sources]
        assert paths and all(path.is_file() for path in paths)
        assert not any(note.endswith("from the hub") for note in study_jobs.source_notes(recipe, load_local_data()))


TAUGHT = {**run("A"), "teacher": "b"}


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"runs": {"a": {**run("A"), "seed": 3}}}, ["runs.a.seed", "did you mean 'seeds'"]),
        ({"runs": {"a": TAUGHT}}, ["a: names the run 'b'; there are a"]),
        ({"runs": {"a": TAUGHT, "b": {**run("B"), "teacher": "a"}}}, ["runs.a.teacher: b has a teacher of its own"]),
        ({"runs": {"a": {**run("A"), "set": {"seed": 3}}}}, ["runs.a.seeds: list each seed once, and there"]),
        ({"runs": {"a": run("A", seeds=(1, 1))}}, ["runs.a.seeds: list each seed once"]),
        ({"figures": [{"kind": "lines", "title": "T", "y": ["accuracy"]}]}, ["'T' is of kind lines and needs x"]),
        ({"table": {"rows": "tests", "columns": ["acuracy"]}}, ["no figure 'acuracy'", "accuracy"]),
        ({"runs": {"a": {**run("A"), "recipe": "quickstrat"}}}, ["runs.a", "did you mean 'quickstart'"]),
        ({"runs": {"a": {**run("A"), "set": {"training.epoch": 3}}}}, ["runs.a", "training.epoch", "'epochs'"]),
    ],
)
def test_a_bad_study_is_refused_with_file_and_key(capsys, tmp_path, change, texts):
    path = write(tmp_path, {**study("bad", {"a": run("A")}), **change})
    assert main([path, "--artifacts", str(tmp_path / "artifacts"), "--dry-run"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert all(text in message for text in ["bad.yaml", *texts]), message
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["table66"], "no study 'table66': no such file, and did you mean 'table6'?"),
        (["table6", "--data", "nowhere"], "--data nowhere: is no folder"),
        (["table6", "--jobs", "0"], "--jobs 0: give 1 or more"),
    ],
)
def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert main(words) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_a_part_of_a_split_is_not_its_whole_file(tmp_path: Path) -> None:
    mapping = load_local_data()
    for file in (file for source in mapping.sources for file in source.files):
        (tmp_path / file["path"]).parent.mkdir(exist_ok=True)
        (tmp_path / file["path"]).touch()
    part = {"kind": "hub", "split": "train[:1000]", "label_value": "positive"}
    names = ("stanfordnlp/imdb", "fancyzhx/yelp_polarity")
    parts = (json.dumps({"train": [{**part, "name": name}]}) for name in names)
    imdb, yelp = (load_recipe("quickstart", [f"data.parts={each}"]) for each in parts)
    with pytest.raises(EdgeformerError, match=r"train\[:1000\] from the hub, a part of a split"):
        with_local_data(imdb, [tmp_path], mapping)
    local: Any = with_local_data(yelp, [tmp_path], mapping)  # a stand-in of fewer rows, as its note says
    assert len(local.data.parts["train"]) == 2
    with pytest.raises(EdgeformerError, match="wikitext-103-raw-v1 train from the hub, for which no local file is"):
        with_local_data(load_recipe("crt_deep_rtx4050"), [tmp_path], mapping)


def test_only_what_decides_the_weights_changes_the_hash() -> None:
    same = load_recipe("quickstart", ["name=other", "description=x", "target=null", "training.log_every=3"])
    other = load_recipe("quickstart", ["training.optimizer.lr=1e-5"])
    assert recipe_sha256(load_recipe("quickstart")) == recipe_sha256(same) != recipe_sha256(other)
    files = (f"data.parts.train=[{{kind: file, path: /{folder}/a.csv}}]" for folder in ("x", "y"))
    first, second = (load_recipe("quickstart", [file]) for file in files)
    assert decisive(first) == decisive(second)


def jobs(path: str, artifacts: Path, *, offline: bool = False) -> list[study_jobs.Job]:
    loaded, file = load_study(path)
    return study_jobs.jobs_of(loaded, file, artifacts, offline=offline)


@pytest.mark.parametrize("name", ["table6", "crt-exits"])
def test_a_committed_run_is_found_for_every_trained_row(name: str) -> None:
    for job in jobs(name, Path("nowhere"), offline=True):
        results = Results(Path("nowhere")).find(job)
        assert results is not None and results.origin == "results in studies", job.title
        assert Results(Path("nowhere"), committed=False).find(job) is None


def test_results_of_different_data_are_not_mixed_where_it_cannot_be_read(tmp_path: Path) -> None:
    hub = {"data.parts": {"train": [{"kind": "hub", "name": "somebody/reviews"}]}}
    path = write(tmp_path, study("far", {"far": {**run("Far", seeds=(1, 2)), "set": hub}}))
    first, second = jobs(path, tmp_path / "artifacts", offline=True)
    results, recipe = Results(tmp_path / "artifacts", committed=False), decisive(first.written)
    results.keep(results_of("k1", recipe_sha256=first.sha256, recipe=recipe))
    assert first.key is None and results.find(first) is not None
    small = SUMMARY.model_copy(update={"fingerprint": "5a5a5a5a", "rows": {"train": 20}})
    results.keep(results_of("k2", recipe_sha256=second.sha256, recipe=recipe, data=small))  # another seed, 20 rows
    assert results.find(first) is None and results.find(second) is None
    assert "5a5a5a5a with 20 rows (trained here)" in results.ambiguity(first)


def test_what_a_finished_run_still_lacks(tmp_path: Path) -> None:
    specification, _ = table_of({}, {"model": [results_of("k")]})
    job = job_of(specification, "model", export=("int8",))
    rows = (scores("torch", "random-split"), scores("onnx-fp32", "random-split"))
    item = results_of("k", evaluation=Evaluation(rows=rows))
    (step,) = missing_steps(job, item, tmp_path, ("test",))
    assert step[:4] == ("export", str(tmp_path), "--int8", "--keep-going")
    item = item.model_copy(update={"artifacts": (graph("fp32"), graph("int8"))})
    (step,) = missing_steps(job, item, tmp_path, ("test",))
    assert step[:4] == ("evaluate", str(tmp_path), "--artifact", "onnx-int8")
    complete = Evaluation(rows=(*rows, scores("onnx-int8", "random-split")))
    assert not [*missing_steps(job, item.model_copy(update={"evaluation": complete}), tmp_path, ("test",))]


def test_finished_runs_are_committed_once(tmp_path: Path) -> None:
    results, folder = Results(tmp_path, committed=False), tmp_path / "committed"
    results.keep(results_of("mine"))
    results.keep(results_of("of another study"))
    row = StudyRow(run="a", label="A", at="test", cells={}, origin="here", keys=("mine",))
    table = StudyTable(study="made", title="T", element="E", protocol="-", columns=("loss",), rows=(row,), minutes=1.0)
    for _ in range(2):
        results.commit(table, folder)
    assert [*kept_documents(folder)] == ["mine"] and kept_documents(folder)["mine"]["epochs"] == 2
    assert len((folder / "runs" / "made.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    assert StudyTable.model_validate_json((folder / "made.json").read_text(encoding="utf-8")) == table
