"""The openvino package: imported without its telemetry, and what it can compute with on this machine.

Importing openvino, and importing nncf, imports ``openvino_telemetry`` where that is installed: it writes an identifier
into the user's home and sends a message with every import, unless the user has forbidden it. Both packages go on
without it where it cannot be imported, so that is what they find here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import util
from typing import Any

from edgeformer.formats.errors import MissingDependencyError, install_hint

EXTRA = "openvino"
TELEMETRY = "openvino_telemetry"
CPU, CPU_BF16 = "openvino-cpu", "openvino-cpu-bf16"
"""The processor, in FP32 (INT8 graphs: what is not INT8); and with products in bfloat16."""

HINTS = {CPU: "f32", CPU_BF16: "bf16"}
"""Provider → what it computes FP32 graphs in. Left to itself, OpenVINO takes bfloat16 wherever the processor has it."""

STREAMS = 1
"""Calls that run at the same time: ours come one after the other, and each wants all threads."""


def missing() -> str | None:
    """Why the package cannot be used; None: it is installed."""
    if util.find_spec("openvino") is not None:
        return None
    return f"package: openvino is not installed ({install_hint(EXTRA)})"


@contextmanager
def without_telemetry() -> Iterator[None]:
    """While openvino or nncf are imported: their telemetry is not there."""
    before = sys.modules.get(TELEMETRY)
    sys.modules[TELEMETRY] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del sys.modules[TELEMETRY]
        else:
            sys.modules[TELEMETRY] = before


@cache
def openvino() -> Any:
    """The package. Raises MissingDependencyError where it is not installed, or does not work."""
    problem = missing()
    if problem is not None:
        raise MissingDependencyError(problem)
    with without_telemetry():
        try:
            import openvino as package
        except Exception as error:  # of its libraries: any class
            hint = install_hint(EXTRA, again=True)
            raise MissingDependencyError(f"openvino is installed, but cannot be imported: {error}; {hint}") from None
    return package


@cache
def core() -> Any:
    """What opens and compiles graphs; one for the process. Raises as :func:`openvino` does."""
    return openvino().Core()


def bf16_missing() -> str | None:
    """Why nothing is computed in bfloat16 here; None: it is. Raises as :func:`openvino` does."""
    if "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return None
    return "this processor has no bfloat16 instructions (avx512_bf16, avx_ne_convert, amx_bf16 or Arm's bf16)"
