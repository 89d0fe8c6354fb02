"""Core ML: models of any batch and length, whose weights are stored once, and what is said where none can run."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from edgeformer.artifacts.bundle_files import lacks_parity
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes import OpenOptions, cannot_run, requested_providers, runtime_of
from edgeformer.runtimes.coreml import session as runtime
from edgeformer.runtimes.coreml.builder import CoreMLBuilder
from edgeformer.runtimes.module_builder import MAX_BATCH
from edgeformer.runtimes.runtime import ArtifactFiles, Target
from tests.runtimes.looped_module import INPUTS, LENGTH, WIDTH, Looped, job_for

pytestmark = pytest.mark.skipif(
    runtime.COREMLTOOLS.missing() is not None, reason="the extra coreml is not installed, which converts to Core ML"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, ArtifactManifest]]:
    bundle = tmp_path_factory.mktemp("coreml")
    entries = CoreMLBuilder().build(Target("coreml", precision="fp16"), job_for(bundle, "fp32", "int8"))
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
    unique = Looped().count()
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
