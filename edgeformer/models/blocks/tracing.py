"""Torch modules as ONNX graphs in memory: tracing, composition of traced parts, conversion to FP16.

Every weight is stored once. A looped block is traced once, whatever the number of loops; the graphs of all exits are
composed of calls of it.
"""

import ast
import functools
import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes import common as passes
from onnxscript.optimizer import fold_constants
from torch import Tensor, nn
from torch.func import functional_call

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.tasks.early_exit import exit_logits

KeyValue = tuple[onnx_ir.Value, onnx_ir.Value]
"""Keys and values of one attention."""
OPSET = 20
FLOAT32 = "float32"
"""Key in a node's ``meta``: whether the node belongs to a module with ``keeps_float32``."""
BATCH, TOKENS = 2, 3
"""Sizes of example inputs: with 0 or 1 torch would make them constants of the graph."""
_DOMAIN, _IR_VERSION = "edgeformer", 10
_FOLDED = {"Transpose", "Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Split"}
"""Operators that are applied to stored weights before export, where their input is a weight."""
_FLOAT, _HALF = onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16
_ONNX_TYPES = {torch.float32: _FLOAT, torch.float16: _HALF}
_MOVES = {"Slice", "Gather", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Split", "Expand", "Identity"}
"""Operators that move numbers and compute nothing. Torch promotes at the first node behind them that computes."""


@dataclass(frozen=True)
class GraphSpec:
    """A module to export, in evaluation mode on the CPU, with example arguments.

    A dynamic axis of an example is at least 2 long, because torch specialises on 0 and 1.
    """

    module: nn.Module
    inputs: Mapping[str, Tensor]  # examples by name, in the order of the module's arguments
    axes: Mapping[str, Mapping[int, str]]  # input → axis → name of the dynamic size: batch, sequence, past…
    outputs: Sequence[str] = ("logits",)
    longest: Mapping[str, int] = field(default_factory=dict)  # dynamic size → its largest value, if bounded


@dataclass(frozen=True)
class Graphs:
    """All graphs of one model in one precision."""

    exits: onnx_ir.Model  # of all exits, as in :class:`Exits`
    steps: dict[str, onnx_ir.Model] = field(default_factory=dict)  # embed, loop, readout…; empty if not requested
    decode: onnx_ir.Model | None = None  # with caches, to generate text
    shared_weights: bool = False  # the graphs keep their weights in one common file, instead of one file each
    has_row_scales: bool = False  # INT8 activations need a scale per position: some are far larger than others
    in_blocks: bool = False  # INT8 and INT4 have a scale per block, as llama.cpp's types, for activations as well
    pieces: Mapping[str, onnx_ir.Model] = field(default_factory=dict)  # traced parts by name, for reuse


class Piece(nn.Module):
    """A method of a model, or a function that uses the model's weights, as a module that can be traced."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.forward = forward


class Exits(Piece):
    """A model as a module from graph inputs to the logits of every exit, then the state after every loop."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.every_exit)
        self.exits = tuple(model.exits)  # the loops after which it answers, in rising order; the last is the full model
        self.outputs = (*map(exit_logits, self.exits), *map(state_name, range(1, self.exits[-1] + 1)))


def state_name(loop: int) -> str:
    """Return the name of the output with the hidden state after ``loop``, float32."""
    return f"state_loop{loop}"


def text_spec(
    module: nn.Module, names: Sequence[str], max_positions: int, outputs: Sequence[str] = ("logits",)
) -> GraphSpec:
    """Return the spec of a module whose arguments are all int64 [batch, sequence]."""
    length = min(7, max_positions)
    examples = {name: torch.ones(2, length, dtype=torch.int64) for name in names}
    if "attention_mask" in examples:
        examples["attention_mask"][1, length // 2 :] = 0
    axes = {name: {0: "batch", 1: "sequence"} for name in names}
    return GraphSpec(module, examples, axes, outputs, {"sequence": max_positions})


def layer_spec(
    layer: nn.Module, arguments: Mapping[str, Tensor], axes: Mapping[str, Mapping[int, str]], outputs: Sequence[str],
    longest: Mapping[str, int], *constants: Any,
) -> GraphSpec:  # fmt: skip
    """Return the spec of a layer with its weights as inputs, after its ``arguments``: one trace serves all layers.

    ``constants``: further arguments of the layer, which are no inputs of the graph.
    """
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    examples = {**arguments, **{name.replace(".", "_"): weight for name, weight in weights.items()}}

    def forward(*values: Tensor) -> Any:
        layer_weights = dict(zip(weights, values[len(arguments) :], strict=True))
        return functional_call(layer, layer_weights, (*values[: len(arguments)], *constants))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD  # torch derives the graph's input names from the signature
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in examples])  # type: ignore[attr-defined]
    return GraphSpec(Piece(layer, forward), examples, axes, outputs, longest)


