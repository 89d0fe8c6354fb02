"""Run an ONNX graph with OpenVINO on the processor. The first session imports openvino, not this module.

OpenVINO accepts inputs that do not fit a graph: it returns zeros for token ids outside the embedding table, and an
empty output for a text longer than the positional table. The session therefore checks types, sizes and ids.

Exported graphs rotate queries and keys with four products, a difference and a sum, the fastest form in ONNX Runtime.
OpenVINO fuses only x · cos + (−second, first) · sin with 4-D tables, so :func:`fuse_rotations` rewrites them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError, MissingDependencyError, install_hint
from edgeformer.artifacts.onnx_outline import Port, read_outline
from edgeformer.runtimes.session import Array, InputType, Session, checked, empty, shape_text
from edgeformer.system.host import default_threads


class _Rotation(NamedTuple):
    """Rotation ``turned`` of x [B, H, S, D] by tables [S, D / 2]; all are outputs in an ``openvino.Model``."""

    turned: Any
    x: Any
    cos: Any
    sin: Any


def fuse_rotations(model: Any) -> int:
    """Rewrite every rotation of halves in the form that OpenVINO fuses; results stay the same.

    Args:
        model: an ``openvino.Model``, modified in place.

    Returns:
        The number of rotations.
    """
    from openvino import opset13 as ops

    rotations = [rotation for node in model.get_ordered_ops() if (rotation := _rotation(node)) is not None]
    tables: dict[Any, Any] = {}

    def full_table(half: Any) -> Any:
        """Convert a table [S, D / 2] to [1, 1, S, D], once per table."""
        if half not in tables:
            tables[half] = ops.unsqueeze(ops.concat([half, half], -1), ops.constant(np.array([0, 1])))
        return tables[half]

    for turned, x, cos, sin in rotations:
        half = x.get_partial_shape()[3].get_length() // 2
        first, second = ops.variadic_split(x, ops.constant(3), ops.constant(np.array([half, half]))).outputs()
        swapped = ops.concat([ops.multiply(second, ops.constant(-1, x.get_element_type())), first], -1)
        turned.replace(ops.add(ops.multiply(x, full_table(cos)), ops.multiply(swapped, full_table(sin))).output(0))
    return len(rotations)


def is_quantised(model: Any) -> bool:
    """Return whether an ``openvino.Model`` has quantised products."""
    return any(node.get_type_name() == "FakeQuantize" for node in model.get_ops())


def _rotation(node: Any) -> _Rotation | None:
    """Match a node that computes concat(first · cos − second · sin, first · sin + second · cos), or return None."""
    if node.get_type_name() != "Concat" or node.get_input_size() != 2:
        return None
    turned = _halves_and_tables(node.input_value(0), "Subtract")
    rest = _halves_and_tables(node.input_value(1), "Add")
    if turned is None or rest is None:
        return None
    (first, cos), (second, sin) = turned
    split = first.get_node()
    x = split.input_value(0)
    is_rotation = (first, second) == tuple(split.outputs()) and set(rest) == {(first, sin), (second, cos)}
    fits = _fits(x, cos, first) and _fits(x, sin, second) and _last(node.output(0)) == _last(x)
    return _Rotation(node.output(0), x, cos, sin) if is_rotation and fits else None


def _halves_and_tables(value: Any, kind: str) -> list[tuple[Any, Any]] | None:
    """Return both (half, table) pairs if ``value`` is a sum or difference of products with a Split's output."""
    if value.get_node().get_type_name() != kind:
        return None
    pairs = []
    for term in value.get_node().input_values():
        factors = term.get_node().input_values() if term.get_node().get_type_name() == "Multiply" else []
        halves = [factor for factor in factors if factor.get_node().get_type_name() == "Split"]
        if len(halves) != 1:
            return None
        pairs.append((halves[0], factors[0] if factors[1] == halves[0] else factors[1]))
    return pairs


