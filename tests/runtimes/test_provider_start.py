"""Providers that do not start: what ONNX Runtime does then, and what edgeformer says. The boundary is ONNX Runtime."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.runtimes.onnxruntime import providers
from edgeformer.runtimes.onnxruntime.providers import CPU, CUDA, RTX, TENSORRT, load_cuda_libraries, rtx_options
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.system import cuda_driver
from edgeformer.system.capability import Answer
from edgeformer.system.cuda_driver import Device
from tests.runtimes.tiny_bundle import classifier_graph
from tests.test_old_format import OLD

CARD = Device(0, "NVIDIA GeForce RTX 4050 Laptop GPU", "8.9")
NOT_LOADED = "Failed to load libcublas.so.13: libcublas.so.13: cannot open shared object file: No such file\n"
COPY = "/venv/site-packages/nvidia/cu13/lib/libcublas.so.13"
OF_COPY = f"Failed to load {COPY}: {COPY}: file too short\n"


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
def test_pips_cuda_libraries_are_loaded_before_the_provider_is_opened(
    graph: Path, provider: str, cuda_build: CudaBuild
) -> None:
    with pytest.raises(InputError):
        OnnxSession(graph, provider)
    assert cuda_build.events == ["preload", f"open {provider}"]
    with OnnxSession(graph) as session:
        assert session.provider == CPU
    assert cuda_build.events.count("preload") == 1, "the CPU needs none of them"


def test_a_provider_that_was_left_out_is_never_passed_off_as_cuda(
    graph: Path, cuda_build: CudaBuild, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as refused:
        OnnxSession(graph, CUDA)
    for part in (CUDA, "does not start", "cannot load libcublas.so.13", f"{CPU} would compute", "doctor"):
        assert part in str(refused.value)
    assert capfd.readouterr().out == "", "what ONNX Runtime prints would be in the middle of --json"


def test_a_provider_that_raises_is_told_from_a_graph_that_is_damaged(
    graph: Path, cuda_build: CudaBuild, capfd: pytest.CaptureFixture[str]
) -> None:
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


def test_the_rtx_provider_gets_a_cache_and_the_shapes_to_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        monkeypatch.setattr(module, "rtx_plugin", lambda: providers.RtxPlugin(("device",)))
    monkeypatch.setattr(cuda_driver, "devices", lambda: (CARD,))
    with OnnxSession(OLD / "classifier-v1" / "bundle" / "onnx" / "model.onnx", RTX, max_positions=64) as session:
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


def test_shapes_of_graphs_with_caches_and_of_foreign_graphs(tmp_path: Path) -> None:
    loop = rtx_options(OLD / "language-v1" / "bundle" / "onnx" / "step_loop.onnx", 64)
    assert loop["nv_profile_min_shapes"].startswith("state:1x1x16,past_key:1x2x0x8,")
    assert loop["nv_profile_opt_shapes"].startswith("state:1x1x16,past_key:1x2x64x8,")
    assert loop["nv_profile_max_shapes"].startswith("state:1024x64x16,past_key:1024x2x64x8,")
    assert "loop:" not in loop["nv_profile_min_shapes"], "its size is fixed"
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 3, "height", "width"])
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 3, "height", "width"])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [value], [output])), tmp_path / "f.onnx")
    assert rtx_options(tmp_path / "f.onnx", None) == {}