def export_graph(spec: GraphSpec) -> onnx_ir.Model:
    """Trace a module to an ONNX graph whose weights are stored once. Raises EdgeformerError if torch cannot."""
    _cache_operator_library()
    names = {name for axes in spec.axes.values() for name in axes.values()}
    sizes = {name: torch.export.Dim(name, max=spec.longest.get(name)) for name in names}
    shapes = {name: {axis: sizes[size] for axis, size in spec.axes.get(name, {}).items()} for name in spec.inputs}
    # The exporter warns that torchvision is missing; it is not needed.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch, and equal names of axes
        try:
            program = torch.onnx.export(
                spec.module, tuple(spec.inputs.values()), dynamo=True, verbose=False, opset_version=OPSET,
                external_data=False, input_names=list(spec.inputs), output_names=list(spec.outputs),
                dynamic_shapes=tuple(shapes.values()),
            )  # fmt: skip
        except torch.onnx.errors.OnnxExporterError as error:
            raise EdgeformerError(f"torch cannot export this model to ONNX: {error}") from error
    assert program is not None
    # Mark the nodes that an FP16 model computes in float32, before deduplicate_weights() removes torch's metadata.
    modules = spec.module.named_modules(remove_duplicate=False)
    float32_scopes = {name for name, module in modules if getattr(module, "keeps_float32", False)}
    for node in program.model.graph:
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        node.meta[FLOAT32] = not float32_scopes.isdisjoint(scopes)
    _compute_softmax_in_float32(program.model)
    deduplicate_weights(program.model)
    return program.model


@functools.cache
def _cache_operator_library() -> None:
    """Make torch read the sources of its ONNX operators once per process: most of a small graph's export time.

    If another torch version keeps them in another place, exports are slower and otherwise unchanged.
    """
    try:
        apis = importlib.import_module("torch.onnx._internal._lazy_import").onnxscript_apis
        module = importlib.import_module(apis._name)
        module.get_torchlib_ops = functools.cache(module.get_torchlib_ops)  # type: ignore[attr-defined]
    except (ImportError, AttributeError):
        return


def _compute_softmax_in_float32(model: onnx_ir.Model) -> None:
    """Put casts around every FP16 softmax: FP16 exponentials lose small differences, and their sum may overflow."""
    for node in [node for node in model.graph if node.op_type == "Softmax"]:
        scores, weights = node.inputs[0], node.outputs[0]
        if scores is None or scores.dtype != _HALF:
            continue
        widen = onnx_ir.node("Cast", [scores], {"to": int(_FLOAT)}, name=f"{node.name}_wide")
        softmax = onnx_ir.node("Softmax", [widen.outputs[0]], dict(node.attributes), name=node.name)
        narrow = onnx_ir.node("Cast", [softmax.outputs[0]], {"to": int(_HALF)}, name=f"{node.name}_narrow")
        widen.outputs[0].name, softmax.outputs[0].name = f"{weights.name}_scores", f"{weights.name}_float32"
        onnx_ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [widen, softmax, narrow], [weights], [narrow.outputs[0]]
        )


def deduplicate_weights(model: onnx_ir.Model) -> None:
    """Store every weight once: apply operators on weights alone to the weights, and merge equal tensors and nodes.

    Runtimes would fold the transposition of each use into a copy, and quantizers skip products of no stored tensor.
    """
    limits = {"input_size_limit": 2**40, "output_size_limit": 2**40}  # none
    fold_constants(model, **limits, should_fold=lambda node: node.op_type in _FOLDED or None)
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        # A folded transposition is a strided view, which cannot be hashed.
        value.const_value = onnx_ir.tensor(np.asarray(value.const_value.numpy(), order="C"), name=value.name)
    passes.RemoveUnusedNodesPass()(model)
    passes.DeduplicateHashedInitializersPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.ClearMetadataAndDocStringPass()(model)  # torch's stack traces: hundreds of kilobytes, with local paths


