"""The encoder's torch half: what training, export and trimming ask of it; flash attention, where a CUDA card and the
package flash-attn are there."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.manifest import AttentionUse
from edgeformer.models.adapter import Loss, ModelAdapter, Place, count_parameters, sharing_copy
from edgeformer.models.distillation import classification_loss
from edgeformer.models.encoder.graphs import EncoderExits, encoder_graphs, half_graphs
from edgeformer.models.encoder.model import Attention, EncoderClassifier, SelfAttention, sdpa
from edgeformer.models.tracing import Graphs
from edgeformer.tasks import Prepared


def choose_attention(requested: str, device_type: str, precision: str) -> tuple[Attention, str | None]:
    """The attention function for ``attention: sdpa | flash``, and why it is not the requested one (None if it is)."""
    reason = None
    if requested != "flash":
        return sdpa, None
    if device_type != "cuda":
        reason = f"flash-attn needs a CUDA card and the model runs on the {device_type.upper()}"
    elif precision == "fp32":
        reason = "flash-attn computes in bf16 or fp16 and training.precision is fp32"
    elif not torch.cuda.is_available():
        reason = "flash-attn needs a CUDA card and torch sees none"
    elif importlib.util.find_spec("flash_attn") is None:
        reason = f"the package flash-attn, which is built from source, is not installed: {install_hint('flash')}"
    elif (capability := torch.cuda.get_device_capability()) < (8, 0):
        reason = "flash-attn needs compute capability 8.0 or newer; this card has {}.{}".format(*capability)
    return (sdpa, reason) if reason else (flash, None)


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """flash-attn on [B, H, S, D] in bf16 or fp16; padded rows go through its variable-length kernel.

    flash-attn computes in half precision only, so float32 inputs (evaluation without autocast) go through SDPA; so does
    the last layer, whose single query has nothing to gain from it.
    """
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[2] != k.shape[2]:
        return sdpa(q, k, v, mask, dropout)
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, H, D]
    if mask is None:
        mixed: Tensor = flash_attn_func(q, k, v, dropout_p=dropout)
        return mixed.transpose(1, 2)
    real = mask[:, 0, 0] == 0  # [B, S]
    lengths = real.sum(-1, dtype=torch.int32)
    ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max())
    packed = flash_attn_varlen_func(q[real], k[real], v[real], ends, ends, longest, longest, dropout_p=dropout)
    mixed = q.new_zeros(q.shape)
    mixed[real] = packed
    return mixed.transpose(1, 2)


class EncoderAdapter(ModelAdapter):
    """See :class:`~edgeformer.models.adapter.Network`."""

    def build(self, recipe: Any, place: Place) -> tuple[EncoderClassifier, AttentionUse]:
        """Flash attention where the recipe asks for it and the place has it; for export always torch's SDPA."""
        config, requested = recipe.model, recipe.model.attention
        wanted = "sdpa" if place.for_export else requested
        chosen, reason = choose_attention(wanted, place.device_type, place.precision)
        options = config.model_dump(exclude={"kind", "attention"})
        used = AttentionUse(requested=requested, used="sdpa" if chosen is sdpa else requested, reason=reason)
        return EncoderClassifier(classes=recipe.classes, attention=chosen, **options), used

    def loss(self, model: EncoderClassifier, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy, or distillation from a teacher."""
        return classification_loss(recipe, prepared)

    def scorer(self, model: EncoderClassifier) -> nn.Module:
        """The model itself."""
        return model

    def exits(self, model: EncoderClassifier) -> EncoderExits:
        return EncoderExits(model)

    def needed(self, model: EncoderClassifier) -> dict[int, int]:
        """Every iteration goes through all layers and the one head."""
        return dict.fromkeys(EncoderExits(model).exits, count_parameters(model))

    def trace(self, model: EncoderClassifier, inputs: Sequence[str], *, steps: bool) -> Graphs:
        return encoder_graphs(model, steps=steps)

    def trace_half(self, model: EncoderClassifier, inputs: Sequence[str], whole: Graphs, *, steps: bool) -> Graphs:
        return half_graphs(model, whole, steps=steps)

    def trace_trimmed(self, model: EncoderClassifier, inputs: Sequence[str], whole: Graphs | None) -> Graphs:
        return encoder_graphs(model, steps=False, whole=whole)

    def trim(self, model: EncoderClassifier, kept: Tensor) -> EncoderClassifier:
        """All other parameters are the same tensors, not copies."""
        trimmed = sharing_copy(model)
        trimmed.tokens = nn.Embedding(len(kept), model.tokens.embedding_dim)
        trimmed.tokens.weight = nn.Parameter(model.tokens.weight.detach()[kept])
        return trimmed.train(model.training)

    def as_on_cuda(self, model: EncoderClassifier) -> None:
        """With dropout, the CPU's attention holds all its weights [B, H, S, S].

        CUDA's fused kernels never do, and neither does the CPU's kernel without dropout, which takes its place here.
        """
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module.dropout = 0.0


ADAPTER = EncoderAdapter()
