"""What of TensorRT works here, with package, libraries, driver and device told apart: each fails for its own reason.

Whether an engine can run here is told from its manifest, before TensorRT touches the file. An engine is bound to the
TensorRT version that built it and to the GPU's compute capability (built by ``tensorrt``: to the GPU model); elsewhere
TensorRT fails with texts that name neither side, or ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from edgeformer.formats.errors import ArtifactError, MissingDependencyError, install_hint
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.machine import cuda_driver
from edgeformer.machine.capability import Answer, Capability, ask_installed, installed_version

Package = Literal["tensorrt-rtx", "tensorrt", "torch-tensorrt"]

DISTRIBUTIONS: dict[Package, tuple[str, ...]] = {
    "tensorrt-rtx": ("tensorrt-rtx", "tensorrt-rtx-cu12", "tensorrt-rtx-cu13"),
    "tensorrt": ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
    "torch-tensorrt": ("torch-tensorrt",),
}
RUNTIMES: dict[str, Package] = {"tensorrt-rtx": "tensorrt-rtx", "tensorrt": "tensorrt", "torch-tensorrt": "tensorrt"}
"""Artifact formats that are engines → what runs them; torch-tensorrt's are TensorRT's own."""

SCRIPTS = {
    "tensorrt_rtx": """
import tensorrt_rtx
say(version=tensorrt_rtx.__version__)
known = [name[2:] for name in dir(tensorrt_rtx.ComputeCapability) if name.startswith("SM")]
say(capabilities=[f"{name[:-1]}.{name[-1]}" for name in sorted(known, key=int)])
logger = tensorrt_rtx.Logger(tensorrt_rtx.Logger.INTERNAL_ERROR)
say(builder=tensorrt_rtx.Builder(logger) is not None)
say(runtime=tensorrt_rtx.Runtime(logger) is not None)
""",
    "tensorrt": """
import tensorrt
say(version=tensorrt.__version__)
logger = tensorrt.Logger(tensorrt.Logger.INTERNAL_ERROR)
say(builder=tensorrt.Builder(logger) is not None)
say(runtime=tensorrt.Runtime(logger) is not None)
""",
    "torch_tensorrt": "import torch_tensorrt\nsay(version=torch_tensorrt.__version__, builder=True)\n",
}
"""Questions for child processes, by the module that they import."""

REMEDIES: dict[Package, str] = {
    "tensorrt-rtx": install_hint("rtx"),
    "tensorrt": f"on a CUDA machine: {install_hint('trt')}; on a Jetson it comes with JetPack",
    "torch-tensorrt": f"on a CUDA machine: {install_hint('trt')}",
}
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0")
"""What tensorrt-rtx builds for, where the installed one cannot be asked."""

ENGINE_SUFFIX = ".engine"
_REBUILD = "export the run again for this device, or use an ONNX artifact of the bundle"
_PICKLED = (
    "was written by an earlier version as a pickled program, which is not opened: opening it could run any code; "
    "export again"
)
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

    name: Package
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
def tensorrt_state(name: Package) -> TensorRTState:
    """Ask once, in a child process: the import may crash, hang or print."""
    module = name.replace("-", "_")
    answer = ask_installed({module: SCRIPTS[module]}, _PROBE_TIMEOUT_S)[module]
    return judge(name, answer, cuda_driver.problem(), cuda_driver.devices())


def judge(
    name: Package, answer: Answer | None, driver: str | None, gpus: Sequence[cuda_driver.Device]
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


def _builder_problem(name: Package, answer: Answer) -> str | None:
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


def why_engine_cannot_run(artifact: ArtifactManifest, here: TensorRTState | None = None) -> str | None:
    """None when this machine can run the engine.

    Args:
        artifact: an engine of a bundle; ``built_for`` says what it needs.
        here: what works here; None: ask.
    """
    if _is_pickled(artifact):
        return _PICKLED
    runtime = RUNTIMES[artifact.format]
    here = here or tensorrt_state(runtime)
    wanted = artifact.built_for or {}
    needs = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in wanted.items()) or "an unknown GPU"
    if not here.can_run():
        remedy = f" ({REMEDIES[runtime]})" if not here.installed() else ""
        return (
            f"this {artifact.format} engine was built for {needs} and cannot run here: {here.missing()}{remedy}; "
            "use an ONNX artifact of the bundle, or copy the bundle to its target"
        )
    version = wanted.get(runtime)
    if version is not None and version != here.version:
        return (
            f"this engine was built by {runtime} {version}, and {runtime} {here.version} is installed here; "
            f"engines run only with the version that built them: install {runtime}=={version}, or {_REBUILD}"
        )
    return _wrong_gpu(artifact, wanted, here.gpus[0])


def _wrong_gpu(artifact: ArtifactManifest, wanted: dict[str, str], gpu: cuda_driver.Device) -> str | None:
    """The first GPU is the one that an engine is opened on."""
    capability, name = wanted.get("compute_capability"), wanted.get("gpu")
    if capability is not None and capability != gpu.compute_capability:
        return (
            f"this engine was built for {_named(name)}compute capability {capability}, but this GPU is "
            f"{gpu.name} with {gpu.compute_capability}; {_REBUILD}"
        )
    if name is not None and name != gpu.name:
        return f"this {artifact.format} engine was built for the GPU {name}, but this one is {gpu.name}; {_REBUILD}"
    return None


def _named(gpu: str | None) -> str:
    return f"{gpu} with " if gpu else ""


def require_runnable(path: Path, artifact: ArtifactManifest) -> None:
    """Refuse an engine before its file is read.

    Args:
        path: the engine's file, for the message.
        artifact: its entry in the manifest.

    Raises:
        MissingDependencyError: package, libraries, driver or GPU are missing; the message says which.
        ArtifactError: the engine was built for another GPU or by another version, or is no engine.
    """
    refusal = why_engine_cannot_run(artifact)
    if refusal is None:
        return
    fault = _is_pickled(artifact) or tensorrt_state(RUNTIMES[artifact.format]).can_run()
    raise (ArtifactError if fault else MissingDependencyError)(f"{path}: {refusal}")


def _is_pickled(artifact: ArtifactManifest) -> bool:
    """What torch-tensorrt wrote before it wrote engines: a program that ``torch.export.load`` unpickles."""
    return artifact.format == "torch-tensorrt" and artifact.file is not None and Path(artifact.file).suffix == ".ep"
