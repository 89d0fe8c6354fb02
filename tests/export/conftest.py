"""Graphs of the committed classifier, traced once for all exports of a worker: tracing takes most of their time."""

from pathlib import Path
from typing import Any

import pytest

from edgeformer.export.judging import Exportable
from edgeformer.export.run_source import open_exportable
from edgeformer.models.blocks.tracing import Graphs
from edgeformer.run import Run


@pytest.fixture(scope="session")
def _small_graphs(finished_run: Path) -> tuple[Exportable, Graphs]:
    subject = open_exportable(Run.open(finished_run))
    return subject, subject.adapter.trace(subject.model, tuple(subject.inputs), steps=False)


@pytest.fixture
def traced_once(_small_graphs: tuple[Exportable, Graphs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exports of copies of ``finished_run`` without steps reuse one trace of its FP32 model, if it is whole."""
    subject, graphs = _small_graphs
    trace_model = type(subject.adapter).trace

    def trace(*arguments: Any, steps: bool, base: Graphs | None = None) -> Graphs:
        assert not steps
        return graphs if base is None else trace_model(*arguments, steps=False, base=base)

    monkeypatch.setattr(type(subject.adapter), "trace", trace)
