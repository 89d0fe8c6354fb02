"""Browsers: what computes a graph there, and the libraries that a page needs for it. No session is opened from here."""

from __future__ import annotations

from collections.abc import Sequence

from edgeformer.runtimes.runtime import ProviderFacts, Runtime
from edgeformer.runtimes.web.libraries import WASM, WEBGPU
from edgeformer.system.capability import Capability

_FACTS = {
    WASM: ProviderFacts("WASM", "cpu", counts_threads=True),
    # On whatever graphics chip the browser is given, NVIDIA or not.
    WEBGPU: ProviderFacts("WebGPU"),
}


class BrowserRuntime(Runtime):
    name = "web"

    def provider_facts(self, provider: str) -> ProviderFacts | None:
        return _FACTS.get(provider)

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        return [Capability("browser", "available", None, "edgeformer page writes a page that runs and measures there")]


RUNTIME = BrowserRuntime()
