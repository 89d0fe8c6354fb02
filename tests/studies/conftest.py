"""A study that is finished before the tests begin."""

from pathlib import Path

import pytest

from benchmarks.studies.study import StudyOptions, plan_study, run_study
from tests.studies.tiny_study import run, study, write

RUNS = {"first": {**run("First", seeds=(1, 2)), "export": ["fp16"]}, "second": run("Second", training__epochs=1)}
PUBLISHED = {"run": "first", "source": "Table 0", "values": {"accuracy": 0.5}}


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study of three runs: its file and its artifacts. Copy it before changing anything."""
    folder = tmp_path_factory.mktemp("study")
    bubbles = {"kind": "bubbles", "title": "trade", "x": "loss", "y": ["accuracy"], "size": "parameters"}
    dots, curves = {"kind": "dots", "title": "accuracy", "y": ["accuracy"]}, {"kind": "curves", "title": "curves"}
    figures = [dots, bubbles, {**curves, "y": ["val_loss"]}]
    choices = [{"title": "Best", "smallest": "accuracy", "paper": "none"}]
    table = {"published": [PUBLISHED], "choices": choices, "paired": {"second": "first"}}
    path = write(folder, study("tiny", RUNS, table=table, figures=figures))
    options = StudyOptions(folder / "artifacts", jobs=2)
    run_study(plan_study(path, options), options)
    return folder
