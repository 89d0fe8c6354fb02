"""torch-tensorrt: which TensorRT runs its engines, and why they cannot be built here."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.runtimes import cannot_run
from edgeformer.runtimes.tensorrt import TorchTensorRTBuilder
from edgeformer.runtimes.tensorrt import state as tensorrt_state_module
from edgeformer.runtimes.tensorrt.state import TensorRTState
from edgeformer.system.cuda_driver import Device
from tests.runtimes.tiny_bundle import artifact_of, write_bundle

LAPTOP = Device(0, "NVIDIA GeForce RTX 4050 Laptop GPU", "8.9")


@pytest.fixture
def everything_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a laptop with torch-tensorrt and an RTX 4050, so that nothing but the file is a reason to refuse."""
    monkeypatch.setattr(
        tensorrt_state_module, "tensorrt_state", lambda name: TensorRTState(name, "10.15", gpus=(LAPTOP,))
    )
    monkeypatch.setitem(sys.modules, "torch_tensorrt", SimpleNamespace(__version__="2.13"))


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
