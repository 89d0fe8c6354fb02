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
_NOT_CHECKED = """## Never checked

- **No GPU**: no estimate for a card was ever compared with a card, and no engine.
- **No other processor** than the one above: ARM (Raspberry Pi, Apple), Intel N100, any with another number of cores;
  nor the same one under `ONEDNN_MAX_CPU_ISA`. The estimator's formulas were chosen by records of this processor:
  another one may show larger errors.
- Runtimes beside ONNX Runtime's CPU provider: OpenVINO, torch, browsers.
- FP16 on processors, 4-bit weights, trimmed vocabularies, step bundles, exits.
- Memory and energy: what is said here is of times.
"""


def newest() -> tuple[Path, dict[str, Any]]:
    """Return the newest record of a cross-validation, by its name, which begins with the date."""
    files = sorted(RESULTS.glob("*/*-estimator.json"), key=lambda file: file.name)
    read = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in files]
    left_out = [(file, record) for file, record in read if record.get("format") == "left-out-models"]
    if not left_out:
        sys.exit(f"{RESULTS}: no record; python -m benchmarks.estimator makes one")
    return left_out[-1]


def shipped_record() -> EstimateRecord:
    """Return the figures of the newest record that reports state beside estimates."""
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
    """Return the whole document."""
    file, record = newest()
    source = file.relative_to(ROOT).as_posix()
    title = f"# Estimates: the record\n\nWritten by `python -m benchmarks.estimates` from `{source}`."
    return "\n\n".join([title, *_parts(record), _NOT_CHECKED])


def _parts(record: dict[str, Any]) -> list[str]:
    """Return its sections."""
    host, summary, other = record["host"], record["summary"], record["without_kind"]
    groups = [("all", summary), *record["precisions"].items(), *record["families"].items()]
    if other is not None:
        groups.append(("*all, without any model of their kind*", other))
    if record["doubted"] is not None:
        groups.append(("*with operators that were never checked*", record["doubted"]))
    header = ["", "cases", "median error", "worst", "within ±15 %", "ranges that held", "widest range", "Kendall τ"]
    return [
        f"Measured on {record['measured'][:10]}: {host['cpu']}, {host['cores']} cores.\n"
        "Each model was left out once: its estimates come from a fit to the other models.\n"
        "Its ranges come from the largest error of a cross-validation among these. Every time is the median over three "
        "fresh processes, in sweeps over all models.",
        _outcome(summary),
        "`edgeformer calibrate` does the same with a bundle and at least two others (`--also`). With fewer models "
        "there is no cross-validation, and ranges are a guess of a factor of 1.5 both ways.",
        "## By precision and family",
        _table(header, [_line(name, figures) for name, figures in groups]),
        _doubted(record["doubted"]),
        "## By model",
        "How often the range held the measurement:",
        _table(
            ["model", "ranges that held"], [[name, f"{share:.0%}"] for name, share in summary["held_by_model"].items()]
        ),
        "## Errors",
        "log2(estimated / measured): 0.2 is 15 % too much, −0.2 is 13 % too little.",
        _table(_LABELS, [[f"{value:+.2f}" for value in summary["quantiles_log2"]]]),
        "## Every case",
        "p50 in ms, and the shortest and longest of the processes.",
        _cases(record["cases"]),
        _missing(record),
    ]


def _outcome(figures: dict[str, Any]) -> str:
    tau, close = figures["tau"], figures["tau_within_twice"]
    order = "no order to compare" if tau is None else f"Kendall's τ {tau:.2f} over all pairs at one shape (0.9)"
    if close is not None:
        order += f"; {close:.2f} over those within a factor of two"
    lacking = [name for name, is_met in figures["enough"].items() if not is_met]
    words = {
        "within_15_percent": f"{figures['within_15_percent']:.0%} of {figures['cases']} cases within ±15 % (80 %)",
        "median_error": f"median error {_percent(figures['median_error'])} (7 %)",
        "ranges_held": f"the range held {figures['ranges_held']:.0%} (95 %)",
        "widest": f"the widest range is {figures['widest']:.2f} times as high as low (2)",
        "tau": order,
        "enough": f"enough cases and a quiet machine{': not ' + ', '.join(lacking) if lacking else ''}",
    }
    lines = [f"- {words[name]}: {'met' if met else '**missed**'}" for name, met in figures["wanted"].items()]
    lines.append(f"- the processes that timed a case differ by {figures['repeatability']:.1%} (median)")
    return "Targets in brackets:\n\n" + "\n".join(lines)


def _doubted(figures: dict[str, Any] | None) -> str:
    """Return the targets for cases with operators that were never checked."""
    if figures is None:
        return "No case has operators of which estimates were never checked (convolutions, recurrent ones)."
    missed = [name for name, met in figures["wanted"].items() if not met]
    outcome = f"**missed** in {', '.join(missed)}" if missed else "met by them, too"
    return f"{figures['cases']} cases have operators of which estimates were never checked; targets: {outcome}."


def _missing(record: dict[str, Any]) -> str:
    rows = [[*map(str, case.values())] for case in record["missing"]]
    rows += [
        [row["model"], row["artifact"], str(row["threads"]), _shape(row), row["reason"]]
        for row in record["cases"]
        if row["log2"] is None
    ]
    if not rows:
        return "Nothing that was planned was left out."
    return "Left out; those that were timed count as missed:\n\n" + _table(
        ["model", "artifact", "threads", "shape", "why"], rows
    )


def _percent(value: float | None) -> str:
    return f"{value:.1%}" if value is not None else "not known"


def _line(name: str, figures: dict[str, Any]) -> list[str]:
    tau = f"{figures['tau']:.2f}" if figures["tau"] is not None else "–"
    shares = [f"{figures[key]:.0%}" for key in ("within_15_percent", "ranges_held")]
    errors = [_percent(figures[key]) for key in ("median_error", "worst_error")]
    width = f"{figures['widest']:.2f}×" if figures["widest"] is not None else "–"
    return [name, f"{figures['cases']}", *errors, *shares, width, tau]


def _shape(case: dict[str, Any]) -> str:
    return f"{case['batch']}×{case['seq']}{' token' if case['phase'] == 'decode' else ''}"


def _cases(cases: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            case["model"], case["artifact"], f"{case['threads']}", _shape(case), f"{case['measured_ms']:.3g}",
            f"{min(case['process_ms']):.3g}–{max(case['process_ms']):.3g}", f"{case['estimated_ms']:.3g}",
            f"{case['low_ms']:.3g}–{case['high_ms']:.3g}", f"{2 ** case['log2'] - 1:+.0%}",
        ]
        for case in cases
        if case["log2"] is not None
    ]  # fmt: skip
    header = ["model", "artifact", "threads", "shape", "measured", "processes", "estimated", "range", "off"]
    return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return tabulate(rows, headers=list(header), tablefmt="github", disable_numparse=True)
