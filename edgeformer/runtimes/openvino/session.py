"""Run an ONNX graph with OpenVINO on the processor. The first session imports openvino, not this module.

OpenVINO accepts inputs that do not fit a graph: it returns zeros for token ids outside the embedding table, and an
empty output for a text longer than the positional table. The session therefore checks types, sizes and ids.

Exported graphs rotate queries and keys with four products, a difference and a sum, the fastest form in ONNX Runtime.
OpenVINO fuses only x · cos + (−second, first) · sin with 4-D tables, so :func:`fuse_rotations` rewrites them.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.onnx_outline import read_outline
from edgeformer.artifacts.workspace import REMEDY
from edgeformer.runtimes.runtime import OptionalPackage
from edgeformer.runtimes.session import Array, Graph, InputType, reason_of, require_file, shape_text
from edgeformer.system.host import default_threads
from edgeformer.system.memory import release_heap

EXTRA = "openvino"
CPU, CPU_BF16 = "openvino-cpu", "openvino-cpu-bf16"
"""Providers: the processor in FP32 (INT8 graphs: the nodes that are not INT8), and with products in bfloat16."""

HINTS = {CPU: "f32", CPU_BF16: "bf16"}
"""Provider → inference precision of FP32 graphs. By default OpenVINO uses bfloat16 if the processor supports it."""

_TELEMETRY = "openvino_telemetry"
OPENVINO = OptionalPackage(
    "openvino", EXTRA, "another runtime for processors", ("openvino",),
    f"""import sys
sys.modules[{_TELEMETRY!r}] = None  # as without_telemetry
import openvino
core = openvino.Core()
bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
more = ["CPU in bfloat16"] if bf16 else []
say(version=openvino.__version__.partition("-")[0], devices=core.available_devices + more)
""",
)  # fmt: skip


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Make ``openvino_telemetry`` unimportable while openvino or nncf are imported: both would send a message."""
    original = sys.modules.get(_TELEMETRY)
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if original is None:
            del sys.modules[_TELEMETRY]
        else:
            sys.modules[_TELEMETRY] = original


@cache
def core() -> Any:
    """Return the process's ``openvino.Core``. Raises MissingDependencyError if the package cannot be imported."""
    with OPENVINO.importing(), without_telemetry():
        import openvino
    return openvino.Core()


class OpenVINOSession(Graph):
    """An ONNX graph opened by OpenVINO with one stream, tuned for latency."""

    def __init__(
        self, path: Path, provider: str = CPU, threads: int | None = None, max_positions: int | None = None
    ) -> None:
        if provider not in HINTS:
            raise InputError(f"provider {provider!r} is unknown to OpenVINO; give one of {', '.join(HINTS)}")
        openvino_core = core()
        if provider == CPU_BF16 and "BF16" not in openvino_core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            instructions = "bfloat16 instructions (avx512_bf16, avx_ne_convert, amx_bf16 or Arm's bf16)"
            raise InputError(f"provider {provider!r} cannot be used here, because this processor has no {instructions}")
        require_file(path)
        outline = read_outline(path)
        self.path, self.provider, self.max_positions = path, provider, max_positions
        self.threads = threads or default_threads()
        self.inputs = {port.name: InputType(port.dtype, port.shape or ()) for port in outline.inputs}
        self._outputs, self._table_rows = outline.outputs, outline.tables
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,  # edgeformer runs calls one after the other, each with all threads
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": HINTS[provider],
        }
        try:
            model = openvino_core.read_model(str(path))
            is_quantised = any(node.get_type_name() == "FakeQuantize" for node in model.get_ops())
            # In bfloat16 the fused kernel is slower than its parts after quantised products.
            if provider == CPU or not is_quantised:
                fuse_rotations(model)
            compiled = openvino_core.compile_model(model, "CPU", options)
            self._request: Any = compiled.create_infer_request()
            release_heap()  # what compiling has left
        except Exception as error:  # mostly RuntimeError, without a common base class
            version = sys.modules["openvino"].__version__
            raise ArtifactError(
                f"{path}: cannot be opened by OpenVINO {version} ({_reason(error)}); {REMEDY}"
            ) from None
        self._settings: dict[str, Any] = {}
        for name in options:  # read back
            value = compiled.get_property(name)
            if not isinstance(value, int):  # a type or an enumeration: bf16, LATENCY
                value = str(value.get_type_name() if hasattr(value, "get_type_name") else getattr(value, "name", value))
            self._settings[name.lower()] = value

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        feed = self.prepare_feed(self._request, inputs)
        sizes: dict[str, int] = {}  # dynamic axis → size in this call
        for name, array in feed.items():
            for axis, size in zip(self.inputs[name].axes, array.shape, strict=True):
                if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                    raise self.refusal(feed, f"the axis {axis!r} is both {sizes[axis]} and {size}")
        for name, rows in self._table_rows.items():
            if name in feed and (feed[name].max() >= rows or feed[name].min() < -rows):
                raise InputError(f"{self.path.name}: {name!r}: a token id lies outside the model's vocabulary ({rows})")
        try:
            results = self._request.infer(feed, share_inputs=True)
        except Exception as error:
            raise self.refusal(feed, _reason(error)) from None
        outputs = {port.name: results[index] for index, port in enumerate(self._outputs)}
        for port in self._outputs:
            shape = outputs[port.name].shape
            expected = shape if port.shape is None else [sizes.get(dim, dim) for dim in port.shape]  # type: ignore[arg-type]
            pairs = zip(expected, shape, strict=False)
            if len(expected) != len(shape) or any(isinstance(dim, int) and dim != size for dim, size in pairs):
                raise self.refusal(feed, f"its output {port.name!r} is {shape_text(outputs[port.name])}")
        return outputs

    def settings(self) -> dict[str, Any]:
        return dict(self._settings)

    def close(self) -> None:
        self._request = None


