"""Every runtime passes the conformance checks: the built-in ones, and one of another package."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import edgeformer.runtimes as runtimes
from edgeformer import registry
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import Progress
from edgeformer.bundle import Bundle
from edgeformer.runtimes import ArtifactFiles, BuildJob, OpenOptions, Runtime, Target, all_runtimes, cannot_run
from tests.fakes.install import RUNTIMES, installed
from tests.runtimes import conformance
from tests.runtimes.tiny_bundle import POSITIONS, classifier_graph, inputs, write_bundle

BUILT_IN = [runtime.name for runtime in all_runtimes()]
with installed(*RUNTIMES):
    REGISTERED = [runtime.name for runtime in runtimes.REGISTRY.announced()]


@pytest.fixture
def reference() -> Iterator[Runtime]:
    """Install the runtimes of other packages for one test and its child processes; return one of them."""
    with installed(*RUNTIMES):
        yield _find_runtime("reference")


def _find_runtime(name: str) -> Runtime:
    located = runtimes.REGISTRY.find(name)
    assert located is not None
    return located


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    graph = classifier_graph()
    for value in graph.graph.input:  # as export calls the axis, and engines are built for
        value.type.tensor_type.shape.dim[1].dim_param = "sequence"
    for node in graph.graph.node:  # the mean would depend on padding, which some runtimes add
        node.op_type = "ReduceSum" if node.op_type == "ReduceMean" else node.op_type
    return write_bundle(tmp_path / "bundle", {"model": graph})


def graph_of(bundle: Path) -> ArtifactManifest:
    types = {"input_ids": "int64[batch, seq]", "attention_mask": "int64[batch, seq]"}
    (graph,) = Bundle.open(bundle).artifacts
    return graph.model_copy(update={"id": "onnx-fp32", "inputs": types})


def classifier_module(graph: ArtifactManifest) -> Any:
    """The classifier of :func:`classifier_graph` in torch, for builders that take a module."""
    import torch

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for tensor in classifier_graph().graph.initializer:
                if tensor.data_type == onnx.TensorProto.FLOAT:
                    weight = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
                    self.register_parameter(tensor.name, torch.nn.Parameter(weight))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            placed = torch.nn.functional.embedding(input_ids, self.table) + self.positions[:, : input_ids.shape[1]]
            return (placed * attention_mask[..., None].float()).sum(1) @ self.head

    return Classifier().eval()


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("name", [*BUILT_IN, *REGISTERED])
@pytest.mark.parametrize(
    "check",
    [
        conformance.check_identity, conformance.check_light, conformance.check_capabilities,
        conformance.check_providers, conformance.check_estimable, conformance.check_builders,
    ],
)  # fmt: skip
def test_every_runtime_conforms(check: Callable[[Runtime], None], name: str) -> None:
    check(_find_runtime(name))


@pytest.mark.parametrize(
    ("format_", "provider", "package"),
    [
        ("gguf", None, "xllamacpp"), ("litert", None, "ai-edge-litert"), ("executorch", None, "executorch"),
        ("onnx", "openvino-cpu", "openvino"),
    ],
)  # fmt: skip
def test_without_its_package_a_runtime_names_it(format_, provider, package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert f"package: {package} is not installed" in str(cannot_run(conformance.entry(format_), provider))


@pytest.mark.slow
def test_what_can_run_here_answers_alike(reference: Runtime, bundle: Path, tmp_path: Path) -> None:
    """Every format that can be built or opened here gives the logits of the graph that it was built of."""
    notes: list[str] = []
    (bundle / "engines").mkdir()
    job = BuildJob(
        bundle=bundle, graphs=(graph_of(bundle),), precision="fp32", max_length=12, max_positions=POSITIONS,
        progress=Progress(), note=notes.append, module=classifier_module,
    )  # fmt: skip
    artifacts_by_format = {job.graphs[0].format: job.graphs[0]}
    for builder in runtimes.all_builders():
        plan = builder.plan(load_profile("rtx4050"))
        # Those need rows or a language model: test_openvino.py, test_llamacpp.py.
        if isinstance(plan, Target) and not builder.joins and builder.name != "gguf":
            (artifact,) = conformance.check_build(builder, plan, job)
            artifacts_by_format[artifact.format] = artifact
    assert {"onnx", "onnx-reference"} <= set(artifacts_by_format)
    answers = {}
    for format_, artifact in artifacts_by_format.items():
        assert artifact.file is not None and artifact.status == "built"
        files = ArtifactFiles(artifact, bundle / artifact.file, max_positions=POSITIONS)
        opener = runtimes.runtime_of(artifact)
        conformance.check_refusals(opener, files, tmp_path)
        if cannot_run(artifact) is None:
            answers[format_] = conformance.check_session(opener.open(files, OpenOptions(threads=1)), inputs())
    assert {"onnx", "onnx-reference"} <= set(answers)
    for located in answers.values():
        np.testing.assert_allclose(located["logits"], answers["onnx"]["logits"], atol=1e-4)


def test_an_unknown_format_is_named_with_the_known_ones(bundle: Path) -> None:
    strange = graph_of(bundle).model_copy(update={"id": "alien-fp32", "format": "alien"})
    refusal = cannot_run(strange)
    assert refusal is not None
    for part in ("artifact 'alien-fp32'", "format 'alien'", "gguf, onnx, openvino, tensorrt-rtx, tensorrt"):
        assert part in refusal
    with pytest.raises(ArtifactError, match="opens the format 'alien'"):
        Bundle.open(bundle).session(strange)
    assert runtimes.provider_of(strange) == "alien"
    assert runtimes.never_runs(strange, load_profile("rtx4050")) is None


@pytest.mark.parametrize(
    ("module", "complaint"),
    [
        ("import nothing_of_that_name", "cannot be loaded: ModuleNotFoundError: .*nothing_of_that_name"),
        ("RUNTIME = 7", "is a int, not an edgeformer.runtimes.Runtime"),
        ("from edgeformer.runtimes.onnxruntime import RUNTIME", r"has the name 'onnxruntime' of 'onnxruntime'"),
    ],
)
def test_a_broken_package_is_named(module, complaint, tmp_path, monkeypatch):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n", encoding="utf-8")
    name = f"broken_{abs(hash(module))}"
    (info / "entry_points.txt").write_text(f"[edgeformer.runtimes]\nodd = {name}:RUNTIME\n", encoding="utf-8")
    (tmp_path / f"{name}.py").write_text(module, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._announced.cache_clear()
    try:
        with pytest.raises(EdgeformerError, match=f"entry point 'odd' .*{complaint}"):
            all_runtimes()
        assert runtimes.runtime_of("onnx").name == "onnxruntime"  # what needs none of it goes on
    finally:
        registry._announced.cache_clear()


def test_provider_helpers_ask_whoever_knows(reference: Runtime) -> None:
    assert runtimes.provider_facts("CPUExecutionProvider").label == "ONNX Runtime"
    assert [runtimes.provider_facts(name).label for name in ("onnx-reference", "torch-cpu", "else")] == [
        "reference", "torch-cpu", "else",
    ]  # fmt: skip
    on_cards = ("CUDAExecutionProvider", "NvTensorRTRTXExecutionProvider", "tensorrt-rtx", "torch-cuda")
    assert all(map(runtimes.on_gpu, on_cards))
    others = ("CPUExecutionProvider", "DmlExecutionProvider", "torch-cpu", "onnx-reference")
    assert not any(map(runtimes.on_gpu, others))
    names = ("CPUExecutionProvider", "torch-cpu", "tensorrt")
    assert [name for name in names if runtimes.provider_facts(name).counts_threads] == ["CPUExecutionProvider"]
    assert [*map(runtimes.default_provider, ("cpu", "cuda"))] == ["CPUExecutionProvider", "CUDAExecutionProvider"]
