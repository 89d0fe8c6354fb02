"""Multi-label classification: data, scores, thresholds, and a model from training to predictions."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from sklearn import metrics

import edgeformer
from edgeformer.artifacts.errors import DataError
from edgeformer.data.rows import label_counts
from edgeformer.data.sources import load_part, load_parts
from edgeformer.data.splits import split
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.run import Run, locate
from edgeformer.tasks.multilabel import MultiLabelData, best_thresholds, probabilities, score
from tests.cli.run_cli import edgeformer as command
from tests.tasks.tiny import train_tiny

LABELS = ("food", "service", "price")
GIVEN = {name: [{"kind": "file", "path": "a.csv"}] for name in ("train", "validation", "test")}


def data_of(folder: Path, name: str, content: str, **changes: Any) -> MultiLabelData:
    (folder / name).write_text(content, encoding="utf-8")
    source = {"kind": "file", "path": str(folder / name)}
    section = {"parts": {"train": [source]}, "split": "stratified", "labels": LABELS, "label_separator": ","}
    return MultiLabelData.model_validate({**section, **changes}, strict=False)


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
def test_rows_have_any_number_of_labels(tmp_path: Path, name: str, content: str) -> None:
    rows = load_part(data_of(tmp_path, name, content), "train")
    assert rows.texts == ["a", "b", "c", "d"]
    assert (rows.labels[:, None] >> np.arange(3) & 1).tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert label_counts(rows.labels, 3, several=True) == [1, 2, 2]
    with pytest.raises(DataError, match=r"line 2: label 'drinks' is not in data.labels; allowed: food"):
        load_part(data_of(tmp_path, "b.csv", 'text;label\nb;"food, drinks"\n'), "train")
    with pytest.raises(DataError, match="several labels a list of them"):
        load_part(data_of(tmp_path, "b.jsonl", '{"text": "a", "label": [1.5]}\n'), "train")


def test_rare_combinations_are_in_every_set(tmp_path: Path) -> None:
    """Ten labels in 200 combinations, each used once."""
    names = [f"l{number}" for number in range(10)]
    rows = [[name for bit, name in enumerate(names) if number >> bit & 1] for number in range(1, 201)]
    lines = "\n".join(f't{number};"{",".join(row)}"' for number, row in enumerate(rows))
    data = data_of(tmp_path, "a.csv", f"text;label\n{lines}\n", labels=names)
    sets = split(data, load_parts(data))
    assert [len(rows) for rows in sets.values()] == [pytest.approx(160, abs=8), *[pytest.approx(20, abs=4)] * 2]
    for name in ("validation", "test"):
        assert sum(count > 0 for count in label_counts(sets[name].labels, 10, several=True)) >= 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream": True, "split": "given", "parts": GIVEN}, "stream: true is not possible"),
        ({"labels": ("a,b", "c")}, "label_separator: also occurs in the label 'a,b'"),
        ({"labels": tuple(f"l{number}" for number in range(63))}, "labels: at most 62"),
        ({"thresholds": {"food": 0.5}}, "thresholds: give one for each"),
    ],
)
def test_impossible_data_sections_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_of(tmp_path, "a.csv", "text;label\n", **changes)


def test_scores_equal_scikit_learn() -> None:
    generator = np.random.default_rng(5)
    logits = generator.normal(size=(200, 3)).astype(np.float32)
    actual = (logits + generator.normal(size=logits.shape) > [0.5, 0.0, 1.5]).astype(np.int64)
    thresholds = {"food": 0.4, "service": 0.5, "price": 0.7}
    result = score(logits, actual, SimpleNamespace(labels=LABELS, thresholds=thresholds))
    predicted = probabilities(logits) >= list(thresholds.values())
    assert result.f1 == pytest.approx(metrics.f1_score(actual, predicted, average="micro"))
    assert result.macro_f1 == pytest.approx(metrics.f1_score(actual, predicted, average="macro"))
    assert result.precision == pytest.approx(metrics.precision_score(actual, predicted, average="micro"))
    assert result.recall == pytest.approx(metrics.recall_score(actual, predicted, average="micro"))
    assert result.accuracy == pytest.approx(metrics.accuracy_score(actual, predicted))
    losses = [metrics.log_loss(actual[:, label], probabilities(logits)[:, label]) for label in range(3)]
    assert result.loss == pytest.approx(float(np.mean(losses)))
    assert list(result.label_f1.values()) == pytest.approx(metrics.f1_score(actual, predicted, average=None))


@pytest.mark.parametrize("seed", range(3))
def test_best_thresholds_equal_a_grid_search(seed: int) -> None:
    generator = np.random.default_rng(seed)
    confidence = np.round(generator.random((60, 1)), 2)  # rounded, so that some are equal
    actual = confidence + generator.normal(scale=0.4, size=confidence.shape) > 0.6
    (threshold,) = best_thresholds(confidence, actual)

    def f1(limit: float) -> float:
        predicted = confidence >= limit
        return float(2 * (predicted & actual).sum() / (predicted.sum() + actual.sum()))

    assert f1(threshold) == pytest.approx(max(f1(limit) for limit in np.linspace(0.001, 0.999, 400)))
    assert f1(0.5) < f1(threshold) or threshold == 0.5
    assert best_thresholds(confidence, np.arange(60)[:, None] < 4) == [0.5], "too rare for a threshold"


def reviews(folder: Path) -> Path:
    """Write 300 rows that a small model learns in seconds."""
    generator, path = random.Random(1), folder / "reviews.csv"
    vocabulary = {"food": ("pizza", "soup", "salad"), "service": ("waiter", "staff"), "price": ("cheap", "bargain")}
    lines = ["text;topics"]
    for number in range(300):
        topics = [topic for topic in LABELS if generator.random() < 0.4]
        words = [generator.choice(vocabulary[topic]) for topic in topics] or ["monday"]
        lines.append(f"{' and '.join(words)} {number};{', '.join(topics)}")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("topics")
    source = {"kind": "file", "path": str(reviews(folder)), "label": "topics"}
    data = {"parts": {"train": [source]}, "labels": [*LABELS], "label_separator": ",", "max_length": 16}
    return train_tiny(folder, "multi-label-classification", data, epochs=14, select_by="f1")


def test_training_keeps_the_best_thresholds(trained: Path) -> None:
    run = Run.open(trained)
    assert run.recipe.data.thresholds is None  # other data has other thresholds
    thresholds = run.data.thresholds
    assert set(thresholds) == set(LABELS) and run.manifest.validation.thresholds == thresholds
    assert run.recipe.fingerprint() == run.manifest.recipe_sha256  # thresholds do not change the weights
    assert run.manifest.test is not None and run.manifest.test.f1 > 0.9
    data = run.data.model_copy(update={"thresholds": dict.fromkeys(LABELS, 0.9)})
    fixed = run.recipe.model_copy(update={"data": data})
    assert run.task.settled(fixed, run.manifest.validation) == fixed, "thresholds of a recipe are kept"
    config = json.loads((trained / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["problem_type"] == "multi_label_classification" and config["thresholds"] == thresholds


@pytest.mark.slow
def test_bundles_predict_at_the_thresholds_of_the_run(trained: Path, tmp_path: Path) -> None:
    bundle = edgeformer.open(trained).export(int8=True)
    assert {artifact.status for artifact in bundle.artifacts} == {"built"}
    both, none = bundle.predict(["pizza and staff 3", "monday 3"])
    thresholds = Run.open(trained).data.thresholds
    # Artifacts are scored at the thresholds of the bundle, not at their own best thresholds.
    assert [artifact.validation.thresholds for artifact in bundle.artifacts] == [thresholds] * len(bundle.artifacts)
    for prediction in (both, none):
        expected = {name for name in LABELS if prediction.probabilities[name] >= thresholds[name]}
        assert set(prediction.as_dict()["labels"]) == expected
    assert "food" in both.labels and none.labels == ()
    # The first row has no labels, so the type of the column comes from a later row.
    (tmp_path / "in.txt").write_text("monday 3\npizza and staff 3", encoding="utf-8")
    files = ("--file", "in.txt", "--output", "out.parquet")
    result = command("predict", trained.name, *files, "--artifacts", str(trained.parent), cwd=tmp_path)
    assert result.code == 0, result.err
    assert parquet.read_table(tmp_path / "out.parquet").column("labels").to_pylist() == [[], both.as_dict()["labels"]]
    path = tmp_path / "labelled.jsonl"
    path.write_text('{"text": "soup 1", "topics": ["food"]}\n{"text": "cheap waiter", "topics": []}\n')
    rows = evaluate(locate(str(trained), trained.parent), EvaluateOptions(artifact="all", data=path)).rows
    assert {row.n for row in rows} == {2} and len({row.f1 for row in rows}) == 1
    assert rows[0].accuracy == 0.5 and rows[0].recall == 1.0 and rows[0].macro_f1 is not None
