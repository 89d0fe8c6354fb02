"""torch: modules of the model families, run as they are. Opens nothing from a bundle: bundles never need torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata, util
from typing import TYPE_CHECKING

from edgeformer.backends.backend import Backend, Kind, ProviderFacts
from edgeformer.formats.errors import InputError, install_hint
from edgeformer.machine import cuda_driver
from edgeformer.machine.capability import Answer, Capability, ask_installed, describe_package, installed_version

if TYPE_CHECKING:
    from edgeformer.formats.manifest import ArtifactManifest

_PROVIDERS: dict[str, Kind] = {"torch-cpu": "cpu", "torch-cuda": "cuda"}
_FLASH_REMEDY = f"optional, on a CUDA machine: {install_hint('flash')}; torch's SDPA is used without it"
_SCRIPTS = {
    "torch": """
import torch
cuda = torch.cuda.is_available()
say(version=torch.__version__, built_for=torch.version.cuda or "cpu", cuda=cuda,
    devices=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [])
""",
    "flash_attn": "import flash_attn\nsay(version=flash_attn.__version__)\n",
}


class TorchBackend(Backend):
    name = "torch"
    distributions = ("torch", "accelerate", "safetensors", "flash-attn")

    def providers(self) -> tuple[str, ...]:
        """The CPU where torch is installed; whether it finds a card is a question for ``doctor``."""
        return ("torch-cpu",) if util.find_spec("torch") is not None else ()

    def provider(self, artifact: ArtifactManifest, wanted: str | None = None, kind: Kind | None = None) -> str:
        return wanted or f"torch-{kind or 'cpu'}"

    def device(self, provider: str | None) -> str:
        """The kind of device, as torch calls it, that ``provider`` computes on; None: a card where torch sees one.

        Raises:
            InputError: it is not one of this runtime's, or there is no card.
            ModuleNotFoundError: torch is not installed.
        """
        import torch

        card = torch.cuda.is_available()
        if provider is None:
            return "cuda" if card else "cpu"
        if provider not in _PROVIDERS:
            raise InputError(f"--runtime {provider}: torch computes as {' or '.join(_PROVIDERS)}")
        if _PROVIDERS[provider] == "cuda" and not card:
            raise InputError(
                f"--runtime {provider}: torch sees no CUDA card here; run edgeformer doctor, or leave it out"
            )
        return _PROVIDERS[provider]

    def provider_facts(self, provider: str) -> ProviderFacts | None:
        return ProviderFacts(provider, _PROVIDERS[provider]) if provider in _PROVIDERS else None

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        answers = ask_installed(_SCRIPTS, timeout_s)
        flash = describe_package("flash-attn", answers["flash_attn"], _FLASH_REMEDY)
        return [_torch(answers["torch"], cuda_driver.problem()), _extra("train"), flash]


def _torch(answer: Answer | None, driver: str | None) -> Capability:
    if answer is None:
        remedy = f"{install_hint('train')}; what works from a bundle does not need it"
        return Capability("torch", "unavailable", None, "not installed", remedy)
    if answer.error is not None:
        remedy = install_hint("train", again=True)
        return Capability("torch", "unavailable", installed_version("torch"), answer.error, remedy)
    facts = answer.facts
    hint: str | None = None
    if facts.get("cuda"):
        detail = f"CUDA {facts['built_for']} on {', '.join(facts.get('devices', []))}"
    elif facts.get("built_for") == "cpu":
        detail = "CPU build: trains on the CPU"
        if driver is None:
            hint = "a CUDA driver is here: install a CUDA build of torch (see the README)"
    else:
        detail = f"built for CUDA {facts.get('built_for')}, trains on the CPU: {driver or 'torch finds no card'}"
    return Capability("torch", "available", facts.get("version"), detail, hint)


def _extra(extra: str) -> Capability:
    """Whether the packages of one of edgeformer's extras are all installed."""
    try:
        requirements = metadata.requires("edgeformer") or []
    except metadata.PackageNotFoundError:
        return Capability(f"extra [{extra}]", "unavailable", None, "edgeformer itself is not installed")
    pattern = re.compile(r"^([A-Za-z0-9._-]+).*;.*extra == ['\"]" + re.escape(extra) + r"['\"]")
    names = [match.group(1) for match in map(pattern.match, requirements) if match]
    missing = [name for name in names if installed_version(name) is None]
    if missing:
        detail = f"missing: {', '.join(missing)}"
        return Capability(f"extra [{extra}]", "unavailable", None, detail, install_hint(extra))
    return Capability(f"extra [{extra}]", "available", None, f"complete: {', '.join(names)}")


BACKEND = TorchBackend()
