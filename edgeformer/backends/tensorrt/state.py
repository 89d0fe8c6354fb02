"""What of TensorRT works here, with package, libraries, driver and device told apart: each fails for its own reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import util
from typing import Literal

from edgeformer.formats.errors import install_hint
from edgeformer.machine import cuda_driver
from edgeformer.machine.capability import Capability, installed_version
from edgeformer.machine.child_probes import Answer, ask_all

Builder = Literal["tensorrt-rtx", "tensorrt", "torch-tensorrt"]

DISTRIBUTIONS: dict[Builder, tuple[str, ...]] = {
    "tensorrt-rtx": ("tensorrt-rtx", "tensorrt-rtx-cu12", "tensorrt-rtx-cu13"),
    "tensorrt": ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
    "torch-tensorrt": ("torch-tensorrt",),
}
REMEDIES: dict[Builder, str] = {
    "tensorrt-rtx": install_hint("rtx"),
    "tensorrt": f"on a CUDA machine: {install_hint('trt')}; on a Jetson it comes with JetPack",
    "torch-tensorrt": f"on a CUDA machine: {install_hint('trt')}",
}
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0")
"""What tensorrt-rtx builds for, where the installed one cannot be asked."""

_PROBE_TIMEOUT_S = 30.0
_OLDEST_TENSORRT = 10


@dataclass(frozen=True)
class TensorRTState:
    """One of the TensorRTs on this machine. A problem is None where there is none.

    Attributes:
        version: None where the package is absent or its libraries do not load.
        builder: why engines cannot be built although package and libraries work.
        capabilities: compute capabilities that it builds for; empty: the GPU's own only.
        gpus: what CUDA programs may use here.
    """

    name: Builder
    version: str | None = None
    package: str | None = None
    libraries: str | None = None
    driver: str | None = None
    device: str | None = None
    builder: str | None = None
    capabilities: tuple[str, ...] = ()
    gpus: tuple[cuda_driver.Device, ...] = field(default=())

    def installed(self) -> bool:
        """Package and libraries work."""
        return self.package is None and self.libraries is None

    def can_build(self) -> bool:
        """Engines can be built here: by tensorrt-rtx without a GPU, by the others only on one."""
        return self.installed() and self.builder is None and (self.name == "tensorrt-rtx" or self.can_run())

    def can_run(self) -> bool:
        """Engines can be run here, if they were built for what is here."""
        return self.installed() and self.driver is None and self.device is None

    def missing(self) -> str:
        """What is missing to run engines, part by part: ``package: not installed; driver: …``. Empty: nothing."""
        return _listed(package=self.package, libraries=self.libraries, driver=self.driver, device=self.device)

    def missing_to_build(self) -> str:
        """What is missing to build them; tensorrt-rtx needs neither driver nor device for that."""
        parts = {"package": self.package, "libraries": self.libraries, "builder": self.builder}
        if self.name != "tensorrt-rtx":
            parts |= {"driver": self.driver, "device": self.device}
        return _listed(**parts)


def _listed(**parts: str | None) -> str:
    return "; ".join(f"{part}: {problem}" for part, problem in parts.items() if problem is not None)


@cache
def tensorrt_state(name: Builder) -> TensorRTState:
    """Ask once, in a child process: the import may crash, hang or print."""
    module = name.replace("-", "_")
    installed = util.find_spec(module) is not None
    answer = ask_all([module], _PROBE_TIMEOUT_S)[module] if installed else None
    return judge(name, answer, cuda_driver.problem(), cuda_driver.devices())


def judge(
    name: Builder, answer: Answer | None, driver: str | None, gpus: Sequence[cuda_driver.Device]
) -> TensorRTState:
    """What a probe's answer means.

    Args:
        answer: of the child process; None where the package is not installed.
        driver: why CUDA's driver cannot be used; None when it can.
    """
    device = None if gpus else "no NVIDIA GPU is present"
    if answer is None:
        return TensorRTState(name, package="not installed", driver=driver, device=device, gpus=tuple(gpus))
    facts = answer.facts
    if "version" not in facts:
        libraries = f"do not load ({answer.error})"
        version = installed_version(*DISTRIBUTIONS[name])
        return TensorRTState(name, version, libraries=libraries, driver=driver, device=device, gpus=tuple(gpus))
    return TensorRTState(
        name,
        facts["version"],
        driver=driver,
        device=device,
        builder=_builder_problem(name, answer),
        capabilities=tuple(facts.get("capabilities", ())),
        gpus=tuple(gpus),
    )


def _builder_problem(name: Builder, answer: Answer) -> str | None:
    version = str(answer.facts["version"])
    if name == "tensorrt" and int(version.partition(".")[0]) < _OLDEST_TENSORRT:
        return f"TensorRT {version} has no strongly typed networks; {_OLDEST_TENSORRT}.0 or newer is needed"
    return None if answer.facts.get("builder") else f"does not start ({answer.error or 'no builder'})"


def describe(state: TensorRTState) -> Capability:
    """The line of `doctor`."""
    if not state.installed():
        return Capability(state.name, "unavailable", state.version, state.missing(), REMEDIES[state.name])
    parts = f"package and libraries: work; driver: {state.driver or 'works'}; device: {state.device or 'present'}"
    if not state.can_build():
        builder = state.builder or "it builds only on the GPU that the engine is for"
        return Capability(state.name, "unavailable", state.version, f"{parts}; engines cannot be built here: {builder}")
    targets = f" for compute capability {', '.join(state.capabilities)}" if state.capabilities else ""
    use = "builds and runs engines" if state.can_run() else "engines can be built but not run here"
    return Capability(state.name, "available", state.version, f"{parts}; {use}{targets}")
