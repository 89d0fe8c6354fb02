"""Run an ONNX graph with ONNX Runtime. Importing this module imports onnxruntime."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime as ort

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.workspace import REMEDY
from edgeformer.runtimes.onnxruntime.providers import (
    CPU,
    CUDA,
    RTX,
    SUFFIX,
    TENSORRT,
    load_cuda_libraries,
    rtx_options,
    rtx_plugin,
)
from edgeformer.runtimes.session import PAST, PRESENT, Array, DeviceCache, Graph, InputType, require_file, shape_text
from edgeformer.system.host import default_threads
from edgeformer.system.memory import release_heap

_DTYPES = {f"tensor({name})": name for name in ("bool", "float16")} | {
    f"tensor({sign}int{bits})": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_DTYPES |= {"tensor(float)": "float32", "tensor(double)": "float64"}
_RTX_DEFAULTS = (
    "the RTX provider runs without CUDA graphs and specialized kernels; tensorrt-rtx engines for whole texts use both, "
    "so the times are not comparable"
)
_SILENT = 4  # onnxruntime also writes its errors to stderr; the exception is enough

Assigned = Mapping[tuple[str, str], int]
"""(provider, operator) → number of nodes that ONNX Runtime assigned."""


class OnnxSession(Graph):
    """An ONNX graph opened by ONNX Runtime with all graph optimisations.

    Args:
        path: the .onnx file; external weights lie in the same folder.
        provider: an execution provider's name. If it is not available, opening fails; there is no fallback.
        in_turns: this process alternates between this session and others, so threads stop spinning when a run ends.
            Otherwise the four graphs of a step artifact took 2 to 3 times as long on 2 cores.
        cache_device: the device on which ``present…`` outputs stay for the next call. None: they become arrays.
    """

    def __init__(
        self, path: Path, provider: str = CPU, threads: int | None = None, max_positions: int | None = None, *,
        in_turns: bool = False, cache_device: Literal["cuda", "cpu"] | None = None,
    ) -> None:  # fmt: skip
        self.path, self.provider, self.max_positions = path, provider, max_positions
        self.threads = threads or default_threads()
        self._rtx_options = rtx_options(path, max_positions) if provider == RTX and path.is_file() else {}
        self._session: Any = _open(path, provider, self.threads, self._rtx_options, in_turns=in_turns)
        self._assigned: Assigned | None = None
        if provider != CPU and hasattr(self._session, "get_provider_graph_assignment_info"):
            parts = self._session.get_provider_graph_assignment_info()
            self._assigned = Counter((part.ep_name, node.op_type) for part in parts for node in part.get_nodes())
        self.inputs = {
            node.name: InputType(_DTYPES.get(node.type, node.type), node.shape) for node in self._session.get_inputs()
        }
        self._outputs = [node.name for node in self._session.get_outputs()]
        has_caches = any(name.startswith(PAST) for name in self.inputs)
        self._cache_device = cache_device if has_caches else None
        self._reads_whole_texts = not has_caches and not in_turns
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = _SILENT

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        feed = self.prepare_feed(self._session, inputs)
        try:
            if self._cache_device is None:
                outputs = self._session.run(self._outputs, feed, self._run_options)
                return dict(zip(self._outputs, outputs, strict=True))
            binding = self._session.io_binding()
            for name, array in feed.items():
                if isinstance(array, DeviceCache):
                    binding.bind_ortvalue_input(name, array.value)
                else:
                    binding.bind_cpu_input(name, np.ascontiguousarray(array))
            for name in self._outputs:
                binding.bind_output(name, self._cache_device if name.startswith(PRESENT) else "cpu", 0)
            self._session.run_with_iobinding(binding, self._run_options)
            values: Any = zip(self._outputs, binding.get_outputs(), strict=True)
            results: dict[str, Any] = {
                name: DeviceCache(value, tuple(value.shape())) if name.startswith(PRESENT) else value.numpy()
                for name, value in values
            }
            return results
        except Exception as error:  # onnxruntime's exceptions share no base class
            feed = {name: array for name, array in feed.items() if not isinstance(array, DeviceCache)}
            shapes = ", ".join(f"{name} {shape_text(array)}" for name, array in feed.items())
            why = _explain(error, f"{self.path.name}: not enough memory for {shapes}")
            if "out of data bounds" in str(error):
                raise InputError(f"{self.path.name}: a token id lies outside the model's vocabulary ({why})") from None
            raise self.refusal(feed, why) from None

    def caveats(self) -> tuple[str, ...]:
        """Return notes about nodes that another provider than the session's computes, and about RTX's defaults."""
        if self.provider == CPU:
            return ()
        requested, notes = self.provider.removesuffix(SUFFIX), list[str]()
        if self._assigned is None:
            notes.append(f"onnxruntime {ort.__version__} does not report which nodes {requested} left to the CPU")
        elif elsewhere := {place: nodes for place, nodes in self._assigned.items() if place[0] != self.provider}:
            operators = Counter[str]()
            for (_, operator), nodes in elsewhere.items():
                operators[operator] += nodes
            providers = ", ".join(dict.fromkeys(name.removesuffix(SUFFIX) for name, _ in elsewhere))
            listed = ", ".join(f"{operator} ({nodes})" for operator, nodes in operators.most_common(6))
            ellipsis = ", …" if len(operators) > 6 else ""
            counts = f"{operators.total()} of {sum(self._assigned.values())} nodes ran on {providers}"
            notes.append(f"{counts}, not on {requested}: {listed}{ellipsis}")
        if self.provider == RTX and self._reads_whole_texts:
            notes.append(_RTX_DEFAULTS)
        return tuple(notes)

    def settings(self) -> dict[str, Any]:
        """Return the number of nodes of each provider, and the options of the RTX provider, without local paths."""
        settings: dict[str, Any] = {}
        if self._assigned is not None:
            providers = (name for (name, _), nodes in self._assigned.items() for _ in range(nodes))
            settings["nodes_by_provider"] = dict(Counter(providers))
        if self.provider == RTX:
            folder = "nv_runtime_cache_path"
            options = {name: "cache folder" if name == folder else text for name, text in self._rtx_options.items()}
            settings["provider_options"] = options
            settings["kernel_specialization"] = "the provider's default (lazy), not read back"
            settings["cuda_graphs"] = "the provider's default (disabled), not read back"
        return settings

    def close(self) -> None:
        self._session = None


def _open(path: Path, provider: str, threads: int, provider_options: dict[str, str], *, in_turns: bool) -> Any:
    """Open a graph without ONNX Runtime's fallback, which prints and computes on the CPU after an error."""
    available, version = ort.get_available_providers(), f"onnxruntime {ort.__version__}"
    is_plugin = provider == RTX and RTX not in available
    if is_plugin and rtx_plugin().problem is not None:
        raise InputError(f"provider {provider!r} cannot be used here: {rtx_plugin().problem}")
    if provider not in available and not is_plugin:
        names = ", ".join(sorted(available))
        raise InputError(f"provider {provider!r} is not available in the installed {version}; available: {names}")
    require_file(path)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = _SILENT
    if provider != CPU:  # which silently leaves unsupported nodes to the CPU provider
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if in_turns:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    missing = None
    try:
        if is_plugin:
            options.add_provider_for_devices(list(rtx_plugin().devices), provider_options)
            session = ort.InferenceSession(str(path), options, enable_fallback=0)
        else:
            if provider in (CUDA, TENSORRT):
                missing = load_cuda_libraries()
            if provider == CUDA:  # which uses TF32 by default: 10 bits of mantissa, FP32 has 23
                provider_options = {"use_tf32": "0"}
            providers = [(provider, provider_options)]
            session = ort.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime's exceptions share no base class
        why = _explain(error, f"{path}: not enough memory to open it")
        if provider != CPU:
            _open(path, CPU, threads, {}, in_turns=in_turns)  # raises if the file is at fault
            raise InputError(
                f"{path}: provider {provider!r} cannot open it, and the CPU can ({why}); run edgeformer doctor"
            ) from None
        problem = f"cannot be opened by {version}"
        if "INVALID_PROTOBUF" in str(error) or "No graph was found" in str(error):
            problem = "is truncated, damaged, or not an ONNX file"
        raise ArtifactError(f"{path}: {problem} ({why}); {REMEDY}") from None
    # onnxruntime silently drops a provider whose library cannot be loaded; a measurement must not.
    if session.get_providers()[0] != provider:
        why = f"it cannot load {missing}" if missing else "its driver or libraries are missing or too old"
        raise InputError(
            f"provider {provider!r} of {version} does not start, because {why}; run edgeformer doctor (without it, "
            f"{session.get_providers()[0]} would compute)"
        )
    release_heap()  # what reading the file has left: about as much as the packed matrices
    return session


def _explain(error: Exception, too_little_memory: str) -> str:
    """Return the first line of onnxruntime's message without prefix, status code and source paths.

    Raises EdgeformerError with ``too_little_memory`` if that is the reason.
    """
    text = str(error)
    line = (text.strip().splitlines() or ["no message"])[0]
    line = line.rsplit("Status Message: ", 1)[-1].rsplit(" : ", 1)[-1]
    if (
        line.startswith("/") or "failed:/" in line
    ):  # "Load model from … failed:/onnxruntime_src/….h:583 signature message"
        line = line.rsplit(") ", 1)[-1]
    if isinstance(error, MemoryError) or "allocate" in text.lower() or "bad_alloc" in text:
        raise EdgeformerError(f"{too_little_memory} ({line[:200]})") from None
    return line[:200]
