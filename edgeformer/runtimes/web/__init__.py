"""Browsers: their providers, and the libraries of a page. This runtime opens no sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from edgeformer.runtimes.runtime import ProviderFacts, Runtime
from edgeformer.runtimes.web.libraries import WASM, WEBGPU
from edgeformer.system.capability import Capability


class BrowserRuntime(Runtime):
    name = "web"
    facts: ClassVar = {
        WASM: ProviderFacts("WASM", "cpu", counts_threads=True),
        WEBGPU: ProviderFacts("WebGPU"),  # no kind: the browser may use any GPU
    }

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        return [
            Capability(
                "browser",
                "available",
                None,
                "edgeformer page writes a page that runs and measures a bundle in a browser",
            )
        ]


RUNTIME = BrowserRuntime()