def extract_outputs(model: onnx_ir.Model, outputs: Mapping[str, str]) -> onnx_ir.Model:
    """Copy the part of a graph that computes ``outputs``, name in ``model`` → name in the copy; unused inputs go."""
    copy = model.clone()
    graph = copy.graph
    selected = [value for value in graph.outputs if value.name in outputs]
    assert len(selected) == len(outputs), f"some outputs are missing: {sorted(outputs)}"
    graph.outputs[:] = selected
    passes.RemoveUnusedNodesPass()(copy)
    for value in selected:
        assert value.name is not None
        value.name = outputs[value.name]
    graph.inputs[:] = [value for value in graph.inputs if value.uses()]
    return copy


class Composer:
    """Builds a graph of calls of traced pieces, whose weights are shared, not copied; :meth:`finish` inlines them."""

    def __init__(self, pieces: Mapping[str, onnx_ir.Model]) -> None:
        self._functions: dict[str, onnx_ir.Function] = {}
        self._weights: dict[str, list[onnx_ir.Value]] = {}
        self._outputs = {name: list(piece.graph.outputs) for name, piece in pieces.items()}
        self._constants: list[onnx_ir.Value] = []
        self._nodes: list[onnx_ir.Node] = []
        for name, piece in pieces.items():
            body = piece.clone().graph
            stored, self._weights[name] = list(body.initializers.values()), []
            body.initializers.clear()
            for value in stored:  # an ONNX function has no weights: they become arguments
                assert value.const_value is not None
                weight = onnx_ir.tensor(np.asarray(value.const_value.numpy()), name=f"{name}.{value.name}")
                self._weights[name].append(onnx_ir.val(weight.name, const_value=weight))
                value.const_value = None
                body.inputs.append(value)
            self._functions[name] = onnx_ir.Function(_DOMAIN, name, graph=body, attributes=[])

    def input(self, piece: str, name: str, new_name: str | None = None) -> onnx_ir.Value:
        """Return a new graph input with the type and shape of a piece's input."""
        value = next(value for value in self._functions[piece].inputs if value.name == name)
        return onnx_ir.Value(name=new_name or name, shape=value.shape, type=value.type)

    def cache_inputs(self, piece: str, count: int) -> list[KeyValue]:
        """Return graph inputs for the keys and values of ``count`` attentions, like those of a piece."""
        return [
            (
                self.input(piece, "past_key", f"past_key_values.{number}.key"),
                self.input(piece, "past_value", f"past_key_values.{number}.value"),
            )
            for number in range(count)
        ]

    @staticmethod
    def cache_outputs(caches: Sequence[KeyValue]) -> dict[str, onnx_ir.Value]:
        """Return the keys and values of attentions as graph outputs by name."""
        return {
            f"present.{number}.{kind}": value
            for number, pair in enumerate(caches)
            for kind, value in zip(("key", "value"), pair, strict=True)
        }

    def call(self, name: str, inputs: Mapping[str, onnx_ir.Value]) -> dict[str, onnx_ir.Value]:
        """Call a piece: its inputs by name → its outputs by name."""
        function, weights, signature = self._functions[name], self._weights[name], self._outputs[name]
        arguments = [inputs[str(value.name)] for value in function.inputs[: len(function.inputs) - len(weights)]]
        node = onnx_ir.node(
            name, [*arguments, *weights], domain=_DOMAIN, num_outputs=len(signature), name=f"{name}_{len(self._nodes)}"
        )
        self._nodes.append(node)
        for value, output in zip(node.outputs, signature, strict=True):
            value.name, value.type, value.shape = f"{node.name}_{output.name}", output.type, output.shape
        return {str(output.name): value for output, value in zip(signature, node.outputs, strict=True)}

    def node(
        self, operator: str, *inputs: onnx_ir.Value, like: onnx_ir.Value | None = None, **attributes: int
    ) -> onnx_ir.Value:
        """Add an operator between pieces, whose result has the type and shape of ``like``."""
        node = onnx_ir.node(operator, list(inputs), attributes, name=f"{operator}_{len(self._nodes)}")
        result = node.outputs[0]
        result.name = f"{operator}_{len(self._nodes)}_result"
        if like is not None:
            result.type, result.shape = like.type, like.shape
        self._nodes.append(node)
        return result

    def to_float32(self, value: onnx_ir.Value) -> onnx_ir.Value:
        result = self.node("Cast", value, like=value, to=int(_FLOAT))
        result.type = onnx_ir.TensorType(_FLOAT)
        return result

    def constant(self, name: str, array: NDArray[np.generic]) -> onnx_ir.Value:
        value = onnx_ir.val(name, const_value=onnx_ir.tensor(array, name=name))
        self._constants.append(value)
        return value

    def store_layers(self, layers: Iterable[nn.Module]) -> list[dict[str, onnx_ir.Value]]:
        """Store the weights of layers; return those of each layer as inputs of a piece from :func:`layer_spec`."""
        return [
            {
                name.replace(".", "_"): self.constant(f"layers.{number}.{name}", weight.detach().numpy())
                for name, weight in layer.named_parameters()
            }
            for number, layer in enumerate(layers)
        ]

    def newest_logits(self, state: onnx_ir.Value) -> onnx_ir.Value:
        """Call the piece ``readout`` on the newest token of a state [B, n, C]: logits [B, 1, V]."""
        slice_last = {"last_start": -1, "last_end": np.iinfo(np.int64).max, "last_axis": 1}
        bounds = [self.constant(name, np.array([number], dtype=np.int64)) for name, number in slice_last.items()]
        newest = self.node("Slice", state, *bounds)
        newest.type = state.type
        logits = self.call("readout", {"state": newest})["logits"]
        assert logits.shape is not None
        logits.shape = onnx_ir.Shape([logits.shape[0], 1, logits.shape[2]])
        return logits

    def finish(self, inputs: Sequence[onnx_ir.Value], outputs: Mapping[str, onnx_ir.Value]) -> onnx_ir.Model:
        """Return the graph from ``inputs`` to ``outputs`` (name → value), each weight stored once."""
        for name, value in outputs.items():
            value.name = name
        weights = [value for values in self._weights.values() for value in values if value.uses()]
        graph = onnx_ir.Graph(
            list(inputs), list(outputs.values()), nodes=self._nodes, initializers=[*weights, *self._constants],
            opset_imports={"": OPSET, _DOMAIN: 1}, name="main_graph",
        )  # fmt: skip
        model = onnx_ir.Model(graph, ir_version=_IR_VERSION, functions=list(self._functions.values()))
        shared = {str(value.name) for value in (*inputs, *(value for node in self._nodes for value in node.outputs))}
        passes.InlinePass()(model)
        passes.RemoveUnusedOpsetsPass()(model)
        read_sizes_from_inputs(model, shared)
        deduplicate_weights(model)
        return model


