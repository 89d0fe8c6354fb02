"""Train, export and honestly benchmark small weight-shared transformers for edge devices.

The Python API is imported when it is first used: ``edgeformer.open``, ``train``, ``plan``, ``import_onnx``, ``Bundle``
and ``Run``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgeformer._version import __version__

if TYPE_CHECKING:
    from edgeformer.api import Bundle, Run, import_onnx, open, plan, train

__all__ = ["Bundle", "Run", "__version__", "import_onnx", "open", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from edgeformer import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
