"""Builders that convert torch modules say why they cannot; Core ML models of any batch and length."""

from __future__ import annotations

import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.bundle_files import lacks_parity
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes import OpenOptions, cannot_run, requested_providers, runtime_of
from edgeformer.runtimes.coreml import session as runtime
from edgeformer.runtimes.coreml.builder import CoreMLBuilder
from edgeformer.runtimes.executorch.builder import ExecuTorchBuilder
from edgeformer.runtimes.module_builder import MAX_BATCH, ModuleBuilder
from edgeformer.runtimes.runtime import ArtifactFiles, Target, Unavailable
from tests.runtimes.looped_module import INPUTS, LENGTH, WIDTH, Branching, Looped, graph, job_for


@pytest.mark.parametrize(
    ("builder", "problem"),
    [
        (CoreMLBuilder(), "coremltools cannot convert this model"),
        (ExecuTorchBuilder(), "ExecuTorch cannot lower this model"),
    ],
    ids=["coreml", "executorch"],
)
def test_what_cannot_be_built_says_why(
    builder: ModuleBuilder, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_module(graph: ArtifactManifest) -> Any:
        raise EdgeformerError("an imported graph has no torch module")

    if (missing := builder.package.missing()) is not None:
        pytest.skip(missing)
    target = Target(builder.name, precision=next(iter(builder.endings)))
    job = job_for(tmp_path, "fp32", module=no_module)
    (imported,) = builder.build(target, job)
    assert (imported.status, imported.reason) == ("unavailable", "an imported graph has no torch module")
    (branching,) = builder.build(target, replace(job, module=lambda graph: Branching().eval()))
    assert branching.status == "rejected" and problem in str(branching.reason)
    (refused,) = builder.build(target, replace(job, graphs=(graph(id="onnx-fp32-decode", role="decode"),)))
    assert refused.status == "rejected" and "caches of earlier tokens are not supported" in str(refused.reason)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plan = builder.plan(None)
    assert isinstance(plan, Unavailable) and f"[{builder.name}]" in plan.reason


Built = tuple[Path, dict[str, ArtifactManifest]]
"""A bundle and the entries of its models."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    if (missing := runtime.COREMLTOOLS.missing()) is not None:
        pytest.skip(missing)
    bundle = tmp_path_factory.mktemp("coreml")
    entries = CoreMLBuilder().build(Target("coreml", precision="fp16"), job_for(bundle, "fp32", "int8"))
    return bundle, {entry.id: entry for entry in entries}


def test_models_take_any_batch_and_length_and_store_weights_once(built: Built, tmp_path: Path) -> None:
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
    unique = Looped().count()
    sizes = {}
    for name, entry in entries.items():
        assert entry.sharing is not None
        assert entry.sharing.stored_parameters == entry.sharing.unique_parameters == unique
        assert entry.sharing.constant_elements >= LENGTH * WIDTH
        sizes[name] = entry.sharing.weight_bytes
    assert 2 * unique <= sizes["coreml-fp16"] < 2.5 * unique and sizes["coreml-int8"] < 0.8 * sizes["coreml-fp16"]
    assert entries["coreml-int8"].quantized == {"weights": 2}  # of more than 2,048 numbers: table and layer


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML runs here")
def test_it_runs_on_apple_devices_only(built: Built) -> None:
    bundle, entries = built
    entry = entries["coreml-fp16"]
    assert lacks_parity(entry) and entry.parity is not None and entry.parity.tolerance is not None
    assert entry.parity.reason == "Core ML runs on Apple devices only; run there: edgeformer verify --write"
    assert cannot_run(entry) == runtime.NOT_APPLE and requested_providers(entry, "coreml") == ("coreml",)
    files = ArtifactFiles(entry, bundle / str(entry.file))
    with pytest.raises(ArtifactError, match="Core ML runs on Apple devices only"):
        runtime_of(entry).open(files, OpenOptions())
