"""Import this to have torch trace the tiny classifier once, for all exports that follow in this process and its forks.

Tracing takes most of an export's time and touches no file. Everything else of an export is as it always is.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process with OpenMP threads would wait for them for ever

from typing import Any

import edgeformer.cli  # noqa: F401
from edgeformer.export.export import export  # noqa: F401
from edgeformer.export.run_source import open_exportable
from edgeformer.models.blocks.tracing import Graphs
from edgeformer.run import Run
from tests.torture.export_children import OLD

_SUBJECT = open_exportable(Run.open(OLD))
GRAPHS = _SUBJECT.adapter.trace(_SUBJECT.model, tuple(_SUBJECT.inputs), steps=False)
_TRACE = type(_SUBJECT.adapter).trace


def traced(*arguments: Any, steps: bool, base: Graphs | None = None) -> Graphs:
    """What ``ModelAdapter.trace`` returns for this run."""
    assert not steps
    return GRAPHS if base is None else _TRACE(*arguments, steps=False, base=base)


type(_SUBJECT.adapter).trace = traced  # type: ignore[method-assign,assignment]
