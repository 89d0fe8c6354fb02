"""Core ML: models of any batch and length, whose weights are stored once, and what is said where none can run."""

from __future__ import annotations

import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgeformer.artifacts.bundle_files import lacks_parity
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import SILENT
from edgeformer.runtimes import OpenOptions, cannot_run, requested_providers, runtime_of
from edgeformer.runtimes.coreml import CoreMLBuilder
from edgeformer.runtimes.coreml import session as runtime
from edgeformer.runtimes.module_builder import MAX_BATCH
from edgeformer.runtimes.runtime import ArtifactFiles, BuildJob, Target, Unavailable

pytestmark = pytest.mark.skipif(
    runtime.COREMLTOOLS.missing() is not None, reason="the extra coreml is not installed, which converts to Core ML"
)

INPUTS, LENGTH, VOCABULARY, WIDTH = ("input_ids", "attention_mask"), 12, 50, 64


class Looped(torch.nn.Module):
    """A classifier whose only layer runs three times, with a table of constants."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 3)
        self.register_buffer("angles", torch.rand(LENGTH, WIDTH), persistent=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        angles: Any = self.angles
        state = self.table(input_ids) * attention_mask[..., None].float() + angles[: input_ids.shape[1]]
        for _ in range(3):
            state = state + torch.sigmoid(self.layer(state))
        return self.head(state[:, 0]).float()


def job_for(bundle: Path, *precisions: Any, **changes: Any) -> BuildJob:
    (bundle / "engines").mkdir()
    (bundle / "model.onnx").write_bytes(b"graph")
    graphs = tuple(
        ArtifactManifest(
            id=f"onnx-{precision}", file="model.onnx", format="onnx", precision=precision, status="built",
            inputs=dict.fromkeys(INPUTS, "int64[batch, sequence]"), outputs={"scores": "float32[batch, 3]"},
        )
        for precision in precisions
    )  # fmt: skip
    job = BuildJob(
        bundle=bundle, graphs=graphs, precision="fp32", max_length=LENGTH, max_positions=2 * LENGTH,
        progress=SILENT, note=print, module=lambda graph: Looped().eval(),
    )  # fmt: skip
    return replace(job, **changes)


TARGET = Target("coreml", precision="fp16")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, ArtifactManifest]]:
    bundle = tmp_path_factory.mktemp("coreml")
    entries = CoreMLBuilder().build(TARGET, job_for(bundle, "fp32", "int8"))
    return bundle, {entry.id: entry for entry in entries}


def test_a_model_takes_any_batch_and_length_up_to_the_largest(
    built: tuple[Path, dict[str, ArtifactManifest]], tmp_path: Path
) -> None:
    bundle, entries = built
    assert [(entry.id, entry.status, entry.reason) for entry in entries.values()] == [
        ("coreml-fp16", "built", None), ("coreml-int8", "built", None),
    ]  # fmt: skip
    coremltools = pytest.importorskip("coremltools")
    for entry in entries.values():
        assert entry.engine is not None and entry.engine.shapes["input_ids"][-1] == (MAX_BATCH, LENGTH)
        with zipfile.ZipFile(bundle / str(entry.file)) as archive:
            archive.extractall(tmp_path / entry.id)
        spec = coremltools.utils.load_spec(str(tmp_path / entry.id / runtime.PACKAGE))
        assert [value.name for value in spec.description.output] == ["scores"]
        for value in spec.description.input:
            ranges = value.type.multiArrayType.shapeRange.sizeRanges
            bounds = [(size.lowerBound, size.upperBound) for size in ranges]
            assert value.name in INPUTS and bounds == [(1, MAX_BATCH), (1, LENGTH)]


def test_weights_are_stored_once(built: tuple[Path, dict[str, ArtifactManifest]]) -> None:
    unique = sum(parameter.numel() for parameter in Looped().parameters())
    sizes = {}
    for name, entry in built[1].items():
        assert entry.sharing is not None
        assert entry.sharing.stored_parameters == entry.sharing.unique_parameters == unique
        assert entry.sharing.constant_elements >= LENGTH * WIDTH
        sizes[name] = entry.sharing.weight_bytes
    assert 2 * unique <= sizes["coreml-fp16"] < 2.5 * unique and sizes["coreml-int8"] < 0.8 * sizes["coreml-fp16"]
    assert built[1]["coreml-int8"].quantized == {"weights": 2}  # of more than 2,048 numbers: table and layer


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML runs here")
def test_it_runs_on_apple_devices_only(built: tuple[Path, dict[str, ArtifactManifest]]) -> None:
    bundle, entries = built
    entry = entries["coreml-fp16"]
    assert lacks_parity(entry) and entry.parity is not None and entry.parity.tolerance is not None
    assert entry.parity.reason == "Core ML runs on Apple devices only; run there: edgeformer verify --write"
    assert cannot_run(entry) == runtime.NOT_APPLE and requested_providers(entry, "coreml") == ("coreml",)
    files = ArtifactFiles(entry, bundle / str(entry.file))
    with pytest.raises(ArtifactError, match="Core ML runs on Apple devices only"):
        runtime_of(entry).open(files, OpenOptions())


def test_what_cannot_be_built_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_module(graph: ArtifactManifest) -> Any:
        raise EdgeformerError("an imported graph has no torch module")

    class Branching(Looped):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids, attention_mask if attention_mask.sum() > 3 else input_ids)

    job = job_for(tmp_path, "fp32", module=no_module)
    (imported,) = CoreMLBuilder().build(TARGET, job)
    assert (imported.status, imported.reason) == ("unavailable", "an imported graph has no torch module")
    (branching,) = CoreMLBuilder().build(TARGET, replace(job, module=lambda graph: Branching().eval()))
    assert branching.status == "rejected" and "coremltools cannot convert this model" in str(branching.reason)
    decode = job.graphs[0].model_copy(update={"id": "onnx-fp32-decode", "role": "decode"})
    (refused,) = CoreMLBuilder().build(TARGET, replace(job, graphs=(decode,)))
    assert refused.status == "rejected" and "caches of earlier tokens are not supported" in str(refused.reason)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plan = CoreMLBuilder().plan(None)
    assert isinstance(plan, Unavailable) and "[coreml]" in plan.reason
