"""Where ONNX Runtime computes a graph's nodes: a provider that leaves some to the CPU says so."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.estimate.estimate import estimate
from edgeformer.runtimes import OpenOptions, cannot_estimate, runtime_of
from edgeformer.runtimes.onnxruntime.session import OnnxSession, placement_note
from tests.runtimes.tiny_bundle import classifier_graph

OLD = Path(__file__).resolve().parents[1] / "old_format" / "classifier-v1" / "bundle"
AZURE = "AzureExecutionProvider"  # takes none of our operators, and is in every ordinary ONNX Runtime


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    onnx.save(classifier_graph(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def require_azure() -> None:
    import onnxruntime

    if not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
        pytest.skip(f"onnxruntime {onnxruntime.__version__} does not tell where nodes are computed")
    if AZURE not in onnxruntime.get_available_providers():
        pytest.skip(f"this onnxruntime has no {AZURE}")


def test_the_cpu_computes_everything_and_has_nothing_to_say(graph: Path) -> None:
    with OnnxSession(graph) as session:
        assert session.placement() is None
        assert session.caveats() == ()


def test_a_provider_that_takes_nothing_is_found_out(graph: Path) -> None:
    require_azure()
    with OnnxSession(graph, AZURE) as session:
        placement = session.placement()
        (note,) = session.caveats()
    assert placement is not None and set(placement) == {"CPUExecutionProvider"}
    nodes = placement["CPUExecutionProvider"]
    assert nodes >= 5
    assert note.startswith(f"{nodes} of {nodes} nodes ran on CPU, not on Azure: ")
    assert "MatMul (1)" in note or note.endswith(", …")


def test_every_graph_of_a_step_bundle_says_it() -> None:
    require_azure()
    step = next(artifact for artifact in Bundle.open(OLD).artifacts if artifact.id == "onnx-int8-step")
    with Bundle.open(OLD).session(step, OpenOptions(AZURE, threads=1)) as session:
        placement, notes = session.placement(), session.caveats()
    assert placement is not None and set(placement) == {"CPUExecutionProvider"}
    assert {note.partition(":")[0] for note in notes} == set(step.parts) & {"embed", "loop", "readout"}
    (loop,) = [note for note in notes if note.startswith("loop: ")]
    assert "nodes ran on CPU, not on Azure" in loop


def test_notes_name_what_went_elsewhere_the_most_frequent_first() -> None:
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    assert placement_note(cuda, {(cuda, "MatMul"): 9}) is None
    mixed = {(cuda, "MatMul"): 9, (cpu, "Shape"): 2, (cpu, "MatMulInteger"): 6}
    assert placement_note(cuda, mixed) == "8 of 17 nodes ran on CPU, not on CUDA: MatMulInteger (6), Shape (2)"
    assert "does not tell which nodes CUDA left to the CPU" in str(placement_note(cuda, None))


@pytest.mark.parametrize("id_", ["onnx-int8", "onnx-int8-exit1", "onnx-int8-step", "onnx-int8-trim"])
def test_int8_products_are_not_estimated_for_cards(id_: str) -> None:
    artifact = next(candidate for candidate in Bundle.open(OLD).artifacts if candidate.id == id_)
    reason = cannot_estimate(artifact, load_profile("rtx4050"))
    assert reason is not None
    assert f"its {artifact.quantized['MatMulInteger']} products in INT8 (MatMulInteger, uint8 × int8)" in reason
    assert cannot_estimate(artifact, load_profile("intel-n100")) is None


def test_rows_of_int8_products_on_a_card_are_unavailable() -> None:
    bundle = Bundle.open(OLD)
    (row,) = estimate(bundle, bundle.artifact("onnx-int8"), load_profile("rtx4050"), [("steady", 1, 16)])
    assert (row.where, row.provider) == ("device", "CUDAExecutionProvider")
    assert row.latency_ms.status == row.memory_bytes.status == "unavailable"
    assert "leaves them to the CPU" in str(row.latency_ms.reason)


def test_other_graphs_are_estimated_for_cards() -> None:
    for artifact in Bundle.open(OLD).artifacts:
        if artifact.is_graph and artifact.precision != "int8":
            assert cannot_estimate(artifact, load_profile("rtx4050")) is None


def test_engines_are_estimated_for_the_card_that_they_were_built_for() -> None:
    engine = ArtifactManifest(
        id="tensorrt-rtx-fp16",
        file="engines/model.engine",
        format="tensorrt-rtx",
        precision="fp16",
        status="built",
        built_for={"compute_capability": "8.9"},
    )
    assert cannot_estimate(engine, load_profile("rtx4050")) is None
    assert "built for compute capability 8.9; 'h200' has 9.0" in str(cannot_estimate(engine, load_profile("h200")))
    assert cannot_estimate(engine, load_profile("intel-n100")) == "tensorrt-rtx engines run on NVIDIA GPUs only"
    assert runtime_of(engine).fuses(engine) and not runtime_of("onnx").fuses(engine)
