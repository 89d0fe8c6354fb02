"""Providers: their lines of `doctor`, which one is the default, and what is said of those that do not start."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest

from edgeformer.artifacts.errors import ArtifactError, InputError, install_hint
from edgeformer.report.listing import runtime_records
from edgeformer.runtimes import default_provider
from edgeformer.runtimes import torch as torch_runtime
from edgeformer.runtimes.onnxruntime import providers
from edgeformer.runtimes.onnxruntime.providers import CPU, CUDA, RTX, TENSORRT, RtxPlugin, load_cuda_libraries
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.tensorrt.state import describe, judge
from edgeformer.system import capability, cuda_driver, nvidia
from edgeformer.system.capability import Answer, Capability
from edgeformer.system.cuda_driver import Device
from tests.conftest import OLD_FORMAT
from tests.runtimes.tiny_bundle import classifier_graph, parsed

WHEELS = ("onnxruntime", "onnxruntime-gpu")
RTX_4050 = ("NVIDIA GeForce RTX 4050 Laptop GPU", "8.9")
CUDA_13 = Answer({"version": "2.13.0", "built_for": "13.0", "cuda": False})
BUILDS = Answer({"version": "1.7", "builder": True, "capabilities": ["8.9"]})
WORKING = RtxPlugin(("device",))
NOT_LOADED = "Failed to load libcublas.so.13: libcublas.so.13: cannot open shared object file: No such file\n"
COPY = "/venv/site-packages/nvidia/cu13/lib/libcublas.so.13"
OF_COPY = f"Failed to load {COPY}: {COPY}: file too short\n"


@pytest.mark.parametrize(
    ("name", "answer", "is_available", "detail"),
    [
        ("tensorrt-rtx", None, False, "package: not installed; driver: no driver; device: no NVIDIA GPU is present"),
        ("tensorrt", Answer(error="ImportError: libnv"), False, "libraries: do not load (ImportError: libnv)"),
        ("tensorrt-rtx", Answer({"version": "1.7"}, "E: x"), False, "cannot be built here: does not start"),
        ("tensorrt", Answer({"version": "10", "builder": True}), False, "only on the GPU that the engine is for"),
        ("tensorrt-rtx", BUILDS, True, "can be built but not run here for compute capability 8.9"),
    ],
)
def test_tensorrt_separates_package_libraries_driver_and_device(name, answer, is_available, detail):
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
        (None, [CUDA], WORKING, "CPU"), (RTX_4050, [CUDA], WORKING, "NvTensorRTRTX"),
        (RTX_4050, [CUDA], RtxPlugin((), "no"), "CUDA"), (RTX_4050, [], RtxPlugin((), "no"), "CPU"),
        (("NVIDIA RTX4050 laptop", "8.9"), [CUDA], WORKING, "NvTensorRTRTX"),
        (("NVIDIA GeForce RTX 2080", "7.5"), [CUDA], WORKING, "CUDA"),
        (("NVIDIA H200", "9.0"), [CUDA, TENSORRT], WORKING, "CUDA"),
        (("NVIDIA H200", "9.0"), [TENSORRT], RtxPlugin(), "CPU"),
    ],
)  # fmt: skip
def test_the_default_provider(card, built_in, plugin, provider, monkeypatch):
    cards = [nvidia.Gpu(0, card[0], "GPU-1", 6 * 2**30, card[1])] if card else []
    monkeypatch.setattr(nvidia, "gpus", lambda: cards)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [*built_in, "CPUExecutionProvider"])
    monkeypatch.setattr(providers, "rtx_plugin", lambda: plugin)
    assert default_provider() == f"{provider}ExecutionProvider"


def test_the_rtx_provider_is_refused_with_its_reason(tmp_path: Path) -> None:
    if providers.rtx_plugin().devices:
        pytest.skip("the RTX provider works here")
    with pytest.raises(InputError, match="'NvTensorRTRTXExecutionProvider' cannot be used here: "):
        OnnxSession(tmp_path / "model.onnx", RTX)


def test_a_missing_package_of_an_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "installed_version", lambda name: None)
    for extra, package in (("train", "accelerate"), ("hf", "transformers"), ("serve", "uvicorn"), ("openvino", "nncf")):
        line = capability.describe_extra(extra)
        assert (line.name, line.status, line.remedy) == (f"extra [{extra}]", "unavailable", install_hint(extra))
        assert package in line.detail


def test_torch_and_flash_attention_are_explained() -> None:
    selector = "pytorch.org's selector gives for CPU"
    assert selector in str(torch_runtime.describe(None, "no driver")[0].remedy)
    assert selector in str(torch_runtime.describe(CUDA_13, "the driver library is not installed")[0].remedy)
    assert torch_runtime.describe(CUDA_13, None)[0].remedy is None, "a card is here: a CPU build is no remedy"
    absent = "flash-attn 2 cannot be imported (No module named 'flash_attn')"
    for facts, status, detail in (
        ({}, "unavailable", "torch finds no CUDA card"),
        ({"cuda": False, "flash": {"varlen_attn": None}}, "unavailable", "torch finds no CUDA card"),
        ({"cuda": True, "flash": {"flash-attn": absent, "varlen_attn": None}}, "available", "varlen_attn"),
        ({"cuda": True, "flash": {"flash-attn": absent, "varlen_attn": "built without"}}, "unavailable", absent),
    ):
        _, line = torch_runtime.describe(Answer(facts), None)
        assert (line.name, line.status) == ("flash attention", status) and line.detail.startswith(detail)


def test_cuda_13_needs_driver_580_and_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "CUDA 13 needs NVIDIA driver R580 or newer, and {} is installed"
    for cuda, driver in (("13.0", "550.54.14"), ("13.1", "579.99")):
        assert capability.driver_too_old(cuda, driver) == reason.format(driver)
    fitting = [("13", "580.65.06"), ("13.0", "610.10"), ("12.8", "550.54.14"), (None, "550.54"), ("13.0", None)]
    assert not any(capability.driver_too_old(*versions) for versions in [*fitting, ("", "550.54")])
    monkeypatch.setattr(cuda_driver, "problem", lambda: None)
    monkeypatch.setattr(cuda_driver, "version", lambda: "12.4")
    monkeypatch.setattr(nvidia, "driver_version", lambda: "550.54.14")
    package = SimpleNamespace(metadata={"Name": "tensorrt_rtx_cu13"})
    monkeypatch.setattr(capability.metadata, "distributions", lambda: [package])

    def driver_line() -> Capability:
        return next(line for line in capability.machine_capabilities() if line.name == "cuda driver")

    reason = reason.format("550.54.14")
    assert driver_line().detail == f"supports CUDA up to 12.4; {reason} (installed for it: tensorrt-rtx-cu13)"
    assert "update the driver to R580 or newer" in str(driver_line().remedy)
    assert reason in torch_runtime.describe(CUDA_13, None)[0].detail
    answer = Answer({"version": "1.31", "providers": [CUDA], "cuda": "13.0", "preload": ""})
    line = next(line for line in providers.describe(answer, None) if line.name.endswith(CUDA))
    assert line.status == "unavailable" and reason in line.detail
    monkeypatch.setattr(nvidia, "driver_version", lambda: "580.65.06")
    assert (driver_line().detail, driver_line().remedy) == ("supports CUDA up to 12.4", None)


def test_list_runtimes_marks_the_experimental_ones() -> None:
    records = runtime_records()
    assert [row["name"] for row in records if row["status"] == "experimental"] == ["coreml", "executorch"]
    assert {"name": "litert", "formats": ["litert"], "export": ["--litert"]}.items() <= records[2].items()


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    onnx.save(classifier_graph(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


class CudaBuild:
    """ONNX Runtime's GPU build on a machine where CUDA's provider does not start: its sessions are the CPU's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.refusal: Exception | None = None
        self.printed = NOT_LOADED
        self._create = onnxruntime.InferenceSession
        patch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CUDA, CPU])
        patch.setattr(onnxruntime, "preload_dlls", self.preload, raising=False)
        patch.setattr(onnxruntime, "InferenceSession", self.create)

    def preload(self) -> None:
        self.events.append("preload")
        print(self.printed, end="")

    def create(self, path: str, options: Any, providers: list[Any], enable_fallback: int = 1) -> Any:
        name = providers[0] if isinstance(providers[0], str) else providers[0][0]
        self.events.append(f"open {name}")
        if name != CPU and self.refusal is not None:
            if enable_fallback:
                print(f"*** EP Error {self.refusal}, falling back")  # as ONNX Runtime does
                return self._create(path, options, providers=[CPU])
            raise self.refusal
        return self._create(path, options, providers=[CPU])


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaBuild]:
    load_cuda_libraries.cache_clear()
    monkeypatch.setattr(cuda_driver, "problem", lambda: None)
    yield CudaBuild(monkeypatch)
    load_cuda_libraries.cache_clear()


