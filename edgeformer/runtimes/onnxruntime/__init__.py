"""ONNX Runtime: runs a bundle's ONNX graphs on any provider of the installed ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgeformer.artifacts.manifest import ONNX, ArtifactManifest
from edgeformer.runtimes.onnxruntime import providers
from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions, ProviderFacts, Runtime
from edgeformer.runtimes.session import Graph, Kind

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile
    from edgeformer.system.capability import Capability


class OnnxRuntime(Runtime):
    name = "onnxruntime"
    formats = (ONNX,)
    distributions = ("onnxruntime", "onnxruntime-gpu")
    session_modules = ("edgeformer.runtimes.decoder", "edgeformer.runtimes.onnxruntime.session")

    def open_graph(self, path: Path, files: ArtifactFiles, options: OpenOptions) -> Graph:
        from edgeformer.runtimes.onnxruntime.session import OnnxSession

        provider, role = options.provider or providers.default_provider(), files.artifact.role
        facts = self.provider_facts(provider)
        # On the CPU, arrays are cheaper than I/O binding: ONNX Runtime returns them without a copy.
        on_card = role in ("step", "decode") and facts is not None and facts.kind == "cuda"
        return OnnxSession(
            path, provider, options.threads, files.max_positions, in_turns=options.in_turns or role == "step",
            cache_device="cuda" if on_card else None,
        )  # fmt: skip

    def provider(self, artifact: ArtifactManifest, requested: str | None = None, kind: Kind | None = None) -> str:
        return requested or providers.default_provider(kind)

    def provider_facts(self, provider: str) -> ProviderFacts | None:
        if not provider.endswith(providers.SUFFIX):
            return None
        kind = providers.PROVIDERS.get(provider, providers.Provider()).kind
        is_cpu = provider == providers.CPU
        name = "ONNX Runtime" if is_cpu else f"ONNX Runtime {provider.removesuffix(providers.SUFFIX)}"
        return ProviderFacts(name, kind, counts_threads=is_cpu)

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        from edgeformer.system import cuda_driver
        from edgeformer.system.capability import ask_installed

        answers = ask_installed(providers.SCRIPTS, timeout_s)
        return providers.describe(answers["onnxruntime"], cuda_driver.problem(), answers[providers.PLUGIN])

    def estimable(self, artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
        products = artifact.quantized.get("MatMulInteger", 0)
        if device.kind == "cuda" and products:
            return (
                f"its {products} products in INT8 (MatMulInteger, uint8 × int8) cannot run on the card: ONNX Runtime's "
                "CUDA provider multiplies int8 by int8 only and leaves them to the CPU; use FP16 there"
            )
        if device.kind == "cuda" and artifact.precision == "int4":
            return "estimates of products with 4-bit weights were never checked on a card"
        return None


RUNTIME = OnnxRuntime()
