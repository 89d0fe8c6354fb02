"""Which TensorRT builds for a device, and which engines run here: refusals name the device and what is missing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from edgeformer.artifacts.device import DeviceProfile, Fact
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import ArtifactError, MissingDependencyError, install_hint
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import SILENT
from edgeformer.runtimes import ArtifactFiles, OpenOptions
from edgeformer.runtimes.runtime import Builder, BuildJob, Target, Unavailable
from edgeformer.runtimes.tensorrt import RUNTIME, TensorRTBuilder, TorchTensorRTBuilder
from edgeformer.runtimes.tensorrt import state as tensorrt_state_module
from edgeformer.runtimes.tensorrt.engine import axis_sizes
from edgeformer.runtimes.tensorrt.state import TensorRTState, judge, why_engine_cannot_run
from edgeformer.system.capability import Answer
from edgeformer.system.cuda_driver import Device

BUILDS = Answer({"version": "1.7", "builder": True, "capabilities": ["7.5", "8.0", "8.9"]})
RTX = judge("tensorrt-rtx", BUILDS, "no driver", [])
NO_RTX = judge("tensorrt-rtx", None, "no driver", [])
NO_TENSORRT = judge("tensorrt", None, "the driver library is not installed", [])
H200 = Device(0, "NVIDIA H200", "9.0")
BROKEN_RTX = judge("tensorrt-rtx", Answer(error="OSError: libtensorrt_rtx.so.1"), None, [])
OLD_TENSORRT = judge("tensorrt", Answer({"version": "8.5.2", "builder": True}), None, [H200])
LAPTOP = Device(0, "NVIDIA GeForce RTX 4050 Laptop GPU", "8.9")
OTHER = Device(0, "NVIDIA GeForce RTX 3050", "8.6")
WORKS = Answer({"version": "1.7.1.116", "builder": True, "capabilities": ["8.6", "8.9"]})

Plan = Callable[..., Target | Unavailable]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return what is built for a device with these states of TensorRT."""

    def plan(device: str, *states: TensorRTState, builder: Builder | None = None) -> Target | Unavailable:
        named = {state.name: state for state in states}
        monkeypatch.setattr(tensorrt_state_module, "tensorrt_state", named.__getitem__)
        return (builder or TensorRTBuilder()).plan(load_profile(device))

    return plan


@pytest.mark.parametrize("device", ["jetson-orin-nano-8gb", "h200", "t4", "gtx1650"])
def test_other_cards_take_tensorrt_whatever_their_capability(device: str, plan: Plan) -> None:
    """tensorrt-rtx builds for the capability of the last two, and for an RTX card that is not here."""
    target = plan("rtx4050", RTX, NO_TENSORRT)
    assert isinstance(target, Target) and (target.format, target.device) == ("tensorrt-rtx", "rtx4050")
    profile = load_profile(device)
    assert profile.compute_capability is not None
    refused = plan(device, RTX, NO_TENSORRT)
    assert isinstance(refused, Unavailable) and refused.format == "tensorrt"
    for part in (
        f"{profile.title} (profile {device!r}, compute capability {profile.compute_capability.value})",
        "its profile states tensorrt: enterprise",
        "use tensorrt on that GPU itself",
        "package: not installed; driver: the driver library is not installed; device: no NVIDIA GPU is present",
    ):
        assert part in refused.reason


@pytest.mark.parametrize(
    ("title", "key", "edition"),
    [
        ("NVIDIA RTX A2000 12GB", None, "rtx"), ("NVIDIA RTX4050 laptop", None, "rtx"),
        ("geforce RTX-4070", None, "rtx"), ("NVIDIA GeForce GTX 1660", None, "enterprise"),
        ("NVIDIA A10", None, "enterprise"), ("NVIDIA A10", "rtx", "rtx"),
        ("NVIDIA GeForce RTX 2060", "enterprise", "enterprise"), ("NVIDIA Tesla K80", "none", "none"),
    ],
)  # fmt: skip
def test_a_profile_without_the_key_is_judged_by_its_name(title, key, edition, monkeypatch):
    capability = Fact(value="7.5", source="test", verified="no")
    device = DeviceProfile(name="mine", title=title, kind="cuda", tensorrt=key, compute_capability=capability)
    assert device.tensorrt_edition == edition
    states = {"tensorrt-rtx": RTX, "tensorrt": NO_TENSORRT}
    monkeypatch.setattr(tensorrt_state_module, "tensorrt_state", states.__getitem__)
    plan = TensorRTBuilder().plan(device)
    assert isinstance(plan, Target if edition == "rtx" else Unavailable)
    text = plan.note if isinstance(plan, Target) else plan.reason
    assert ("is inferred, because its name" in (text or "")) is (key is None)
    assert edition != "none" or "its profile says that TensorRT does not support it (tensorrt: none)" in str(text)
    if isinstance(plan, Target):  # the guess becomes a note of the export
        notes: list[str] = []
        job = BuildJob(Path(), (), "fp16", 24, 64, SILENT, notes.append, lambda: None)
        assert list(TensorRTBuilder().build(plan, job)) == [] and notes == ([text] if key is None else [])


@pytest.mark.parametrize(
    ("device", "states", "message"),
    [
        ("rtx3050-6gb", (RTX, NO_TENSORRT), "of tensorrt-rtx builds only for compute capability 7.5, 8.0, 8.9;"),
        ("rtx4050", (NO_RTX, NO_TENSORRT), "builds for it on any m"),
        ("rtx4050", (NO_RTX, NO_TENSORRT), install_hint("rtx")),
        ("rtx4050", (BROKEN_RTX, NO_TENSORRT), "libraries: do not load (OSError: libtensorrt"),
        ("h200", (RTX, OLD_TENSORRT), "tensorrt 8.5.2 is too old; 10.0 or newer is needed"),
        ("host", (RTX, NO_TENSORRT), "is not an NVIDIA GPU"),
    ],
)
def test_a_refusal_names_what_is_missing(device, states, message, plan):
    refused = plan(device, *states)
    assert isinstance(refused, Unavailable) and message in refused.reason


