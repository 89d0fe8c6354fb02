"""State of TensorRT on this system: package, libraries, driver and device, and its log.

The manifest decides whether an engine can run here, before TensorRT reads the file. An engine requires the TensorRT
version that built it and the GPU's compute capability (built by ``tensorrt``: the GPU model). Otherwise TensorRT fails
with a message that names neither, or ends the process.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, Literal

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.system import cuda_driver, nvidia
from edgeformer.system.capability import Answer, Capability, ask_installed, installed_version

Package = Literal["tensorrt-rtx", "tensorrt", "torch-tensorrt"]

RUNTIMES: dict[str, Package] = {"tensorrt-rtx": "tensorrt-rtx", "tensorrt": "tensorrt", "torch-tensorrt": "tensorrt"}
"""Engine format → package that runs it; torch-tensorrt writes engines of TensorRT."""

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
"""Probe scripts for child processes, by the module that they import."""


_TRT_HINT = f"on a CUDA machine, with Python 3.10 to 3.13 because of torch-tensorrt: {install_hint('trt')}"
REMEDIES: dict[Package, str] = {
    "tensorrt-rtx": install_hint("rtx"),
    "tensorrt": f"{_TRT_HINT}; on a Jetson it comes with JetPack: make the environment with python3 -m venv "
    "--system-site-packages",
    "torch-tensorrt": _TRT_HINT,
}
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0")
"""Compute capabilities of tensorrt-rtx if the installed one does not report them."""

_REBUILD = "export the run again for this device, or use an ONNX artifact of the bundle"
_PROBE_TIMEOUT_S = 30.0
_MIN_VERSIONS: dict[Package, tuple[int, int]] = {"tensorrt-rtx": (1, 3), "tensorrt": (10, 0)}
"""The first releases with runtime settings, and with strongly typed networks."""


@dataclass(frozen=True)
class TensorRTState:
    """State of one TensorRT package on this system.

    ``problems``: by part (package, libraries, driver, device, builder). ``capabilities``: compute capabilities that it
    builds for; empty: only the GPU's.
    """

    name: Package
    version: str | None = None
    problems: Mapping[str, str] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    gpus: tuple[cuda_driver.Device, ...] = ()

    @property
    def is_installed(self) -> bool:
        """Whether package and libraries work."""
        return self.problems.keys().isdisjoint({"package", "libraries"})

    def missing(self, *, to_build: bool = False) -> str:
        """Return what is missing to run or build (tensorrt-rtx: without a driver) engines; empty: nothing."""
        parts = ["package", "libraries", *(["builder"] if to_build else [])]
        if not to_build or self.name != "tensorrt-rtx":
            parts += ["driver", "device"]
        return "; ".join(f"{part}: {self.problems[part]}" for part in parts if part in self.problems)


@cache
def tensorrt_state(name: Package) -> TensorRTState:
    """Probe a package once, in a child process, because the import may crash, hang or print."""
    module = name.replace("-", "_")
    answer = ask_installed({module: SCRIPTS[module]}, _PROBE_TIMEOUT_S)[module]
    return judge(name, answer, cuda_driver.problem(), cuda_driver.devices())


def judge(
    name: Package, answer: Answer | None, driver: str | None, gpus: Sequence[cuda_driver.Device]
) -> TensorRTState:
    """Convert a probe's answer (None: not installed) to a state; ``driver``: why CUDA's driver cannot be used."""
    facts = answer.facts if answer is not None else {}
    version, problems = facts.get("version"), dict[str, str]()
    if answer is None:
        problems["package"] = "not installed"
    elif version is None:
        problems["libraries"] = f"do not load ({answer.error})"
        version = installed_version(name, f"{name}-cu12", f"{name}-cu13")
    elif tuple(map(int, re.findall(r"\d+", f"{version}.0")[:2])) < (needed := _MIN_VERSIONS.get(name, (0, 0))):
        problems["builder"] = f"{name} {version} is too old; {needed[0]}.{needed[1]} or newer is needed"
    elif not facts.get("builder"):
        problems["builder"] = f"does not start ({answer.error or 'it has no builder'})"
    if driver is not None:
        problems["driver"] = driver
    if not gpus:
        problems["device"] = "no NVIDIA GPU is present"
    return TensorRTState(name, version, problems, tuple(facts.get("capabilities", ())), tuple(gpus))


def describe(state: TensorRTState) -> Capability:
    """Return the package's line of `doctor`."""
    if not state.is_installed:
        return Capability(state.name, "unavailable", state.version, state.missing(), REMEDIES[state.name])
    driver, device = state.problems.get("driver", "works"), state.problems.get("device", "present")
    parts = f"package and libraries: work; driver: {driver}; device: {device}"
    if state.missing(to_build=True):
        builder = state.problems.get("builder", "it builds only on the GPU that the engine is for")
        return Capability(state.name, "unavailable", state.version, f"{parts}; engines cannot be built here: {builder}")
    targets = f" for compute capability {', '.join(state.capabilities)}" if state.capabilities else ""
    use = "engines can be built but not run here" if state.missing() else "builds and runs engines"
    return Capability(state.name, "available", state.version, f"{parts}; {use}{targets}")


