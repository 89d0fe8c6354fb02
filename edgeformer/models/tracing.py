"""Dynamic sizes in composed graphs: asked of the graph's inputs, so that what follows from them is computed once."""

from __future__ import annotations

import ast
import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes import PassManager
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    CommonSubexpressionEliminationPass,
    DeduplicateHashedInitializersPass,
    InlinePass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)
from onnxscript.optimizer import fold_constants
from torch import Tensor, nn

from edgeformer.artifacts.errors import EdgeformerError


def ask_inputs(model: onnx_ir.Model, between: Collection[str]) -> None:
    """Ask inputs for the sizes of what is handed from piece to piece.

    Every loop asks its own state and its own cache how many tokens there are, and makes a mask of the answer. Asked of
    one value, these are equal nodes, which :func:`~edgeformer.models.tracing.tidy` merges: one mask for all loops.

    Args:
        model: a graph whose pieces are in place.
        between: names of inputs, and of what pieces gave; of these alone a dynamic size's name means the same
            everywhere. What a piece has inside may have been traced with other sizes than it is called with.
    """
    places: dict[str, tuple[onnx_ir.Value, int]] = {}
    for value in model.graph.inputs:
        for axis in range(len(value.shape or ())):
            if (name := _size(value, axis)) is not None:
                places.setdefault(name, (value, axis))
    for node in model.graph:
        (asked, *_), axis = node.inputs or (None,), node.attributes.get_int("start", 0)
        if node.op_type != "Shape" or asked is None or asked.name not in between:
            continue
        one = node.attributes.get_int("end", -1) == axis + 1
        place = places.get(_size(asked, axis) or "") if one else None
        if place is not None:
            node.replace_input_with(0, place[0])
            node.attributes["start"] = onnx_ir.AttrInt64("start", place[1])
            node.attributes["end"] = onnx_ir.AttrInt64("end", place[1] + 1)


def _size(value: onnx_ir.Value, axis: int) -> str | None:
    """Name of a dynamic size; None where it is a number, or has none."""
    size = value.shape[axis] if value.shape is not None else None
    return size.value if isinstance(size, onnx_ir.SymbolicDim) else None


# What stays in float32 in an FP16 graph: nodes of modules that say so, and every softmax.


FLOAT32 = "float32"
"""In a node's ``meta``: whether it belongs to a module that says ``keeps_float32``."""


def mark_float32(model: onnx_ir.Model, module: nn.Module) -> None:
    """Note in the nodes which of them a halved model computes in float32; what torch wrote there is cleared later."""
    keeping = {
        name for name, one in module.named_modules(remove_duplicate=False) if getattr(one, "keeps_float32", False)
    }
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        node.meta[FLOAT32] = not keeping.isdisjoint(scopes)


def softmax_in_float32(model: onnx_ir.Model) -> None:
    """In an FP16 graph: exponentials of FP16 scores lose what tells close tokens apart, and their sum may overflow."""
    for node in [node for node in model.graph if node.op_type == "Softmax"]:
        scores, weights = node.inputs[0], node.outputs[0]
        if scores is None or scores.dtype != onnx_ir.DataType.FLOAT16:
            continue
        wide = onnx_ir.node("Cast", [scores], {"to": int(onnx_ir.DataType.FLOAT)}, name=f"{node.name}_wide")
        exact = onnx_ir.node("Softmax", [wide.outputs[0]], dict(node.attributes), name=node.name)
        half = int(onnx_ir.DataType.FLOAT16)
        narrow = onnx_ir.node("Cast", [exact.outputs[0]], {"to": half}, name=f"{node.name}_narrow")
        wide.outputs[0].name, exact.outputs[0].name = f"{weights.name}_scores", f"{weights.name}_float32"
        onnx_ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [wide, exact, narrow], [weights], [narrow.outputs[0]]
        )


# A torch module as an ONNX graph in memory: dynamic axes, every weight stored once; graphs cut out of it, or made of
# pieces that were traced once each: a block that is looped is traced once, however deep the loop.


OPSET = 20
_DOMAIN, _IR_VERSION = "edgeformer", 10
_NO_LIMIT = 2**40
_FOLDED = {"Transpose", "Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Split"}
"""What is done to weights alone is done once, before they are stored; what a graph does not use of them is left out."""


def state_name(loop: int) -> str:
    """Output with the hidden state after ``loop``, float32."""
    return f"state_loop{loop}"


