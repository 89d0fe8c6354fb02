"""The looped decoder as the tensors and metadata of a GGUF file, under the names of llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.models.blocks.layers import split_linear

if TYPE_CHECKING:
    from edgeformer.models.decoder.model import DecoderModel

LOOPED = "nanbeige"
"""llama.cpp's architecture whose layers are applied ``num_loops`` times, with keys and values for each loop and layer
(llama.cpp#25994)."""


def gguf_contents(model: DecoderModel) -> tuple[str, dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Return llama.cpp's architecture, its metadata (key → number), and name → array; shared layers are there once.

    Raises EdgeformerError if llama.cpp has no architecture for the model.
    """
    # 1. Choose the architecture
    config = model.config
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
        "context_length": config.max_positions, "embedding_length": config.hidden_size, "block_count": config.layers,
        "feed_forward_length": config.ffn_size, "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads, "attention.key_length": config.head_width,
        "attention.value_length": config.head_width, "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": config.head_width, "rope.freq_base": config.rope_theta,
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    if config.iterations > 1:
        architecture = LOOPED
        metadata |= {"num_loops": config.iterations, "skip_loop_final_norm": False}

    # 3. Name the tensors
    tensors: dict[str, Tensor] = {"token_embd.weight": model.tokens.weight, "output_norm.weight": model.norm.weight}
    if not config.tied:
        tensors["output.weight"] = model.head.weight
    # These architectures rotate neighbours instead of halves, so the rows of a head change places.
    rotates_neighbours = architecture in ("llama", LOOPED)
    layer: Any
    for number, layer in enumerate(model.layers):
        attention: Any = layer.attention
        widths = [heads * attention.head_size for heads in (attention.heads, attention.kv_heads, attention.kv_heads)]
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
