"""Several labels per text: how they are read, scored and thresholded, and a model of them from data to predictions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pyarrow import parquet
from sklearn import metrics

import edgeformer
from edgeformer.artifacts.data_config import DataSection
from edgeformer.artifacts.errors import DataError, RecipeError
from edgeformer.data.data_warnings import label_findings, rows_per_label
from edgeformer.data.rows import label_counts, label_sets
from edgeformer.data.sources import load_part, load_parts
from edgeformer.data.splits import split
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.models import load_recipe, read_recipe_of
from edgeformer.run import Run, locate
from edgeformer.tasks import task_named
from edgeformer.tasks.multilabel import MultiLabelData, best_thresholds, probabilities, score
from tests.cli.run_cli import edgeformer as command

LABELS = ("food", "service", "price")
TASK = task_named("multi-label-classification")


def data(folder: Path, name: str, content: str, **changes: Any) -> MultiLabelData:
    (folder / name).write_text(content, encoding="utf-8")
    section = {
        "parts": {"train": [{"kind": "file", "path": str(folder / name)}]},
        "split": "stratified",
        "labels": LABELS,
        "label_separator": ",",
        **changes,
    }
    return MultiLabelData.model_validate(section, strict=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'text;label\na;"food, price"\nb;\nc; service \nd;1,price\n'),
        ("a.tsv", "text\tlabel\na\tfood,price\nb\t\nc\tservice\nd\tprice,1\n"),
        (
            "a.jsonl",
            '{"text": "a", "label": ["food", "price"]}\n{"text": "b", "label": []}\n'
            '{"text": "c", "label": "service"}\n{"text": "d", "label": [1, "price"]}\n',
        ),
    ],
)
def test_rows_have_none_one_or_several(tmp_path: Path, name: str, content: str) -> None:
    rows = load_part(data(tmp_path, name, content), "train")
    assert rows.texts == ["a", "b", "c", "d"]
    assert label_sets(rows.labels, 3).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert label_counts(rows.labels, 3, several=True) == [1, 2, 2]


def test_rows_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 3: label 'drinks' is not in the set; allowed: food, service, price"):
        load_part(data(tmp_path, "a.csv", 'text;label\na;food\nb;"food, drinks"\n'), "train")
    with pytest.raises(DataError, match="its items must be names or numbers"):
        load_part(data(tmp_path, "a.jsonl", '{"text": "a", "label": [1.5]}\n'), "train")


def test_rows_that_nobody_labelled_can_be_left_out(tmp_path: Path) -> None:
    config = data(tmp_path, "a.csv", "text;label\na;food\nb;\n")
    (source,) = config.parts["train"]
    some = config.model_copy(update={"parts": {"train": (source.model_copy(update={"skip_unlabelled": True}),)}})
    assert load_part(config, "train").texts == ["a", "b"] and load_part(some, "train").texts == ["a"]


def test_rare_combinations_are_tested_too(tmp_path: Path) -> None:
    """Ten labels in 200 combinations, none of them twice."""
    names = [f"l{number}" for number in range(10)]
    rows = [[name for bit, name in enumerate(names) if number >> bit & 1] for number in range(1, 201)]
    lines = "\n".join(f't{number};"{",".join(row)}"' for number, row in enumerate(rows))
    config = data(tmp_path, "a.csv", f"text;label\n{lines}\n", labels=names)
    sets = split(config, load_parts(config))
    assert [len(found) for found in sets.values()] == [pytest.approx(160, abs=8), *[pytest.approx(20, abs=4)] * 2]
    for found in (sets["validation"], sets["test"]):
        assert sum(count > 0 for count in label_counts(found.labels, 10, several=True)) >= 7


def test_what_is_odd_is_told_of_sets_of_labels(tmp_path: Path) -> None:
    config = data(tmp_path, "a.csv", 'text;label\na;food\nb;"food,service"\n')
    counts = rows_per_label(config, {"train": load_part(config, "train")})
    assert counts == {"train": {"food": 2, "service": 1, "price": 0}}
    assert [finding.kind for finding in label_findings(config, counts)] == ["labels without rows"]


def test_sections_that_cannot_be(tmp_path: Path) -> None:
    source = {"kind": "file", "path": "a.csv"}
    parts = {name: [source] for name in ("train", "validation", "test")}
    for changes, said in (
        ({"stream": True, "split": "given", "parts": parts}, "stream: is not possible"),
        ({"labels": ("a,b", "c")}, "label_separator: is in the label 'a,b'"),
        ({"labels": tuple(f"l{n}" for n in range(63))}, "labels: at most 62"),
        ({"thresholds": {"food": 0.5}}, "thresholds: needs one for each"),
    ):
        with pytest.raises(ValueError, match=said):
            data(tmp_path, "a.csv", "text;label\n", **changes)
    known = data(tmp_path, "a.csv", "text;label\n")
    assert isinstance(DataSection.recognise(known.model_dump(mode="json")), MultiLabelData)


def test_scores_are_scikit_learns() -> None:
    generator = np.random.default_rng(5)
    logits = generator.normal(size=(200, 3)).astype(np.float32)
    actual = (logits + generator.normal(size=logits.shape) > [0.5, 0.0, 1.5]).astype(np.int64)
    limits = {"food": 0.4, "service": 0.5, "price": 0.7}
    found = score(logits, actual, LABELS, limits)
    given = probabilities(logits) >= list(limits.values())
    assert found.f1 == pytest.approx(metrics.f1_score(actual, given, average="micro"))
    assert found.macro_f1 == pytest.approx(metrics.f1_score(actual, given, average="macro"))
    assert found.precision == pytest.approx(metrics.precision_score(actual, given, average="micro"))
    assert found.recall == pytest.approx(metrics.recall_score(actual, given, average="micro"))
    assert found.accuracy == pytest.approx(metrics.accuracy_score(actual, given))
    each = [metrics.log_loss(actual[:, label], probabilities(logits)[:, label]) for label in range(3)]
    assert found.loss == pytest.approx(float(np.mean(each)))
    assert list(found.label_f1.values()) == pytest.approx(metrics.f1_score(actual, given, average=None))


def test_thresholds_are_the_best_there_are() -> None:
    generator = np.random.default_rng(6)
    for _ in range(20):
        found = np.round(generator.random((60, 1)), 2)  # ties among them
        actual = found + generator.normal(scale=0.4, size=found.shape) > 0.6
        (threshold,) = best_thresholds(found, actual)

        def f1(limit: float, found: Any = found, actual: Any = actual) -> float:
            given = found >= limit
            return float(2 * (given & actual).sum() / (given.sum() + actual.sum()))

        assert f1(threshold) == pytest.approx(max(f1(limit) for limit in np.linspace(0.001, 0.999, 400)))
        assert f1(0.5) < f1(threshold) or threshold == 0.5
    few = np.zeros((60, 1), bool)
    few[:4] = True
    assert best_thresholds(generator.random((60, 1)), few) == [0.5]


def reviews(folder: Path) -> Path:
    """300 rows of what can be learned in seconds."""
    drawn, path = random.Random(1), folder / "reviews.csv"
    said = {"food": ("pizza", "soup", "salad"), "service": ("waiter", "staff"), "price": ("cheap", "bargain")}
    lines = ["text;topics"]
    for number in range(300):
        topics = [topic for topic in LABELS if drawn.random() < 0.4]
        words = [drawn.choice(said[topic]) for topic in topics] or ["monday"]
        lines.append(f"{' and '.join(words)} {number};{', '.join(topics)}")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder."""
    folder = tmp_path_factory.mktemp("topics")
    recipe = {
        "name": "topics",
        "task": "multi-label-classification",
        "data": {
            "parts": {"train": [{"kind": "file", "path": str(reviews(folder)), "label": "topics"}]},
            "split": "stratified",
            "labels": [*LABELS],
            "label_separator": ",",
            "cleaning": "none",
            "max_length": 16,
        },
        "tokenizer": {"kind": "trained"},
        "model": {
            "kind": "encoder", "vocab_size": 120, "hidden_size": 32, "layers": 1, "iterations": 2, "heads": 2,
            "ffn_size": 48, "residual_scale": 0.5,
        },
        "training": {
            "epochs": 14, "batch_size": 16, "optimizer": {"lr": 4.0e-3}, "schedule": {"kind": "one-cycle"},
            "select_by": "f1",
        },
    }  # fmt: skip
    path = folder / "topics.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return edgeformer.train(path, artifacts=folder / "artifacts").folder


