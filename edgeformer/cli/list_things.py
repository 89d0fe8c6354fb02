"""edgeformer list: recipes, device profiles and runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from edgeformer.cli.options import Artifacts, Json

if TYPE_CHECKING:
    from edgeformer.formats.device import DeviceProfile, Fact
    from edgeformer.formats.manifest import RunManifest

T = TypeVar("T")


def command(
    what: Annotated[Literal["recipes", "devices", "runs"], typer.Argument(help="What to list.")],
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """List the shipped recipes, the hardware profiles, or the runs in artifacts/."""
    from edgeformer.cli.console import print_json, stdout
    from edgeformer.reporting.tables import plain_table

    rows = _recipes() if what == "recipes" else _devices(artifacts) if what == "devices" else _runs(artifacts)
    if as_json:
        print_json({what: rows})
    elif rows:
        shown = [_device_cells(row) for row in rows] if what == "devices" else rows
        table = plain_table(what, shown)
        table.columns[0].no_wrap = True  # names are there to be copied
        stdout().print(table)
    else:
        typer.echo(f"no {what} in {artifacts}; train one: edgeformer train quickstart")


def _recipes() -> list[dict[str, Any]]:
    from edgeformer.families import load_recipe
    from edgeformer.formats.documents import shipped_names

    recipes = [load_recipe(name) for name in shipped_names("recipes")]
    return [{"name": r.name, "task": r.task, "target": r.target, "description": r.description} for r in recipes]


def _devices(artifacts: Path) -> list[dict[str, Any]]:
    """The shipped profiles; a calibrated one in ``artifacts/profiles`` stands for its shipped namesake."""
    from edgeformer.formats.documents import load_profile, shipped_names
    from edgeformer.formats.errors import RecipeError

    local = {path.stem: path for path in (artifacts / "profiles").glob("*.yaml")}
    rows = []
    for name in sorted({*shipped_names("profiles"), *local}):
        try:
            rows.append(_device(load_profile(str(local[name]) if name in local else name)))
        except RecipeError as error:  # a file of the user's: the others are still worth a list
            rows.append({"name": name, "device": f"unreadable: {error}"})
    return rows


def _device(profile: DeviceProfile) -> dict[str, Any]:
    """What one looks for when choosing a device. Bytes, bytes and operations per second, watts."""
    power, calibration, fp16 = _value(profile.power), profile.calibration, _value(profile.peaks.fp16)
    return {
        "name": profile.name,
        "device": profile.title,
        "kind": profile.kind,
        "compute_capability": _value(profile.compute_capability),
        "memory_bytes": _value(profile.memory_bytes),
        "usable_memory_bytes": _value(profile.usable_memory_bytes),
        "bandwidth_bytes_per_s": _value(profile.bandwidth_bytes_per_s),
        "fp32_ops_per_s": _value(profile.peaks.fp32),
        "fp16_ops_per_s": fp16,
        "int8_ops_per_s": _value(profile.peaks.int8),
        "power_w": [power.low_w, power.high_w] if power is not None else None,
        "calibrated": calibration.created if calibration is not None else None,
        "median_log2_error": calibration.error.median_log2 if calibration and calibration.error else None,
    }


def _value(fact: Fact[T] | None) -> T | None:
    return fact.value if fact is not None else None


def _device_cells(row: dict[str, Any]) -> dict[str, Any]:
    """A device's row as the terminal shows it, 80 columns wide: fewer figures, with units."""
    if "kind" not in row:
        return {"name": row["name"], "problem": row["device"]}
    usable, power = row["usable_memory_bytes"], row["power_w"]
    watts = None if power is None else f"{power[0]:g}" if power[0] == power[1] else f"{power[0]:g}–{power[1]:g}"
    return {
        "name": row["name"],
        "kind": row["kind"],
        "memory": f"{usable / 2**30:.4g} GiB" if usable is not None else None,
        "GB/s": _scaled(row["bandwidth_bytes_per_s"], 1e9),
        "FP16 TFLOP/s": _scaled(row["fp16_ops_per_s"], 1e12),
        "W": watts,
        "calibrated": _calibrated(row["calibrated"], row["median_log2_error"]),
    }


def _scaled(value: float | None, unit: float) -> str | None:
    if value is None:
        return None
    return f"{value / unit:,.0f}" if value >= 100 * unit else f"{value / unit:.3g}"


def _calibrated(created: str | None, median_log2: float | None) -> str:
    if created is None:
        return "no"
    return created[:10] if median_log2 is None else f"{created[:10]}, median error {2**median_log2 - 1:.0%}"


def _scores(manifest: RunManifest) -> dict[str, Any]:
    test = manifest.test
    found: dict[str, Any] = {name: getattr(test, name, None) for name in ("accuracy", "f1")}
    if getattr(test, "perplexity", None) is not None:
        found["perplexity"] = getattr(test, "perplexity", None)
    return {**found, "leaks": manifest.leaks} if manifest.leaks or "perplexity" in found else found


def _runs(artifacts: Path) -> list[dict[str, Any]]:
    from edgeformer.formats.errors import ArtifactError
    from edgeformer.run import read_run, run_folders

    rows: list[dict[str, Any]] = []
    for folder in run_folders(artifacts):
        try:
            manifest = read_run(folder)
        except ArtifactError as error:
            rows.append({"run": folder.name, "status": f"unreadable: {error}"})
            continue
        rows.append(
            {
                "run": manifest.run,
                "status": manifest.status,
                "started": manifest.started,
                "split": manifest.data.split,
                "synthetic": manifest.data.synthetic,
                "parameters": manifest.parameters,
                **_scores(manifest),
                "bundle": (folder / "bundle" / "bundle.json").is_file(),
            }
        )
    return rows
