"""What the measuring child notes beside the times: what opening took, and which nodes ran elsewhere."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from edgeformer.artifacts.progress import Silent
from edgeformer.artifacts.report import Row
from edgeformer.benchmark import process
from edgeformer.benchmark.measurement import CheckedArtifact, MeasureSpec, measure_in_child, phases_of
from edgeformer.bundle import Bundle
from tests.benchmark.measuring_child import RULES, make_spec
from tests.runtimes.tiny_bundle import write_bundle
from tests.web.old_bundles import LANGUAGE

# A clock for which every import, and every JSON file that is read, takes a quarter of an hour. Opening a session of a
# tiny graph really takes milliseconds.
SLOW_TO_PREPARE = """
import sys, time
late_s, real = 0.0, time.perf_counter
time.perf_counter = lambda: real() + late_s
def hear(event, arguments):
    global late_s
    if event == "import" or event == "open" and str(arguments[0]).endswith(".json"):
        late_s += 1000.0
from edgeformer.benchmark import process
sys.addaudithook(hear)
process.run_worker()
"""


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(LANGUAGE, tmp_path_factory.mktemp("language") / "bundle"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("measuring") / "bundle")


def load_times(rows: list[Row]) -> list[float]:
    """Milliseconds, of cold rows and of the others."""
    assert all(row.latency_ms.status == "measured" for row in rows), [row.latency_ms.reason for row in rows]
    found = [row.load_ms if row.phase == "cold" else row.conditions["load_ms"] for row in rows]
    return [ms for ms in found if ms is not None]


@pytest.mark.parametrize(
    ("id_", "phases"),
    [("onnx-fp32", ["steady"]), ("onnx-fp32-decode", ["decode"]), ("onnx-fp32-step", ["steady", "decode"])],
)
def test_load_ms_is_the_opening_alone_without_imports_and_manifests(
    monkeypatch: pytest.MonkeyPatch, language: Path, id_: str, phases: list[str]
) -> None:
    opened = Bundle.open(language)
    artifact = opened.artifact(id_)
    spec = MeasureSpec(
        checked=CheckedArtifact.of(opened, artifact),
        provider="CPUExecutionProvider",
        threads=1,
        phases=phases_of(artifact, opened.task),
        shapes=((1, 8),),
        rules=RULES,
    )
    monkeypatch.setattr(process, "child_command", lambda: [sys.executable, "-c", SLOW_TO_PREPARE])
    rows = measure_in_child(spec, Silent())
    assert [row.phase for row in rows] == ["cold", *phases]
    times = load_times(rows)
    assert len(times) == len(rows) and all(0 < ms < 1e6 for ms in times), times


def test_rows_say_which_nodes_another_provider_computed(classifier: Path) -> None:
    """Azure's provider is in the ordinary package and takes no node of a local graph: all of them run on the CPU."""
    rows = measure_in_child(make_spec(classifier, provider="AzureExecutionProvider"), Silent())
    assert [row.phase for row in rows] == ["cold", "steady", "steady"]
    for row in rows:
        assert row.latency_ms.status == "measured" and row.provider == "AzureExecutionProvider"
        (nodes,) = row.conditions["nodes_by_provider"].values()
        said = f"{nodes} of {nodes} nodes ran on CPU, not on Azure: "
        assert any(warning.startswith(said) for warning in row.latency_ms.warnings), row.latency_ms.warnings


def test_rows_of_the_provider_that_computes_everything_say_nothing(classifier: Path) -> None:
    for row in measure_in_child(make_spec(classifier), Silent()):
        assert "nodes_by_provider" not in row.conditions
        assert not any("nodes ran on" in warning for warning in row.latency_ms.warnings)