@pytest.mark.parametrize("provider", [CUDA, TENSORRT])
def test_pips_cuda_libraries_are_loaded_before_the_provider_is_opened(graph, provider, cuda_build):
    with pytest.raises(InputError):
        OnnxSession(graph, provider)
    assert cuda_build.events == ["preload", f"open {provider}"]
    with OnnxSession(graph) as session:
        assert session.provider == CPU
    assert cuda_build.events.count("preload") == 1, "the CPU needs none of them"


def test_a_provider_that_does_not_start_is_told_from_a_damaged_graph(graph, cuda_build, capfd):
    with pytest.raises(InputError) as refused:
        OnnxSession(graph, CUDA)
    for part in (CUDA, "does not start", "cannot load libcublas.so.13", f"{CPU} would compute", "doctor"):
        assert part in str(refused.value)
    assert capfd.readouterr().out == "", "what ONNX Runtime prints would be in the middle of --json"
    load_cuda_libraries.cache_clear()
    cuda_build.refusal = RuntimeError("CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version")
    cuda_build.printed = ""
    with pytest.raises(InputError, match=r"cannot open it, and the CPU can \(CUDA failure 35: CUDA driver"):
        OnnxSession(graph, CUDA)
    graph.write_bytes(b"no graph")
    with pytest.raises(ArtifactError, match=r"export the run again"):
        OnnxSession(graph, CUDA)
    assert capfd.readouterr().out == ""


