"""What of TensorRT works here, with package, libraries, driver and device told apart: each fails for its own reason.

Whether an engine can run here is told from its manifest, before TensorRT touches the file. An engine is bound to the
TensorRT version that built it and to the GPU's compute capability (built by ``tensorrt``: to the GPU model); elsewhere
TensorRT fails with texts that name neither side, or ends the process.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import util
from pathlib import Path
from typing import Literal

from edgeformer.artifacts.errors import ArtifactError, MissingDependencyError, install_hint
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.system import cuda_driver, nvidia
from edgeformer.system.capability import Answer, Capability, ask_installed, installed_version

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


def trt_hint(python: tuple[int, int]) -> str:
    """Return how to install the extra ``trt``, or that this version of Python has no torch-tensorrt for our torch."""
    if python >= (3, 14):
        return (
            f"on a CUDA machine, in an environment with Python 3.10 to 3.13: {install_hint('trt')}; torch-tensorrt for "
            f"torch 2.11 to 2.13 has no wheel for Python {python[0]}.{python[1]}"
        )
    return f"on a CUDA machine: {install_hint('trt')}"


REMEDIES: dict[Package, str] = {
    "tensorrt-rtx": install_hint("rtx"),
    "tensorrt": f"{trt_hint(sys.version_info[:2])}; on a Jetson it comes with JetPack, and an environment "
    "sees it that was made with python3 -m venv --system-site-packages",
    "torch-tensorrt": trt_hint(sys.version_info[:2]),
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
    """One of the TensorRTs on this machine.

    Attributes:
        version: None where the package is absent or its libraries do not load.
        problems: part → what is wrong with it: package, libraries, driver, device; ``builder``: why engines cannot be
            built although package and libraries work.
        capabilities: compute capabilities that it builds for; empty: the GPU's own only.
        gpus: what CUDA programs may use here.
    """

    name: Package
    version: str | None = None
    problems: Mapping[str, str] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    gpus: tuple[cuda_driver.Device, ...] = ()

    def installed(self) -> bool:
        """Package and libraries work."""
        return not self._listed("package", "libraries")

    def missing(self) -> str:
        """What is missing to run engines, part by part: ``package: not installed; driver: …``. Empty: nothing."""
        return self._listed("package", "libraries", "driver", "device")

    def missing_to_build(self) -> str:
        """What is missing to build them; tensorrt-rtx needs neither driver nor device for that. Empty: nothing."""
        card = () if self.name == "tensorrt-rtx" else ("driver", "device")
        return self._listed("package", "libraries", "builder", *card)

    def _listed(self, *parts: str) -> str:
        return "; ".join(f"{part}: {self.problems[part]}" for part in parts if part in self.problems)


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
    facts = answer.facts if answer is not None else {}
    version, problems = facts.get("version"), dict[str, str]()
    if answer is None:
        problems["package"] = "not installed"
    elif version is None:
        problems["libraries"] = f"do not load ({answer.error})"
        version = installed_version(*DISTRIBUTIONS[name])
    elif name == "tensorrt" and int(str(version).partition(".")[0]) < _OLDEST_TENSORRT:
        problems["builder"] = (
            f"TensorRT {version} has no strongly typed networks; {_OLDEST_TENSORRT}.0 or newer is needed"
        )
    elif not facts.get("builder"):
        problems["builder"] = f"does not start ({answer.error or 'no builder'})"
    if driver is not None:
        problems["driver"] = driver
    if not gpus:
        problems["device"] = "no NVIDIA GPU is present"
    return TensorRTState(name, version, problems, tuple(facts.get("capabilities", ())), tuple(gpus))


def describe(state: TensorRTState) -> Capability:
    """The line of `doctor`."""
    if not state.installed():
        return Capability(state.name, "unavailable", state.version, state.missing(), REMEDIES[state.name])
    driver, device = state.problems.get("driver", "works"), state.problems.get("device", "present")
    parts = f"package and libraries: work; driver: {driver}; device: {device}"
    if state.missing_to_build():
        builder = state.problems.get("builder", "it builds only on the GPU that the engine is for")
        return Capability(state.name, "unavailable", state.version, f"{parts}; engines cannot be built here: {builder}")
    targets = f" for compute capability {', '.join(state.capabilities)}" if state.capabilities else ""
    use = "engines can be built but not run here" if state.missing() else "builds and runs engines"
    return Capability(state.name, "available", state.version, f"{parts}; {use}{targets}")


def why_engine_cannot_run(artifact: ArtifactManifest, here: TensorRTState | None = None) -> str | None:
    """None when this machine can run the engine.

    Args:
        artifact: an engine of a bundle; ``built_for`` says what it needs.
        here: what works here; None: ask.
    """
    # What torch-tensorrt wrote before it wrote engines: a program that ``torch.export.load`` unpickles.
    if artifact.format == "torch-tensorrt" and artifact.file is not None and Path(artifact.file).suffix == ".ep":
        return _PICKLED
    runtime = RUNTIMES[artifact.format]
    here = here or tensorrt_state(runtime)
    wanted = artifact.built_for or {}
    needs = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in wanted.items()) or "an unknown GPU"
    if here.missing():
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
    # The first GPU is the one that an engine is opened on.
    gpu, name, capability = here.gpus[0], wanted.get("gpu"), wanted.get("compute_capability")
    if capability is not None and capability != gpu.compute_capability:
        named = f"{name} with " if name else ""
        return (
            f"this engine was built for {named}compute capability {capability}, but this GPU is "
            f"{gpu.name} with {gpu.compute_capability}; {_REBUILD}"
        )
    if name is not None and name != gpu.name:
        return f"this {artifact.format} engine was built for the GPU {name}, but this one is {gpu.name}; {_REBUILD}"
    return None


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
    fault = refusal == _PICKLED or not tensorrt_state(RUNTIMES[artifact.format]).missing()
    raise (ArtifactError if fault else MissingDependencyError)(f"{path}: {refusal}")


def measured_on() -> dict[str, str]:
    """GPU and driver of this machine, for engines whose kernels were measured on it."""
    return {"gpu": cuda_driver.devices()[0].name, "driver": nvidia.driver_version() or "unknown"}


# What `doctor` says of a Jetson: which JetPack it has, what edgeformer can do with that, and what a venv hides.
#
# Nobody has run edgeformer on a Jetson. What stands here was read in NVIDIA's release notes and in the reports of
# users.


_RELEASE = Path("etc/nv_tegra_release")
_TENSORRT = "usr/lib/python3*/dist-packages/tensorrt"
_OF_RELEASE = {
    (35, 0): (
        "JetPack 5",
        "its Python is 3.8, where 3.10 is needed, and its TensorRT 8 has no strongly typed networks",
    ),
    (36, 0): ("JetPack 6.0", "its TensorRT 8.6 has no strongly typed networks"),
    (36, 4): ("JetPack 6.1 or 6.2", None),
    (38, 0): ("JetPack 7", None),
}
"""(L4T release, its first revision) → what it is called, and why no engine is built or run there."""


def jetson_capability(root: Path = Path("/")) -> list[Capability]:
    """The line of a Jetson; none on other machines.

    Args:
        root: where the system's files lie.
    """
    try:
        text = (root / _RELEASE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", text)
    if found is None:
        return [Capability("jetpack", "unavailable", None, f"{root / _RELEASE} names no release")]
    release, revision = int(found[1]), found[2]
    known = [key for key in _OF_RELEASE if key <= (release, int(revision.split(".")[0]))]
    name, problem = _OF_RELEASE[max(known)] if known else ("JetPack 4 or older", "its Python is older than 3.10")
    version, detail = f"L4T {release}.{revision}", f"{name}; nobody has run edgeformer on a Jetson yet"
    if problem is not None:
        remedy = "ONNX graphs run on its processor with Python 3.10 or newer; engines need JetPack 6.1 or newer"
        return [Capability("jetpack", "unavailable", version, f"{detail}; {problem}", remedy)]
    if hidden := hidden_tensorrt(root):
        return [Capability("jetpack", "unavailable", version, f"{detail}; {hidden}", _SEEN)]
    return [Capability("jetpack", "available", version, detail)]


_SEEN = (
    "make the environment anew with the system's own Python: python3 -m venv --system-site-packages .venv; no index "
    "has TensorRT for a Jetson"
)


def hidden_tensorrt(root: Path = Path("/")) -> str | None:
    """Why JetPack's TensorRT cannot be imported although it is installed; None: it can be, or is not there.

    Args:
        root: where the system's files lie.
    """
    installed = sorted(root.glob(_TENSORRT))
    if not installed or util.find_spec("tensorrt") is not None:
        return None
    own = re.sub(r"\D*", "", installed[0].parts[-3].removeprefix("python3"))
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    if own and own != str(sys.version_info.minor):
        return f"JetPack's TensorRT in {installed[0]} is for Python 3.{own}, and this is Python {mine}"
    return f"JetPack's TensorRT in {installed[0]} is not seen from this environment ({sys.prefix})"