def why_engine_cannot_run(artifact: ArtifactManifest, state: TensorRTState | None = None) -> str | None:
    """Return why this system (``state``; None: probe it) cannot run an engine, by its ``built_for``, or None."""
    runtime = RUNTIMES[artifact.format]
    state = state or tensorrt_state(runtime)
    built_for = artifact.built_for or {}
    if state.missing():
        needs = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in built_for.items()) or "an unknown GPU"
        remedy = f" ({REMEDIES[runtime]})" if not state.is_installed else ""
        return (
            f"this {artifact.format} engine was built for {needs} and cannot run here: {state.missing()}{remedy}; "
            "use an ONNX artifact of the bundle, or copy the bundle to its target"
        )
    version = built_for.get(runtime)
    if version is not None and version != state.version:
        return (
            f"this engine was built by {runtime} {version}, and {runtime} {state.version} is installed here; "
            f"engines run only with the version that built them: install {runtime}=={version}, or {_REBUILD}"
        )
    # Engines are opened on the first GPU.
    gpu, name, capability = state.gpus[0], built_for.get("gpu"), built_for.get("compute_capability")
    if capability is not None and capability != gpu.compute_capability:
        gpu_prefix = f"{name} with " if name else ""
        return (
            f"this engine was built for {gpu_prefix}compute capability {capability}, but this GPU is "
            f"{gpu.name} with {gpu.compute_capability}; {_REBUILD}"
        )
    if name is not None and name != gpu.name:
        return f"this {artifact.format} engine was built for the GPU {name}, but this one is {gpu.name}; {_REBUILD}"
    return None


def measured_on() -> dict[str, str]:
    """Return GPU and driver of this system, for engines whose kernels were timed on it."""
    return {"gpu": cuda_driver.devices()[0].name, "driver": nvidia.driver_version() or "unknown"}


@cache
def tensorrt_log(trt: ModuleType) -> Any:
    """Return the logger of a TensorRT package, which prints nothing. TensorRT uses only the first of a process."""

    class Log(trt.ILogger):  # type: ignore[misc,name-defined]
        """Latest (severity, text) except VERBOSE ones, the builder's listing of the latest engine's layers, and an
        exception raised while a message was recorded, e.g. by Ctrl-C, which must not propagate through TensorRT."""

        def clear(self) -> None:
            self.messages: deque[tuple[str, str]] = deque(maxlen=10_000)
            self.listing = ""
            self.interruption: BaseException | None = None

        def log(self, severity: Any, text: str) -> None:
            try:
                if severity.name != "VERBOSE":
                    self.messages.append((severity.name, text))
                elif text.startswith("Layers:"):
                    self.listing = text
            except BaseException as error:
                self.interruption = error

        def texts(self, *severities: str) -> tuple[str, ...]:
            """Return the distinct texts of these severities in order."""
            return tuple(dict.fromkeys(text for severity, text in self.messages if severity in severities))

        def last_error(self) -> str:
            errors = self.texts("INTERNAL_ERROR", "ERROR")
            return errors[-1].strip().splitlines()[0][:300] if errors else "TensorRT gives no reason"

    log = Log()
    log.clear()
    return log
