"""torch: runs the modules of checkpoints.

Bundles do not need torch. To compare runtimes, it stands in for a language model's FP32 decode graph, with the weights
of the run in whose folder the bundle lies.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

from edgeformer.artifacts.errors import ArtifactError, InputError, install_hint
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest
from edgeformer.artifacts.workspace import MODEL_FOLDER
from edgeformer.runtimes.decoder import Decoder
from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions, ProviderFacts, Runtime
from edgeformer.system import capability, cuda_driver, nvidia
from edgeformer.system.capability import Answer, Capability

_CPU_ONLY = "for a CPU-only torch, first install torch with the command that pytorch.org's selector gives for CPU"
_SCRIPTS = {
    "torch": """
import torch
cuda = torch.cuda.is_available()
say(version=torch.__version__, built_for=torch.version.cuda or "cpu", cuda=cuda,
    devices=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [])
from edgeformer.models.blocks.segments import kernel_problems
say(flash=kernel_problems())
""",
}


class TorchRuntime(Runtime):
    name = "torch"
    reads = (ONNX,)
    distributions = ("torch", "accelerate", "safetensors")
    session_modules = ("edgeformer.models.weights",)
    facts: ClassVar = {
        "torch-cpu": ProviderFacts("torch-cpu", "cpu"),
        "torch-cuda": ProviderFacts("torch-cuda", "cuda"),
    }

    def also_opens(self, artifact: ArtifactManifest) -> bool:
        is_full = artifact.precision == "fp32" and not artifact.trimmed
        return is_full and artifact.role == "decode" and super().also_opens(artifact)

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        if (problem := super().cannot_run(artifact)) is not None or capability.installed_version("torch"):
            return problem
        return f"package: torch is not installed ({install_hint('train')})"

    def open_decoder(self, files: ArtifactFiles, exits: Collection[int] | None, options: OpenOptions) -> Decoder[Any]:
        import torch

        from edgeformer.models import model_spec_of, read_run_recipe
        from edgeformer.models.weights import load_model
        from edgeformer.runtimes.torch.session import TorchEngine

        run = files.file.parents[len(Path(str(files.artifact.file)).parts)]  # the folder around the bundle's
        if not (run / MODEL_FOLDER).is_dir():
            raise ArtifactError(f"{run}: is no run; torch needs its weights, so measure the bundle in its folder")
        torch.set_num_threads(options.threads or torch.get_num_threads())
        model: Any = load_model(run).to(self.device(options.provider))
        return Decoder(TorchEngine(model_spec_of(read_run_recipe(run)).adapter.decoder(model)))

    def device(self, provider: str | None) -> str:
        """Return torch's name of the device that ``provider`` computes on; None: a GPU if torch finds one.

        Raises InputError for another provider or without a GPU, ModuleNotFoundError without torch.
        """
        import torch

        card = torch.cuda.is_available()
        if provider is None:
            return "cuda" if card else "cpu"
        if provider not in self.facts:
            raise InputError(f"--runtime {provider}: cannot run the weights of a run; use {' or '.join(self.facts)}")
        if provider == "torch-cuda" and not card:
            raise InputError(
                f"--runtime {provider}: torch finds no CUDA card; run edgeformer doctor, or leave out --runtime"
            )
        return provider.removeprefix("torch-")

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        answer = capability.ask_installed(_SCRIPTS, timeout_s)["torch"]
        return [*describe(answer, cuda_driver.problem()), capability.describe_extra("train")]


def describe(answer: Answer | None, driver: str | None) -> list[Capability]:
    """Return the lines of ``doctor`` about torch and about flash attention in training.

    ``answer`` None: torch is not installed; ``driver``: why CUDA's driver cannot be used.
    """
    facts = {} if answer is None else answer.facts
    problems = facts.get("flash", {}) if facts.get("cuda") else {"": "torch finds no CUDA card"}
    kernels = [name for name, problem in problems.items() if problem is None]
    detail = "; ".join(kernels or filter(None, problems.values()))
    flash = Capability("flash attention", "available" if kernels else "unavailable", None, detail)
    if answer is None:
        remedy = f"{install_hint('train')}; {_CPU_ONLY}; bundles work without torch"
        return [Capability("torch", "unavailable", None, "not installed", remedy), flash]
    if answer.error is not None:
        remedy, version = install_hint("train", reinstall=True), capability.installed_version("torch")
        return [Capability("torch", "unavailable", version, answer.error, remedy), flash]
    hint: str | None = None
    if facts.get("cuda"):
        detail = f"CUDA {facts.get('built_for')} on {', '.join(facts.get('devices', []))}"
    elif facts.get("built_for") == "cpu":
        detail = "CPU build: trains on the CPU"
        if driver is None:
            hint = "this machine has a CUDA driver: install a CUDA build of torch (see the README)"
    else:
        too_old = capability.driver_too_old(facts.get("built_for"), nvidia.driver_version())
        why = driver or too_old or "torch finds no card"
        detail = f"built for CUDA {facts.get('built_for')}, trains on the CPU: {why}"
        hint = None if driver is None else _CPU_ONLY
    return [Capability("torch", "available", facts.get("version"), detail, hint), flash]


RUNTIME = TorchRuntime()
