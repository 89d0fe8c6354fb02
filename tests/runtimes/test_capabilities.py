"""The runtimes' lines of `doctor`, and which provider is the default."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from edgeformer.artifacts.errors import InputError, install_hint
from edgeformer.report.listing import runtime_records
from edgeformer.runtimes import default_provider
from edgeformer.runtimes import torch as torch_runtime
from edgeformer.runtimes.onnxruntime import providers
from edgeformer.runtimes.onnxruntime.providers import CUDA, RTX, TENSORRT, RtxPlugin, rtx_plugin
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.tensorrt.state import Package, describe, judge
from edgeformer.system import capability, cuda_driver, nvidia
from edgeformer.system.capability import Answer, Capability
from edgeformer.system.cuda_driver import Device

WHEELS = ("onnxruntime", "onnxruntime-gpu")
RTX_4050 = ("NVIDIA GeForce RTX 4050 Laptop GPU", "8.9")
CUDA_13 = Answer({"version": "2.13.0", "built_for": "13.0", "cuda": False})
WORKING = RtxPlugin(("device",))


@pytest.mark.parametrize(
    ("name", "answer", "is_available", "detail"),
    [
        ("tensorrt-rtx", None, False, "package: not installed; driver: no driver; device: no NVIDIA GPU is present"),
        ("tensorrt", Answer(error="ImportError: libnv"), False, "libraries: do not load (ImportError: libnv)"),
        ("tensorrt-rtx", Answer({"version": "1.7"}, "E: x"), False, "cannot be built here: does not start"),
        ("tensorrt", Answer({"version": "10", "builder": True}), False, "only on the GPU that the engine is for"),
        (
            "tensorrt-rtx",
            Answer({"version": "1.7", "builder": True, "capabilities": ["8.9"]}),
            True,
            "can be built but not run here for compute capability 8.9",
        ),
    ],
)
def test_tensorrt_separates_package_libraries_driver_and_device(
    name: Package, answer: Answer | None, is_available: bool, detail: str
) -> None:
    line = describe(judge(name, answer, "no driver", ()))
    assert (line.status == "available") == is_available and detail in line.detail
    assert answer is not None or line.remedy == install_hint("rtx")
    card = describe(judge("tensorrt", Answer({"version": "10.15", "builder": True}), None, [Device(0, *RTX_4050)]))
    assert card.status == "available" and card.detail.endswith("builds and runs engines")


def explain(built_in: list[str], plugin: Answer | None = None, driver: str | None = None) -> dict[str, Capability]:
    lines = providers.describe(Answer({"providers": built_in}), driver, plugin)
    return {line.name.removeprefix("onnxruntime: "): line for line in lines[1:]}


def test_every_provider_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    described = explain(["CPUExecutionProvider", "AzureExecutionProvider", "NewExecutionProvider"], None, "no driver")
    assert {"CUDA", "Tensorrt", "NvTensorRTRTX", "CPU", "Azure", "New"} == {
        name.removesuffix("ExecutionProvider") for name in described
    }
    assert all("used" in line.detail or "uses" in line.detail for line in described.values())
    assert [name for name, line in described.items() if line.status == "available"] == [
        "AzureExecutionProvider", "CPUExecutionProvider", "NewExecutionProvider",
    ]  # fmt: skip
    assert described[CUDA].remedy is None  # nothing to install helps without a driver
    assert "onnxruntime-gpu" in str(explain([])[CUDA].remedy)
    assert "pip install onnxruntime-ep-nv-tensorrt-rtx" in str(explain([])[RTX].remedy)
    broken = explain([], Answer({"version": "0.5"}, "Fail: libcuda.so.1"))[RTX]
    assert (broken.status, broken.version) == ("unavailable", "0.5") and "Fail: libcuda.so.1" in broken.detail
    works = explain([], Answer({"version": "0.5", "devices": 1}))[RTX]
    assert works.status == "available" and "plugin works on 1 card" in works.detail
    monkeypatch.setattr(capability, "installed_version", lambda name: "1" if name in WHEELS else None)
    package, *_ = providers.describe(Answer({"version": "1.31", "providers": [CUDA]}), "no driver")
    assert "onnxruntime and onnxruntime-gpu are both installed" in package.detail


@pytest.mark.parametrize(
    ("card", "built_in", "plugin", "provider"),
    [
        (None, [CUDA], WORKING, "CPU"),
        (RTX_4050, [CUDA], WORKING, "NvTensorRTRTX"),
        (RTX_4050, [CUDA], RtxPlugin((), "no"), "CUDA"),
        (RTX_4050, [], RtxPlugin((), "no"), "CPU"),
        (("NVIDIA RTX4050 laptop", "8.9"), [CUDA], WORKING, "NvTensorRTRTX"),
        (("NVIDIA GeForce RTX 2080", "7.5"), [CUDA], WORKING, "CUDA"),
        (("NVIDIA H200", "9.0"), [CUDA, TENSORRT], WORKING, "CUDA"),
        (("NVIDIA H200", "9.0"), [TENSORRT], RtxPlugin(), "CPU"),
    ],
)
def test_the_default_provider(
    card: tuple[str, str] | None, built_in: list[str], plugin: RtxPlugin, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [nvidia.Gpu(0, card[0], "GPU-1", 6 * 2**30, card[1])] if card else []
    monkeypatch.setattr(nvidia, "gpus", lambda: cards)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [*built_in, "CPUExecutionProvider"])
    monkeypatch.setattr(providers, "rtx_plugin", lambda: plugin)
    assert default_provider() == f"{provider}ExecutionProvider"


def test_the_rtx_provider_is_refused_with_its_reason(tmp_path: Path) -> None:
    if rtx_plugin().devices:
        pytest.skip("the RTX provider works here")
    with pytest.raises(InputError, match="'NvTensorRTRTXExecutionProvider' cannot be used here: "):
        OnnxSession(tmp_path / "model.onnx", RTX)


def test_a_missing_package_of_an_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "installed_version", lambda name: None)
    for extra, package in (("train", "accelerate"), ("hf", "transformers"), ("serve", "uvicorn"), ("openvino", "nncf")):
        line = capability.describe_extra(extra)
        assert (line.name, line.status, line.remedy) == (f"extra [{extra}]", "unavailable", install_hint(extra))
        assert package in line.detail


def test_a_cpu_only_torch_is_explained_where_it_helps() -> None:
    selector = "pytorch.org's selector gives for CPU"
    assert selector in str(torch_runtime.describe_torch(None, "no driver").remedy)
    assert selector in str(torch_runtime.describe_torch(CUDA_13, "the driver library is not installed").remedy)
    assert torch_runtime.describe_torch(CUDA_13, None).remedy is None, "a card is here: a CPU build is no remedy"


def test_flash_attention_has_a_line() -> None:
    absent = "flash-attn 2 cannot be imported (No module named 'flash_attn')"
    for facts, status, detail in (
        ({}, "unavailable", "torch finds no CUDA card"),
        ({"cuda": False, "flash": {"varlen_attn": None}}, "unavailable", "torch finds no CUDA card"),
        ({"cuda": True, "flash": {"flash-attn": absent, "varlen_attn": None}}, "available", "varlen_attn"),
        ({"cuda": True, "flash": {"flash-attn": absent, "varlen_attn": "built without"}}, "unavailable", absent),
    ):
        line = torch_runtime.describe_flash(facts)
        assert (line.name, line.status) == ("flash attention", status) and line.detail.startswith(detail)


def test_cuda_13_needs_driver_580() -> None:
    reason = "CUDA 13 needs NVIDIA driver R580 or newer, and {} is installed"
    for cuda, driver in (("13.0", "550.54.14"), ("13.1", "579.99")):
        assert capability.driver_too_old(cuda, driver) == reason.format(driver)
    fitting = [("13", "580.65.06"), ("13.0", "610.10"), ("12.8", "550.54.14"), (None, "550.54"), ("13.0", None)]
    assert not any(capability.driver_too_old(*versions) for versions in [*fitting, ("", "550.54")])


def test_doctor_compares_the_driver_with_the_cuda_version_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "problem", lambda: None)
    monkeypatch.setattr(cuda_driver, "version", lambda: "12.4")
    monkeypatch.setattr(nvidia, "driver_version", lambda: "550.54.14")
    package = SimpleNamespace(metadata={"Name": "tensorrt_rtx_cu13"})
    monkeypatch.setattr(capability.metadata, "distributions", lambda: [package])

    def driver_line() -> Capability:
        return next(line for line in capability.machine_capabilities() if line.name == "cuda driver")

    reason = "CUDA 13 needs NVIDIA driver R580 or newer, and 550.54.14 is installed"
    assert driver_line().detail == f"supports CUDA up to 12.4; {reason} (installed for it: tensorrt-rtx-cu13)"
    assert "update the driver to R580 or newer" in str(driver_line().remedy)
    assert reason in torch_runtime.describe_torch(CUDA_13, None).detail
    answer = Answer({"version": "1.31", "providers": [CUDA], "cuda": "13.0", "preload": ""})
    line = next(line for line in providers.describe(answer, None) if line.name.endswith(CUDA))
    assert line.status == "unavailable" and reason in line.detail
    monkeypatch.setattr(nvidia, "driver_version", lambda: "580.65.06")
    assert (driver_line().detail, driver_line().remedy) == ("supports CUDA up to 12.4", None)


def test_list_runtimes_marks_the_experimental_ones() -> None:
    records = runtime_records()
    assert [row["name"] for row in records if row["status"] == "experimental"] == ["coreml", "executorch"]
    assert {"name": "litert", "formats": ["litert"], "export": ["--litert"]}.items() <= records[2].items()
