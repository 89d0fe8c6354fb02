"""Run an ONNX graph with OpenVINO on the processor. Importing this imports nothing of it: the first session does.

OpenVINO takes what does not fit a graph and answers all the same: rows of zeros for token ids beyond the table, and
nothing at all for a text beyond the positional table. Types, sizes and ids are therefore compared with the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeformer.backends.feeding import Wanted, checked, empty
from edgeformer.backends.openvino.rotation import fuse_rotations, is_quantised
from edgeformer.backends.openvino.runtime import CPU, CPU_BF16, HINTS, STREAMS, bf16_missing, core, openvino
from edgeformer.backends.session import Array, Session, shape_text
from edgeformer.formats.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.formats.onnx_outline import Port, read_outline
from edgeformer.machine.host import default_threads


class OpenVINOSession(Session):
    """An ONNX graph opened by OpenVINO: one stream, tuned for latency.

    Args:
        path: the .onnx file; external weights lie beside it.
        provider: one of ``runtime.HINTS``. It is used or refused, never replaced.
        threads: of one call; None takes :func:`~edgeformer.machine.host.default_threads`.
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
        self._inputs: dict[str, Wanted] = {port.name: (port.dtype, port.shape or ()) for port in outline.inputs}
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
