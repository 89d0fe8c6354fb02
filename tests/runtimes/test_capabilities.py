"""What the runtimes say to `doctor`, and which provider is chosen."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest

from edgeformer.artifacts.errors import InputError, install_hint
from edgeformer.cli import doctor
from edgeformer.runtimes import default_provider
from edgeformer.runtimes import torch as torch_runtime
from edgeformer.runtimes.onnxruntime import providers
from edgeformer.runtimes.onnxruntime.providers import RtxPlugin, rtx_plugin
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.tensorrt.state import Package, describe, judge
from edgeformer.system import capability, cuda_driver, nvidia
from edgeformer.system.capability import Answer, Capability, installed_version
from edgeformer.system.cuda_driver import Device

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
    has_torch = util.find_spec("torch") is not None
    assert (capabilities["torch"].status == "available") == has_torch


def test_what_is_unavailable_says_why(capabilities: dict[str, Capability]) -> None:
    silent = [
        name for name, described in capabilities.items() if described.status == "unavailable" and not described.detail
    ]
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
        return {entry.name.removeprefix("onnxruntime: "): entry for entry in lines[1:]}

    described = explain(["CPUExecutionProvider", "AzureExecutionProvider", "NewExecutionProvider"])
    assert {"CUDA", "Tensorrt", "NvTensorRTRTX", "CPU", "Azure", "New"} == {
        name.removesuffix("ExecutionProvider") for name in described
    }
    assert all("used" in entry.detail or "uses" in entry.detail for entry in described.values())
    assert [name for name, entry in described.items() if entry.status == "available"] == [
        "AzureExecutionProvider", "CPUExecutionProvider", "NewExecutionProvider",
    ]  # fmt: skip
    assert described["CUDAExecutionProvider"].remedy is None  # nothing to install helps without a driver
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
        (("NVIDIA RTX4050 laptop", "8.9"), ["CUDAExecutionProvider"], RtxPlugin(("device",)), "NvTensorRTRTX"),
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


@pytest.mark.parametrize(
    ("extra", "package"),
    [("train", "accelerate"), ("hf", "transformers"), ("serve", "uvicorn"), ("openvino", "nncf")],
)
def test_a_missing_package_of_an_extra_is_named(extra: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = installed_version
    monkeypatch.setattr(capability, "installed_version", lambda name: None if name == package else installed(name))
    described = capability.describe_extra(extra)
    assert (described.name, described.status, described.remedy) == (
        f"extra [{extra}]",
        "unavailable",
        install_hint(extra),
    )
    assert package in described.detail


def test_doctor_lists_every_extra(capabilities: dict[str, Capability]) -> None:
    assert {"extra [train]", "extra [hf]", "extra [serve]", "extra [openvino]"} <= capabilities.keys()


def test_a_cpu_only_torch_is_explained_where_it_helps() -> None:
    selector = "pytorch.org's selector gives for CPU"
    assert selector in str(torch_runtime.describe_torch(None, "no driver").remedy)
    cuda_build = Answer({"version": "2.13.0", "built_for": "13.0", "cuda": False})
    assert selector in str(torch_runtime.describe_torch(cuda_build, "the driver library is not installed").remedy)
    assert torch_runtime.describe_torch(cuda_build, None).remedy is None, "a card is here: a CPU build is no remedy"


@pytest.mark.parametrize(
    ("cuda", "driver", "too_old"),
    [
        ("13.0", "550.54.14", True), ("13.1", "579.99", True), ("13", "580.65.06", False), ("13.0", "610.10", False),
        ("12.8", "550.54.14", False), (None, "550.54", False), ("13.0", None, False), ("", "550.54", False),
    ],
)  # fmt: skip
def test_cuda_13_needs_driver_580(cuda: str | None, driver: str | None, too_old: bool) -> None:
    reason = capability.driver_too_old(cuda, driver)
    assert (reason is not None) == too_old
    assert reason is None or reason == f"CUDA 13 needs NVIDIA driver R580 or newer, and {driver} is installed"


def test_doctor_compares_the_driver_with_what_packages_were_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "problem", lambda: None)
    monkeypatch.setattr(cuda_driver, "version", lambda: "12.4")
    monkeypatch.setattr(nvidia, "driver_version", lambda: "550.54.14")
    monkeypatch.setattr(capability, "_cuda_13_packages", lambda: ["tensorrt-rtx-cu13"])
    line = next(entry for entry in capability.machine_capabilities() if entry.name == "cuda driver")
    reason = "CUDA 13 needs NVIDIA driver R580 or newer, and 550.54.14 is installed"
    assert line.detail == f"runs CUDA up to 12.4; {reason} (installed for it: tensorrt-rtx-cu13)"
    assert "update the driver to R580 or newer" in str(line.remedy)
    cuda_build = Answer({"version": "2.13.0", "built_for": "13.0", "cuda": False})
    assert reason in torch_runtime.describe_torch(cuda_build, None).detail
    answer = Answer({"version": "1.31", "providers": ["CUDAExecutionProvider"], "cuda": "13.0", "preload": ""})
    described = {entry.name: entry for entry in providers.describe(answer, None)}["onnxruntime: CUDAExecutionProvider"]
    assert described.status == "unavailable" and reason in described.detail
    monkeypatch.setattr(nvidia, "driver_version", lambda: "580.65.06")
    line = next(entry for entry in capability.machine_capabilities() if entry.name == "cuda driver")
    assert (line.detail, line.remedy) == ("runs CUDA up to 12.4", None)


def test_packages_for_cuda_13_are_recognised_by_name() -> None:
    if installed_version("tensorrt-rtx-cu13") is None:
        pytest.skip("tensorrt-rtx-cu13 is not installed")
    assert "tensorrt-rtx-cu13" in capability._cuda_13_packages()


def test_two_onnxruntime_wheels_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "installed_version", lambda name: "1" if name in WHEELS else None)
    names = ["CPUExecutionProvider", "CUDAExecutionProvider"]
    described = providers.describe(Answer({"version": "1.31", "providers": names}), "no driver")
    assert "onnxruntime and onnxruntime-gpu are both installed" in described[0].detail
    cuda = next(entry for entry in described if entry.name == "onnxruntime: CUDAExecutionProvider")
    assert cuda.status == "unavailable" and cuda.detail.startswith("built in, but no driver; used by default")
