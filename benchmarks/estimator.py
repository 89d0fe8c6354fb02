"""How far are estimated times from measured ones? Calibrates on one run, compares on all, on this machine's CPU.

The calibration never sees the cases that are compared: it is fitted on one run's graph at other shapes. Beside it, the
range that would be given without a calibration (from the same peak rates) is checked: how often it holds the
measurement, and how wide it is. Nothing else may use the processor meanwhile. With three classifiers of 10 to 30M
parameters it takes about 6 minutes.

Usage: python benchmarks/estimator.py RUN... [--calibrate-on RUN] [--batch 1,8] [--seq 16,64,128] [--threads N]
                                      [--profile FILE] [--json FILE]

RUN: a run's or a bundle's folder. --calibrate-on: default, the first RUN. --profile: validate this calibrated profile
instead of calibrating. Exit code 1 when the median of |log2(estimated / measured)| is above 0.25, or the worst above
0.6.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from edgeformer.backends import library_versions
from edgeformer.bundle import Bundle
from edgeformer.cli.progress import show_progress
from edgeformer.formats.device import DeviceProfile, FittedCase
from edgeformer.formats.documents import load_profile
from edgeformer.machine.host import describe_host, now
from edgeformer.run import locate
from edgeformer.stages.profiling.estimating.calibrate import FIT_SHAPES, calibrate
from edgeformer.stages.profiling.estimating.check import check_estimates, with_error
from edgeformer.stages.profiling.estimating.estimate import estimate
from edgeformer.stages.profiling.messages import Item

MEDIAN_BAR, WORST_BAR = 0.25, 0.6


def bundle_of(run: Path) -> Path:
    """The bundle of a run's, or of a bundle's, folder."""
    return locate(str(run), run.parent).require_bundle()


def uncalibrated(device: DeviceProfile, bundles: Sequence[Path], cases: Sequence[FittedCase]) -> list[dict[str, Any]]:
    """The range that the same profile gives without its calibration, for every case."""
    plain = device.model_copy(update={"calibration": None})
    found: list[dict[str, Any]] = []
    for bundle in bundles:
        opened = Bundle.open(bundle)
        for artifact in opened.artifacts:
            mine = [case for case in cases if (case.run, case.artifact) == (opened.name, artifact.id)]
            items: list[Item] = [("steady", case.batch, case.seq) for case in mine]
            rows = estimate(opened, artifact, plain, items) if mine else []
            for case, row in zip(mine, rows, strict=True):
                low, high = row.latency_ms.low, row.latency_ms.high
                if low is None or high is None:
                    raise SystemExit(f"{artifact.id} at {case.batch}×{case.seq}: {row.latency_ms.reason}")
                holds = low <= case.measured_ms <= high
                shape = {"run": case.run, "artifact": case.artifact, "batch": case.batch, "seq": case.seq}
                found.append({**shape, "low_ms": low, "high_ms": high, "holds": holds})
    return found


def result_of(device: DeviceProfile, ranges: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Everything that was found, for JSON."""
    calibration = device.calibration
    assert calibration is not None and calibration.error is not None
    error = calibration.error
    cases = [
        {**case.model_dump(), "log2": math.log2(case.estimated_ms / case.measured_ms)}
        for case in calibration.validated_on
        if case.estimated_ms
    ]
    return {
        "median_log2": error.median_log2,
        "worst_log2": error.worst_log2,
        "within_bar": error.median_log2 <= MEDIAN_BAR and error.worst_log2 <= WORST_BAR,
        "cases": cases,
        "uncalibrated": {
            "cases": len(ranges),
            "hold_the_measurement": sum(item["holds"] for item in ranges),
            "median_width": sorted(item["high_ms"] / item["low_ms"] for item in ranges)[len(ranges) // 2],
            "ranges": list(ranges),
        },
        "profile": device.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True),
        "seconds": seconds,
        "host": {**describe_host(), "versions": library_versions(), "measured": now()},
    }


def show(result: dict[str, Any]) -> None:
    """The cases and the verdict."""
    for case in result["cases"]:
        name = f"{case['run']} {case['artifact']} {case['batch']}×{case['seq']}"
        print(f"{name:48} {case['measured_ms']:9.2f} ms  ≈ {case['estimated_ms']:9.2f} ms  log2 {case['log2']:+.2f}")
    ranges = result["uncalibrated"]
    print(
        f"median |log2| {result['median_log2']:.3f}, worst {result['worst_log2']:.3f} in {len(result['cases'])} cases"
    )
    print(
        f"without a calibration the range holds {ranges['hold_the_measurement']} of {ranges['cases']} measurements; "
        f"its high end is {ranges['median_width']:.1f} times its low end"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--calibrate-on", type=Path)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--seq", default="16,64,128")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--profile", help="a calibrated profile to validate")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    shapes = list(product(*(tuple(map(int, text.split(","))) for text in (arguments.batch, arguments.seq))))
    if not arguments.profile and set(shapes) & set(FIT_SHAPES):
        raise SystemExit(f"these shapes are fitted on: {sorted(set(shapes) & set(FIT_SHAPES))}")
    bundles, progress, began = [bundle_of(run) for run in arguments.runs], show_progress(), time.monotonic()
    if arguments.profile:
        device = load_profile(arguments.profile)
    else:
        teacher = bundle_of(arguments.calibrate_on) if arguments.calibrate_on else bundles[0]
        device = calibrate(teacher, load_profile("host"), threads=arguments.threads, progress=progress)
    cases = check_estimates(bundles, device, shapes, progress=progress)
    result = result_of(with_error(device, cases), uncalibrated(device, bundles, cases), time.monotonic() - began)
    show(result)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if result["within_bar"] else 1)


if __name__ == "__main__":
    main()