def cast_node(value: onnx_ir.Value, dtype: onnx_ir.DataType, name: str, result: str | None = None) -> onnx_ir.Node:
    """Return a cast of a value. Its result is called ``result``; None: like the node."""
    cast = onnx_ir.node("Cast", [value], {"to": int(dtype)}, name=name)
    output = cast.outputs[0]
    output.name, output.type, output.shape = result or name, onnx_ir.TensorType(dtype), value.shape
    return cast


def read_sizes_from_inputs(model: onnx_ir.Model, shared: Collection[str]) -> None:
    """Make Shape nodes read dynamic sizes from the graph's inputs, so that :func:`deduplicate_weights` merges them.

    Every loop builds a mask from the number of tokens of its own state and cache. Once all read it from the same value,
    one mask serves all loops. Only at inputs and pieces' results, ``shared``, do equal names of dynamic sizes mean
    equal sizes: a piece may have been traced with other sizes than it is called with.
    """
    sources: dict[str | None, tuple[onnx_ir.Value, int]] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, onnx_ir.SymbolicDim) and size.value is not None:
                sources.setdefault(size.value, (value, axis))
    for node in model.graph:
        operand = node.inputs[0] if node.op_type == "Shape" and node.inputs else None
        axis = node.attributes.get_int("start", 0)
        if operand is None or operand.name not in shared or node.attributes.get_int("end", -1) != axis + 1:
            continue
        name = operand.shape[axis] if operand.shape is not None else None
        if isinstance(name, onnx_ir.SymbolicDim) and name.value in sources:
            value, axis = sources[name.value]
            node.replace_input_with(0, value)
            node.attributes["start"] = onnx_ir.AttrInt64("start", axis)
            node.attributes["end"] = onnx_ir.AttrInt64("end", axis + 1)


