"""Records and tables of the available recipes, device profiles, runtimes and runs."""

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from edgeformer.artifacts.documents import load_profile, own_profiles, shipped_names
from edgeformer.artifacts.errors import ArtifactError, RecipeError
from edgeformer.estimate.published import published_record
from edgeformer.models import load_recipe
from edgeformer.report.columns import Column, Record, TableColumns, TerminalTable
from edgeformer.run import Run, find_bundle, run_folders
from edgeformer.runtimes import all_runtimes, library_versions
from edgeformer.tasks import get_task


def _scaled(value: float | None, unit: float, suffix: str = "") -> str | None:
    """Format a value in multiples of ``unit``, with three digits."""
    if value is None:
        return None
    return f"{value / unit:,.0f}{suffix}" if value >= 100 * unit else f"{value / unit:.3g}{suffix}"


def runtime_records() -> list[Record]:
    """Return the runtimes: formats that they open, options of export that write these, versions of their packages."""
    versions = library_versions()
    return [
        {
            "name": runtime.name,
            "status": "experimental" if runtime.experimental else "supported",
            "formats": [*runtime.formats, *runtime.reads],
            "export": [builder.flag for builder in runtime.builders],
            "installed": {name: versions[name] for name in runtime.distributions if name in versions},
        }
        for runtime in all_runtimes()
    ]


RUNTIMES: TableColumns[Record] = TableColumns(
    Column("name"),
    Column("status"),
    Column("formats", lambda row: ", ".join(row["formats"]), flows=True),
    Column("export", lambda row: ", ".join(row["export"]), flows=True),
    Column("installed", lambda row: ", ".join(map(" ".join, row["installed"].items())), flows=True),
)


def recipe_records() -> list[Record]:
    """Return the shipped recipes."""
    recipes = [load_recipe(name) for name in shipped_names("recipes")]
    return [{"name": r.name, "task": r.task, "target": r.target, "description": r.description} for r in recipes]


RECIPES: TableColumns[Record] = TableColumns(*map(Column, ("name", "task", "target", "description")))


def device_records(artifacts: Path) -> list[Record]:
    """Return the shipped profiles; a user's calibrated profile replaces the shipped one of its name.

    Sizes in bytes, rates in bytes and operations per second, power in watts.
    """
    rows: list[Record] = []
    folder = own_profiles(artifacts)
    for name in shipped_names("profiles", folder):
        try:
            profile = load_profile(name, folder)
        except RecipeError as error:  # a user's file must not hide the other profiles
            rows.append({"name": name, "device": f"unreadable: {error}"})
            continue
        keys = ("compute_capability", "memory_bytes", "usable_memory_bytes", "bandwidth_bytes_per_s")
        facts = {key: getattr(profile, key) for key in keys}
        facts |= {f"{name}_ops_per_s": getattr(profile.peaks, name) for name in ("fp32", "fp16", "int8")}
        power, calibration = profile.power, profile.calibration
        published = published_record().devices.get(profile.name)
        rows.append({
            "name": profile.name, "device": profile.title, "kind": profile.kind, "address": profile.address,
            **{key: fact.value if fact is not None else None for key, fact in facts.items()},
            "power_w": [power.value.low_w, power.value.high_w] if power is not None else None,
            "calibrated": calibration.created if calibration is not None else None,
            "median_log2_error": calibration.error.median_log2 if calibration and calibration.error else None,
            "published_times": published.rows if published is not None else 0,
            "published_median_error": published.median_error if published is not None else None,
        })  # fmt: skip
    return rows


def device_table(rows: Sequence[Record]) -> TerminalTable[Record]:
    """Return the devices in 80 columns: fewer figures, with units."""
    lines = []
    for row in rows:
        watts, created, median = row.get("power_w"), row.get("calibrated"), row.get("median_log2_error")
        error = f", error {2**median - 1:.0%}" if median is not None else ""
        estimates = f"calibrated{error}" if created is not None else None
        if estimates is None and row.get("published_times"):
            count = row["published_times"]
            estimates = f"{count:,} time{'s' if count != 1 else ''}, error {row['published_median_error']:.0%}"
        power = "–".join(dict.fromkeys(f"{end:g}" for end in watts)) if watts is not None else None
        problem = None if "kind" in row else row["device"]
        lines.append({"kind": None, **row, "W": power, "estimates": estimates, "problem": problem})
    columns: TableColumns[Record] = TableColumns(
        Column("name"),
        Column("address"),
        Column("kind"),
        Column("memory", lambda row: _scaled(row.get("usable_memory_bytes"), 2**30, " GiB"), number=True),
        Column("GB/s", lambda row: _scaled(row.get("bandwidth_bytes_per_s"), 1e9), number=True),
        Column("FP16 TFLOP/s", lambda row: _scaled(row.get("fp16_ops_per_s"), 1e12), number=True),
        Column("W", number=True),
        Column("estimates", heading="estimates checked by"),
        Column("problem", flows=True),
    )
    return columns.drop_empty(lines, "address", "problem").terminal("devices", lines)


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
        metric = get_task(manifest.task).metric
        value = metric.of(test)
        can_leak = manifest.leaks or (test is not None and bool(test.by_exit))
        rows.append({
            "run": folder.name,  # commands take this name, whatever the run was trained as
            "status": run.status, "started": manifest.started, "steps": manifest.steps, "split": manifest.data.split,
            "synthetic": manifest.data.synthetic, "parameters": manifest.parameters, "metric": metric.name,
            **{name: getattr(test, name, None) for name in ("accuracy", "f1")},
            **({metric.name: value} if value is not None else {}),
            **({"leaks": manifest.leaks} if can_leak else {}),
            "bundle": find_bundle(folder) is not None,
        })  # fmt: skip
    return rows


def run_table(rows: Sequence[Record]) -> TerminalTable[Record]:
    """Return the runs in 80 columns, if their names are short."""
    lines = []
    for row in rows:
        value, score = row.get(str(row.get("metric"))), None
        if value is not None:
            cautions = [f"({caution.upper()})" for caution in ("leaks", "synthetic") if row.get(caution)]
            score = " ".join([f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}", row["metric"], *cautions])
        status = "exported" if row.get("bundle") else str(row["status"]).partition(":")[0]
        started = row["started"][:10] if "started" in row else None
        lines.append({**row, "status": status, "started": started, "score": score})
    columns: TableColumns[Record] = TableColumns(
        Column("run"),
        Column("status", mark=True),
        Column("started"),
        Column("params", lambda row: _scaled(row.get("parameters"), 1e6, " M"), number=True),
        Column("score"),
    )
    problems = [row["status"] for row in rows if "started" not in row]
    return columns.terminal("runs", lines, Text("\n".join(problems)) if problems else None)
