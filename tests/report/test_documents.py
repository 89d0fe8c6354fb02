"""Documents made from reports and manifests say what these hold, and say so when something is not known."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from edgeformer.artifacts.report import Check, Energy, Latency, Memory, Report, Row, Verdict
from edgeformer.models import load_recipe
from edgeformer.models.card import model_card
from edgeformer.report.compare import format_comparison, run_records
from edgeformer.report.plots import draw_learning_curve
from edgeformer.report.report_files import as_csv, as_markdown, write_report
from edgeformer.report.words import in_words
from edgeformer.run import locate, read_run


def row(where: str, latency: Latency, phase: str = "steady") -> Row:
    return Row(
        artifact="onnx-fp32",
        precision="fp32",
        provider="CPUExecutionProvider",
        where=where,
        phase=phase,
        batch=1,
        seq=128,
        latency_ms=latency,
        memory_bytes=Memory(status="measured", peak=3 * 2**20),
        size_bytes=20 * 2**20,
        energy_mj=Energy(status="unavailable", reason="no counter"),
    )


def report(checks: tuple[Check, ...], status: str = "unknown", on_target: bool = False) -> Report:
    measured = Latency(status="measured", p50=1.234, p90=1.5, mean=1.3, cv=0.01, n=200, stable=True)
    absent = Latency(status="unavailable", reason="not present")
    return Report(
        device="rtx4050",
        device_title="NVIDIA GeForce RTX 4050 Laptop GPU",
        host={"cpu": "Some CPU", "cores": 2, "system": "Linux"},
        on_target=on_target,
        run="mine-001",
        bundle="bundle",
        created="2026-11-21T00:00:00+00:00",
        synthetic=True,
        parameters=1234,
        rows=(row("host", measured), row("device", absent)),
        verdict=Verdict(status=status, checks=checks),
    )


SIZE = Check(name="size", artifact="onnx-fp32", limit=100 * 2**20, value=20 * 2**20, unit="bytes", status="pass")
SPEED = Check(name="latency", artifact="onnx-fp32", limit=5.0, value=None, unit="ms", status="unknown", reason="absent")


def test_words_for_each_outcome() -> None:
    unknown = in_words(report((SIZE, SPEED)))
    assert unknown.startswith("size within budget; latency not known, because no NVIDIA")
    guessed = SPEED.model_copy(update={"status": "pass", "value": 2.0, "basis": "estimated"})
    int8 = SPEED.model_copy(update={"artifact": "onnx-int8"})
    one = in_words(report((guessed, int8)))  # not for the device's sake: others were estimated for it
    assert "latency not known of onnx-int8" in one and "no NVIDIA" not in one
    failed = SIZE.model_copy(update={"status": "fail"})
    assert in_words(report((failed, SPEED), "fail")) == "Over budget: size of onnx-fp32."
    assert in_words(report((SIZE,), "pass", on_target=True)) == "Every check is within budget."


def test_markdown_has_verdict_first_and_marks_synthetic_data() -> None:
    text = as_markdown(report((SIZE, SPEED)))
    assert text.index("**Verdict: unknown.**") < text.index("## Budget") < text.index("## Measurements")
    assert "**SYNTHETIC data.**" in text
    assert "unavailable" in text and "1.23" in text


def test_csv_has_every_row_with_units_in_its_columns() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(report((SIZE,))))))
    assert [r["where"] for r in rows] == ["host", "device"]
    assert float(rows[0]["p50_ms"]) == 1.234
    assert rows[1]["p50_ms"] == "" and rows[1]["reason"] == "not present"


def test_report_files(tmp_path: Path, finished_run: Path) -> None:
    location = locate(str(finished_run), finished_run.parent)
    location = type(location)(tmp_path, location.bundle)
    written = write_report(report((SIZE, SPEED)), location)
    assert [path.name for path in written] == [
        f"rtx4050.{kind}" for kind in ("json", "md", "csv", "html", "svg", "png")
    ]
    assert Report.model_validate_json(written[0].read_bytes(), strict=False) == report((SIZE, SPEED))
    assert written[5].read_bytes().startswith(b"\x89PNG")


def test_learning_curve(finished_run: Path) -> None:
    path = draw_learning_curve(finished_run)
    assert path == finished_run / "plots" / "learning_curve.png"
    assert path.stat().st_size > 10_000


def test_training_and_export_write_the_card(fresh_run: Path) -> None:
    """Neither was run by a command."""
    card = model_card(read_run(fresh_run), load_recipe(str(fresh_run / "recipe.yaml")))
    for folder in ("model", "bundle"):
        assert (fresh_run / folder / "README.md").read_text(encoding="utf-8") == card


def test_model_card_names_protocol_scores_and_overlap(finished_run: Path) -> None:
    manifest = read_run(finished_run)
    card = model_card(manifest, load_recipe(str(finished_run / "recipe.yaml")))
    assert manifest.test is not None
    assert f"{manifest.test.accuracy:.4f}" in card
    assert "random-split" in card and "also training texts" in card
    real = manifest.model_copy(update={"data": manifest.data.model_copy(update={"synthetic": False})})
    assert "Synthetic data" not in model_card(real, load_recipe(str(finished_run / "recipe.yaml")))


@pytest.mark.parametrize("style", ["plain", "markdown", "csv"])
def test_comparison(finished_run: Path, style: str) -> None:
    location = locate(str(finished_run), finished_run.parent)
    rows = run_records([location]) * 2
    assert rows[0]["parameters"] == read_run(finished_run).parameters
    assert rows[0]["onnx-fp16_bytes"] < rows[0]["onnx-fp32_bytes"]
    text = format_comparison(rows, style)  # type: ignore[arg-type]
    assert text.count("small") >= 2
    json.dumps(rows)
