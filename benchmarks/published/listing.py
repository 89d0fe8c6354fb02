"""Operators of a PyTorch module on the meta device, as nodes of an ONNX graph: nothing is computed or stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, Tensor

_OPERATORS = {
    "convolution": "Conv", "addmm": "Gemm", "mm": "MatMul", "bmm": "MatMul", "baddbmm": "MatMul",
    "native_layer_norm": "LayerNormalization", "native_group_norm": "GroupNormalization", "_softmax": "Softmax",
    "_safe_softmax": "Softmax",
    "rms_norm": "RMSNormalization", "_fused_rms_norm": "RMSNormalization", "gelu": "Gelu", "relu": "Relu",
    "relu_": "Relu", "hardtanh": "Clip", "hardtanh_": "Clip", "clamp": "Clip", "hardswish": "HardSwish",
    "hardswish_": "HardSwish", "hardsigmoid": "HardSigmoid", "silu": "QuickGelu", "silu_": "QuickGelu",
    "sigmoid": "Sigmoid", "tanh": "Tanh", "leaky_relu": "LeakyRelu", "leaky_relu_": "LeakyRelu", "mish": "Mul",
    "add": "Add", "add_": "Add", "sub": "Sub", "mul": "Mul", "mul_": "Mul", "div": "Div", "pow": "Pow",
    "rsqrt": "Sqrt", "mean": "ReduceMean", "sum": "ReduceSum", "embedding": "Gather", "cat": "Concat",
    "clone": "Transpose", "max_pool2d_with_indices": "MaxPool", "avg_pool2d": "AveragePool", "avg_pool3d": "LRN",
    "roll": "Concat",
    "_adaptive_avg_pool2d": "AveragePool", "upsample_nearest2d": "Resize", "upsample_bilinear2d": "Resize",
    "constant_pad_nd": "Pad", "exp": "Exp", "cos": "Cos", "sin": "Sin", "neg": "Neg", "masked_fill": "Where",
    "where": "Where", "native_batch_norm": "", "_native_batch_norm_legit_no_training": "",
}  # fmt: skip
"""aten operator → ONNX operator; an empty one is folded into a product. A local response norm is ``avg_pool3d``."""
_VIEWS = {
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "slice", "select", "split",
    "split_with_sizes", "unsqueeze", "squeeze", "unbind", "chunk", "detach", "alias", "as_strided", "as_strided_",
    "unfold",
    "_reshape_alias", "lift_fresh", "empty", "zeros", "ones", "full", "arange", "scalar_tensor", "_to_copy", "copy_",
    "tril", "triu", "new_zeros", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like", "fill_",
    "dropout", "eq", "ne",
    "gt", "lt", "ge", "le", "bitwise_and", "bitwise_not", "logical_not", "cumsum", "sym_size", "topk", "max", "index",
}  # fmt: skip
"""They move no data, or make constants and masks, whose time is none beside that of the products."""


class _Recorder(TorchDispatchMode):
    """Keeps a node for every operator that runs under it; ``parameters``: storages of weights and buffers."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.nodes: list[ExecutedNode] = []
        self._parameters = parameters

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _VIEWS or _OPERATORS.get(name) == "":
            return results
        if name not in _OPERATORS:
            raise KeyError(f"aten.{name} has no ONNX operator in this table")
        inputs = [value for value in _flat(args) if isinstance(value, torch.Tensor)]
        if name == "addmm":
            inputs = [inputs[1], inputs[2], inputs[0]]
        outputs = [value for value in _flat((results,)) if isinstance(value, torch.Tensor)][:1]
        constants = sum(value.numel() * 4 for value in inputs if value.untyped_storage()._cdata in self._parameters)
        self.nodes.append(
            ExecutedNode(
                _OPERATORS[name], f"{name}_{len(self.nodes)}", tuple(map(_described, inputs)),
                tuple(map(_described, outputs)), constants, 0.0,
            )
        )  # fmt: skip
        return results


def list_operators(module: nn.Module, *inputs: torch.Tensor) -> list[ExecutedNode]:
    """Return the nodes of a forward pass. Module and inputs are on the meta device.

    Raises KeyError: an operator that the table of this module does not have.
    """
    parameters = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    with torch.no_grad(), _Recorder(parameters) as recorder:
        module(*inputs)
    return recorder.nodes


def _flat(values: Any) -> list[Any]:
    """Return the elements of nested lists and tuples in order."""
    if isinstance(values, (list, tuple)):
        return [element for value in values for element in _flat(value)]
    return [values]


def _described(tensor: torch.Tensor) -> Tensor:
    """Return type and shape; floats of any width are those of FP32."""
    return Tensor("float" if tensor.is_floating_point() else "int64", tuple(tensor.shape))
