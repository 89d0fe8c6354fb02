"""Looped decoder: N layers with RMSNorm, RoPE, grouped queries and SwiGLU, applied R times; cached decoding, GGUF.

Shapes: B rows, T tokens, n new tokens, C width, H heads, K heads of keys and values, D size of a head, V vocabulary.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.models.blocks.causal import (
    Attend,
    CachedModel,
    Head,
    KeyValueCache,
    LanguageModel,
    RunLoop,
    TiedHead,
    cpu_attention,
)
from edgeformer.models.blocks.layers import (
    INITIAL_STD,
    RMSNorm,
    Rotation,
    SwiGLU,
    initialize_weights,
    rotary_table,
    split_linear,
)
from edgeformer.models.blocks.segments import Mask
from edgeformer.models.decoder import LOOPED, DecoderConfig


class GroupedAttention(nn.Module):
    """Causal attention with RoPE, in which H / K heads of queries share one head of keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, width = config.hidden_size, config.head_width
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, width
        self.qkv = nn.Linear(size, (config.heads + 2 * config.kv_heads) * width, bias=config.qkv_bias)
        self.out = nn.Linear(config.heads * width, size, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.rotate = Rotation(has_neighbours=False)
        self.dropout = nn.Dropout(config.dropout)
        self.attend = cpu_attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None, attend: Attend | None = None) -> Tensor:
        """x [B, T, C] → [B, T, C]; ``cos`` and ``sin`` [1 or B, T, 1, D / 2].

        ``mask`` of :func:`~edgeformer.models.blocks.causal.attention_arguments`; ``attend`` for cached tokens.
        """
        heads = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_size))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), -2)
        q, k = self.rotate(self.q_norm(q), cos, sin), self.rotate(self.k_norm(k), cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, D], and [B, K, T, D] twice
        if attend is not None:
            mixed = attend(q, k, v)
        else:
            groups = self.heads // self.kv_heads
            if groups > 1:
                k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
            mixed = self.attend(q, k, v, mask)
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