@pytest.mark.parametrize("builder", [TensorRTBuilder(), TorchTensorRTBuilder()], ids=["tensorrt", "torch-tensorrt"])
def test_a_data_centre_card_takes_tensorrt_on_itself_only(builder: Builder, plan: Plan) -> None:
    """An H100 has the capability of an H200, and kernels that were chosen by its bandwidth."""

    def plan_on(*gpus: Device, device: str = "h200") -> Target | Unavailable:
        answer = Answer({"version": "11.0.0.1", "builder": True})
        state = judge(builder.name, answer, None, gpus)  # type: ignore[arg-type]
        return plan(device, RTX, state, builder=builder)

    assert plan_on(H200) == Target(builder.name, "h200", "9.0")
    for gpu in (Device(0, "NVIDIA H100 80GB HBM3", "9.0"), Device(0, "NVIDIA H200", "10.0")):
        message = f"the GPU is {gpu.name} with compute capability {gpu.compute_capability}"
        assert message in getattr(plan_on(gpu), "reason", "")
    assert "the GPU is NVIDIA H200" in getattr(plan_on(H200, device="jetson-orin-nano-8gb"), "reason", "")
    assert "here: device: no NVIDIA GPU is present" in getattr(plan_on(), "reason", "")


def test_shapes_cover_the_texts_and_the_budgets_shape() -> None:
    lengths = ((64, 512), (128, 512), (384, 1024), (50, 64))
    jobs = [BuildJob(Path(), (), "fp16", *key, SILENT, print, lambda: None) for key in lengths]
    sizes = [axis_sizes(job)["sequence"] for job in jobs]
    assert sizes == [(1, 64, 128), (1, 128, 128), (1, 128, 384), (1, 50, 64)]
    assert axis_sizes(jobs[0])["batch"] == (1, 1, 16)


def engine(**changes: object) -> ArtifactManifest:
    entry = ArtifactManifest(
        id="tensorrt-rtx-fp16", file="engines/model_fp16.rtx4050.engine", format="tensorrt-rtx", precision="fp16",
        status="built", built_for={"compute_capability": "8.9", "tensorrt-rtx": "1.7.1.116"},
    )  # fmt: skip
    return entry.model_copy(update=changes)


def state_on(
    answer: Answer | None = WORKS, driver: str | None = None, gpus: tuple[Device, ...] = (LAPTOP,)
) -> TensorRTState:
    return judge("tensorrt-rtx", answer, driver, gpus)


@pytest.mark.parametrize(
    ("state", "messages"),
    [
        (state_on(), ()),
        (state_on(gpus=(LAPTOP, OTHER)), ()),
        (state_on(gpus=(OTHER, LAPTOP)),  # the first GPU counts
         ("built for compute capability 8.9, but this GPU is NVIDIA GeForce RTX 3050 with 8.6",
          "export the run again for this device")),
        (state_on(Answer({"version": "1.6.0.2", "builder": True})),
         ("built by tensorrt-rtx 1.7.1.116, and tensorrt-rtx 1.6.0.2 is installed here",
          "install tensorrt-rtx==1.7.1.116")),
        (state_on(None),
         ('package: not installed (python -m pip install ".[rtx]" in the clone',
          "built for compute capability 8.9, tensorrt-rtx 1.7.1.116")),
        (state_on(Answer(error="OSError: libcudart.so")), ("libraries: do not load (OSError: libcudart.so)",)),
        (state_on(driver="no libcuda.so.1", gpus=()), ("driver: no libcuda.so.1; device: no NVIDIA",)),
    ],
)  # fmt: skip
def test_an_engine_runs_on_its_card_with_its_version(state: TensorRTState, messages: tuple[str, ...]) -> None:
    refusal = why_engine_cannot_run(engine(), state)
    assert (refusal is None) == (not messages) and all(message in str(refusal) for message in messages)


def test_engines_of_tensorrt_are_for_one_gpu_model() -> None:
    built_for = {"compute_capability": "9.0", "tensorrt": "11.0", "gpu": "NVIDIA H200", "driver": "580.1"}
    artifact, answer = engine(format="tensorrt", built_for=built_for), Answer({"version": "11.0", "builder": True})
    refusals = [
        why_engine_cannot_run(artifact, judge("tensorrt", answer, None, [Device(0, name, "9.0")]))
        for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    ]
    assert refusals[0] is None
    assert "for the GPU NVIDIA H200, but this one is NVIDIA H100 80GB HBM3" in str(refusals[1])
    state = judge("tensorrt", answer, None, [H200])
    for version, message in (("11.0", "None"), ("10.9", "built by tensorrt 10.9, and tensorrt 11.0 is installed")):
        built_for = {"compute_capability": "9.0", "torch-tensorrt": "2.13", "tensorrt": version, "gpu": H200.name}
        assert message in str(why_engine_cannot_run(engine(format="torch-tensorrt", built_for=built_for), state))


def test_a_refused_engine_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for state, error in ((state_on(gpus=(OTHER,)), ArtifactError), (state_on(None), MissingDependencyError)):
        monkeypatch.setattr(tensorrt_state_module, "tensorrt_state", lambda name, state=state: state)
        with pytest.raises(error, match=r"nowhere\.engine: this"):
            RUNTIME.open(ArtifactFiles(engine(), Path("nowhere.engine")), OpenOptions())
