"""``export --litert``: text encoders as .tflite files, converted from torch by litert-torch."""

import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import EdgeformerError, install_hint
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import ArtifactManifest, Sharing
from edgeformer.artifacts.progress import bar
from edgeformer.runtimes.litert.session import EXTRA
from edgeformer.runtimes.runtime import ENGINES_FOLDER, Builder, BuildJob, Target, converting, stored_twice
from edgeformer.system.output import capture_native_stderr

FORMAT = "litert"
PACKAGES = ("ai-edge-litert", "litert-torch", "ai-edge-quantizer")
_SHORTEST = 16
_MEASURED_LENGTH = 128
"""Length of the latency budgets, which a file takes if the model does."""
_BATCH_ROWS, _LONGEST_IN_BATCH = 8, 32
"""Texts of up to 32 tokens also get a signature of 8 rows; longer ones gain little (docs/guides/deploy.md)."""
_BOUND = -3e38
_WEIGHT_OPERATORS = {"FULLY_CONNECTED": 1, "BATCH_MATMUL": 1, "EMBEDDING_LOOKUP": 1, "GATHER": 0, "DEQUANTIZE": 0}
"""Operator → number of the operand that is a weight if it is stored."""

_NO_CACHE = (
    "LiteRT: a language model is not built, because the file's fixed shapes have no cache that grows with the text; "
    "leave out --litert"
)
_NO_FP16 = (
    "litert: no FP16 file, because XNNPACK computes FP16 only on processors with FP16 arithmetic; this was not tested"
)


class LiteRTBuilder(Builder):
    """A file for every full and exit graph: FP32, and with ``--int8`` also INT8 by AI Edge Quantizer."""

    name = "litert"
    formats = (FORMAT,)
    flag = "--litert"
    packages, extra, precision = (*PACKAGES, "torch"), EXTRA, "fp32"

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        if job.precision == "fp16":
            job.note(_NO_FP16)
        has_int8 = any(graph.precision == "int8" for graph in job.graphs)
        shapes = signature_shapes(job)
        lengths = "|".join(map(str, sorted({tokens for _, tokens in shapes})))
        for graph in job.full_text_graphs("fp32"):
            entry = self.initial_entry(graph, "fp32")
            try:
                module = job.module(graph)
            except EdgeformerError as error:
                yield entry.model_copy(update={"status": "unavailable", "reason": str(error)})
                continue
            if "attention_mask" not in graph.inputs:
                yield entry.model_copy(update={"reason": _NO_CACHE})
                return
            entry = entry.model_copy(update={"inputs": dict.fromkeys(graph.inputs, f"int64[batch, {lengths}]")})
            file = f"{ENGINES_FOLDER}/{Path(str(graph.file)).stem}.tflite"
            path = job.bundle / file
            label = f"Converting {graph.id} for LiteRT, {len(shapes)} signatures"
            try:
                with bar(job.progress, label, None):
                    for bounds_norms in (False, True):
                        names = tuple(graph.inputs), tuple(graph.outputs) or ("logits",)
                        convert(module, *names, shapes, path, bounds_norms=bounds_norms)
                        unique = graph.sharing.unique_parameters if graph.sharing is not None else None
                        sharing, _ = audit_file(path, unique)
                        if stored_twice(sharing) is None:
                            break
                yield self._describe(graph, entry, job, file)
                if not has_int8:
                    continue
                entry = self.initial_entry(graph, "int8").model_copy(update={"inputs": entry.inputs})
                file = f"{ENGINES_FOLDER}/{path.stem}_int8.tflite"
                with bar(job.progress, f"Quantizing {graph.id} for LiteRT", None):
                    recipe = quantize(path, job.bundle / file)
                if recipe != _RECIPES[0]:
                    job.note(f"{entry.id}: quantized by {recipe}, because {_RECIPES[0]} fails: it computes in FP32")
                yield self._describe(graph, entry, job, file)
            except EdgeformerError as error:
                yield entry.model_copy(update={"reason": str(error)})

    def _describe(self, graph: ArtifactManifest, entry: ArtifactManifest, job: BuildJob, file: str) -> ArtifactManifest:
        """Complete the entry of a written file; export then measures its parity and scores."""
        needed = graph.sharing.unique_parameters if graph.sharing is not None else None
        sharing, quantized = audit_file(job.bundle / file, needed)
        absent = f"ai-edge-litert is not installed, which runs it; {install_hint(EXTRA)}"
        parity = self.unmeasured_parity(graph, absent, entry.precision)
        fields = {"sharing": sharing, "quantized": quantized, "parity": parity}
        return self.built_entry(entry, job.bundle, file, self.packages, **fields)


def signature_shapes(job: BuildJob) -> list[tuple[int, int]]:
    """Return rows and tokens of every signature: 16, 32, 64… up to the longest text, or 128 if that is more."""
    longest = min(job.max_positions, max(job.max_length, _MEASURED_LENGTH))
    lengths = [_SHORTEST << doublings for doublings in range(longest.bit_length()) if _SHORTEST << doublings < longest]
    shapes = [(1, tokens) for tokens in (*lengths, longest)]
    return shapes + [(_BATCH_ROWS, tokens) for _, tokens in shapes if tokens <= _LONGEST_IN_BATCH]


