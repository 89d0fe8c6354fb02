"""Studies on a card: several runs share it, and what is finished when the time is up is kept and shown."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from benchmarks.gpu.session import Figures, Session
from benchmarks.studies.results import StudyTable
from benchmarks.studies.study import StudyOptions
from edgeformer.artifacts.errors import EdgeformerError, InputError, InterruptedRun
from edgeformer.system.host import usable_cores

OWN = Path(__file__).parent / "studies"
AT_A_TIME = 6
"""Runs that share a card: each keeps one processor core busy launching kernels, the card is mostly idle with one."""


def parallel_runs() -> int:
    """Return how many runs share the card: as many as there are cores, less one, if `nvidia-cuda-mps-control -d` runs.

    With it kernels of several processes run at the same time, else they take turns.
    """
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return max(AT_A_TIME, usable_cores() - 1) if (pipes / "control").exists() else AT_A_TIME


def tabulated(session: Session, name: str) -> Figures:
    """A study's table, its missing runs trained; of a dry run, which trains nothing, with every row missing.

    Args:
        session: in whose folder the runs lie.
        name: of a study, or a path.

    Raises:
        InterruptedRun: the time is up. The session's ``partial`` has what is finished.
    """
    if session.options.data is None and not session.tiny:
        raise InputError("no data here: bring it (benchmarks/gpu/pack.py), or say --data DIR")
    try:
        table = _run(session, name, train=not session.tiny)
    except (KeyboardInterrupt, InterruptedRun):
        figures = _figures(_run(session, name, train=False))
        session.document.setdefault("partial", {})[name] = figures
        raise
    finally:
        _keep_runs(session)
    figures = _figures(table)
    session.document.get("partial", {}).pop(name, None)
    reasons = "; ".join(sorted({row.missing for row in table.rows if row.missing is not None}))
    if figures["missing"] == len(table.rows) and not session.tiny:
        raise EdgeformerError(f"every row is missing: {reasons}")
    return {**figures, "reasons": reasons}


def options_of(session: Session, *, train: bool) -> StudyOptions:
    """Return the options by which a session's studies are made."""
    data = (session.options.data,) if session.options.data is not None and not session.tiny else ()
    return StudyOptions(session.work, data=data, jobs=parallel_runs(), train=train)


def _run(session: Session, name: str, *, train: bool) -> StudyTable:
    from benchmarks.studies.study import plan_study, run_study

    options = options_of(session, train=train)
    return run_study(plan_study(name, options), options)


def _figures(table: StudyTable) -> Figures:
    rows = [row.model_dump(mode="json") for row in table.rows]
    text: dict[str, Any] = {}
    for row in rows:
        cells = {key: cell for key, cell in row["cells"].items() if cell["mean"] is not None}
        text[f"{row['label']}, {row['at']}"] = cells
    return {
        "rows": text,
        "missing": sum(row["missing"] is not None for row in rows),
        "minutes": table.minutes,
        "table": table.model_dump(mode="json"),
    }


def _keep_runs(session: Session) -> None:
    """Copy the scores of every finished run beside the results, where ``benchmarks.studies --results`` reads them."""
    source, target = session.work / "studies" / "runs", session.path.parent / "runs"
    for path in source.glob("*.json") if source.is_dir() else ():
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / path.name)
