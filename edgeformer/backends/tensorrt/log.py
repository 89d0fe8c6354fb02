"""What TensorRT says while it parses, builds and opens engines: collected, never printed."""

from __future__ import annotations

from collections import deque
from functools import cache
from types import ModuleType
from typing import Any

LISTING = "Layers:"
"""How the builder's listing of the finished engine begins, a VERBOSE message."""

_ERRORS = ("INTERNAL_ERROR", "ERROR")
_KEPT = (*_ERRORS, "WARNING", "INFO")
_MOST = 10_000


class TensorRTLog:
    """Messages by severity. TensorRT keeps the first logger that a process gives it, so there is one per package.

    Attributes:
        logger: what TensorRT's constructors take.
        messages: (severity, text) since :meth:`clear`, the latest of them; severities are TensorRT's own names. Of
            the tens of thousands of VERBOSE ones only the listing of the engine is kept.
    """

    def __init__(self, trt: Any) -> None:
        self.messages: deque[tuple[str, str]] = deque(maxlen=_MOST)
        self.interruption: BaseException | None = None
        collected = self

        class _Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, text: str) -> None:
                # An exception (Ctrl-C may arrive here) must not travel through TensorRT's own code.
                try:
                    if severity.name in _KEPT or text.startswith(LISTING):
                        collected.messages.append((severity.name, text))
                except BaseException as error:
                    collected.interruption = error

        self.logger: Any = _Logger()

    def clear(self) -> None:
        """Forget everything."""
        self.messages.clear()
        self.interruption = None

    def listing(self) -> str | None:
        """The builder's listing of the engine that it built last; None where this builder has none."""
        return next((text for _, text in reversed(self.messages) if text.startswith(LISTING)), None)

    def of(self, *severities: str) -> tuple[str, ...]:
        """Texts of these severities, each once, in order."""
        return tuple(dict.fromkeys(text for severity, text in self.messages if severity in severities))

    def errors(self) -> tuple[str, ...]:
        """Error texts."""
        return self.of(*_ERRORS)

    def last_error(self) -> str | None:
        """The latest error, cut to a line."""
        errors = self.errors()
        return errors[-1].strip().splitlines()[0][:300] if errors else None


@cache
def tensorrt_log(trt: ModuleType) -> TensorRTLog:
    """The one log of a TensorRT package in this process."""
    return TensorRTLog(trt)