def convert(
    module: Any, inputs: Sequence[str], outputs: Sequence[str], shapes: Sequence[tuple[int, int]], path: Path, *,
    bounds_norms: bool = False,
) -> None:  # fmt: skip
    """Write a .tflite file with a signature per shape, which share their weights.

    Dynamic shapes are no alternative: the converter cannot lower a reshape whose size is only known at run time.

    ``module`` takes ``inputs`` in this order, int64 [rows, tokens] each, and returns ``outputs``. A signature's inputs
    are int32, the only integers that lookups take. ``bounds_norms``: put a bound that no number reaches behind every
    norm. The converter multiplies weights by the norm before them, and so stores a shared layer once per norm; the
    bound prevents that. Raises EdgeformerError: the model cannot be converted.
    """
    import torch

    class Named(torch.nn.Module):
        module: torch.nn.Module

        def forward(self, **arrays: torch.Tensor) -> dict[str, torch.Tensor]:
            results = self.module(*(arrays[name].long() for name in inputs))
            return dict(zip(outputs, results if isinstance(results, tuple) else (results,), strict=True))

    norms = [part for part in module.modules() if "Norm" in type(part).__name__] if bounds_norms else []
    hooks = [norm.register_forward_hook(lambda norm, _, output: output.clamp(min=_BOUND)) for norm in norms]
    try:
        with converting(f"{path.name}: litert-torch cannot convert this model"), capture_native_stderr():
            import litert_torch
            from litert_torch._config import config

            config.show_progress = False
            named, converter = Named().eval(), None
            named.module = module.eval()
            for rows, tokens in shapes:
                arrays = {name: torch.ones(rows, tokens, dtype=torch.int32) for name in inputs}
                add = (litert_torch if converter is None else converter).signature
                converter = add(f"{rows}x{tokens}", named, sample_kwargs=arrays)
            assert converter is not None
            with replacing(path) as temporary:
                converter.convert().export(str(temporary))
    finally:
        for hook in hooks:
            hook.remove()


_RECIPES = ("dynamic_wi8_afp32", "weight_only_wi8_afp32")
"""AI Edge Quantizer's recipes with a scale per channel: INT8 products, or weights that are only stored in INT8."""


def quantize(source: Path, target: Path) -> str:
    """Quantize a .tflite file; return the name of the first recipe that works. Raises EdgeformerError if none does."""
    problem: EdgeformerError | None = None
    for name in _RECIPES:
        try:
            with converting(f"{source.name}: AI Edge Quantizer cannot quantize it"), capture_native_stderr():
                from ai_edge_quantizer import quantizer, recipe

                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it prints sizes and bars
                    result = quantizer.Quantizer(str(source), getattr(recipe, name)()).quantize()
                with replacing(target) as temporary:
                    temporary.write_bytes(result.quantized_model)
            return name
        except EdgeformerError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def audit_file(path: Path, unique_parameters: int | None) -> tuple[Sharing, dict[str, int]]:
    """Count what a .tflite file stores, every buffer once; and nodes of the first signature with a quantized weight.

    Parameters are the weights of products and lookups, the biases of products, and other stored vectors: norms.
    Everything else is a constant: shapes, the rotary table, positions that were added for a length.
    """
    from ai_edge_litert import schema_py_generated as schema

    content = path.read_bytes()
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    operator_names = {value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)}
    integers = (schema.TensorType.INT8, schema.TensorType.INT4)
    # A buffer with a size lies behind the FlatBuffer.
    buffer_bytes = [int(b.size) if b.size > 1 else 0 if b.data is None else len(b.data) for b in model.buffers]
    sizes: dict[int, int] = {}  # buffer → elements, of parameters and of others
    parameters: set[int] = set()
    quantized = Counter[str]()
    for number, subgraph in enumerate(model.subgraphs):
        for tensor in subgraph.tensors:
            if not buffer_bytes[tensor.buffer]:
                continue
            shape = () if tensor.shape is None else tuple(map(int, tensor.shape))
            sizes[tensor.buffer] = math.prod(shape)
            if sizes[tensor.buffer] == max((*shape, 1)) > 1 and tensor.type == schema.TensorType.FLOAT32:
                parameters.add(tensor.buffer)
        for node in subgraph.operators:
            code = model.operatorCodes[node.opcodeIndex]
            name = operator_names[max(code.builtinCode, code.deprecatedBuiltinCode)]
            if name not in _WEIGHT_OPERATORS:
                continue
            weight = subgraph.tensors[node.inputs[_WEIGHT_OPERATORS[name]]]
            if weight.buffer in sizes and weight.type in (*integers, schema.TensorType.FLOAT32):
                parameters.add(weight.buffer)
                quantized[name] += number == 0 and weight.type in integers
    stored = sum(sizes[buffer] for buffer in parameters)
    weight_bytes = sum(buffer_bytes[buffer] for buffer in sizes)
    sharing = Sharing(
        unique_parameters=stored if unique_parameters is None else unique_parameters, stored_parameters=stored,
        constant_elements=sum(sizes.values()) - stored, weight_bytes=weight_bytes,
    )  # fmt: skip
    return sharing, {name: nodes for name, nodes in sorted(quantized.items()) if nodes}
