"""Memory of opened artifacts: a shared matrix takes its memory once, copies of it take it once each."""

import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeformer.artifacts.manifest import ArtifactManifest, Sharing
from edgeformer.bundle import Bundle
from edgeformer.inference.verify import verify
from edgeformer.measurement.artifact import MeasureJob, check_artifact, own_memory
from edgeformer.measurement.resident import Resident, ResidentJob, add_resident, measure_resident
from edgeformer.runtimes import ArtifactFiles
from edgeformer.system import worker
from edgeformer.system.worker import run_job
from tests.cli.run_cli import edgeformer
from tests.measurement.measuring_child import RULES
from tests.runtimes.tiny_bundle import CLASSIFIER, VOCABULARY, parsed, write_bundle, write_manifest

WIDTH = 1100
WEIGHTS = VOCABULARY * WIDTH + WIDTH * WIDTH + WIDTH * 2
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells memory from mapped files")


def looped_graph(loops: int, *, copies: int = 1) -> onnx.ModelProto:
    """``copies`` matrices of 4.8 MB, of which ``loops`` products use one after the other."""
    shapes = {"table": (VOCABULARY, WIDTH), "head": (WIDTH, 2)}
    shapes |= {f"matrix{number}": (WIDTH, WIDTH) for number in range(copies)}
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.03, shape).astype(np.float32) for name, shape in shapes.items()}
    steps = "".join(f"p{n} = MatMul (h{n}, matrix{n % copies}) h{n + 1} = Tanh (p{n})\n        " for n in range(loops))
    nodes = f"""{{
        h0 = Gather (table, input_ids)
        {steps}
        mask = Cast <to = 1> (attention_mask)
        column = Unsqueeze (mask, last)
        masked = Mul (h{loops}, column)
        pooled = ReduceMean <keepdims = 0> (masked, first)
        logits = MatMul (pooled, head)
    }}"""
    return parsed(CLASSIFIER + nodes, **weights, last=[-1], first=[1])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    graphs = {"one": looped_graph(1), "four": looped_graph(4), "copies": looped_graph(4, copies=4)}
    folder = write_bundle(tmp_path_factory.mktemp("resident") / "bundle", graphs)
    sharing = Sharing(unique_parameters=WEIGHTS, stored_parameters=WEIGHTS, weight_bytes=4 * WEIGHTS)
    entries = [entry.model_copy(update={"sharing": sharing}) for entry in Bundle.open(folder).artifacts]
    write_manifest(folder, entries)
    return Bundle.open(folder)


@pytest.mark.slow
def test_a_shared_matrix_counts_once_also_when_verify_and_profile_repeat_it(bundle: Bundle) -> None:
    entries = add_resident(bundle, bundle.manifest).artifacts
    one, four, copies = (entry.sharing for entry in entries)
    assert one is not None and four is not None and copies is not None and four.mapped_bytes is not None
    assert one.resident_ratio is not None and four.resident_ratio is not None and copies.resident_ratio is not None
    assert 0.9 < one.resident_ratio < 1.8
    assert four.resident_ratio == pytest.approx(one.resident_ratio, abs=0.3)
    assert 2 < copies.resident_ratio - one.resident_ratio < 3.5
    small = four.model_copy(update={"weight_bytes": 1 << 20})
    assert small.resident_ratio is None  # other buffers would be most of it
    expected = [entry.sharing.resident_bytes for entry in entries if entry.sharing]
    checks = verify(bundle).artifacts
    assert [check.resident_bytes for check in checks] == pytest.approx(expected, rel=0.15)
    assert checks[2].resident_ratio is not None and checks[2].resident_ratio > 3
    table = edgeformer("verify", str(bundle.folder), cwd=bundle.folder.parent).out
    assert f"({checks[2].resident_ratio:.0f}" in table.replace("in memory", "")
    files, item = check_artifact(bundle, bundle.artifact("four")), ("steady", 1, 16)
    rows: list[Any] = []
    run_job(MeasureJob(threads=1, files=files, items=(item,), rules=RULES), rows.append)
    (cold,) = [row.conditions.resident_bytes for row in rows if getattr(row, "phase", None) == "cold"]
    assert cold == pytest.approx(expected[1], rel=0.3)


def test_why_nothing_was_measured(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = bundle.artifacts[:1]
    assert "GPU" in str(measure_resident(bundle, entries, "tensorrt-rtx")["one"].reason)
    monkeypatch.setattr("psutil.LINUX", False)
    assert "only Linux" in str(measure_resident(bundle, entries)["one"].reason)
    unmeasured = add_resident(bundle, bundle.manifest)
    assert unmeasured.artifacts == bundle.artifacts
    assert "one: memory was not measured: only Linux" in unmeasured.notes[0]
    assert "memory was not measured: only Linux" in verify(bundle).artifacts[0].notes[-1]


def test_a_process_that_dies_is_reported(bundle: Bundle) -> None:
    entry = bundle.artifact("one")
    job = ResidentJob(threads=1, files=(check_artifact(bundle, entry),) * 2, provider="CPUExecutionProvider")
    messages: list[Resident] = []
    kill = "import os, signal; os.fork = lambda fork=os.fork: fork() or os.kill(os.getpid(), signal.SIGKILL)"
    code = f"{kill}; from edgeformer.system.worker import run_worker; run_worker()"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "worker_command", lambda: [sys.executable, "-c", code])
        end = run_job(job, messages.append)
    assert end.reason is None and [message.index for message in messages] == [0, 1]
    assert all("ended early" in str(message.reason) and message.bytes == 0 for message in messages)


def test_memory_without_a_file_on_disk_counts_as_anonymous(tmp_path: Path) -> None:
    artifact = ArtifactManifest(id="a", file="model", format="onnx", precision="fp32", status="built")
    files = ArtifactFiles(artifact, tmp_path / "model")
    before = own_memory(files)
    descriptor = os.memfd_create("weights")
    os.ftruncate(descriptor, 2**22)
    with mmap.mmap(descriptor, 2**22) as memory:
        memory[:] = bytes(2**22)
        assert own_memory(files, before)[0] >= 2**22
    os.close(descriptor)
