"""OpenVINO: looked for by ``doctor``. edgeformer opens nothing with it yet."""

from __future__ import annotations

from collections.abc import Sequence

from edgeformer.backends.backend import Backend
from edgeformer.formats.errors import install_hint
from edgeformer.machine.capability import Capability, ask_installed, describe_package

_SCRIPTS = {
    "openvino": """
import openvino
say(version=openvino.__version__, devices=openvino.Core().available_devices)
"""
}


class OpenVINOBackend(Backend):
    name = "openvino"

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        answer = ask_installed(_SCRIPTS, timeout_s)["openvino"]
        return [describe_package("openvino", answer, install_hint("openvino"))]


BACKEND = OpenVINOBackend()
