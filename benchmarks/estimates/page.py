"""docs/estimator.md: every case that was validated, how far off estimates were, and what was never checked."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.results_page.tables import ROOT
from edgeformer.artifacts.device import EstimateRecord
from edgeformer.estimate import estimate

PAGE, RESULTS = ROOT / "docs" / "estimator.md", ROOT / "benchmarks" / "results"
SHIPPED = Path(estimate.__file__).with_name(estimate.RECORD_FILE)
_LABELS = ("least", "5 %", "25 %", "median", "75 %", "95 %", "most")
_NEVER = """## Never checked

- **No GPU**: no estimate for a card was ever compared with a card, and no engine.
- **No other processor** than the one above: ARM (Raspberry Pi, Apple), Intel N100, any with another number of cores;
  nor the same one under `ONEDNN_MAX_CPU_ISA`. The estimator's formulas were chosen by records of this processor, the
  one above among them: another one may show larger errors.
- Runtimes beside ONNX Runtime's CPU provider: OpenVINO, torch, browsers.
- FP16 on processors, 4-bit weights, trimmed vocabularies, step bundles, exits.
- Memory and energy: what is said here is of times.
"""


def newest() -> tuple[Path, dict[str, Any]]:
    """The newest record that left models out, by its name, which begins with the date."""
    files = sorted(RESULTS.glob("*/*-estimator.json"), key=lambda file: file.name)
    read = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in files]
    left_out = [one for one in read if one[1].get("format") == "left-out-models"]
    if not left_out:
        sys.exit(f"{RESULTS}: no record; python -m benchmarks.estimator makes one")
    return left_out[-1]


def shipped_record() -> EstimateRecord:
    """The figures of the newest record that reports state beside estimates."""
    _, record = newest()
    summary = record["summary"]
    return EstimateRecord(
        source=PAGE.relative_to(ROOT).as_posix(),
        kind="cpu",
        processor=record["host"]["cpu"],
        cores=record["host"]["cores"],
        measured=record["measured"][:10],
        precisions=tuple(record["precisions"]),
        **{
            name: summary[name]
            for name in ("cases", "models", "median_error", "worst_error", "within_15_percent", "ranges_held")
        },
    )


def page() -> str:
    """The whole document."""
    file, record = newest()
    source = file.relative_to(ROOT).as_posix()
    title = f"# Estimates: the record\n\nWritten by `python -m benchmarks.estimates` from `{source}`."
    return "\n\n".join([title, *_parts(record), _NEVER])


def _parts(record: dict[str, Any]) -> list[str]:
    """Its sections."""
    host, whole, other = record["host"], record["summary"], record["without_kind"]
    groups = [("all", whole), *record["precisions"].items(), *record["families"].items()]
    if other is not None:
        groups.append(("*all, without any model of their kind*", other))
    if record["doubted"] is not None:
        groups.append(("*with operators that were never checked*", record["doubted"]))
    header = ["", "cases", "median error", "worst", "within ±15 %", "ranges that held", "widest range", "Kendall τ"]
    speeds = "\n".join(_speed(threads, found) for threads, found in record["speeds"].items())
    return [
        f"Measured on {record['measured'][:10]}: {host['cpu']}, {host['cores']} cores.\n"
        "Each model was left out once: its estimates come from the other models alone, its ranges from how far those "
        "are off each other.\nEvery time is the median over fresh processes, of sweeps over all models; each was "
        "taken beside a probe of the machine's speed, and is as it would be at the usual one.",
        speeds,
        _outcome(whole),
        "This is what `edgeformer calibrate` does with a bundle and at least two others (`--also`). With one "
        "bundle alone nobody was left out, and its ranges are a guess of a factor of 1.5 both ways.",
        "## By precision and family",
        _table(header, [_line(name, found) for name, found in groups]),
        _doubted(record["doubted"]),
        "## By model",
        "How often the range held, of ranges that the other models made:",
        _table(["model", "ranges that held"], [[name, f"{held:.0%}"] for name, held in whole["held_by_model"].items()]),
        "## Errors",
        "log2(estimated / measured): 0.2 is 15 % too much, −0.2 is 13 % too little.",
        _table(_LABELS, [[f"{value:+.2f}" for value in whole["quantiles_log2"]]]),
        "## Every case",
        "p50 in ms at the usual speed, over both passes; *again*: in the second pass alone.",
        _cases(record["cases"]),
        _missing(record),
    ]


def _speed(threads: str, found: dict[str, Any]) -> str:
    told = f"its reference product took {found['product_us']:.0f} µs, the copy {found['copy_us']:.0f} µs"
    both = found["two_speeds_us"]
    if both is not None:
        told += f"; **the machine has two speeds** ({both[0]:.0f} and {both[1]:.0f} µs)"
    return f"- beside {threads} thread{'s' if threads != '1' else ''}: {told}"


def _outcome(found: dict[str, Any]) -> str:
    tau, close = found["tau"], found["tau_within_twice"]
    order = "no order to compare" if tau is None else f"Kendall's τ {tau:.2f} over all pairs at one shape (0.9)"
    if close is not None:
        order += f"; {close:.2f} over those within a factor of two"
    lacking = [name for name, there in found["enough"].items() if not there]
    words = {
        "within_15_percent": f"{found['within_15_percent']:.0%} of {found['cases']} cases within ±15 % (80 %)",
        "median_error": f"median error {_percent(found['median_error'])} (7 %, or 1.5 times the repeatability)",
        "ranges_held": f"the range held {found['ranges_held']:.0%} (95 %)",
        "widest": f"the widest range is {found['widest']:.2f} times as high as low (2)",
        "tau": order,
        "enough": f"enough was looked at{': not ' + ', '.join(lacking) if lacking else ''}",
    }
    lines = [f"- {words[name]}: {'met' if met else '**missed**'}" for name, met in found["wanted"].items()]
    if found["repeatability"] is not None:
        same, raw = found["repeatability"], found["repeatability_raw"]
        lines.append(f"- the same case measured again differs by {same:.1%}, without the probe by {raw:.1%} (medians)")
    return "What is wanted in brackets:\n\n" + "\n".join(lines)


def _doubted(found: dict[str, Any] | None) -> str:
    """The same bars for what is said with a doubt."""
    if found is None:
        return "No case has operators of which estimates were never checked (convolutions, recurrent ones)."
    missed = [name for name, met in found["wanted"].items() if not met]
    told = f"**missed** in {', '.join(missed)}" if missed else "met by them, too"
    return f"{found['cases']} cases have operators of which estimates were never checked; what is wanted: {told}."


def _missing(record: dict[str, Any]) -> str:
    rows = [[*map(str, one.values())] for one in record["missing"]]
    rows += [
        [row["model"], row["artifact"], str(row["threads"]), _shape(row), row["reason"]]
        for row in record["cases"]
        if row["log2"] is None
    ]
    if not rows:
        return "Nothing that was planned was left out."
    told = "Left out; those that were timed count as cases that were missed:"
    return f"{told}\n\n" + _table(["model", "artifact", "threads", "shape", "why"], rows)


def _percent(value: float | None) -> str:
    return f"{value:.1%}" if value is not None else "not known"


def _line(name: str, found: dict[str, Any]) -> list[str]:
    tau = f"{found['tau']:.2f}" if found["tau"] is not None else "–"
    shares = [f"{found[key]:.0%}" for key in ("within_15_percent", "ranges_held")]
    errors = [_percent(found[key]) for key in ("median_error", "worst_error")]
    width = f"{found['widest']:.2f}×" if found["widest"] is not None else "–"
    return [name, f"{found['cases']}", *errors, *shares, width, tau]


def _shape(case: dict[str, Any]) -> str:
    return f"{case['batch']}×{case['seq']}{' token' if case['phase'] == 'decode' else ''}"


def _cases(cases: Sequence[dict[str, Any]]) -> str:
    def row(case: dict[str, Any]) -> list[str]:
        again = f"{case['again_ms']:.3g}" if "again_ms" in case else "–"
        found = [f"{case['measured_ms']:.3g}", again, f"{case['estimated_ms']:.3g}"]
        bounds = f"{case['low_ms']:.3g}–{case['high_ms']:.3g}"
        return [case["model"], case["artifact"], f"{case['threads']}", _shape(case), *found, bounds, _off(case)]

    header = ["model", "artifact", "threads", "shape", "measured", "again", "estimated", "range", "off"]
    return _table(header, [row(case) for case in cases if case["log2"] is not None])


def _off(case: dict[str, Any]) -> str:
    return f"{2 ** case['log2'] - 1:+.0%}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return tabulate(rows, headers=list(header), tablefmt="github", disable_numparse=True)
