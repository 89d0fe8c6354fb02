"""What the runtimes say to `doctor`, and which provider is chosen."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest

from edgeformer.backends import default_provider
from edgeformer.backends import torch as torch_backend
from edgeformer.backends.onnxruntime import providers
from edgeformer.backends.onnxruntime.providers import RtxPlugin, rtx_plugin
from edgeformer.backends.onnxruntime.session import OnnxSession
from edgeformer.backends.tensorrt.state import Package, describe, judge
from edgeformer.cli import doctor
from edgeformer.formats.errors import InputError, install_hint
from edgeformer.machine import capability, nvidia
from edgeformer.machine.capability import Answer, Capability, installed_version
from edgeformer.machine.cuda_driver import Device

WHEELS = ("onnxruntime", "onnxruntime-gpu")


@pytest.fixture(scope="module")
def capabilities() -> dict[str, Capability]:
    return {capability.name: capability for capability in doctor.capabilities()}


def test_tells_the_truth_about_this_machine(capabilities: dict[str, Capability]) -> None:
    import onnxruntime

    assert capabilities["onnxruntime"].version == onnxruntime.__version__
    assert capabilities["onnxruntime: CPUExecutionProvider"].status == "available"
    for name in ("tensorrt-rtx", "tensorrt", "torch-tensorrt", "flash-attn", "openvino"):
        installed = util.find_spec(name.replace("-", "_")) is not None
        assert installed or capabilities[name].status == "unavailable", name
        assert capabilities[name].status == "available" or capabilities[name].detail
    torch_here = util.find_spec("torch") is not None
    assert (capabilities["torch"].status == "available") == torch_here


def test_what_is_unavailable_says_why(capabilities: dict[str, Capability]) -> None:
    silent = [name for name, found in capabilities.items() if found.status == "unavailable" and not found.detail]
    assert silent == []


def test_tensorrt_tells_package_libraries_driver_and_device_apart() -> None:
    def tell(name: Package, answer: Answer | None, driver: str | None = "no driver", *gpus: Device) -> Capability:
        return describe(judge(name, answer, driver, gpus))

    absent = tell("tensorrt-rtx", None)
    assert (absent.status, absent.remedy) == ("unavailable", install_hint("rtx"))
    assert absent.detail == "package: not installed; driver: no driver; device: no NVIDIA GPU is present"
    stub = tell("tensorrt", Answer(error="ImportError: libnvonnxparser.so.10"))
    assert stub.status == "unavailable" and "libraries: do not load (ImportError: libnvonn" in stub.detail
    broken = tell("tensorrt-rtx", Answer({"version": "1.7"}, "TypeError: no builder"))
    assert broken.status == "unavailable"
    assert "driver: no driver" in broken.detail and "cannot be built here: does not start" in broken.detail
    alone = tell("tensorrt", Answer({"version": "10.15", "builder": True}))
    assert alone.status == "unavailable" and "only on the GPU that the engine is for" in alone.detail
    builds = tell("tensorrt-rtx", Answer({"version": "1.7", "builder": True, "capabilities": ["8.9"]}))
    assert (builds.status, builds.version) == ("available", "1.7")
    assert "can be built but not run here for compute capability 8.9" in builds.detail
    card = Device(0, "NVIDIA GeForce RTX 4050 Laptop GPU", "8.9")
    runs = tell("tensorrt", Answer({"version": "10.15", "builder": True}), None, card)
    assert (runs.status, runs.detail.endswith("builds and runs engines")) == ("available", True)


def test_every_provider_is_explained() -> None:
    def explain(
        built_in: list[str], plugin: Answer | None = None, driver: str | None = "no driver"
    ) -> dict[str, Capability]:
        lines = providers.describe(Answer({"providers": built_in}), driver, plugin)
        return {one.name.removeprefix("onnxruntime: "): one for one in lines[1:]}

    found = explain(["CPUExecutionProvider", "AzureExecutionProvider", "NewExecutionProvider"])
    assert {"CUDA", "Tensorrt", "NvTensorRTRTX", "Dml", "OpenVINO", "CoreML", "Xnnpack", "CPU", "Azure", "New"} == {
        name.removesuffix("ExecutionProvider") for name in found
    }
    assert all("used" in one.detail or "uses" in one.detail for one in found.values())
    assert [name for name, one in found.items() if one.status == "available"] == [
        "AzureExecutionProvider", "CPUExecutionProvider", "NewExecutionProvider",
    ]  # fmt: skip
    assert found["CUDAExecutionProvider"].remedy is None  # nothing to install helps without a driver
    assert "onnxruntime-gpu" in str(explain([], driver=None)["CUDAExecutionProvider"].remedy)
    rtx = "NvTensorRTRTXExecutionProvider"
    assert "pip install onnxruntime-ep-nv-tensorrt-rtx" in str(explain([], driver=None)[rtx].remedy)
    broken = explain([], Answer({"version": "0.5"}, "Fail: libcuda.so.1"), None)[rtx]
    assert (broken.status, broken.version) == ("unavailable", "0.5") and "Fail: libcuda.so.1" in broken.detail
    works = explain([], Answer({"version": "0.5", "devices": 1}), None)[rtx]
    assert works.status == "available" and "plugin works on 1 card" in works.detail


@pytest.mark.parametrize(
    ("card", "built_in", "plugin", "chosen"),
    [
        (None, ["CUDAExecutionProvider"], RtxPlugin(("device",)), "CPU"),
        (
            ("NVIDIA GeForce RTX 4050 Laptop GPU", "8.9"),
            ["CUDAExecutionProvider"],
            RtxPlugin(("device",)),
            "NvTensorRTRTX",
        ),
        (("NVIDIA GeForce RTX 4050 Laptop GPU", "8.9"), ["CUDAExecutionProvider"], RtxPlugin((), "no"), "CUDA"),
        (("NVIDIA GeForce RTX 4050 Laptop GPU", "8.9"), [], RtxPlugin((), "no"), "CPU"),
        (("NVIDIA GeForce RTX 2080", "7.5"), ["CUDAExecutionProvider"], RtxPlugin(("device",)), "CUDA"),
        (
            ("NVIDIA H200", "9.0"),
            ["CUDAExecutionProvider", "TensorrtExecutionProvider"],
            RtxPlugin(("device",)),
            "CUDA",
        ),
        (("NVIDIA H200", "9.0"), ["TensorrtExecutionProvider"], RtxPlugin(), "CPU"),
    ],
)
def test_the_default_provider(
    card: tuple[str, str] | None,
    built_in: list[str],
    plugin: RtxPlugin,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = [nvidia.Gpu(0, card[0], "GPU-1", 6 * 2**30, card[1])] if card else []
    monkeypatch.setattr(nvidia, "gpus", lambda: cards)
    monkeypatch.setattr(providers, "available_providers", lambda: [*built_in, "CPUExecutionProvider"])
    monkeypatch.setattr(providers, "rtx_plugin", lambda: plugin)
    assert default_provider() == f"{chosen}ExecutionProvider"


def test_the_rtx_provider_is_refused_with_its_reason(tmp_path: Path) -> None:
    if rtx_plugin().devices:
        pytest.skip("the RTX provider works here")
    with pytest.raises(InputError, match="'NvTensorRTRTXExecutionProvider' cannot be used here: "):
        OnnxSession(tmp_path / "model.onnx", "NvTensorRTRTXExecutionProvider")


def test_a_missing_package_of_the_train_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = installed_version
    monkeypatch.setattr(
        torch_backend, "installed_version", lambda name: None if name == "accelerate" else installed(name)
    )
    extra = torch_backend._extra("train")
    assert extra.status == "unavailable" and extra.remedy == install_hint("train")
    assert "accelerate" in extra.detail


def test_two_onnxruntime_wheels_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "installed_version", lambda name: "1" if name in WHEELS else None)
    names = ["CPUExecutionProvider", "CUDAExecutionProvider"]
    found = providers.describe(Answer({"version": "1.31", "providers": names}), "no driver")
    assert "onnxruntime and onnxruntime-gpu are both installed" in found[0].detail
    cuda = next(one for one in found if one.name == "onnxruntime: CUDAExecutionProvider")
    assert cuda.status == "unavailable" and cuda.detail.startswith("built in, but no driver; used by default")
