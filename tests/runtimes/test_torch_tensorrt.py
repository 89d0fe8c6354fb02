"""torch-tensorrt writes engines, never pickled programs. It cannot be installed here; what it lacks is said."""

from __future__ import annotations

import io
import logging
import sys
import zipfile
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import ArtifactManifest
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


def crafted_program(path: Path, marker: Path) -> None:
    """An exported program as torch saves it, whose example inputs are the payload."""

    class Double(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x + x

    honest, payload = io.BytesIO(), io.BytesIO()
    torch.export.save(torch.export.export(Double(), (torch.ones(2),)), honest)
    torch.save(Payload(marker), payload)
    with zipfile.ZipFile(honest) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, payload.getvalue() if name.endswith("sample_inputs/model.pt") else source.read(name))


@pytest.fixture
def everything_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a laptop with torch-tensorrt and an RTX 4050, so that nothing but the file is a reason to refuse."""
    monkeypatch.setattr(
        tensorrt_state_module, "tensorrt_state", lambda name: TensorRTState(name, "10.15", gpus=(LAPTOP,))
    )
    monkeypatch.setitem(sys.modules, "torch_tensorrt", SimpleNamespace(__version__="2.13"))


@pytest.mark.filterwarnings("ignore")
def test_a_pickled_program_of_an_earlier_version_is_never_loaded(tmp_path: Path, everything_works: None) -> None:
    bundle, marker = write_bundle(tmp_path / "bundle"), tmp_path / "code of the file has run"
    (bundle / "engines").mkdir()
    program = bundle / "engines" / "model_fp16.rtx4050.ep"
    crafted_program(program, marker)
    built_for = {"compute_capability": "8.9", "torch-tensorrt": "10.15", "gpu": LAPTOP.name}
    about = {"id": "torch-tensorrt-fp16", "format": "torch-tensorrt", "precision": "fp16", "built_for": built_for}
    artifact = artifact_of(bundle, "engines/model_fp16.rtx4050.ep", **about)
    write_manifest(bundle, [artifact])
    with pytest.raises(ArtifactError, match=r"rtx4050\.ep: was written by an earlier version as a pickled program"):
        Bundle.open(bundle).session(artifact)
    assert "export again" in str(cannot_run(artifact))
    assert not marker.exists()
    # The file is a live one: torch's own reader runs its code.
    logging.disable(logging.CRITICAL)
    try:
        with pytest.raises(AssertionError, match="expected tuple or dict"):
            torch.export.load(program)
    finally:
        logging.disable(logging.NOTSET)
    assert marker.exists()


def test_its_engines_are_run_by_the_tensorrt_of_the_version_that_built_them(everything_works: None) -> None:
    built_for = {"compute_capability": "8.9", "torch-tensorrt": "2.13", "tensorrt": "10.15", "gpu": LAPTOP.name}
    artifact = ArtifactManifest(
        id="torch-tensorrt-fp16",
        file="engines/model_fp16.rtx4050.torch.engine",
        format="torch-tensorrt",
        precision="fp16",
        status="built",
        built_for=built_for,
    )
    assert cannot_run(artifact) is None
    other = artifact.model_copy(update={"built_for": {**built_for, "tensorrt": "10.9"}})
    assert "built by tensorrt 10.9, and tensorrt 10.15 is installed here" in str(cannot_run(other))


@pytest.mark.skipif(util.find_spec("torch_tensorrt") is not None, reason="torch-tensorrt is installed here")
def test_what_is_missing_to_compile_is_said() -> None:
    plan = TorchTensorRTBuilder().plan(load_profile("rtx4050"))
    reason = getattr(plan, "reason", "")
    assert "torch-tensorrt compiles on that very GPU, but here package: not installed" in reason


@pytest.mark.parametrize("version", ["2.11", "newer"])
def test_it_is_asked_for_strong_types_where_it_must_be(version: str) -> None:
    """Newer versions know nothing else, and take no such argument."""
    from edgeformer.runtimes.tensorrt.torch_tensorrt import convert

    arguments: dict[str, Any] = {}

    def of_2_11(program: object, *, arg_inputs: list[Any], disable_tf32: bool, use_explicit_typing: bool) -> bytes:
        arguments.update(tf32=not disable_tf32, typed=use_explicit_typing, inputs=arg_inputs)
        return b"engine"

    def newer(program: object, *, arg_inputs: list[Any], disable_tf32: bool) -> bytes:
        arguments.update(tf32=not disable_tf32, typed=True, inputs=arg_inputs)
        return b"engine"

    of_version = {"2.11": of_2_11, "newer": newer}[version]
    package = SimpleNamespace(dynamo=SimpleNamespace(convert_exported_program_to_serialized_trt_engine=of_version))
    assert convert(package, None, ("ids", "mask")) == b"engine"  # type: ignore[arg-type]
    assert arguments == {"tf32": False, "typed": True, "inputs": ["ids", "mask"]}
