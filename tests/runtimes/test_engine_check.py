"""Engines are refused by their manifest, naming both sides, before anything touches the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeformer.artifacts.errors import ArtifactError, MissingDependencyError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes import ArtifactFiles, OpenOptions, runtime_of
from edgeformer.runtimes.tensorrt import RUNTIME
from edgeformer.runtimes.tensorrt import state as tensorrt_state_module
from edgeformer.runtimes.tensorrt.state import TensorRTState, judge, why_engine_cannot_run
from edgeformer.system.capability import Answer
from edgeformer.system.cuda_driver import Device

LAPTOP = Device(0, "NVIDIA GeForce RTX 4050 Laptop GPU", "8.9")
OTHER = Device(0, "NVIDIA GeForce RTX 3050", "8.6")
WORKS = Answer({"version": "1.7.1.116", "builder": True, "capabilities": ["8.6", "8.9"]})
BUILT_FOR = {"compute_capability": "8.9", "tensorrt-rtx": "1.7.1.116"}


def engine(**changes: object) -> ArtifactManifest:
    entry = ArtifactManifest(
        id="tensorrt-rtx-fp16",
        file="engines/model_fp16.rtx4050.engine",
        format="tensorrt-rtx",
        precision="fp16",
        status="built",
        built_for=BUILT_FOR,
    )
    return entry.model_copy(update=changes)


def state_on(
    answer: Answer | None = WORKS, driver: str | None = None, gpus: tuple[Device, ...] = (LAPTOP,)
) -> TensorRTState:
    return judge("tensorrt-rtx", answer, driver, gpus)


def test_the_right_machine_may_open_it() -> None:
    assert why_engine_cannot_run(engine(), state_on()) is None
    graph = engine(format="onnx", built_for=None)
    assert runtime_of(graph).cannot_run(graph) is None


def test_the_wrong_gpu_is_named_and_so_is_the_right_one() -> None:
    refusal = why_engine_cannot_run(engine(), state_on(gpus=(OTHER,)))
    assert refusal is not None
    assert "built for compute capability 8.9, but this GPU is NVIDIA GeForce RTX 3050 with 8.6" in refusal
    assert "export the run again for this device" in refusal


def test_the_first_gpu_counts() -> None:
    assert why_engine_cannot_run(engine(), state_on(gpus=(LAPTOP, OTHER))) is None
    assert why_engine_cannot_run(engine(), state_on(gpus=(OTHER, LAPTOP))) is not None


def test_another_version_is_named_and_so_is_the_builders() -> None:
    refusal = why_engine_cannot_run(engine(), state_on(Answer({"version": "1.6.0.2", "builder": True})))
    assert refusal is not None
    assert "built by tensorrt-rtx 1.7.1.116, and tensorrt-rtx 1.6.0.2 is installed here" in refusal
    assert "install tensorrt-rtx==1.7.1.116" in refusal


@pytest.mark.parametrize(
    ("state", "problem_text"),
    [
        (state_on(None), 'package: not installed (python -m pip install ".[rtx]" in the clone'),
        (state_on(Answer(error="OSError: libcudart.so")), "libraries: do not load (OSError: libcudart.so)"),
        (
            state_on(driver="libcuda.so.1 is not installed", gpus=()),
            "driver: libcuda.so.1 is not installed; device: no NVIDIA",
        ),
        (state_on(gpus=()), "device: no NVIDIA GPU is present"),
        (
            state_on(None, "no driver", ()),
            "package: not installed; driver: no driver; device: no NVIDIA GPU is present",
        ),
    ],
)
def test_what_is_missing_is_named_part_by_part(state: TensorRTState, problem_text: str) -> None:
    refusal = why_engine_cannot_run(engine(), state)
    assert refusal is not None and problem_text in refusal
    assert "built for compute capability 8.9, tensorrt-rtx 1.7.1.116" in refusal


def test_tensorrts_engines_are_for_one_gpu_model() -> None:
    built_for = {"compute_capability": "9.0", "tensorrt": "11.0", "gpu": "NVIDIA H200", "driver": "580.1"}
    artifact = engine(format="tensorrt", built_for=built_for)

    def on(name: str) -> str | None:
        gpus = [Device(0, name, "9.0")]
        return why_engine_cannot_run(
            artifact, judge("tensorrt", Answer({"version": "11.0", "builder": True}), None, gpus)
        )

    assert on("NVIDIA H200") is None
    refusal = on("NVIDIA H100 80GB HBM3")
    assert refusal is not None and "for the GPU NVIDIA H200, but this one is NVIDIA H100 80GB HBM3" in refusal


@pytest.mark.parametrize(
    ("state", "error"), [(state_on(gpus=(OTHER,)), ArtifactError), (state_on(None), MissingDependencyError)]
)
def test_a_refused_engine_is_never_read(
    state: TensorRTState, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_state_module, "tensorrt_state", lambda name: state)
    with pytest.raises(error, match=r"nowhere\.engine: this"):
        RUNTIME.open(ArtifactFiles(engine(), Path("nowhere.engine")), OpenOptions())


def test_this_very_machine_refuses_an_engine_for_a_card_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    path.write_bytes(b"not an engine")
    artifact = engine(built_for={"compute_capability": "99.0", "tensorrt-rtx": "0.0"})
    with pytest.raises((ArtifactError, MissingDependencyError), match=r"model\.engine: this .*engine was built"):
        runtime_of(artifact).open(ArtifactFiles(artifact, path), OpenOptions())
