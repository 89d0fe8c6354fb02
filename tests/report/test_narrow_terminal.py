"""What a report looks like in 80 columns: no word is cut in two, and the verdict is not buried."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from edgeformer.artifacts.report import Report, Verdict, Work
from edgeformer.report.compare import compare_reports
from edgeformer.report.panels import Panel, TradePanel
from edgeformer.report.plots import _draw_sizes
from edgeformer.report.report_tables import print_report, print_search
from tests.benchmark.search_cases import artifact, bundle
from tests.report.made_reports import LATENCY, SIZE, estimated, made_report, made_row, made_search, measured

NAMES = [f"onnx-{precision}-{part}" for precision in ("fp32", "fp16", "int8") for part in ("full", "exit10", "step")]
NAMES += ["tensorrt-rtx-fp16", "tensorrt-rtx-fp16-exit1"]


def crowded() -> Report:
    """Eleven artifacts, measured here with much noise and estimated for the device."""
    noisy = [
        measured(stable=False, warnings=(f"the calls vary by {place}.5% (above 2.5% is noisy)", "drifted: 1 to 2 ms"))
        for place in range(len(NAMES))
    ]
    rows = [made_row(latency, artifact=name, threads=2) for name, latency in zip(NAMES, noisy, strict=True)]
    far = {"provider": "CPUExecutionProvider", "threads": 4}
    rows += [made_row(estimated(10.5, 98.5), "device", artifact=name, **far) for name in NAMES]
    checks = [check.model_copy(update={"artifact": name}) for name in NAMES for check in (SIZE, LATENCY)]
    return made_report(*rows, verdict=Verdict(status="pass", checks=tuple(checks)))


def printed(report: Report, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    print_report(report, [], console)
    if report.search is not None:
        print_search(report.search, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_eleven_artifacts_fit_into_80_columns_and_no_name_is_broken() -> None:
    text = printed(crowded())
    tables = [line for line in text.splitlines() if not line.startswith("note")]
    for name in NAMES:
        assert sum(line.startswith(f" {name} ") for line in tables) == 2, "measured and estimated, each in one line"
    assert "≈ 10.5 to 98.5 ms" in text, "the range, which is what is judged, stays"
    assert "per second" in printed(crowded(), 180) and "per second" not in text, "what matters least leaves first"


def test_a_search_fits_too() -> None:
    text = printed(made_report(search=made_search()))
    assert "▶ 1" in text and any(line.split()[1:3] == ["2", "onnx-fp32-big"] or "onnx-fp32-big" in line.split()
                                 for line in text.splitlines())  # fmt: skip


def test_long_words_beside_it_break_no_name() -> None:
    search = made_search()
    why = "accuracy 0.4414 is below 0.9; size 42.0 MiB is over 30.0 MiB; latency 9.00 ms is over 5.00 ms"
    changed = [c.model_copy(update={"artifact": name, "reason": why, "feasible": False, "low_ms": 5.8, "high_ms": 48.0})
               for c, name in zip(search.candidates, NAMES, strict=False)]  # fmt: skip
    text = printed(made_report(search=search.model_copy(update={"candidates": tuple(changed), "pick": None})))
    for name in NAMES[: len(changed)]:
        assert f" {name} " in text
    assert text.count("≈ 5.80 to 48.0 ms") == len(changed)


def test_many_noisy_rows_are_one_line_with_a_count() -> None:
    notes = [line for line in printed(crowded()).splitlines() if line.startswith("note")]
    (noise,) = [line for line in notes if "noisy" in line]
    assert noise.startswith("note 11 of 11 rows are noisy, 11 not stable: ")
    assert "the calls vary (11 rows)" in noise and "drifted (11 rows)" in noise
    few = made_report(made_row(measured(warnings=("the calls vary by 9.0%",))))
    assert "note onnx-fp32 1 × 128: the calls vary by 9.0%" in printed(few), "one row alone is told in full"


def test_this_hosts_threads_and_the_devices_are_no_sweep() -> None:
    assert printed(crowded()).count("threads") == 1, "those of the device, above all that is estimated"


def test_one_machine_has_one_name_in_both_reports_of_a_comparison() -> None:
    here = {"device": "host", "device_title": "This host (CPU)", "on_target": True}
    compared = compare_reports(made_report(made_row(measured()), **here), made_report())
    assert compared["a"]["measured_on"] == compared["b"]["measured_on"] == "Some CPU"
    assert not any("machines" in note for note in compared["notes"])


def drawn(report: Report) -> object:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axis = Figure(figsize=(4.7, 4.3), layout="constrained").subplots()
    TradePanel(axis, report).roofline()
    axis.figure.canvas.draw()
    return axis


def test_no_two_labels_of_a_roofline_lie_on_each_other() -> None:
    report = crowded()
    works = [Work(operations=4e8, bytes_moved=3e7 + n, weight_bytes=2e7, operators=90, kernels=40) for n in range(22)]
    rows = [row.model_copy(update={"work": work}) for row, work in zip(report.rows, works, strict=True)]
    other = [row.model_copy(update={"seq": 16}) for row in rows]
    for held in (rows, [*rows, *other]):
        axis = drawn(report.model_copy(update={"rows": tuple(held)}))
        texts = [text for text in axis.texts if text.get_text()]  # type: ignore[attr-defined]
        boxes = [text.get_window_extent() for text in texts]
        pairs = [(a, b) for place, a in enumerate(boxes) for b in boxes[:place]]
        assert not any(a.overlaps(b) for a, b in pairs), [text.get_text() for text in texts]
        legend = [text.get_text() for text in axis.get_legend().get_texts()]  # type: ignore[attr-defined]
        assert set(legend) >= {*NAMES, "estimated", "on this host"}


def test_eleven_artifacts_have_eleven_colours() -> None:
    assert len(set(Panel(None, crowded()).colours.values())) == len(NAMES)


@pytest.mark.parametrize(("weights", "label"), [(None, "size (MiB)"), ("w", "its share of the weights file beside it")])
def test_the_axis_of_a_bundles_sizes_says_what_it_has(weights: str | None, label: str) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    entry = artifact("onnx-fp32", weights_file=weights)
    _draw_sizes(axis, [entry], bundle(entry))
    assert axis.get_xlabel().startswith("size (MiB)") and axis.get_xlabel().endswith(label)
