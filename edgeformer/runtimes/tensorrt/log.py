"""Collect and parse TensorRT's messages, layer listings and progress; nothing is printed.

The builder writes the listing of the finished engine's layers to the log, which needs no GPU. The inspector of an open
engine, which needs one, returns the same as JSON.
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
"""Prefix of the VERBOSE message with the builder's listing of the finished engine."""

_ERRORS = ("INTERNAL_ERROR", "ERROR")
_RECORDED = (*_ERRORS, "WARNING", "INFO")
_MAX_MESSAGES = 10_000
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
    """Messages by severity. TensorRT uses the first logger of a process only, so there is one per package.

    Attributes:
        logger: argument for TensorRT's constructors.
        messages: the latest (severity, text) since :meth:`clear`, with TensorRT's names of severities. Of the VERBOSE
            messages, only the engine's listing is stored.
        interruption: exception raised while a message was recorded, e.g. by Ctrl-C.
    """

    def __init__(self, trt: Any) -> None:
        self.messages: deque[tuple[str, str]] = deque(maxlen=_MAX_MESSAGES)
        self.interruption: BaseException | None = None
        collected = self

        class _Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, text: str) -> None:
                # An exception (e.g. Ctrl-C) must not propagate through TensorRT's code.
                try:
                    if severity.name in _RECORDED or text.startswith(LISTING):
                        collected.messages.append((severity.name, text))
                except BaseException as error:
                    collected.interruption = error

        self.logger: Any = _Logger()

    def clear(self) -> None:
        """Delete all messages."""
        self.messages.clear()
        self.interruption = None

    def listing(self) -> str | None:
        """Return the builder's listing of its latest engine, or None."""
        return next((text for _, text in reversed(self.messages) if text.startswith(LISTING)), None)

    def of(self, *severities: str) -> tuple[str, ...]:
        """Return the distinct texts of these severities in order."""
        return tuple(dict.fromkeys(text for severity, text in self.messages if severity in severities))

    def last_error(self) -> str | None:
        """Return the first line of the latest error, or None."""
        errors = self.of(*_ERRORS)
        return errors[-1].strip().splitlines()[0][:300] if errors else None


@cache
def tensorrt_log(trt: ModuleType) -> TensorRTLog:
    """Return the log of a TensorRT package; one per process."""
    return TensorRTLog(trt)


@dataclass(frozen=True)
class Layers:
    """The layers of an engine.

    Attributes:
        count: number of layers; None: not known.
        by_precision: precision → number of outputs.
        weight_elements: precision → elements of the weights, counted once per layer that reads them.
    """

    count: int | None = None
    by_precision: dict[str, int] = field(default_factory=dict)
    weight_elements: dict[str, int] = field(default_factory=dict)


def read_listing(text: str) -> Layers | None:
    """Parse the layers in the builder's log; None if its format is unknown."""
    layers = [match.groups() for match in map(_LAYER.match, text.splitlines()) if match is not None]
    return _counted([(_TENSOR.findall(outputs), _TENSOR.findall(constants)) for constants, outputs in layers])


def read_inspector(text: str) -> Layers | None:
    """Parse the layers in an inspector's JSON; None if it holds names only or has another format."""
    try:
        layers: list[dict[str, Any]] = [layer for layer in json.loads(text)["Layers"] if isinstance(layer, dict)]
        return _counted(
            [
                (
                    [("", _kind(output)) for output in layer["Outputs"]],
                    [
                        (",".join(map(str, weight["Dimensions"])), _kind(weight))
                        for weight in layer.get("Constants", [])
                    ],
                )
                for layer in layers
            ]
        )
    except (ValueError, KeyError, TypeError):
        return None


def _kind(tensor: dict[str, Any]) -> str:
    """Return a tensor's type: newer versions write ``Half``, older ones ``Row major linear FP16 format``."""
    text = str(tensor.get("Datatype") or tensor.get("Format/Datatype"))
    return next((word for word in text.split() if word in _PRECISIONS), text)


def _counted(layers: list[tuple[list[_Tensor], list[_Tensor]]]) -> Layers | None:
    """Count the layers, given as (outputs, constants); None if there are none."""
    elements: Counter[str] = Counter()
    by_precision: Counter[str] = Counter()
    for outputs, constants in layers:
        by_precision.update(_PRECISIONS.get(kind, kind) for _, kind in outputs)
        for dimensions, kind in constants:
            elements[_PRECISIONS.get(kind, kind)] += math.prod(int(size) for size in dimensions.split(",") if size)
    return Layers(len(layers), dict(sorted(by_precision.items())), dict(sorted(elements.items()))) if layers else None


def read_total(messages: Iterable[str], memory: str) -> int | None:
    """Return the bytes of the engine's ``weights`` or ``activations`` in the builder's messages, or None."""
    for message in messages:
        match = re.search(rf"{_TOTALS[memory]}: (\d+) bytes", message)
        if match is not None:
            return int(match.group(1))
    return None


class Phases:
    """Total progress of nested phases: an inner phase is part of the outer phase's current step."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._open: dict[str, tuple[int, int]] = {}  # phase → (steps done, total steps)
        self._reported = 0

    def start(self, name: str, steps: int) -> None:
        """Start a phase inside the open phases."""
        self._open[name] = (0, max(1, steps))

    def step(self, name: str) -> None:
        """Complete a step of an open phase."""
        if name in self._open:
            done, steps = self._open[name]
            self._open[name] = (min(done + 1, steps), steps)
        part, width = 0.0, 1.0
        for done, steps in self._open.values():
            part += width * done / steps
            width /= steps
        self.reach(round(PARTS * part))

    def finish(self, name: str) -> None:
        """End a phase."""
        self._open.pop(name, None)

    def reach(self, part: int) -> None:
        """Report progress up to ``part`` of ``PARTS``. Builders skip steps, so call it with ``PARTS`` at the end."""
        # A phase may be repeated, but progress never decreases.
        reached = max(self._reported, min(PARTS, part))
        self._progress.advance(reached - self._reported)
        self._reported = reached


def progress_monitor(trt: Any, progress: Progress) -> Any:
    """Return a ``progress_monitor`` for a builder's configuration, or None if this TensorRT does not support one.

    An exception (Ctrl-C, or from ``progress``) cancels the build and is stored in the monitor's ``interruption``,
    because it must not propagate through TensorRT's code.
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
