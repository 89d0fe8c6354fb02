"""A study's file is checked before anything is trained; the shipped ones are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edgeformer.formats.study import load_study
from edgeformer.studies.jobs import decisive, recipe_sha256
from edgeformer.studies.local_data import shipped_mapping, told, with_local_data

from edgeformer.families import load_recipe
from edgeformer.formats.documents import shipped_names
from edgeformer.formats.errors import EdgeformerError
from tests.cli.in_process import Edgeformer, in_process
from tests.studies.tiny_study import run, study, write

STUDIES = shipped_names("recipes/studies")


@pytest.fixture
def edgeformer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Edgeformer:
    return in_process(monkeypatch, capsys)


@pytest.mark.parametrize("name", STUDIES)
def test_a_shipped_study_is_named_like_its_file_and_its_recipes_are_valid(name: str) -> None:
    found, _ = load_study(name)
    assert found.name == name
    for row, spec in found.runs.items():
        recipe = load_recipe(spec.recipe, [f"{key}={value!r}" if isinstance(value, str) else f"{key}={_yaml(value)}"
                                           for key, value in spec.set.items()])  # fmt: skip
        assert recipe.to_yaml(), row


def _yaml(value: object) -> str:
    import json

    return json.dumps(value)


@pytest.mark.data
@pytest.mark.parametrize("name", STUDIES)
def test_every_shipped_recipe_has_local_data(name: str, data_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "models" / "all-MiniLM-L6-v2").mkdir(parents=True)
    (tmp_path / "models" / "all-MiniLM-L6-v2" / "tokenizer.json").touch()
    found, _ = load_study(name)
    mapping = shipped_mapping()
    for spec in found.runs.values():
        recipe = load_recipe(spec.recipe, [f"{key}={_yaml(value)}" for key, value in spec.set.items()])
        local: Any = with_local_data(recipe, [data_folder, tmp_path], mapping)
        paths = [Path(source.path) for sources in local.data.parts.values() for source in sources]
        assert paths and all(path.is_file() for path in paths)
        assert all("in place of the hub's" in note for note in told(recipe, mapping))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"runs": {"a": {**run("A"), "seed": 3}}}, ["runs.a.seed", "did you mean 'seeds'"]),
        ({"runs": {"a": {**run("A"), "teacher": "b"}}}, ["a: names the run 'b'; there are a"]),
        (
            {"runs": {"a": {**run("A"), "teacher": "b"}, "b": {**run("B"), "teacher": "a"}}},
            ["runs.a.teacher: goes in a circle: a, b, a"],
        ),
        ({"runs": {"a": {**run("A"), "set": {"seed": 3}}}}, ["runs.a.set: seed", "write seeds:"]),
        ({"runs": {"a": run("A", seeds=(1, 1))}}, ["runs.a.seeds: a seed stands there twice"]),
        ({"figures": [{"kind": "bubbles", "title": "T", "y": ["accuracy"]}]}, ["'T' is of kind bubbles and needs x"]),
        ({"figures": [{"kind": "lines", "title": "T", "y": ["accuracy"]}]}, ["'T' is of kind lines and needs x"]),
        ({"table": {"rows": "tests", "columns": ["acuracy"]}}, ["no figure 'acuracy'", "accuracy"]),
        ({"table": {"rows": "rows", "columns": ["accuracy"]}}, ["table.rows", "'tests'"]),
        ({"runs": {"a": {**run("A"), "recipe": "quickstrat"}}}, ["runs.a", "did you mean 'quickstart'"]),
        (
            {"runs": {"a": {**run("A"), "set": {"training.epoch": 3}}}},
            ["runs.a", "training.epoch", "did you mean 'epochs'"],
        ),
    ],
)
def test_a_bad_study_says_file_and_key(
    edgeformer: Edgeformer, tmp_path: Path, change: dict[str, Any], said: list[str]
) -> None:
    path = write(tmp_path, {**study("bad", {"a": run("A")}), **change})
    printed = edgeformer("study", path, "--artifacts", str(tmp_path / "artifacts"), "--dry-run", code=2)
    unbroken = " ".join(printed.split())
    for words in ["bad.yaml", *said]:
        assert words in unbroken
    assert not list((tmp_path / "artifacts").glob("*/run.json"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-such",), "no study 'no-such'"),
        (("table6", "--only", "basline"), "--only basline: table6 has no such row"),
        (("table6", "--seeds", "one"), "--seeds 1,2,3"),
        (("table6", "--data", "nowhere"), "nowhere: is no folder"),
    ],
)
def test_bad_usage(edgeformer: Edgeformer, arguments: tuple[str, ...], said: str) -> None:
    assert said in " ".join(edgeformer("study", *arguments, code=2).replace("│", " ").split())


def test_a_hub_source_without_a_file_is_named(tmp_path: Path) -> None:
    recipe = load_recipe("crt_deep_rtx4050")
    with pytest.raises(
        EdgeformerError, match="wikitext-103-raw-v1 train from the hub, for which no local file is known"
    ):
        with_local_data(recipe, [tmp_path], shipped_mapping())


def test_a_part_of_a_split_is_not_its_whole_file(tmp_path: Path) -> None:
    mapping = shipped_mapping()
    for known in mapping.sources:
        for file in known.files:
            (tmp_path / file["path"]).parent.mkdir(exist_ok=True)
            (tmp_path / file["path"]).touch()
    parts = [
        {"train": [{"kind": "hub", "name": name, "split": "train[:1000]", "label_value": "positive"}]}
        for name in ("stanfordnlp/imdb", "fancyzhx/yelp_polarity")
    ]
    whole, sample = (load_recipe("quickstart", [f"data.parts={_yaml(part)}"]) for part in parts)
    with pytest.raises(EdgeformerError, match=r"train\[:1000\] from the hub, a part of a split"):
        with_local_data(whole, [tmp_path], mapping)
    local: Any = with_local_data(sample, [tmp_path], mapping)  # a stand-in of fewer rows, which its note says
    assert len(local.data.parts["train"]) == 2


def test_studies_are_listed(edgeformer: Edgeformer) -> None:
    assert all(name in edgeformer("list", "studies") for name in STUDIES)


def test_what_decides_nothing_changes_no_key(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart")
    same = load_recipe("quickstart", ["name=other", "description=x", "target=null", "training.log_every=3"])
    other = load_recipe("quickstart", ["training.optimizer.lr=1e-5"])
    assert recipe_sha256(recipe) == recipe_sha256(same) != recipe_sha256(other)
    here, there = ({"data.parts.train": [{"kind": "file", "path": f"/{place}/a.csv"}]} for place in ("x", "y"))
    made = [
        load_recipe("quickstart", [f"{key}={_yaml(value)}" for key, value in each.items()]) for each in (here, there)
    ]
    assert decisive(made[0]) == decisive(made[1])