@dataclass(frozen=True)
class GraphSpec:
    """What is exported: a module in evaluation mode on the CPU, with examples of its arguments.

    Attributes:
        inputs: name → example, in the order of the module's arguments. No dynamic axis of an example is 0 or 1 long,
            so that nothing specialises on that.
        axes: input → axis → name of the dynamic size: ``batch``, ``sequence``, ``past``…
        outputs: names, in the order of what the module returns.
        longest: dynamic size → its largest value, where there is one.
    """

    module: nn.Module
    inputs: Mapping[str, Tensor]
    axes: Mapping[str, Mapping[int, str]]
    outputs: Sequence[str] = ("logits",)
    longest: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Graphs:
    """All graphs of one model in one precision, in memory.

    Attributes:
        exits: one graph with the logits of every exit and the state after every loop as outputs, called
            :func:`~edgeformer.tasks.early_exit.exit_logits` and :func:`state_name`.
        steps: part → graph: embed, loop, readout…; empty where they were not asked for.
        decode: of a model that writes text: a graph with caches.
        shared_weights: the graphs keep their weights in one file beside them; else every file stands for itself.
        row_scales: in INT8, activations need a scale per position: some positions are far larger than others.
        pieces: what was traced of them, by name, where that serves to make the graphs of a trimmed vocabulary.
    """

    exits: onnx_ir.Model
    steps: dict[str, onnx_ir.Model] = field(default_factory=dict)
    decode: onnx_ir.Model | None = None
    shared_weights: bool = False
    row_scales: bool = False
    pieces: Mapping[str, onnx_ir.Model] = field(default_factory=dict)


