"""torch-tensorrt writes engines, never pickled programs. It cannot be installed here; a refusal names it."""

from __future__ import annotations

import io
import sys
import zipfile
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.bundle import Bundle
from edgeformer.runtimes import cannot_run
from edgeformer.runtimes.tensorrt import TorchTensorRTBuilder
from edgeformer.runtimes.tensorrt import state as tensorrt_state_module
from edgeformer.runtimes.tensorrt.state import TensorRTState
from edgeformer.system.cuda_driver import Device
from tests.runtimes.tiny_bundle import artifact_of, write_bundle, write_manifest

torch = pytest.importorskip("torch")

LAPTOP = Device(0, "NVIDIA GeForce RTX 4050 Laptop GPU", "8.9")


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def everything_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a laptop with torch-tensorrt and an RTX 4050, so that nothing but the file is a reason to refuse."""
    monkeypatch.setattr(
        tensorrt_state_module, "tensorrt_state", lambda name: TensorRTState(name, "10.15", gpus=(LAPTOP,))
    )
    monkeypatch.setitem(sys.modules, "torch_tensorrt", SimpleNamespace(__version__="2.13"))


def test_a_pickled_program_of_an_earlier_version_is_never_loaded(tmp_path: Path, everything_works: None) -> None:
    """An exported program as torch saves it, whose example inputs make a file when they are unpickled."""
    bundle, marker, payload = write_bundle(tmp_path / "bundle"), tmp_path / "code of the file has run", io.BytesIO()
    (bundle / "engines").mkdir()
    torch.save(Payload(marker), payload)
    with zipfile.ZipFile(bundle / "engines" / "model_fp16.rtx4050.ep", "w") as archive:
        archive.writestr("data/sample_inputs/model.pt", payload.getvalue())
    artifact = artifact_of(
        bundle,
        "engines/model_fp16.rtx4050.ep",
        id="torch-tensorrt-fp16",
        format="torch-tensorrt",
        precision="fp16",
        built_for={"compute_capability": "8.9", "torch-tensorrt": "10.15", "gpu": LAPTOP.name},
    )
    write_manifest(bundle, [artifact])
    with pytest.raises(ArtifactError, match=r"rtx4050\.ep: was written by an earlier version as a pickled program"):
        Bundle.open(bundle).session(artifact)
    assert "export again" in str(cannot_run(artifact))
    assert not marker.exists()
    # The payload is a live one: loading it runs its code.
    payload.seek(0)
    torch.load(payload, weights_only=False)
    assert marker.exists()


def test_its_engines_are_run_by_the_tensorrt_of_the_version_that_built_them(
    tmp_path: Path, everything_works: None
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    built_for = {"compute_capability": "8.9", "torch-tensorrt": "2.13", "tensorrt": "10.15", "gpu": LAPTOP.name}
    artifact = artifact_of(bundle, "onnx/model.onnx", format="torch-tensorrt", built_for=built_for)
    assert cannot_run(artifact) is None
    other = artifact.model_copy(update={"built_for": {**built_for, "tensorrt": "10.9"}})
    assert "built by tensorrt 10.9, and tensorrt 10.15 is installed here" in str(cannot_run(other))


@pytest.mark.skipif(util.find_spec("torch_tensorrt") is not None, reason="torch-tensorrt is installed here")
def test_a_missing_package_is_named() -> None:
    plan = TorchTensorRTBuilder().plan(load_profile("rtx4050"))
    reason = getattr(plan, "reason", "")
    assert "torch-tensorrt compiles on that very GPU, but here package: not installed" in reason


@pytest.mark.parametrize("is_optional", [True, False], ids=["2.11", "newer"])
def test_engines_are_strongly_typed(is_optional: bool) -> None:
    """Newer versions know nothing else, and take no such argument."""
    from edgeformer.runtimes.tensorrt.torch_tensorrt import convert

    arguments: dict[str, Any] = {}

    def of_2_11(program: object, *, arg_inputs: list[Any], disable_tf32: bool, use_explicit_typing: bool) -> bytes:
        arguments.update(tf32=not disable_tf32, typed=use_explicit_typing, inputs=arg_inputs)
        return b"engine"

    def newer(program: object, *, arg_inputs: list[Any], disable_tf32: bool) -> bytes:
        return of_2_11(program, arg_inputs=arg_inputs, disable_tf32=disable_tf32, use_explicit_typing=True)

    converter = of_2_11 if is_optional else newer
    package = SimpleNamespace(dynamo=SimpleNamespace(convert_exported_program_to_serialized_trt_engine=converter))
    assert convert(package, None, ("ids", "mask")) == b"engine"  # type: ignore[arg-type]
    assert arguments == {"tf32": False, "typed": True, "inputs": ["ids", "mask"]}
