"""Rotary position embeddings in the form that OpenVINO fuses.

Our graphs turn the halves of a query or key by four products, a difference and a sum: of the forms that were tried,
ONNX Runtime is quickest with this one. OpenVINO knows a rotation by another one, x · cos + (−second, first) · sin with
tables of four axes, and computes that in a single kernel.
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
    """What ``turned`` computes of x [B, H, S, D] by tables [S, D / 2]; all are values of an ``openvino.Model``."""

    turned: Any
    x: Any
    cos: Any
    sin: Any


def fuse_rotations(model: Any) -> int:
    """Write every rotation of halves as OpenVINO fuses it; what is computed stays the same.

    Args:
        model: an ``openvino.Model``, which is changed.

    Returns:
        How many there were.
    """
    from openvino import opset13 as ops

    found = [one for node in model.get_ordered_ops() if (one := _rotation(node)) is not None]
    tables: dict[Any, Any] = {}

    def whole(half: Any) -> Any:
        """[S, D / 2] → [1, 1, S, D], made once."""
        if half not in tables:
            tables[half] = ops.unsqueeze(ops.concat([half, half], -1), ops.constant(np.array([0, 1])))
        return tables[half]

    for turned, x, cos, sin in found:
        half = x.get_partial_shape()[3].get_length() // 2
        first, second = ops.variadic_split(x, ops.constant(3), ops.constant(np.array([half, half]))).outputs()
        swapped = ops.concat([ops.multiply(second, ops.constant(-1, x.get_element_type())), first], -1)
        turned.replace(ops.add(ops.multiply(x, whole(cos)), ops.multiply(swapped, whole(sin))).output(0))
    return len(found)


def is_quantised(model: Any) -> bool:
    """Whether a graph (an ``openvino.Model``) has quantised products."""
    return any(node.get_type_name() == "FakeQuantize" for node in model.get_ops())


def _rotation(node: Any) -> _Rotation | None:
    """What a node is that computes concat(first · cos − second · sin, first · sin + second · cos); else None."""
    if node.get_type_name() != "Concat" or node.get_input_size() != 2:
        return None
    turned = _halves_and_tables(node.input_value(0), "Subtract")
    rest = _halves_and_tables(node.input_value(1), "Add")
    if turned is None or rest is None:
        return None
    (first, cos), (second, sin) = turned
    split = first.get_node()
    x = split.input_value(0)
    told = (first, second) == tuple(split.outputs()) and set(rest) == {(first, sin), (second, cos)}
    fits = _fits(x, cos, first) and _fits(x, sin, second) and _last(node.output(0)) == _last(x)
    return _Rotation(node.output(0), x, cos, sin) if told and fits else None


def _halves_and_tables(value: Any, kind: str) -> list[tuple[Any, Any]] | None:
    """Both (half, table) of a sum or a difference of products of one part of a Split each; None: it is none."""
    if value.get_node().get_type_name() != kind:
        return None
    found = []
    for term in value.get_node().input_values():
        factors = term.get_node().input_values() if term.get_node().get_type_name() == "Multiply" else []
        halves = [one for one in factors if one.get_node().get_type_name() == "Split"]
        if len(halves) != 1:
            return None
        found.append((halves[0], factors[0] if factors[1] == halves[0] else factors[1]))
    return found


def _fits(x: Any, table: Any, half: Any) -> bool:
    """Whether x is [B, H, S, D] with a known D, and its half [B, H, S, D / 2] is multiplied with [S, D / 2]: with as
    many angles as x has positions, for that is how long OpenVINO takes the result to be."""
    sizes, angles = x.get_partial_shape(), table.get_partial_shape()
    if sizes.rank != 4 or angles.rank != 2 or not sizes[3].is_static:
        return False
    known = [size.get_length() if size.is_static else None for size in (sizes[2], angles[0])]
    halved = _last(half) == angles[1] and 2 * _last(half).get_length() == sizes[3].get_length()
    return bool(halved and known[0] == known[1])


def _last(value: Any) -> Any:
    """The size of its last axis."""
    return value.get_partial_shape()[-1]


# The openvino package: imported without its telemetry, and what it can compute with on this machine.
#
# Importing openvino, and importing nncf, imports ``openvino_telemetry`` where that is installed: it writes an
# identifier
# into the user's home and sends a message with every import, unless the user has forbidden it. Both packages go on
# without it where it cannot be imported, so that is what they find here.


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


# Run an ONNX graph with OpenVINO on the processor. Importing this imports nothing of it: the first session does.
#
# OpenVINO takes what does not fit a graph and answers all the same: rows of zeros for token ids beyond the table, and
# nothing at all for a text beyond the positional table. Types, sizes and ids are therefore compared with the file.


class OpenVINOSession(Session):
    """An ONNX graph opened by OpenVINO: one stream, tuned for latency.

    Args:
        path: the .onnx file; external weights lie beside it.
        provider: one of ``runtime.HINTS``. It is used or refused, never replaced.
        threads: of one call; None takes :func:`~edgeformer.system.host.default_threads`.
        max_positions: longest sequence that the model's positional table covers, when the caller knows it.

    Raises:
        ArtifactError: the file is missing, truncated, or no ONNX graph that this OpenVINO can run.
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
            # In bfloat16 the fused kernel is slower behind quantised products than its parts are.
            if provider == CPU or not is_quantised(model):
                fuse_rotations(model)
            compiled = core().compile_model(model, "CPU", options)
            self._request: Any = compiled.create_infer_request()
        except Exception as error:  # RuntimeError mostly; its classes are its own affair
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
        """What a ``past…`` input holds at the start of ``rows`` texts."""
        return empty(self._inputs[name], rows)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self._request is None:
            raise EdgeformerError(f"{self.path}: the session is closed")
        feed = {
            name: checked(self.path.name, name, wanted, inputs, self.max_positions)
            for name, wanted in self._inputs.items()
        }
        sizes = self._sizes(feed)
        self._require_known(feed)
        try:
            found = self._request.infer(feed, share_inputs=True)
        except Exception as error:
            raise self._refused(feed, _reason(error)) from None
        outputs = {port.name: found[index] for index, port in enumerate(self._outputs)}
        for port in self._outputs:
            if not _as_announced(port, outputs[port.name], sizes):
                raise self._refused(feed, f"its output {port.name!r} is {shape_text(outputs[port.name])}")
        return outputs

    def settings(self) -> dict[str, Any]:
        """Threads, streams, hint and precision, as OpenVINO itself says them of the compiled graph."""
        return dict(self._settings)

    def close(self) -> None:
        self._request = None

    def _sizes(self, feed: Mapping[str, Array]) -> dict[str, int]:
        """Name of an axis → its size in this call. Raises InputError where inputs differ in it."""
        sizes: dict[str, int] = {}
        for name, array in feed.items():
            for axis, size in zip(self._inputs[name][1], array.shape, strict=True):
                if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                    raise self._refused(feed, f"{axis!r} is {sizes[axis]} and {size}")
        return sizes

    def _require_known(self, feed: Mapping[str, Array]) -> None:
        """Raises InputError for ids of rows that a table does not have."""
        for name, rows in self._tables.items():
            if name in feed and (feed[name].max() >= rows or feed[name].min() < -rows):
                raise InputError(f"{self.path.name}: {name!r}: a token id lies outside the model's vocabulary ({rows})")

    def _refused(self, feed: Mapping[str, Array], why: str) -> InputError:
        shapes = ", ".join(f"{name} {shape_text(array)}" for name, array in feed.items())
        longer = "; the sequence may be longer than the model's positional table" if "input_ids" in feed else ""
        return InputError(f"{self.path.name}: the graph refuses {shapes}{longer} ({why})")


def _plain(setting: Any) -> int | str:
    """A property as a number or a word: ``1``, ``LATENCY``, ``bf16``."""
    if isinstance(setting, int):
        return int(setting)
    return str(setting.get_type_name() if hasattr(setting, "get_type_name") else getattr(setting, "name", setting))


def _as_announced(port: Port, array: Array, sizes: Mapping[str, int]) -> bool:
    """Whether an output has the axes that its graph announces."""
    if port.shape is None:
        return True
    known = [sizes.get(axis) if isinstance(axis, str) else axis for axis in port.shape]
    return len(known) == array.ndim and all(
        size in (None, actual) for size, actual in zip(known, array.shape, strict=True)
    )


def _reason(error: Exception) -> str:
    """The line of OpenVINO's message that says what is wrong: those before it say where in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("Exception from", "Check '", "FrontEnd API failed"))]
    return " ".join((told or lines or [type(error).__name__])[-1].split())[:200]