def test_from_a_file_to_labels(trained: Path) -> None:
    run = Run.open(trained)
    assert run.recipe.data.thresholds is None  # training that recipe with other data finds others
    thresholds = run.data.thresholds  # type: ignore[attr-defined]
    assert set(thresholds) == set(LABELS) and run.manifest.validation.thresholds == thresholds  # type: ignore[union-attr]
    assert run.recipe.fingerprint() == run.manifest.recipe_sha256  # thresholds decide nothing of the weights
    assert run.manifest.test is not None and run.manifest.test.f1 > 0.9  # type: ignore[attr-defined]
    config = json.loads((trained / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["problem_type"] == "multi_label_classification" and config["thresholds"] == thresholds


def said_in_parquet(texts: list[str], run: Path, folder: Path) -> list[list[str]]:
    """Labels of texts, from a file into a file: the first row has none, which says nothing of their type."""
    (folder / "in.txt").write_text("\n".join(texts), encoding="utf-8")
    done = command("predict", run.name, "--file", "in.txt", "--output", "out.parquet", "--artifacts", str(run.parent),
                   cwd=folder)  # fmt: skip
    assert done.code == 0, done.err
    return [*parquet.read_table(folder / "out.parquet").column("labels").to_pylist()]


def test_its_bundle_says_the_same(trained: Path, tmp_path: Path) -> None:
    bundle = edgeformer.open(trained).export(int8=True)  # type: ignore[union-attr]
    assert {artifact.status for artifact in bundle.artifacts} == {"built"}
    both, none = bundle.predict(["pizza and staff 3", "monday 3"])
    thresholds = Run.open(trained).data.thresholds  # type: ignore[attr-defined]
    # Every artifact is judged at those that the bundle answers at, not at the best ones for itself.
    assert [artifact.validation.thresholds for artifact in bundle.artifacts] == [thresholds] * len(bundle.artifacts)
    for found in (both, none):
        given = {name for name in LABELS if found.probabilities[name] >= thresholds[name]}
        assert set(found.as_dict()["labels"]) == given
    assert "food" in both.labels and none.labels == ()
    assert said_in_parquet(["monday 3", "pizza and staff 3"], trained, tmp_path) == [[], both.as_dict()["labels"]]
    own = tmp_path / "own.jsonl"
    own.write_text('{"text": "soup 1", "topics": ["food"]}\n{"text": "cheap waiter", "topics": []}\n', encoding="utf-8")
    location = locate(str(trained), trained.parent)
    rows = evaluate(location, EvaluateOptions(artifact="all", data=own)).rows
    assert {row.n for row in rows} == {2} and len({row.f1 for row in rows}) == 1
    assert rows[0].accuracy == 0.5 and rows[0].recall == 1.0 and rows[0].macro_f1 is not None


def test_a_recipe_that_fixes_its_thresholds_keeps_them(trained: Path) -> None:
    recipe = read_recipe_of(trained)
    fixed = dict.fromkeys(LABELS, 0.9)
    data = recipe.data.model_copy(update={"thresholds": fixed})
    recipe = recipe.model_copy(update={"data": data})
    assert TASK.settled(recipe, score(np.zeros((1, 3)), np.ones((1, 3)), LABELS, None)) == recipe


def test_teachers_are_for_one_label(trained: Path) -> None:
    with pytest.raises(RecipeError, match=r"unknown key 'training\.teacher'"):
        load_recipe(str(trained / "recipe.yaml"), ["training.teacher=x"])
