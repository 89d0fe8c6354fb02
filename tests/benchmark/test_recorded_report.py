"""profile REPORT.json: reports that were measured elsewhere, honest ones, foreign ones and hostile ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.benchmark.profile import judge_report
from edgeformer.benchmark.request import ProfileOptions
from edgeformer.bundle import Bundle
from tests.cli.in_process import Edgeformer
from tests.conftest import OLD_FORMAT

BUNDLE = OLD_FORMAT / "classifier-v1" / "bundle"
SHA256 = {entry.id: entry.sha256 for entry in Bundle.open(BUNDLE).artifacts}
PI, CARD = "raspberry-pi-5", "rtx4050"

Document = dict[str, Any]


def latency(p50: float = 2.0, **changes: Any) -> Document:
    return {"status": "measured", "p50": p50, "p90": None, "p95": None, "p99": None, "mean": p50, "min": p50,
            "cv": 0.01, "n": 100, "stable": True, "reason": None, "warnings": [],
            "quantiles_ms": [], **changes}  # fmt: skip


def row(artifact: str = "onnx-fp32", provider: str = "wasm", seq: int = 64, **changes: Any) -> Document:
    why = {"status": "unavailable", "reason": "a browser does not tell"}
    return {"artifact": artifact, "precision": "fp32", "provider": provider, "where": "host", "phase": "steady",
            "batch": 1, "seq": seq, "latency_ms": latency(), "memory_bytes": why, "energy_mj": why,
            "size_bytes": 56904, "threads": 1 if provider == "wasm" else None, **changes}  # fmt: skip


def report(*rows: Document, **changes: Any) -> Document:
    known_rows = {name: {"role": "exit" if "exit" in name else "full", "sha256": sum_} for name, sum_ in SHA256.items()}
    return {"format_version": 1, "device": "browser", "device_title": "my phone",
            "host": {"cpu": "my phone, in Firefox 150"},
            "on_target": True, "run": "classifier-v1", "bundle": "b", "created": "2026-11-22T12:00:00.000+00:00",
            "synthetic": True, "leaks": False, "parameters": 1, "rows": list(rows), "verdict": {"status": "unknown"},
            "notes": ["measured in a browser"], "measured_in": "browser",
            "subject": {"task": "classification", "max_positions": 64, "artifacts": known_rows}, **changes}  # fmt: skip


Write = Callable[[Document], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(document: Document) -> Path:
        (tmp_path / "browser.json").write_text(json.dumps(document), encoding="utf-8")
        return tmp_path / "browser.json"

    return written


def statuses(path: Path, device: str = PI, **options: Any) -> dict[tuple[str, str], str]:
    judged = judge_report(path, load_profile(device), ProfileOptions(**options))
    return {(check.name, check.artifact): check.status for check in judged.verdict.checks}


def test_rows_are_judged_at_the_budgets_shape(write: Write) -> None:
    path = write(report(row(), row(seq=16, latency_ms=latency(9000.0)), row("onnx-int8", latency_ms=latency(101.0))))
    judged = judge_report(path, load_profile(PI), ProfileOptions())
    result = {(check.name, check.artifact): check for check in judged.verdict.checks}
    assert result["latency", "onnx-fp32"].status == "pass" and result["latency", "onnx-fp32"].basis == "measured"
    assert result["latency", "onnx-int8"].status == "fail" and judged.verdict.status == "fail"
    memory = result["memory", "onnx-fp32"]
    assert memory.status == "unknown" and "does not tell" in str(memory.reason)
    assert (judged.device, judged.on_target, judged.judged_from) == (PI, True, str(path))
    for words in ("cannot check where it was measured", "measured in a browser", "at most 64 tokens"):
        assert any(words in note for note in judged.notes)


def test_limits_artifacts_and_providers_of_the_judged_rows(write: Write) -> None:
    path = write(report(row(), row("onnx-int8")))
    assert statuses(path, max_latency_ms=1.0, artifacts=("onnx-int8",))["latency", "onnx-int8"] == "fail"
    assert ("latency", "onnx-fp32") not in statuses(path, artifacts=("onnx-int8",))
    with pytest.raises(InputError, match=r"--artifact onnx-fp16: .* has onnx-fp32, onnx-int8"):
        statuses(path, artifacts=("onnx-fp16",))
    assert statuses(write(report(row())), CARD)["latency", "onnx-fp32"] == "unknown"
    assert statuses(write(report(row(), row(provider="webgpu"))), CARD)["latency", "onnx-fp32"] == "pass"
    # On a device without such a card, the better one of both is judged.
    slow = row(latency_ms=latency(500.0))
    assert statuses(write(report(slow, row(provider="webgpu"))))["latency", "onnx-fp32"] == "pass"


def test_with_the_bundle_the_files_must_be_the_same(write: Write) -> None:
    bundle, device = Bundle.open(BUNDLE), load_profile(PI)
    assert judge_report(write(report(row())), device, ProfileOptions(), bundle).rows
    assert judge_report(write(report(row(), subject=None)), device, ProfileOptions(), bundle).rows
    other = report(row())
    other["subject"]["artifacts"]["onnx-fp32"]["sha256"] = "0" * 64
    with pytest.raises(ArtifactError, match="was measured with another 'onnx-fp32'"):
        judge_report(write(other), device, ProfileOptions(), bundle)
    with pytest.raises(ArtifactError, match="was measured with another 'onnx-fp99'"):
        judge_report(write(report(row("onnx-fp99"))), device, ProfileOptions(), bundle)
    with pytest.raises(InputError, match="--bundle RUN"):
        judge_report(write(report(row(), subject=None)), device, ProfileOptions())


def test_the_checksum_notices_an_edit(write: Write) -> None:
    document, device = report(row()), load_profile(PI)
    judged = judge_report(write(document), device, ProfileOptions())
    assert any(note.startswith("browser.json has no checksum") for note in judged.notes)
    sealed = json.loads(judged.model_dump_json())
    judged = judge_report(write(dict(reversed(sealed.items()))), device, ProfileOptions())
    assert sum("no checksum" in note for note in judged.notes) == 1, "of the first report, which the second one quotes"
    for edit in ({"device_title": "a faster phone"}, {"report_sha256": "0" * 64}):
        with pytest.raises(ArtifactError, match=r"browser\.json: edited since it was written: .*measure again"):
            judge_report(write({**sealed, **edit}), device, ProfileOptions())


def test_a_language_model_is_judged_per_token(write: Write) -> None:
    """Its graphs have no caches in a browser: each token costs a pass over the text."""
    artifacts = {"lm": {"role": "full", "sha256": None}}
    subject = {"task": "language-modeling", "max_positions": None, "artifacts": artifacts}
    path = write(report(row("lm", seq=128), subject=subject))
    judged = judge_report(path, load_profile("host"), ProfileOptions())
    (check,) = [check for check in judged.verdict.checks if check.name == "latency"]
    assert check.status == "pass" and "a whole pass" in str(check.reason)
    # Of this host's memory, nothing is said of another one's.
    assert not [check for check in judged.verdict.checks if check.name == "memory"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (report(), "has no measured row"),
        (report(row(where="device")), "has no measured row"),
        (report(row(latency_ms={"status": "unavailable", "reason": "no"})), "has no measured row"),
        (report(row(), on_target=False), "has only estimates"),
        (report(row(latency_ms=latency(float("nan")))), "cannot be a measured number"),
        (report(row(), host={"cpu": [1, {"deep": float("inf")}]}), "cannot be a measured number"),
        (report(row(), unknown=1), "unknown"),
        ({**report(row()), "rows": "many"}, "rows"),
        (report(row(), subject={"task": "poetry", "artifacts": {}}), "poetry"),
    ],
)
def test_impossible_reports_are_refused(document: Document, message: str, write: Write) -> None:
    with pytest.raises(InputError, match=message):
        judge_report(write(document), load_profile(PI), ProfileOptions())


def test_the_command(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edgeformer: Edgeformer) -> None:
    monkeypatch.chdir(tmp_path)
    write(report(row(), row("onnx-int8", "webgpu"), device_title="\x1b[31mphone [bold]", notes=["[red]x"]))
    command = ("profile", "browser.json", "--device", PI)
    output = edgeformer(*command)
    assert "measured elsewhere: my phone" in output and "WebGPU" in output and "unknown" in output
    assert "[red]x" in output and "\x1b[31m" not in output
    failed = edgeformer(*command, "--max-latency", "1ms", "--json", code=3)
    assert json.loads(failed)["verdict"]["status"] == "fail"
    assert list(tmp_path.iterdir()) == [tmp_path / "browser.json"]
    searching = (("--min-score", "0"), ("--minimize", "size"), ("--allow-leak",))
    for option in (("--batch", "1"), ("--strict",), ("--choose",), ("--shape", "x=1"), *searching):
        assert f"{option[0]}: browser.json is a report, so nothing is measured" in edgeformer(*command, *option, code=2)
    edgeformer("profile", "browser.json", code=2)
    assert "Verdict for raspberry-pi-5" in edgeformer(*command, "--bundle", str(BUNDLE))
    write(report(row("onnx-fp99")))
    assert "was measured with another" in edgeformer(*command, "--bundle", str(BUNDLE), code=2)
    assert "gone.json: cannot be read" in edgeformer("profile", "gone.json", "--device", PI, code=2)
    (tmp_path / "browser.json").write_text("{" * 50_000, encoding="utf-8")
    edgeformer(*command, code=2)
    edgeformer("compare", "browser.json", "browser.json", code=2)
