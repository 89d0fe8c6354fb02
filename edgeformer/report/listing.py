"""Records and tables of what there is: recipes, device profiles, runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.documents import load_profile, own_profiles, profile_names, shipped_names
from edgeformer.artifacts.errors import ArtifactError, RecipeError
from edgeformer.artifacts.manifest import RunManifest
from edgeformer.models import load_recipe
from edgeformer.report.columns import Column, Columns
from edgeformer.run import Run, bundle_in, run_folders
from edgeformer.system.lock import owner_elsewhere
from edgeformer.tasks import task_named

Record = dict[str, Any]


def recipe_records() -> list[Record]:
    """The shipped recipes."""
    recipes = [load_recipe(name) for name in shipped_names("recipes")]
    return [{"name": r.name, "task": r.task, "target": r.target, "description": r.description} for r in recipes]


def device_records(artifacts: Path) -> list[Record]:
    """The shipped profiles; a calibrated one among the user's own stands for its shipped namesake."""
    rows: list[Record] = []
    folder = own_profiles(artifacts)
    for name in profile_names(folder):
        try:
            rows.append(_device(load_profile(name, folder)))
        except RecipeError as error:  # a file of the user's: the others are still worth a list
            rows.append({"name": name, "device": f"unreadable: {error}"})
    return rows


def _device(profile: DeviceProfile) -> Record:
    """What one looks for when choosing a device. Bytes, bytes and operations per second, watts."""
    of_device = ("compute_capability", "memory_bytes", "usable_memory_bytes", "bandwidth_bytes_per_s")
    facts = {
        **{name: getattr(profile, name) for name in of_device},
        **{f"{name}_ops_per_s": getattr(profile.peaks, name) for name in ("fp32", "fp16", "int8")},
    }
    power, calibration = profile.power, profile.calibration
    return {
        "name": profile.name,
        "device": profile.title,
        "kind": profile.kind,
        **{name: fact.value if fact is not None else None for name, fact in facts.items()},
        "power_w": [power.value.low_w, power.value.high_w] if power is not None else None,
        "calibrated": calibration.created if calibration is not None else None,
        "median_log2_error": calibration.error.median_log2 if calibration and calibration.error else None,
    }


def run_records(artifacts: Path) -> list[Record]:
    """The runs below a folder, oldest first; one whose manifest cannot be read says so."""
    rows: list[Record] = []
    for folder in run_folders(artifacts):
        try:
            run = Run.open(folder)
        except ArtifactError as error:
            rows.append({"run": folder.name, "status": f"unreadable: {error}"})
            continue
        manifest = run.manifest
        rows.append(
            {
                "run": folder.name,  # what commands take, whatever it was trained as
                "status": run.status,
                "started": manifest.started,
                **({"locked_by": owner} if (owner := owner_elsewhere(folder)) is not None else {}),
                "steps": manifest.steps,
                **{key: getattr(manifest.data, key) for key in ("split", "synthetic")},
                "parameters": manifest.parameters,
                **_scores(manifest),
                "bundle": bundle_in(folder) is not None,
            }
        )
    return rows


def _scores(manifest: RunManifest) -> Record:
    """Accuracy and F1 of every run, which scripts rely on, and its own metric; a leak where there can be one."""
    test, task = manifest.test, task_named(manifest.task)
    found: Record = {"metric": task.metric.name, **{name: getattr(test, name, None) for name in ("accuracy", "f1")}}
    value = task.metric.of(test)
    if value is not None:
        found[task.metric.name] = value
    return {**found, "leaks": manifest.leaks} if manifest.leaks or (test is not None and test.by_exit) else found


def record_table(title: str, rows: Sequence[Record]) -> Table:
    """Any list of records; names are there to be copied, and never broken.

    Args:
        title: what they are.
        rows: one line each.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Columns.of_records(names).terminal(title, rows)
    table.columns[0].no_wrap = True
    return table


def run_table(rows: Sequence[Record]) -> Table:
    """Runs as the terminal shows them, 80 columns wide where their names are not long."""
    metrics = {row["metric"] for row in rows if "metric" in row}
    one = metrics.pop() if len(metrics) == 1 else None
    columns: Columns[Record] = Columns(
        [
            Column("run", lambda row: row["run"]),
            Column("status", _state, mark=True),
            Column("started", lambda row: row["started"][:10] if "started" in row else None),
            Column("params", lambda row: _scaled(row.get("parameters"), 1e6, " M"), number=True),
            Column(one or "score", lambda row: _headline(row, named=one is None)),
        ]
    )
    problems = [row["status"] for row in rows if "started" not in row]
    problems += [f"{row['run']}: locked by {row['locked_by']}" for row in rows if "locked_by" in row]
    table = columns.terminal("runs", rows, caption=Text("\n".join(problems)) if problems else None)
    table.columns[0].no_wrap = True
    return table


def _headline(row: Record, *, named: bool) -> str | None:
    """The metric of its task, of the test set; a leak spoils it, and made-up text says nothing of real text."""
    value = row.get(str(row.get("metric")))
    if value is None:
        return None
    shown = f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"
    marks = [mark for mark in ("leaks", "synthetic") if row.get(mark)]
    return " ".join([shown, *([row["metric"]] if named else []), *(f"({mark.upper()})" for mark in marks)])


def _state(row: Record) -> str:
    return "exported" if row.get("bundle") else str(row["status"]).partition(":")[0]


def device_table(rows: Sequence[Record]) -> Table:
    """Devices as the terminal shows them, 80 columns wide: fewer figures, with units."""
    columns: Columns[Record] = Columns(
        [
            Column("name", lambda row: row["name"]),
            Column("kind", lambda row: row.get("kind")),
            Column("memory", lambda row: _scaled(row.get("usable_memory_bytes"), 2**30, " GiB")),
            Column("GB/s", lambda row: _scaled(row.get("bandwidth_bytes_per_s"), 1e9)),
            Column("FP16 TFLOP/s", lambda row: _scaled(row.get("fp16_ops_per_s"), 1e12)),
            Column("W", lambda row: _watts(row.get("power_w"))),
            Column("calibrated", _calibrated),
            Column("problem", lambda row: None if "kind" in row else row["device"]),
        ]
    )
    table = columns.known_in(rows, "problem").terminal("devices", rows)
    table.columns[0].no_wrap = True
    return table


def _scaled(value: float | None, unit: float, name: str = "") -> str | None:
    if value is None:
        return None
    return f"{value / unit:,.0f}{name}" if value >= 100 * unit else f"{value / unit:.3g}{name}"


def _watts(power: Sequence[float] | None) -> str | None:
    if power is None:
        return None
    low, high = power
    return f"{low:g}" if low == high else f"{low:g}–{high:g}"


def _calibrated(row: Mapping[str, Any]) -> str | None:
    """``no``, or the day, with how far estimates were off typically."""
    if "kind" not in row:
        return None
    created, median = row["calibrated"], row["median_log2_error"]
    if created is None:
        return "no"
    return str(created[:10]) if median is None else f"{created[:10]}, median error {2**median - 1:.0%}"