def _fits(x: Any, table: Any, half: Any) -> bool:
    """Return whether x is [B, H, S, D] with static D, its half [B, H, S, D / 2] and the table [S, D / 2].

    S must match, because OpenVINO derives the result's length from the table.
    """
    sizes, angles = x.get_partial_shape(), table.get_partial_shape()
    if sizes.rank != 4 or angles.rank != 2 or not sizes[3].is_static:
        return False
    lengths = [size.get_length() if size.is_static else None for size in (sizes[2], angles[0])]
    halved = _last(half) == angles[1] and 2 * _last(half).get_length() == sizes[3].get_length()
    return bool(halved and lengths[0] == lengths[1])


def _last(value: Any) -> Any:
    return value.get_partial_shape()[-1]


EXTRA = "openvino"
TELEMETRY = "openvino_telemetry"
CPU, CPU_BF16 = "openvino-cpu", "openvino-cpu-bf16"
"""Providers: the processor in FP32 (INT8 graphs: the nodes that are not INT8), and with products in bfloat16."""

HINTS = {CPU: "f32", CPU_BF16: "bf16"}
"""Provider → inference precision of FP32 graphs. By default OpenVINO uses bfloat16 if the processor supports it."""

STREAMS = 1
"""Concurrent calls. edgeformer runs calls one after the other, each with all threads."""


def missing() -> str | None:
    """Return why the package cannot be used, or None if it is installed."""
    if util.find_spec("openvino") is not None:
        return None
    return f"package: openvino is not installed ({install_hint(EXTRA)})"


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Make ``openvino_telemetry`` unimportable while openvino or nncf are imported.

    Both import it if it is installed. It writes an identifier to the user's home and sends a message at every import.
    Both packages work without it.
    """
    original = sys.modules.get(TELEMETRY)
    sys.modules[TELEMETRY] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if original is None:
            del sys.modules[TELEMETRY]
        else:
            sys.modules[TELEMETRY] = original


@cache
def openvino() -> Any:
    """Import the package. Raises MissingDependencyError if it is not installed or cannot be imported."""
    problem = missing()
    if problem is not None:
        raise MissingDependencyError(problem)
    with without_telemetry():
        try:
            import openvino as package
        except Exception as error:  # its libraries raise any class
            hint = install_hint(EXTRA, reinstall=True)
            raise MissingDependencyError(f"openvino is installed, but cannot be imported: {error}; {hint}") from None
    return package


@cache
def core() -> Any:
    """Return the process's ``openvino.Core``. Raises as :func:`openvino`."""
    return openvino().Core()


def bf16_missing() -> str | None:
    """Return why bfloat16 is not available on this system, or None. Raises as :func:`openvino`."""
    if "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return None
    return "this processor has no bfloat16 instructions (avx512_bf16, avx_ne_convert, amx_bf16 or Arm's bf16)"