def convert_graph_to_fp16(piece: onnx_ir.Model, spec: GraphSpec) -> onnx_ir.Model:
    """Convert an FP32 trace to the graph that tracing the FP16 model would give, which saves the seconds of tracing.

    Both traces have the same nodes but for casts. The types follow from the FP16 model, ``spec``, by torch's rules: its
    tensors say which weight is stored in which type, operands of two types are promoted, constants of the code take the
    type of the other operand, and modules with ``keeps_float32`` take FP16, compute in float32 and return FP16. Tests
    compare the two graphs node for node. Raises EdgeformerError if the FP16 type of a node is undefined.
    """
    # 1. Define the casts
    model = piece.clone()
    graph = model.graph
    narrowed: set[onnx_ir.Value] = set()  # results of keeps_float32 modules, which nodes behind the module read in FP16
    constants: set[onnx_ir.Value] = set()  # FP32 numbers from the code, which are no tensors of the model
    casts: dict[tuple[onnx_ir.Value, onnx_ir.DataType], onnx_ir.Value] = {}

    def as_type(value: onnx_ir.Value, dtype: onnx_ir.DataType, user: onnx_ir.Node | None) -> onnx_ir.Value:
        """Return the value in a type, from a cast before its first user; None: at the graph's end."""
        if value.dtype == dtype or (value, dtype) in casts:
            return casts.get((value, dtype), value)
        name = f"{value.name}_{'wide' if dtype == _FLOAT else 'half'}"
        if value in constants:
            assert value.const_value is not None
            with np.errstate(over="ignore"):  # becomes infinity, as in torch; the parity check reports the effect
                array = value.const_value.numpy().astype(np.float16)
            converted = onnx_ir.val(name, const_value=onnx_ir.tensor(array, name=name))
            graph.register_initializer(converted)
        else:
            cast = cast_node(value, dtype, name)
            converted = cast.outputs[0]
            if user is None:
                graph.append(cast)
            else:
                graph.insert_before(user, cast)
        casts[value, dtype] = converted
        return converted

    # 2. Convert inputs and stored weights
    for value in graph.inputs:
        if value.dtype == _FLOAT:
            # Setting value.dtype would change the type object that clones share.
            value.type = onnx_ir.TensorType(_ONNX_TYPES[spec.inputs[str(value.name)].dtype])
    stored: dict[str, Tensor] = {**spec.module.state_dict(keep_vars=True), **dict(spec.module.named_buffers())}
    for name, value in graph.initializers.items():
        if value.dtype == _FLOAT and name in stored:
            value.const_value = onnx_ir.tensor(stored[name].detach().numpy(), name=name)
            value.type = onnx_ir.TensorType(value.const_value.dtype)
        elif value.dtype == _FLOAT:
            constants.add(value)

    # 3. Give all float operands of a node one type
    for node in list(graph):  # in execution order: all float operands get one type, which the float results get, too
        results = [value for value in node.outputs if value.dtype == _FLOAT]
        operands = [value for value in node.inputs if value is not None and value.dtype in (_FLOAT, _HALF)]
        if not operands and not results:
            continue
        in_float32 = bool(node.meta.get(FLOAT32))
        tensors = [value for value in operands if value not in constants]
        types = {_HALF if not in_float32 and value in narrowed else value.dtype for value in tensors}
        if node.op_type == "Cast" and not operands:
            dtype = _FLOAT if in_float32 else _HALF
            node.attributes["to"] = onnx_ir.AttrInt64("to", int(dtype))
        elif not tensors:
            raise EdgeformerError(
                f"FP16: the type of {node.op_type} {node.name!r} cannot be inferred from its operands"
            )
        else:
            only_moves_half = node.op_type in _MOVES and types == {_HALF}
            dtype = _FLOAT if _FLOAT in types or (in_float32 and not only_moves_half and results) else _HALF
        for index, operand in enumerate(node.inputs):
            if operand is not None and operand in operands:
                node.replace_input_with(index, as_type(operand, dtype, node))
        for value in results:
            value.type = onnx_ir.TensorType(dtype)
            if in_float32 and dtype == _FLOAT:
                narrowed.add(value)

    # 4. Give the outputs the types of the FP16 model's
    with torch.inference_mode():
        outputs = spec.module(*spec.inputs.values())
    for index, output in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
        value = graph.outputs[index]
        converted = as_type(value, _ONNX_TYPES[output.dtype], None)
        if converted is not value:  # the graph's output keeps its name
            name = str(value.name)
            value.name, converted.name = f"{name}_before", name
            graph.outputs[index] = converted
    _compute_softmax_in_float32(model)
    deduplicate_weights(model)
    return model
