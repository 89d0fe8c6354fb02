"""Accuracy of the estimator: every validated case, and the summary in docs/explanation/estimating.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from benchmarks.frame import ROOT, markdown
from edgeformer.artifacts.device import EstimateRecord
from edgeformer.estimate import estimate
from edgeformer.estimate.published import published_record

PAGE, RESULTS = ROOT / "docs" / "results" / "estimates.md", ROOT / "benchmarks" / "results"
EXPLANATION = ROOT / "docs" / "explanation" / "estimating.md"
SHIPPED = Path(estimate.__file__).with_name(estimate.RECORD_FILE)
_LABELS = ("least", "5%", "25%", "median", "75%", "95%", "most")


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
    """Return the page of every case."""
    file, record = newest()
    summary, host = record["summary"], record["host"]
    parts = [
        "# Accuracy of estimates",
        f"**{summary['within_15_percent']:.0%} of {summary['cases']} estimated times are within 15% of the measured "
        f"time; the median error is {_percent(summary['median_error'])}.**",
        "The estimate of each case comes from a calibration with the other models. [How it estimates](../explanation/"
        "estimating.md) has the method, the targets, the figures by precision and model family, and the limits.",
        f"Measured on {record['measured'][:10]}: {host['cpu']}, {host['cores']} cores. A time is the median of three "
        f"processes. Raw data: `{file.relative_to(ROOT).as_posix()}`.",
        "## By model",
        markdown(
            ["model", "measured times within the estimated range"],
            [[name, f"{share:.0%}"] for name, share in summary["held_by_model"].items()],
        ),
        "## Errors",
        "log2(estimated ÷ measured): 0.2 is 15% too much, −0.2 is 13% too little.",
        markdown(_LABELS, [[f"{value:+.2f}" for value in summary["quantiles_log2"]]]),
        "## Every case",
        "*Measured* and *processes* are the median and the range of the three processes, p50 in ms.",
        _cases(record["cases"]),
        _missing(record),
        "## Measure again",
        "```bash\npython -m benchmarks.estimator\n```",
    ]
    return "\n\n".join(parts) + "\n"


def explanation() -> str:
    """Return docs/explanation/estimating.md from its template and the newest record."""
    _, record = newest()
    host = record["host"]
    template = EXPLANATION.with_name(f"{EXPLANATION.name}.jinja").read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(template).render(
        processor=f"{host['cpu']}, {host['cores']} cores", outcome=_outcome(record["summary"]),
        groups=_groups(record), doubted=_doubted(record["doubted"]),
        published=f"{sum(errors.rows for errors in published_record().devices.values()):,}",
    )  # fmt: skip


def _groups(record: dict[str, Any]) -> str:
    """Return the errors by precision and model family."""
    groups = [("all", record["summary"]), *record["precisions"].items(), *record["families"].items()]
    if record["without_kind"] is not None:
        groups.append(("*all, calibrated without models of the same family*", record["without_kind"]))
    if record["doubted"] is not None:
        groups.append(("*with unchecked operators*", record["doubted"]))
    header = ["", "cases", "median error", "worst", "within ±15%", "range holds", "widest range", "Kendall τ"]
    return markdown(header, [_line(name, figures) for name, figures in groups])


def _outcome(figures: dict[str, Any]) -> str:
    tau, close = figures["tau"], figures["tau_within_twice"]
    order = "no order to compare" if tau is None else f"order of models at one shape, Kendall's τ: {tau:.2f} | 0.9"
    if close is not None:
        order = order.replace(" |", f" ({close:.2f} for pairs within a factor of two) |")
    lacking = [name for name, is_met in figures["enough"].items() if not is_met]
    words = {
        "within_15_percent": f"cases within ±15%: {figures['within_15_percent']:.0%} of {figures['cases']} | 80%",
        "median_error": f"median error: {_percent(figures['median_error'])} | 7%",
        "ranges_held": f"measured time within the range: {figures['ranges_held']:.0%} | 95%",
        "widest": f"widest range, high end ÷ low end: {figures['widest']:.2f} | 2",
        "tau": order if tau is not None else f"{order} | 0.9",
        "enough": f"enough cases, idle machine{': not ' + ', '.join(lacking) if lacking else ''} | –",
    }
    lines = [f"| {words[name]} | {'met' if met else '**missed**'} |" for name, met in figures["wanted"].items()]
    lines.append(f"| difference between the processes of a case, median: {figures['repeatability']:.1%} | – | – |")
    return "\n".join(["| measured | target | verdict |", "|---|---|---|", *lines])


def _doubted(figures: dict[str, Any] | None) -> str:
    """Return the targets for cases with operators that were never checked."""
    if figures is None:
        return "No case has unchecked operators, such as convolutions."
    missed = sum(not met for met in figures["wanted"].values())
    outcome = f"they miss {missed} of {len(figures['wanted'])} targets" if missed else "they meet all targets"
    return f"{figures['cases']} further cases have unchecked operators, such as convolutions: {outcome}."


def _missing(record: dict[str, Any]) -> str:
    rows = [[*map(str, case.values())] for case in record["missing"]]
    rows += [
        [row["model"], row["artifact"], str(row["threads"]), _shape(row), row["reason"]]
        for row in record["cases"]
        if row["log2"] is None
    ]
    if not rows:
        return "No planned case is missing."
    return "Missing cases. A case with a measured time and without an estimate counts as missed:\n\n" + markdown(
        ["model", "artifact", "threads", "shape", "why"], rows
    )


def _percent(value: float | None) -> str:
    return f"{value:.1%}" if value is not None else "unknown"


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
    header = ["model", "artifact", "threads", "shape", "measured", "processes", "estimated", "range", "error"]
    return markdown(header, rows)
