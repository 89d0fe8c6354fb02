"""A model in FP16, as it is exported: half the bytes; what computes in float32 keeps its float32 numbers."""

from __future__ import annotations

from torch import nn

from edgeformer.families.crt.layers import LayerNorm, TokenBatchNorm
from edgeformer.families.encoder.layers import RMSNorm

NORMS = (RMSNorm, LayerNorm, TokenBatchNorm)
"""They compute in float32 whatever they are given."""


def half_for_export(model: nn.Module) -> nn.Module:
    """The model with its matrices and biases in FP16, in place.

    The parameters of norms, running statistics and rotary tables are used in float32 and keep their values.
    """
    for module in model.modules():
        if not isinstance(module, NORMS):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.half()
    return model
