"""What TensorRT says while it parses, builds and opens engines: collected and read, never printed.

Three things: its messages; the listing of a finished engine's layers, which the builder writes to the log while it
builds (which needs no GPU) and the inspector of an opened engine (which does) says again; and its progress.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from edgeformer.artifacts.progress import Progress

LISTING = "Layers:"
"""How the builder's listing of the finished engine begins, a VERBOSE message."""

_ERRORS = ("INTERNAL_ERROR", "ERROR")
_KEPT = (*_ERRORS, "WARNING", "INFO")
_MOST = 10_000
PARTS = 100

_PRECISIONS = {
    "Half": "FP16", "FP16": "FP16", "Float": "FP32", "FP32": "FP32", "BFloat16": "BF16", "BF16": "BF16",
    "Int64": "INT64", "Int32": "INT32", "Int8": "INT8", "Bool": "BOOL",
}  # fmt: skip
_LAYER = re.compile(r"^Name: .*?, LayerType: .*?, Inputs: \[.*?\], Constants: \[(.*)\], Outputs: \[(.*)\], TacticName")
_TENSOR = re.compile(r"Name: .+?, Dimensions: \[([\d,-]*)\].*?Datatype: (\w+)")
_Tensor = tuple[str, str]  # dimensions, as "3,4", and type
_TOTALS = {"weights": "Total Weights Memory", "activations": "Total Activation Memory"}


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

    def last_error(self) -> str | None:
        """The latest error, cut to a line."""
        errors = self.of(*_ERRORS)
        return errors[-1].strip().splitlines()[0][:300] if errors else None


@cache
def tensorrt_log(trt: ModuleType) -> TensorRTLog:
    """The one log of a TensorRT package in this process."""
    return TensorRTLog(trt)


@dataclass(frozen=True)
class Layers:
    """The layers of an engine.

    Attributes:
        by_precision: of their outputs.
        weight_elements: precision → elements of the weights, counted once per layer that reads them.
    """

    count: int | None = None
    by_precision: dict[str, int] = field(default_factory=dict)
    weight_elements: dict[str, int] = field(default_factory=dict)


def read_listing(text: str) -> Layers | None:
    """Layers from the builder's log; None where its format is not the known one."""
    layers = [found.groups() for found in map(_LAYER.match, text.splitlines()) if found is not None]
    return _counted([(_TENSOR.findall(outputs), _TENSOR.findall(constants)) for constants, outputs in layers])


def read_inspector(text: str) -> Layers | None:
    """Layers from an inspector's JSON; None where it holds names only, or something else."""
    try:
        layers: list[dict[str, Any]] = [one for one in json.loads(text)["Layers"] if isinstance(one, dict)]
        return _counted(
            [
                (
                    [("", _kind(one)) for one in layer["Outputs"]],
                    [(",".join(map(str, one["Dimensions"])), _kind(one)) for one in layer.get("Constants", [])],
                )
                for layer in layers
            ]
        )
    except (ValueError, KeyError, TypeError):
        return None


def _kind(tensor: dict[str, Any]) -> str:
    """``Half`` of newer versions, ``Row major linear FP16 format`` of older ones."""
    text = str(tensor.get("Datatype") or tensor.get("Format/Datatype"))
    return next((word for word in text.split() if word in _PRECISIONS), text)


def _counted(layers: list[tuple[list[_Tensor], list[_Tensor]]]) -> Layers | None:
    """Of each layer its outputs and constants; None where there is no layer."""
    elements: Counter[str] = Counter()
    by_precision: Counter[str] = Counter()
    for outputs, constants in layers:
        by_precision.update(_PRECISIONS.get(kind, kind) for _, kind in outputs)
        for dimensions, kind in constants:
            elements[_PRECISIONS.get(kind, kind)] += math.prod(int(size) for size in dimensions.split(",") if size)
    return Layers(len(layers), dict(sorted(by_precision.items())), dict(sorted(elements.items()))) if layers else None


def read_total(messages: Iterable[str], what: str) -> int | None:
    """Bytes of the engine's ``weights`` or ``activations`` as the builder logs them; None where it does not."""
    for message in messages:
        found = re.search(rf"{_TOTALS[what]}: (\d+) bytes", message)
        if found is not None:
            return int(found.group(1))
    return None


class Phases:
    """How much of the whole is done: a phase inside another one is part of that one's current step."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._open: dict[str, tuple[int, int]] = {}  # phase → steps that are done, of how many
        self._shown = 0

    def start(self, name: str, steps: int) -> None:
        """A phase begins inside those that are open."""
        self._open[name] = (0, max(1, steps))

    def step(self, name: str) -> None:
        """A step of an open phase is done."""
        if name in self._open:
            done, steps = self._open[name]
            self._open[name] = (min(done + 1, steps), steps)
        part, width = 0.0, 1.0
        for done, steps in self._open.values():
            part += width * done / steps
            width /= steps
        self.reach(round(PARTS * part))

    def finish(self, name: str) -> None:
        """A phase ends."""
        self._open.pop(name, None)

    def reach(self, part: int) -> None:
        """So much is done. At the end all of it: builders skip steps that they announced."""
        # A phase may be repeated; what was shown is not taken back.
        reached = max(self._shown, min(PARTS, part))
        self._progress.advance(reached - self._shown)
        self._shown = reached


def progress_monitor(trt: Any, progress: Progress) -> Any:
    """What a builder's configuration takes as ``progress_monitor``, or None where this TensorRT has none.

    An exception (Ctrl-C, or of ``progress``) cancels the build and is kept in the monitor's ``interruption``: it must
    not travel through TensorRT's own code.
    """
    if not hasattr(trt, "IProgressMonitor"):
        return None

    class _Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.interruption: BaseException | None = None
            self.phases = Phases(progress)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._guarded(self.phases.start, phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._guarded(self.phases.step, phase_name)
            return self.interruption is None

        def phase_finish(self, phase_name: str) -> None:
            self._guarded(self.phases.finish, phase_name)

        def _guarded(self, report: Callable[..., None], *facts: Any) -> None:
            try:
                report(*facts)
            except BaseException as error:
                self.interruption = error

    return _Monitor()