class DecoderLayer(nn.Module):
    """h' = h + Attention(Norm(h)); h'' = h' + FFN(Norm(h'))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = GroupedAttention(config)
        self.norm2 = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn = SwiGLU(config.hidden_size, config.ffn_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None, attend: Attend | None = None) -> Tensor:
        h = h + self.attention(self.norm1(h), cos, sin, mask, attend)
        return h + self.dropout(self.ffn(self.norm2(h)))


class DecoderModel(LanguageModel):
    """Token table → R × (N layers, final norm) → head. An exit is an iteration after which the head answers."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, config.all_exits)
        size = config.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(size, config.norm_eps)
        self.head: Head = TiedHead(self.tokens) if config.tied else nn.Linear(size, config.vocab_size, bias=False)
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = rotary_table(config.max_positions, config.head_width, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        initialize_weights(self)
        # A sum of n residuals grows like √n; the matrices that write into it are smaller by that factor.
        layer: Any
        for layer in self.layers:
            for last in (layer.attention.out, layer.ffn.w3):
                nn.init.normal_(last.weight, std=INITIAL_STD / math.sqrt(2 * config.layers))

    def head_of(self, loop: int) -> Head:
        return self.head

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [B, T] → [B, T, C]."""
        return self.dropout(self.tokens(input_ids))

    def iterate(self, h: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        """Apply all layers and the final norm once: [B, T, C] → [B, T, C]."""
        for layer in self.layers:
            h = layer(h, cos, sin, mask)
        return self.norm(h)

    def begin(self, input_ids: Tensor, positions: Tensor | None, mask: Mask) -> tuple[Tensor, RunLoop]:
        if positions is None:
            place = slice(0, input_ids.shape[1])
            cos, sin = self.cos[None, place, None], self.sin[None, place, None]
        else:
            cos, sin = self.cos[positions, None], self.sin[positions, None]
        return self.embed(input_ids), lambda h, loop: self.iterate(h, cos, sin, mask)

    def gguf_contents(self) -> tuple[str, dict[str, Any], dict[str, NDArray[np.float32]]]:
        """Return llama.cpp's architecture, its metadata (key → number), and name → array; shared layers are there once.

        Raises EdgeformerError if llama.cpp has no architecture for the model.
        """
        # 1. Choose the architecture
        config = self.config
        extras = [name for name, is_set in (("qk_norm", config.qk_norm), ("qkv_bias", config.qkv_bias)) if is_set]
        if config.iterations > 1 and extras:
            raise EdgeformerError(
                f"GGUF: llama.cpp runs looped layers without model.{extras[0]} only; train with {extras[0]}: false, or "
                "with iterations: 1"
            )
        if len(extras) > 1:
            raise EdgeformerError("GGUF: llama.cpp has no architecture with model.qk_norm and model.qkv_bias; use one")
        architecture = {"qk_norm": "qwen3", "qkv_bias": "qwen2"}[extras[0]] if extras else "llama"

        # 2. Describe the sizes
        metadata: dict[str, Any] = {
            "context_length": config.max_positions, "embedding_length": config.hidden_size,
            "block_count": config.layers, "feed_forward_length": config.ffn_size, "attention.head_count": config.heads,
            "attention.head_count_kv": config.kv_heads, "attention.key_length": config.head_width,
            "attention.value_length": config.head_width, "attention.layer_norm_rms_epsilon": config.norm_eps,
            "rope.dimension_count": config.head_width, "rope.freq_base": config.rope_theta,
            "vocab_size": config.vocab_size,
        }  # fmt: skip
        if config.iterations > 1:
            architecture = LOOPED
            metadata |= {"num_loops": config.iterations, "skip_loop_final_norm": False}

        # 3. Name the tensors
        tensors: dict[str, Tensor] = {"token_embd.weight": self.tokens.weight, "output_norm.weight": self.norm.weight}
        if not config.tied:
            tensors["output.weight"] = self.head.weight
        # These architectures rotate neighbours instead of halves, so the rows of a head change places.
        rotates_neighbours = architecture in ("llama", LOOPED)
        layer: Any
        for number, layer in enumerate(self.layers):
            attention: Any = layer.attention
            counts = attention.heads, attention.kv_heads, attention.kv_heads
            widths = [count * attention.head_size for count in counts]
            parts = dict(zip("qkv", split_linear(attention.qkv, widths), strict=True))
            ffn: Any = layer.ffn
            gate, up = split_linear(ffn.w12, [ffn.w12.out_features // 2] * 2)
            own = {"attn_norm.weight": layer.norm1.weight, "ffn_norm.weight": layer.norm2.weight}
            for name, part in parts.items():
                heads = attention.heads if name == "q" else attention.kv_heads
                for kind, parameter in part.named_parameters():
                    rows: Tensor = parameter
                    if rotates_neighbours and name != "v":  # pairs (i, i + D / 2) of a head become neighbours
                        rows = rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
                    own[f"attn_{name}.{kind}"] = rows
                if name != "v" and hasattr(norm := getattr(attention, f"{name}_norm"), "weight"):
                    own[f"attn_{name}_norm.weight"] = norm.weight
            products = {"attn_output": attention.out, "ffn_gate": gate, "ffn_up": up, "ffn_down": ffn.w3}
            own |= {f"{name}.weight": product.weight for name, product in products.items()}
            tensors |= {f"blk.{number}.{name}": tensor for name, tensor in own.items()}
        arrays = {name: tensor.detach().float().numpy() for name, tensor in tensors.items()}
        return architecture, metadata, arrays


class CachedDecoder(CachedModel):
    """Keys and values of a looped decoder."""

    def __init__(self, model: DecoderModel) -> None:
        super().__init__(model)
        self._caches = [[KeyValueCache() for _ in model.layers] for _ in range(model.loops)]

    @torch.inference_mode()
    def embed(self, input_ids: Tensor, start: int, *, keep: bool) -> Tensor:
        """Embed tokens, int64 [B, n] → [B, n, C]; the arguments of the engines' interface are not needed."""
        return self._model.embed(input_ids)

    @torch.inference_mode()
    def run_loop(self, number: int, x: Tensor, *, keep: bool) -> Tensor:
        """Run iteration ``number``, from 0, on the tokens after those it kept: [B, n, C] → [B, n, C]."""
        model, caches = self._model, self._caches[number]
        place = slice(caches[0].length, caches[0].length + x.shape[1])
        cos, sin = model.cos[None, place, None], model.sin[None, place, None]
        for layer, cache in zip(model.layers, caches, strict=True):
            x = layer(x, cos, sin, attend=cache.attend)
            if keep:
                cache.length += x.shape[1]
        return model.norm(x)
