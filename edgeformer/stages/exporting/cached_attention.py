"""Causal attention to what is kept of earlier tokens, as one operator of ONNX Runtime's own.

Written out it is eighteen operators in every loop, as many as a token has no time for. Only for graphs that no other
runtime could read anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
from onnxscript.rewriter.pattern import RewriteRuleClassBase, RewriteRuleSet

DOMAIN = "com.microsoft"


class _Attention(RewriteRuleClassBase):  # type: ignore[misc]
    """What :func:`edgeformer.families.crt.graphs._run_loop` is exported as."""

    def pattern(
        self,
        op: Any,
        projected: Any,
        heads: Any,
        past_key: Any,
        past_value: Any,
        scale: Any,
        unseen: Any,
        least: Any,
        flat: Any,
    ) -> Any:
        """q, k and v [B, S, 3 H D] in one, with what came before → the mixed values [B, S, H D], keys and values."""
        split = op.Transpose(op.Reshape(projected, heads), perm=[2, 0, 3, 1, 4])
        q, k, v = (op.Squeeze(op.Slice(split, [place], [place + 1], [0]), [0]) for place in range(3))
        keys, values = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
        scores = op.MatMul(op.Mul(q, scale), op.Transpose(keys, perm=[0, 1, 3, 2]))
        mixed = op.MatMul(op.Softmax(op.Where(unseen, least, scores), axis=-1), values)
        return op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), flat), keys, values

    def check(
        self,
        context: Any,
        past_key: onnx_ir.Value,
        scale: onnx_ir.Value,
        unseen: onnx_ir.Value,
        least: onnx_ir.Value,
        **_: Any,
    ) -> bool:
        """What is masked is what comes later, and the number of heads and the scale are known.

        The mask is no part of the pattern: all loops share it, so it must stay for those that come after.
        """
        inverted = unseen.producer()
        triangle = inverted.inputs[0].producer() if inverted is not None and inverted.inputs[0] is not None else None
        causal = triangle is not None and triangle.op_type == "Trilu" and not triangle.attributes.get_int("upper", 1)
        masked = least.const_value is not None and bool(np.all(least.const_value.numpy() == -np.inf))
        shape = past_key.shape
        return causal and masked and shape is not None and isinstance(shape[1], int) and scale.const_value is not None

    def rewrite(
        self,
        op: Any,
        projected: onnx_ir.Value,
        past_key: onnx_ir.Value,
        past_value: onnx_ir.Value,
        scale: onnx_ir.Value,
        **_: Any,
    ) -> Any:
        """One operator behind a Split: it wants q, k and v apart."""
        assert past_key.shape is not None and scale.const_value is not None
        q, k, v = op.Split(projected, axis=-1, num_outputs=3, _outputs=3)
        return op.MultiHeadAttention(
            q, k, v, None, None, None, past_key, past_value,
            num_heads=past_key.shape[1], scale=float(scale.const_value.numpy()), unidirectional=1,
            _domain=DOMAIN, _outputs=3,
        )  # fmt: skip


def merge_attention(model: onnx_ir.Model) -> int:
    """Put the operator in the place of every such attention, in ``model`` itself; how many there were."""
    count: int = RewriteRuleSet([_Attention.rule()]).apply_to_model(model)
    return count
