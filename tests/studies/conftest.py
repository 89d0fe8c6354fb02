"""A study that is finished before the tests begin."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgeformer.studies.study import StudyOptions

from tests.studies.tiny_study import make, run, study, write

RUNS = {"first": run("First", seeds=(1, 2)), "second": run("Second", training__optimizer__lr=1e-3)}
"""Runs of one kind: what a step takes is timed once."""
PAPER = {"run": "first", "source": "nobody's table", "values": {"accuracy": 0.5}}


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of three runs: its file, and the folder of artifacts. Copy it before changing anything."""
    folder = tmp_path_factory.mktemp("study")
    figures = [
        {"kind": "bars", "title": "accuracy", "y": ["accuracy"]},
        {"kind": "bubbles", "title": "trade", "x": "loss", "y": ["accuracy"], "size": "parameters"},
        {"kind": "curves", "title": "curves", "y": ["val_loss"]},
    ]
    choices = [{"title": "Best", "smallest": "accuracy", "paper": "none"}]
    path = write(folder, study("tiny", RUNS, table={"published": [PAPER], "choices": choices}, figures=figures))
    plan, _ = make(path, StudyOptions(folder / "artifacts"))
    assert all("timed steps" in estimate.basis and estimate.seconds > 0 for estimate in plan.estimates)
    return folder
