"""The promise to whoever adds a task: one file, and every step works with it (``tests/fakes/reference_task``)."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import edgeformer
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.scores import read_evaluation
from edgeformer.benchmark.choice import ChoiceOptions, check_options
from edgeformer.benchmark.gate_result import GateCheck
from edgeformer.benchmark.gate_scores import compare_figures
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.predict import predict
from edgeformer.models import load_recipe
from edgeformer.run import Run, locate
from edgeformer.tasks import Origin, get_task
from edgeformer.training.train import TrainOptions, train
from tests.fakes.install import installed
from tests.tasks.tiny import train_tiny

RATINGS = ("bad", "fair", "good", "great")


@pytest.fixture(scope="module", autouse=True)
def _ratings() -> Iterator[None]:
    with installed("reference_task"):
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a trained run with a bundle."""
    folder, choose = tmp_path_factory.mktemp("ratings"), random.Random(0)
    things = ("soup", "room", "staff")
    lines = [f"{rating}\tthe {choose.choice(things)} was {rating} {n}" for n in range(60) for rating in RATINGS]
    (folder / "rated.tsv").write_text("label\ttext\n" + "\n".join(lines) + "\n", encoding="utf-8")
    data = {"parts": {"train": [{"kind": "file", "path": str(folder / "rated.tsv")}]}, "labels": [*RATINGS]}
    run = train_tiny(folder, "ratings", {**data, "max_length": 16}, epochs=6)
    edgeformer.open(run).export(int8=True)
    return run


@pytest.mark.slow
def test_training_export_prediction_limits_and_comparisons(trained: Path) -> None:
    run, location = Run.open(trained), locate(str(trained), trained.parent)
    assert run.manifest.test is not None and run.task.metric.of(run.manifest.test) < 0.1
    assert "val_distance" in json.loads((trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    answers: Any = predict(location, ["the room was bad 7", "the soup was great 7"])[1]
    assert [answer.label for answer in answers] == ["bad", "great"]
    artifacts = (bundle := location.open_bundle()).built("full")
    assert {artifact.precision for artifact in artifacts} == {"fp32", "int8"}
    assert all(run.task.metric.of(artifact.validation) is not None for artifact in artifacts)
    rows = evaluate(location, EvaluateOptions(artifact="all")).rows
    assert all(row.distance < 0.1 for row in rows)
    assert {row.distance for row in read_evaluation(trained).rows} == {row.distance for row in rows}
    check_options(ChoiceOptions(min_score=0.3), bundle.manifest)
    with pytest.raises(InputError, match="--min-score -1: is the highest accepted distance of a rating model"):
        check_options(ChoiceOptions(min_score=-1.0), bundle.manifest)
    task, check = get_task("ratings"), GateCheck(name="score", artifact="a", status="undecided", limit=0.1)
    rows = bundle.task.rows.read_set(bundle.data, bundle.reader(), "test", Origin())
    with bundle.session(bundle.built("full")[0]) as session:
        batch = task.rows.batch(rows, np.arange(len(rows)), bundle.reader().pad)
        figures = task.row_figures(task.row_answers(session.run(batch), batch, bundle.data), rows, bundle.data)
    compared = compare_figures(task, check, figures, figures, "the test set")
    assert (compared.status, compared.change) == ("pass", 0.0)


@pytest.mark.slow
def test_a_linear_classifier_learns_it(trained: Path, tmp_path: Path) -> None:
    source = trained.parents[1] / "rated.tsv"
    data = f"parts: {{train: [{{kind: file, path: {source}}}]}}, labels: [{', '.join(RATINGS)}], split: stratified"
    recipe = load_recipe("linear_sst2", ["task=ratings", f"data={{{data}, max_length: 16}}", "model.minimum_count=1"])
    run = Run.open(train(recipe, TrainOptions(tmp_path, name="linear")))
    assert run.manifest.test is not None and run.task.metric.of(run.manifest.test) < 0.1
    weights = load_file(run.folder / "model" / "model.safetensors")["weights"]
    assert weights.shape[1] == len(RATINGS) - 1  # exactly one rating applies, so one column is the reference