def _reason(error: Exception) -> str:
    """Return the line of OpenVINO's message with the cause; the lines above it name source locations."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if not line.startswith(("Exception from", "Check '", "FrontEnd API failed"))]
    return reason_of((reasons or lines or [type(error).__name__])[-1])


def fuse_rotations(model: Any) -> int:
    """Rewrite the rotations of halves in an ``openvino.Model`` in the form that OpenVINO fuses; return their number."""
    from openvino import opset13 as ops

    tables: dict[Any, Any] = {}
    rotations = [(node, match) for node in model.get_ordered_ops() if (match := _match_rotation(node)) is not None]
    for node, (x, cos, sin) in rotations:
        for table in (cos, sin):  # [S, D / 2] to [1, 1, S, D]
            if table not in tables:
                tables[table] = ops.unsqueeze(ops.concat([table, table], -1), ops.constant(np.array([0, 1])))
        half = x.get_partial_shape()[3].get_length() // 2
        first, second = ops.variadic_split(x, ops.constant(3), ops.constant(np.array([half, half]))).outputs()
        swapped = ops.concat([ops.multiply(second, ops.constant(-1, x.get_element_type())), first], -1)
        rotated = ops.add(ops.multiply(x, tables[cos]), ops.multiply(swapped, tables[sin]))
        node.output(0).replace(rotated.output(0))
    return len(rotations)


def _match_rotation(node: Any) -> tuple[Any, Any, Any] | None:
    """Match concat(first · cos − second · sin, first · sin + second · cos) of the halves of x.

    Return x [B, H, S, D], cos and sin [S, D / 2], or None if it does not match.
    """
    if node.get_type_name() != "Concat" or node.get_input_size() != 2:
        return None
    pairs: list[tuple[Any, Any]] = []  # (half, table) of the four products
    for value, kind in zip(node.input_values(), ("Subtract", "Add"), strict=True):
        if value.get_node().get_type_name() != kind:
            return None
        for term in value.get_node().input_values():
            factors = term.get_node().input_values() if term.get_node().get_type_name() == "Multiply" else []
            halves = [factor for factor in factors if factor.get_node().get_type_name() == "Split"]
            if len(halves) != 1:
                return None
            pairs.append((halves[0], factors[0] if factors[1] == halves[0] else factors[1]))
    (first, cos), (second, sin), *summands = pairs
    split = first.get_node()
    x = split.input_value(0)
    if (first, second) != tuple(split.outputs()) or set(summands) != {(first, sin), (second, cos)}:
        return None
    shape = x.get_partial_shape()
    if shape.rank != 4 or not shape[3].is_static or node.output(0).get_partial_shape()[-1] != shape[3]:
        return None
    length, half_width = shape[2].get_length() if shape[2].is_static else None, first.get_partial_shape()[-1]
    for table in (cos, sin):
        angles = table.get_partial_shape()
        if angles.rank != 2 or half_width != angles[1] or 2 * half_width.get_length() != shape[3].get_length():
            return None
        # OpenVINO derives the result's length from the table.
        if length != (angles[0].get_length() if angles[0].is_static else None):
            return None
    return x, cos, sin
