"""torch: runs the modules of checkpoints. It opens no artifact of a bundle, because bundles do not need torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from edgeformer.artifacts.errors import InputError, install_hint
from edgeformer.runtimes.runtime import ProviderFacts, Runtime
from edgeformer.system import cuda_driver, nvidia
from edgeformer.system.capability import (
    Answer,
    Capability,
    ask_installed,
    describe_extra,
    driver_too_old,
    installed_version,
)

_CPU_ONLY = "for a CPU-only torch, first install torch with the command that pytorch.org's selector gives for CPU"
_SCRIPTS = {
    "torch": """
import torch
cuda = torch.cuda.is_available()
say(version=torch.__version__, built_for=torch.version.cuda or "cpu", cuda=cuda,
    devices=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [])
""",
}


class TorchRuntime(Runtime):
    name = "torch"
    distributions = ("torch", "accelerate", "safetensors")
    facts: ClassVar = {
        "torch-cpu": ProviderFacts("torch-cpu", "cpu"),
        "torch-cuda": ProviderFacts("torch-cuda", "cuda"),
    }

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
        answers = ask_installed(_SCRIPTS, timeout_s)
        return [describe_torch(answers["torch"], cuda_driver.problem()), describe_extra("train")]


def describe_torch(answer: Answer | None, driver: str | None) -> Capability:
    """Return torch's line of ``doctor``; ``driver``: why CUDA's driver cannot be used."""
    if answer is None:
        remedy = f"{install_hint('train')}; {_CPU_ONLY}; bundles work without torch"
        return Capability("torch", "unavailable", None, "not installed", remedy)
    if answer.error is not None:
        remedy = install_hint("train", reinstall=True)
        return Capability("torch", "unavailable", installed_version("torch"), answer.error, remedy)
    facts = answer.facts
    hint: str | None = None
    if facts.get("cuda"):
        detail = f"CUDA {facts['built_for']} on {', '.join(facts.get('devices', []))}"
    elif facts.get("built_for") == "cpu":
        detail = "CPU build: trains on the CPU"
        if driver is None:
            hint = "this machine has a CUDA driver: install a CUDA build of torch (see the README)"
    else:
        too_old = driver_too_old(facts.get("built_for"), nvidia.driver_version())
        why = driver or too_old or "torch finds no card"
        detail = f"built for CUDA {facts.get('built_for')}, trains on the CPU: {why}"
        hint = None if driver is None else _CPU_ONLY
    return Capability("torch", "available", facts.get("version"), detail, hint)


RUNTIME = TorchRuntime()