class Piece(nn.Module):
    """A part of a model as a module of its own, which is what can be traced.

    Args:
        model: whose weights it has.
        forward: what it computes: a method of the model, or a function around it.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.forward = forward


def text_spec(
    module: nn.Module, names: Sequence[str], max_positions: int, outputs: Sequence[str] = ("logits",)
) -> GraphSpec:
    """The spec of a module whose arguments are all int64 [batch, sequence]; ``attention_mask`` may hold zeros."""
    length = min(7, max_positions)
    examples = {name: torch.ones(2, length, dtype=torch.int64) for name in names}
    if "attention_mask" in examples:
        examples["attention_mask"][1, length // 2 :] = 0
    axes = {name: {0: "batch", 1: "sequence"} for name in names}
    return GraphSpec(module, examples, axes, outputs, {"sequence": max_positions})


@functools.cache
def _read_operators_once() -> None:
    """torch reads the source of every ONNX operator again for each export: most of the time that a small graph takes.

    Where another version of torch keeps them elsewhere, exports are slower and nothing else changes.
    """
    try:
        apis = importlib.import_module("torch.onnx._internal._lazy_import").onnxscript_apis
        module = importlib.import_module(apis._name)
        module.get_torchlib_ops = functools.cache(module.get_torchlib_ops)  # type: ignore[attr-defined]
    except (ImportError, AttributeError):
        return


def export_graph(spec: GraphSpec) -> onnx_ir.Model:
    """The module as an ONNX graph whose weights are stored once. Raises EdgeformerError where torch cannot."""
    _read_operators_once()
    names = {name for axes in spec.axes.values() for name in axes.values()}
    sizes = {name: torch.export.Dim(name, max=spec.longest.get(name)) for name in names}
    shapes = {name: {axis: sizes[size] for axis, size in spec.axes.get(name, {}).items()} for name in spec.inputs}
    # The exporter reports that torchvision is absent; nobody here needs it.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch, and axis names that coincide
        try:
            program = torch.onnx.export(
                spec.module,
                tuple(spec.inputs.values()),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                external_data=False,
                input_names=list(spec.inputs),
                output_names=list(spec.outputs),
                dynamic_shapes=tuple(shapes.values()),
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise EdgeformerError(f"torch cannot export this model to ONNX: {error}") from error
    assert program is not None
    mark_float32(program.model, spec.module)
    softmax_in_float32(program.model)
    tidy(program.model)
    return program.model


def tidy(model: onnx_ir.Model) -> None:
    """Store every weight once: fold what is done to weights alone into them, and merge equal tensors.

    A layer that is used twice refers to its weight through one transposition per use. Runtimes fold each into a copy
    of its own when they load the file, and quantizers silently skip products whose weight is not a stored tensor.
    """
    fold_constants(
        model,
        input_size_limit=_NO_LIMIT,
        output_size_limit=_NO_LIMIT,
        should_fold=lambda node: node.op_type in _FOLDED or None,
    )
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        # A folded transposition is a strided view, which cannot be hashed.
        value.const_value = onnx_ir.tensor(np.asarray(value.const_value.numpy(), order="C"), name=value.name)
    PassManager(
        [
            RemoveUnusedNodesPass(),
            DeduplicateHashedInitializersPass(),
            CommonSubexpressionEliminationPass(),
            RemoveUnusedNodesPass(),
            ClearMetadataAndDocStringPass(),  # torch's stack traces: hundreds of kilobytes, and paths of this machine
        ]
    )(model)


def cut_out(model: onnx_ir.Model, outputs: Mapping[str, str]) -> onnx_ir.Model:
    """A graph of its own that computes some of ``model``'s outputs, with the nodes and weights that those need.

    Args:
        outputs: name in ``model`` → name in the new graph. Inputs that nothing needs any more are left out.
    """
    copy = model.clone()
    graph = copy.graph
    kept = [value for value in graph.outputs if value.name in outputs]
    assert len(kept) == len(outputs), f"{sorted(outputs)} are not all outputs"
    graph.outputs[:] = kept
    RemoveUnusedNodesPass()(copy)
    for value in kept:
        assert value.name is not None
        value.name = outputs[value.name]
    for name in [value.name for value in graph.inputs if not value.uses()]:
        del graph.inputs[[value.name for value in graph.inputs].index(name)]
    return copy


class Composer:
    """Collects calls of pieces; :meth:`finish` puts their nodes in the calls' place."""

    def __init__(self) -> None:
        self._functions: dict[str, onnx_ir.Function] = {}
        self._weights: dict[str, list[onnx_ir.Value]] = {}
        self._outputs: dict[str, list[onnx_ir.Value]] = {}
        self._constants: list[onnx_ir.Value] = []
        self._nodes: list[onnx_ir.Node] = []

    def add(self, name: str, piece: onnx_ir.Model) -> None:
        """Make a traced graph callable as ``name``. It is left as it was; its weights are shared, not copied."""
        body = piece.clone().graph
        stored, self._weights[name] = list(body.initializers.values()), []
        body.initializers.clear()
        for value in stored:  # a function has no weights of its own: they become arguments
            assert value.const_value is not None
            weight = onnx_ir.tensor(np.asarray(value.const_value.numpy()), name=f"{name}.{value.name}")
            self._weights[name].append(onnx_ir.val(weight.name, const_value=weight))
            value.const_value = None
            body.inputs.append(value)
        self._outputs[name] = list(piece.graph.outputs)
        self._functions[name] = onnx_ir.Function(_DOMAIN, name, graph=body, attributes=[])

    def call(self, name: str, inputs: Mapping[str, onnx_ir.Value]) -> dict[str, onnx_ir.Value]:
        """Use a piece: its inputs by name → its outputs by name."""
        body, number = self._functions[name], len(self._nodes)
        weights = self._weights[name]
        own = body.inputs[: len(body.inputs) - len(weights)]
        node = onnx_ir.node(
            name,
            [*(inputs[str(value.name)] for value in own), *weights],
            domain=_DOMAIN,
            num_outputs=len(self._outputs[name]),
            name=f"{name}_{number}",
        )
        self._nodes.append(node)
        for value, described in zip(node.outputs, self._outputs[name], strict=True):
            value.name, value.type, value.shape = f"{name}_{number}_{described.name}", described.type, described.shape
        return {str(d.name): value for d, value in zip(self._outputs[name], node.outputs, strict=True)}

    def node(self, operator: str, inputs: Sequence[onnx_ir.Value], **attributes: int) -> onnx_ir.Value:
        """An operator between pieces."""
        node = onnx_ir.node(operator, list(inputs), attributes, name=f"{operator}_{len(self._nodes)}")
        node.outputs[0].name = f"{operator}_{len(self._nodes)}_result"
        self._nodes.append(node)
        return node.outputs[0]

    def constant(self, name: str, array: NDArray[np.generic]) -> onnx_ir.Value:
        """A stored number or vector."""
        value = onnx_ir.val(name, const_value=onnx_ir.tensor(array, name=name))
        self._constants.append(value)
        return value

    def finish(self, inputs: Sequence[onnx_ir.Value], outputs: Mapping[str, onnx_ir.Value]) -> onnx_ir.Model:
        """The graph from ``inputs`` to ``outputs``, each weight stored once; outputs get the names they have here."""
        for name, value in outputs.items():
            value.name = name
        weights = [value for values in self._weights.values() for value in values if value.uses()]
        graph = onnx_ir.Graph(
            list(inputs),
            list(outputs.values()),
            nodes=self._nodes,
            initializers=[*weights, *self._constants],
            opset_imports={"": OPSET, _DOMAIN: 1},
            name="main_graph",
        )
        model = onnx_ir.Model(graph, ir_version=_IR_VERSION, functions=list(self._functions.values()))
        between = {str(value.name) for value in (*inputs, *(value for node in self._nodes for value in node.outputs))}
        InlinePass()(model)
        RemoveUnusedOpsetsPass()(model)
        ask_inputs(model, between)
        tidy(model)
        return model


def like(value: onnx_ir.Value, name: str) -> onnx_ir.Value:
    """A graph input with the type and shape of a piece's input."""
    return onnx_ir.Value(name=name, shape=value.shape, type=value.type)
