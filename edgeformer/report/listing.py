"""Records and tables of the available recipes, device profiles and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from edgeformer.artifacts.documents import load_profile, own_profiles, profile_names, shipped_names
from edgeformer.artifacts.errors import ArtifactError, RecipeError
from edgeformer.models import load_recipe
from edgeformer.report.columns import Column, Columns
from edgeformer.run import Run, find_bundle, run_folders
from edgeformer.system.lock import remote_owner
from edgeformer.tasks import get_task

Record = dict[str, Any]


def _table(title: str, columns: Columns[Record], rows: Sequence[Record], caption: Text | None = None) -> Table:
    """Return a table whose first column, the names, is never broken: names are copied."""
    table = columns.terminal(title, rows, caption)
    table.columns[0].no_wrap = True
    return table


def record_table(title: str, rows: Sequence[Record]) -> Table:
    """Return a table of any records: a column per key."""
    return _table(title, Columns.of_records(dict.fromkeys(name for row in rows for name in row)), rows)


def _scaled(value: float | None, unit: float, name: str = "") -> str | None:
    if value is None:
        return None
    return f"{value / unit:,.0f}{name}" if value >= 100 * unit else f"{value / unit:.3g}{name}"


# Recipes


def recipe_records() -> list[Record]:
    """Return the shipped recipes."""
    recipes = [load_recipe(name) for name in shipped_names("recipes")]
    return [{"name": r.name, "task": r.task, "target": r.target, "description": r.description} for r in recipes]


def device_records(artifacts: Path) -> list[Record]:
    """Return the shipped profiles; a user's calibrated profile replaces the shipped one of its name.

    Sizes in bytes, rates in bytes and operations per second, power in watts.
    """
    rows: list[Record] = []
    folder = own_profiles(artifacts)
    for name in profile_names(folder):
        try:
            profile = load_profile(name, folder)
        except RecipeError as error:  # a user's file must not hide the other profiles
            rows.append({"name": name, "device": f"unreadable: {error}"})
            continue
        keys = ("compute_capability", "memory_bytes", "usable_memory_bytes", "bandwidth_bytes_per_s")
        facts = {key: getattr(profile, key) for key in keys}
        facts |= {f"{name}_ops_per_s": getattr(profile.peaks, name) for name in ("fp32", "fp16", "int8")}
        power, calibration = profile.power, profile.calibration
        rows.append(
            {
                "name": profile.name,
                "device": profile.title,
                "kind": profile.kind,
                **{key: fact.value if fact is not None else None for key, fact in facts.items()},
                "power_w": [power.value.low_w, power.value.high_w] if power is not None else None,
                "calibrated": calibration.created if calibration is not None else None,
                "median_log2_error": calibration.error.median_log2 if calibration and calibration.error else None,
            }
        )
    return rows


def device_table(rows: Sequence[Record]) -> Table:
    """Return the devices in 80 columns: fewer figures, with units."""

    def watts(row: Record) -> str | None:
        power = row.get("power_w")
        return None if power is None else "–".join(dict.fromkeys(f"{end:g}" for end in power))

    def calibrated(row: Record) -> str | None:
        if "kind" not in row:
            return None
        created, median = row["calibrated"], row["median_log2_error"]
        if created is None:
            return "no"
        return str(created[:10]) if median is None else f"{created[:10]}, median error {2**median - 1:.0%}"

    columns: Columns[Record] = Columns(
        [
            Column("name", lambda row: row["name"]),
            Column("kind", lambda row: row.get("kind")),
            Column("memory", lambda row: _scaled(row.get("usable_memory_bytes"), 2**30, " GiB")),
            Column("GB/s", lambda row: _scaled(row.get("bandwidth_bytes_per_s"), 1e9)),
            Column("FP16 TFLOP/s", lambda row: _scaled(row.get("fp16_ops_per_s"), 1e12)),
            Column("W", watts),
            Column("calibrated", calibrated),
            Column("problem", lambda row: None if "kind" in row else row["device"]),
        ]
    )
    return _table("devices", columns.drop_empty(rows, "problem"), rows)


# Runs


def run_records(artifacts: Path) -> list[Record]:
    """Return the runs in a folder, oldest first; a run with an unreadable manifest has an error in its status.

    Every run has accuracy and F1, an interface for scripts, and the metric of its task.
    """
    rows: list[Record] = []
    for folder in run_folders(artifacts):
        try:
            run = Run.open(folder)
        except ArtifactError as error:
            rows.append({"run": folder.name, "status": f"unreadable: {error}"})
            continue
        manifest, test = run.manifest, run.manifest.test
        metric, owner = get_task(manifest.task).metric, remote_owner(folder)
        value = metric.of(test)
        can_leak = manifest.leaks or (test is not None and bool(test.by_exit))
        rows.append(
            {
                "run": folder.name,  # commands take this name, whatever the run was trained as
                "status": run.status,
                "started": manifest.started,
                **({"locked_by": owner} if owner is not None else {}),
                "steps": manifest.steps,
                "split": manifest.data.split,
                "synthetic": manifest.data.synthetic,
                "parameters": manifest.parameters,
                "metric": metric.name,
                **{name: getattr(test, name, None) for name in ("accuracy", "f1")},
                **({metric.name: value} if value is not None else {}),
                **({"leaks": manifest.leaks} if can_leak else {}),
                "bundle": find_bundle(folder) is not None,
            }
        )
    return rows


def run_table(rows: Sequence[Record]) -> Table:
    """Return the runs in 80 columns, if their names are short."""
    metrics = {row["metric"] for row in rows if "metric" in row}
    heading = metrics.pop() if len(metrics) == 1 else "score"

    def score(row: Mapping[str, Any]) -> str | None:
        value = row.get(str(row.get("metric")))
        if value is None:
            return None
        name = [row["metric"]] if heading == "score" else []
        cautions = [f"({caution.upper()})" for caution in ("leaks", "synthetic") if row.get(caution)]
        return " ".join([f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}", *name, *cautions])

    columns: Columns[Record] = Columns(
        [
            Column("run", lambda row: row["run"]),
            Column(
                "status",
                lambda row: "exported" if row.get("bundle") else str(row["status"]).partition(":")[0],
                mark=True,
            ),
            Column("started", lambda row: row["started"][:10] if "started" in row else None),
            Column("params", lambda row: _scaled(row.get("parameters"), 1e6, " M"), number=True),
            Column(heading, score),
        ]
    )
    problems = [row["status"] for row in rows if "started" not in row]
    problems += [f"{row['run']}: locked by {row['locked_by']}" for row in rows if "locked_by" in row]
    return _table("runs", columns, rows, Text("\n".join(problems)) if problems else None)