def test_doctor_names_a_library_only_if_no_copy_of_it_loads() -> None:
    for printed, is_loaded in (("", True), (OF_COPY, True), (NOT_LOADED, False), (OF_COPY + NOT_LOADED, False)):
        answer = Answer({"providers": [CUDA, CPU], "preload": printed})
        cuda = next(line for line in providers.describe(answer, None, None) if line.name.endswith(CUDA))
        assert "site-packages" not in cuda.detail and (cuda.status == "available") is is_loaded
        assert is_loaded or cuda.remedy == 'pip install "onnxruntime-gpu[cuda,cudnn]"'
        assert is_loaded or cuda.detail.startswith("built in, but cannot load libcublas.so.13;")


def test_the_rtx_provider_gets_a_cache_and_shapes_to_expect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions are the CPU's, and say that they are the plugin's."""
    recorded: dict[str, str] = {}
    real_options, create = onnxruntime.SessionOptions, onnxruntime.InferenceSession

    class Options(real_options):  # type: ignore[misc]
        def add_provider_for_devices(self, devices: list[Any], options: dict[str, str]) -> None:
            assert devices == ["device"]
            recorded.update(options)

    class Session(create):  # type: ignore[misc]
        def get_providers(self) -> list[str]:
            return [RTX, CPU]

    monkeypatch.setenv("EDGEFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    for module in (providers, sys.modules[OnnxSession.__module__]):
        monkeypatch.setattr(module, "rtx_plugin", lambda: WORKING)
    monkeypatch.setattr(cuda_driver, "devices", lambda: (Device(0, *RTX_4050),))
    with OnnxSession(OLD_FORMAT / "classifier-v1" / "bundle" / "onnx" / "model.onnx", RTX, max_positions=64) as session:
        settings, caveats = session.settings(), session.caveats()
    folder = Path(recorded.pop("nv_runtime_cache_path"))
    assert folder.is_dir() and folder.is_relative_to(tmp_path) and "rtx-4050" in folder.name
    assert recorded == {
        "nv_profile_min_shapes": "input_ids:1x1,attention_mask:1x1",
        "nv_profile_opt_shapes": "input_ids:1x64,attention_mask:1x64",
        "nv_profile_max_shapes": "input_ids:1024x64,attention_mask:1024x64",
    }
    assert settings["kernel_specialization"] == "the provider's default (lazy), not read back"
    assert settings["cuda_graphs"] == "the provider's default (disabled), not read back"
    assert any("runs without CUDA graphs and specialized kernels" in note for note in caveats)
    assert settings["provider_options"] == {**recorded, "nv_runtime_cache_path": "cache folder"}
    assert str(tmp_path) not in json.dumps(settings), "reports hold no paths of this machine"
    loop = providers.rtx_options(OLD_FORMAT / "language-v1" / "bundle" / "onnx" / "step_loop.onnx", 64)
    assert loop["nv_profile_min_shapes"].startswith("state:1x1x16,past_key:1x2x0x8,")
    assert loop["nv_profile_opt_shapes"].startswith("state:1x1x16,past_key:1x2x64x8,")
    assert loop["nv_profile_max_shapes"].startswith("state:1024x64x16,past_key:1024x2x64x8,")
    assert "loop:" not in loop["nv_profile_min_shapes"], "its size is fixed"
    shape = "float[N, 3, height, width]"
    onnx.save(parsed(f"g ({shape} x) => ({shape} y) {{ y = Relu (x) }}"), tmp_path / "f.onnx")
    monkeypatch.setattr(cuda_driver, "devices", lambda: ())
    assert providers.rtx_options(tmp_path / "f.onnx", None) == {}