class OpenVINOSession(Session):
    """An ONNX graph opened by OpenVINO with one stream, tuned for latency.

    Args:
        path: the .onnx file; external weights lie in the same folder.
        provider: one of ``HINTS``. If it is not available, opening fails; there is no fallback.
        threads: threads per call; None: :func:`~edgeformer.system.host.default_threads`.
        max_positions: longest sequence of the model's positional table; None: not known.

    Raises:
        ArtifactError: the file is missing, truncated, or not an ONNX graph that this OpenVINO can run.
        InputError: the provider is not available here.
        MissingDependencyError: openvino is not installed.
    """

    def __init__(
        self, path: Path, provider: str = CPU, threads: int | None = None, max_positions: int | None = None
    ) -> None:
        if provider not in HINTS:
            raise InputError(f"provider {provider!r} is none of OpenVINO's; there are: {', '.join(HINTS)}")
        package = openvino()
        if provider == CPU_BF16 and (problem := bf16_missing()) is not None:
            raise InputError(f"provider {provider!r} cannot be used here: {problem}")
        if not path.is_file():
            raise ArtifactError(f"{path}: no such file; export the run again, or copy the whole bundle again")
        outline = read_outline(path)
        self.path, self.provider, self.max_positions = path, provider, max_positions
        self.threads = threads or default_threads()
        self._inputs: dict[str, InputType] = {port.name: (port.dtype, port.shape or ()) for port in outline.inputs}
        self._outputs = outline.outputs
        self._tables = outline.tables
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": STREAMS,
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": HINTS[provider],
        }
        try:
            model = core().read_model(str(path))
            # In bfloat16 the fused kernel is slower than its parts after quantised products.
            if provider == CPU or not is_quantised(model):
                fuse_rotations(model)
            compiled = core().compile_model(model, "CPU", options)
            self._request: Any = compiled.create_infer_request()
        except Exception as error:  # mostly RuntimeError, without a common base class
            raise ArtifactError(
                f"{path}: cannot be opened by OpenVINO {package.__version__} ({_reason(error)}); export the run again, "
                "or copy the whole bundle again"
            ) from None

        self._settings = {name.lower(): _plain(compiled.get_property(name)) for name in options}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs."""
        return tuple(self._inputs)

    def empty(self, name: str, rows: int) -> Array:
        """Return the initial value of a ``past…`` input for ``rows`` texts."""
        return empty(self._inputs[name], rows)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self._request is None:
            raise EdgeformerError(f"{self.path}: the session is closed")
        feed = {
            name: checked(self.path.name, name, port_type, inputs, self.max_positions)
            for name, port_type in self._inputs.items()
        }
        sizes = self._sizes(feed)
        self._check_ids(feed)
        try:
            results = self._request.infer(feed, share_inputs=True)
        except Exception as error:
            raise self._refused(feed, _reason(error)) from None
        outputs = {port.name: results[index] for index, port in enumerate(self._outputs)}
        for port in self._outputs:
            if not _matches_port(port, outputs[port.name], sizes):
                raise self._refused(feed, f"its output {port.name!r} is {shape_text(outputs[port.name])}")
        return outputs

    def settings(self) -> dict[str, Any]:
        """Return threads, streams, hint and precision, as read back from the compiled graph."""
        return dict(self._settings)

    def close(self) -> None:
        self._request = None

    def _sizes(self, feed: Mapping[str, Array]) -> dict[str, int]:
        """Return axis name → size in this call. Raises InputError if inputs disagree."""
        sizes: dict[str, int] = {}
        for name, array in feed.items():
            for axis, size in zip(self._inputs[name][1], array.shape, strict=True):
                if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                    raise self._refused(feed, f"{axis!r} is {sizes[axis]} and {size}")
        return sizes

    def _check_ids(self, feed: Mapping[str, Array]) -> None:
        """Raise InputError for ids outside an embedding table."""
        for name, rows in self._tables.items():
            if name in feed and (feed[name].max() >= rows or feed[name].min() < -rows):
                raise InputError(f"{self.path.name}: {name!r}: a token id lies outside the model's vocabulary ({rows})")

    def _refused(self, feed: Mapping[str, Array], why: str) -> InputError:
        shapes = ", ".join(f"{name} {shape_text(array)}" for name, array in feed.items())
        longer = "; the sequence may be longer than the model's positional table" if "input_ids" in feed else ""
        return InputError(f"{self.path.name}: the graph refuses {shapes}{longer} ({why})")


def _plain(setting: Any) -> int | str:
    """Convert a property to a number or a word: ``1``, ``LATENCY``, ``bf16``."""
    if isinstance(setting, int):
        return int(setting)
    return str(setting.get_type_name() if hasattr(setting, "get_type_name") else getattr(setting, "name", setting))


def _matches_port(port: Port, array: Array, sizes: Mapping[str, int]) -> bool:
    """Return whether an output has the shape that its graph declares."""
    if port.shape is None:
        return True
    expected = [sizes.get(axis) if isinstance(axis, str) else axis for axis in port.shape]
    return len(expected) == array.ndim and all(
        size in (None, actual) for size, actual in zip(expected, array.shape, strict=True)
    )


def _reason(error: Exception) -> str:
    """Return the line of OpenVINO's message with the cause; the lines above it name source locations."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if not line.startswith(("Exception from", "Check '", "FrontEnd API failed"))]
    return " ".join((reasons or lines or [type(error).__name__])[-1].split())[:200]
