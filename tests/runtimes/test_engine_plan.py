"""Which TensorRT builds for a device, and refusals that name the device and what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from edgeformer.artifacts.device import DeviceProfile, Fact
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.progress import SILENT
from edgeformer.runtimes import tensorrt as builders
from edgeformer.runtimes.runtime import Builder, BuildJob, Target, Unavailable
from edgeformer.runtimes.tensorrt import TensorRTBuilder, TorchTensorRTBuilder
from edgeformer.runtimes.tensorrt.engine import text_shapes
from edgeformer.runtimes.tensorrt.state import TensorRTState, judge
from edgeformer.system.capability import Answer
from edgeformer.system.cuda_driver import Device

RTX = judge(
    "tensorrt-rtx", Answer({"version": "1.7", "builder": True, "capabilities": ["7.5", "8.0", "8.9"]}), "no driver", []
)
NO_RTX = judge("tensorrt-rtx", None, "no driver", [])
NO_TENSORRT = judge("tensorrt", None, "the driver library is not installed", [])
H200 = Device(0, "NVIDIA H200", "9.0")


Plan = Callable[..., Target | Unavailable]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """What is built for a device where these states of TensorRT are found."""

    def plan(device: str, *states: TensorRTState, builder: Builder | None = None) -> Target | Unavailable:
        monkeypatch.setattr(builders, "tensorrt_state", {state.name: state for state in states}.__getitem__)
        return (builder or TensorRTBuilder()).plan(load_profile(device))

    return plan


@pytest.mark.parametrize("device", ["rtx4050", "rtx4060-laptop"])
def test_rtx_builds_for_a_card_that_is_not_here(device: str, plan: Plan) -> None:
    target = plan(device, RTX, NO_TENSORRT)
    assert isinstance(target, Target)
    assert (target.format, target.device) == ("tensorrt-rtx", device)


@pytest.mark.parametrize(
    ("device", "device_text", "instead"),
    [
        ("jetson-orin-nano-8gb", "NVIDIA Jetson Orin Nano 8GB", "TensorRT of JetPack, on the Jetson itself"),
        ("h200", "NVIDIA H200", "tensorrt, on that very GPU"),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", "tensorrt, on that very GPU"),
        ("t4", "NVIDIA Tesla T4", "tensorrt, on that very GPU"),
        ("l4", "NVIDIA L4", "tensorrt, on that very GPU"),
        ("gtx1650", "NVIDIA GeForce GTX 1650", "tensorrt, on that very GPU"),
    ],
)
def test_what_is_no_rtx_card_takes_tensorrt_whatever_its_capability(
    device: str, device_text: str, instead: str, plan: Plan
) -> None:
    """The capability of each of them is among those that tensorrt-rtx builds for, but for the first two."""
    profile = load_profile(device)
    assert profile.compute_capability is not None
    refused = plan(device, RTX, NO_TENSORRT)
    assert isinstance(refused, Unavailable) and refused.format == "tensorrt"
    for part in (
        f"{device_text} (profile {device!r}, compute capability {profile.compute_capability.value})",
        "its profile says tensorrt: enterprise",
        f"Use {instead}",
        "package: not installed; driver: the driver library is not installed; device: no NVIDIA GPU is present",
    ):
        assert part in refused.reason


def test_an_rtx_card_that_this_tensorrt_rtx_does_not_know_is_refused(plan: Plan) -> None:
    refused = plan("rtx3050-6gb", RTX, NO_TENSORRT)  # 8.6, of which the stand-in has no code
    assert isinstance(refused, Unavailable) and refused.format == "tensorrt-rtx"
    assert "this tensorrt-rtx builds only for compute capability 7.5, 8.0, 8.9; install a newer one" in refused.reason


@pytest.mark.parametrize(
    ("title", "key", "chosen"),
    [
        ("NVIDIA RTX A2000 12GB", None, "rtx"),
        ("NVIDIA GeForce RTX 2060", None, "rtx"),
        ("NVIDIA RTX4050 laptop", None, "rtx"),
        ("GeForce RTX-4070", None, "rtx"),
        ("nvidia geforce rtx 4070", None, "rtx"),
        ("NVIDIA GeForce GTX 1660", None, "enterprise"),
        ("NVIDIA A10", None, "enterprise"),
        ("NVIDIA A10", "rtx", "rtx"),
        ("NVIDIA GeForce RTX 2060", "enterprise", "enterprise"),
        ("NVIDIA Tesla K80", "none", "none"),
    ],
)
def test_a_profile_without_the_key_is_judged_by_its_name(
    title: str, key: Literal["rtx", "enterprise", "none"] | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability = Fact(value="7.5", source="test", verified=False)
    device = DeviceProfile(name="mine", title=title, kind="cuda", tensorrt=key, compute_capability=capability)
    assert device.tensorrt_edition == chosen
    states = {"tensorrt-rtx": RTX, "tensorrt": NO_TENSORRT}
    monkeypatch.setattr(builders, "tensorrt_state", states.__getitem__)
    plan = TensorRTBuilder().plan(device)
    assert isinstance(plan, Target if chosen == "rtx" else Unavailable)
    text = plan.note if isinstance(plan, Target) else plan.reason
    assert ("is a guess, because its name" in (text or "")) is (key is None)
    assert chosen != "none" or "its profile says that no TensorRT supports it (tensorrt: none)" in plan.reason


def test_export_notes_that_the_edition_is_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    device = DeviceProfile(
        name="mine",
        title="GeForce RTX-4070",
        kind="cuda",
        compute_capability=Fact(value="8.9", source="t", verified=False),
    )
    monkeypatch.setattr(builders, "tensorrt_state", {"tensorrt-rtx": RTX, "tensorrt": NO_TENSORRT}.__getitem__)
    target = TensorRTBuilder().plan(device)
    assert isinstance(target, Target) and target.format == "tensorrt-rtx"
    job = BuildJob(tmp_path, (), "fp16", 24, 64, None, SILENT, notes.append, lambda: None)
    assert list(TensorRTBuilder().build(target, job)) == []
    (note,) = notes
    assert note == (
        "engines: GeForce RTX-4070: its profile has no key tensorrt; rtx is a guess, because its name has RTX in it "
        "(set tensorrt in the profile to choose)"
    )


def test_a_missing_rtx_package_is_named_with_its_extra(plan: Plan) -> None:
    refused = plan("rtx4050", NO_RTX, NO_TENSORRT)
    assert isinstance(refused, Unavailable) and refused.format == "tensorrt-rtx"
    assert "builds for it on any machine, but here package: not installed (python -m pip install" in refused.reason
    assert "driver" not in refused.reason and install_hint("rtx") in refused.reason


def test_libraries_that_do_not_load_are_told_from_the_package(plan: Plan) -> None:
    broken = judge("tensorrt-rtx", Answer(error="OSError: libtensorrt_rtx.so.1"), None, [])
    refused = plan("rtx4050", broken, NO_TENSORRT)
    assert isinstance(refused, Unavailable) and "libraries: do not load (OSError: libtensorrt" in refused.reason


def test_a_data_centre_card_takes_tensorrt_on_itself_only(plan: Plan) -> None:
    works = {"version": "11.0.0.1", "builder": True}
    tensorrt_state = judge("tensorrt", Answer(works), None, [H200])
    target = plan("h200", RTX, tensorrt_state)
    assert target == Target("tensorrt", "h200", "9.0")
    elsewhere = plan("jetson-orin-nano-8gb", RTX, tensorrt_state)
    assert isinstance(elsewhere, Unavailable)
    assert "this machine's GPU is NVIDIA H200 with compute capability 9.0" in elsewhere.reason
    no_card = plan("h200", RTX, judge("tensorrt", Answer(works), None, []))
    assert isinstance(no_card, Unavailable) and "here device: no NVIDIA GPU is present" in no_card.reason


@pytest.mark.parametrize("gpu", [Device(0, "NVIDIA H100 80GB HBM3", "9.0"), Device(0, "NVIDIA H200", "10.0")])
def test_neither_the_name_nor_the_capability_alone_makes_a_card_the_target(gpu: Device, plan: Plan) -> None:
    """An H100 has the capability of an H200, and kernels that were chosen by its bandwidth."""
    for builder, name in ((TensorRTBuilder(), "tensorrt"), (TorchTensorRTBuilder(), "torch-tensorrt")):
        tensorrt_state = judge(name, Answer({"version": "11.0.0.1", "builder": True}), None, [gpu])
        refused = plan("h200", RTX, tensorrt_state, builder=builder)
        assert isinstance(refused, Unavailable)
        assert f"GPU is {gpu.name} with compute capability {gpu.compute_capability}" in refused.reason


def test_tensorrt_without_strongly_typed_networks_is_too_old(plan: Plan) -> None:
    old = judge("tensorrt", Answer({"version": "8.5.2", "builder": True}), None, [H200])
    refused = plan("h200", RTX, old)
    assert isinstance(refused, Unavailable) and "TensorRT 8.5.2 has no strongly typed networks" in refused.reason


def test_a_processor_is_no_target(plan: Plan) -> None:
    refused = plan("host", RTX, NO_TENSORRT)
    assert isinstance(refused, Unavailable) and "is not an NVIDIA GPU" in refused.reason


def test_torch_tensorrt_says_what_is_missing(plan: Plan) -> None:
    stub = Answer(error="Exception: libraries were not found")
    builder = TorchTensorRTBuilder()
    refused = plan("rtx4050", judge("torch-tensorrt", stub, "no driver library", []), builder=builder)
    assert isinstance(refused, Unavailable) and refused.format == "torch-tensorrt"
    assert "libraries: do not load (Exception: libraries were not found); driver: no driver library" in refused.reason
    tensorrt_state = judge("torch-tensorrt", Answer({"version": "2.13", "builder": True}), None, [H200])
    assert plan("h200", tensorrt_state, builder=builder) == Target("torch-tensorrt", "h200", "9.0")


def test_shapes_cover_the_texts_and_the_budgets_shape() -> None:
    sizes = [text_shapes(*key)["sequence"] for key in ((64, 512), (128, 512), (384, 1024), (50, 64))]
    assert sizes == [(1, 64, 128), (1, 128, 128), (1, 128, 384), (1, 50, 64)]
    assert text_shapes(64, 512)["batch"] == (1, 1, 16)
