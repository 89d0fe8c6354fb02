"""Checkpoints of the public CRT code, renamed and reshaped to our layout (listed in docs/importing.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from pydantic import ValidationError
from torch import Tensor

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.models.crt import CRTConfig

WRAPPERS = ("model_state_dict", "model", "state_dict")
"""Keys under which training checkpoints store the weights."""
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.)+")
"""Name prefixes of DistributedDataParallel and torch.compile."""
_RENAMED = (
    (r"^embed\.base_embedding\.", "tokens."),
    (r"^embed\.(projection|refine)\.", r"\1."),
    (r"^pos_embed\.", "positions."),
    (r"^lm_head\.", "head."),
    (r"^out_proj\.", "attention.out."),
    (r"^intermediate_heads\.loop_", "exit_heads."),
    (r"\.convs\.(\d+)\.", r".cycles.\1."),
    (r"\.norms\.(\d+)\.", r".cycles.\1.norm."),
    (r"\.(lin[12])\.(\d+)\.", r".cycles.\2.\1."),
)
"""Regular expression in the public layout → replacement in ours."""
ATTENTION_HEADS = 8
"""Number of heads in the public code; no tensor's shape shows it."""


def extract_state_dict(content: object, where: str) -> dict[str, Tensor]:
    """Return the name → tensor mapping of a checkpoint, bare or in a training checkpoint. Raises ArtifactError."""
    weights = content
    if isinstance(content, Mapping):
        weights = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), content)
    if not isinstance(weights, Mapping) or not weights or not all(isinstance(v, Tensor) for v in weights.values()):
        raise ArtifactError(
            f"{where}: holds no state dict; expected name → tensor, bare or under {', '.join(map(repr, WRAPPERS))}"
        )
    return {_PREFIXES.sub("", str(name)): tensor for name, tensor in weights.items()}


def infer_config(weights: Mapping[str, Tensor], where: str) -> CRTConfig:
    """Derive the configuration from the tensors' shapes. The public code is not causal.

    Raises:
        ArtifactError: a tensor is missing, has another number of dimensions, or the sizes describe no CRT.
    """

    def size(name: str, dimension: int, dimensions: int) -> int:
        tensor = weights.get(name)
        if tensor is None:
            raise ArtifactError(f"{where}: is no CRT checkpoint: {name} is missing")
        if tensor.ndim != dimensions:
            raise ArtifactError(f"{where}: {name} has {tensor.ndim} dimensions, not {dimensions}")
        return int(tensor.shape[dimension])

    def numbers(pattern: str) -> list[int]:
        return sorted({int(match[1]) for name in weights if (match := re.match(pattern, name))})

    exits = numbers(r"intermediate_heads\.loop_(\d+)\.weight$")
    hidden = size("lm_head.weight", 1, 2)
    if hidden % ATTENTION_HEADS:
        raise ArtifactError(f"{where}: width {hidden} is no multiple of the public code's {ATTENTION_HEADS} heads")
    try:
        return CRTConfig(
            kind="crt",
            vocab_size=size("lm_head.weight", 0, 2),
            hidden_size=hidden,
            embedding_size=size("embed.base_embedding.weight", 1, 2),
            embedding_cycles=max(numbers(r"embed\.refine\.convs\.(\d+)\."), default=-1) + 1,
            attention_heads=ATTENTION_HEADS,
            ffn_size=size("trm.lin1.0.weight", 0, 2),
            loops=size("loop_encodings", 0, 4),
            cycles=max(numbers(r"trm\.convs\.(\d+)\."), default=-1) + 1,
            exits=tuple(exits),
            heads="separate" if exits else "tied",
            max_positions=size("pos_embed.weight", 0, 2),
            causal=False,
        )
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ArtifactError(f"{where}: the sizes of its tensors describe no CRT: {reason}") from None


def public_shapes(config: CRTConfig) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every tensor in the public layout."""
    d, inner, words = config.hidden_size, config.ffn_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed.base_embedding.weight": (words, config.embedding_size),
        "embed.projection.weight": (d, config.embedding_size),
        "embed.projection.bias": (d,),
        "pos_embed.weight": (config.max_positions, d),
        "loop_encodings": (config.loops, 1, 1, d),
        "lm_head.weight": (words, d),
        **{f"{name}_proj.weight": (d, d) for name in "qkv"},
        "out_proj.weight": (d, d),
        **{f"norm{n}.{part}": (d,) for n in (1, 2) for part in ("weight", "bias")},
        **{f"intermediate_heads.loop_{loop}.weight": (words, d) for loop in config.exits},
    }
    for trm, cycles in (("embed.refine", config.embedding_cycles), ("trm", config.cycles)):
        for i in range(cycles):
            shapes |= {
                f"{trm}.convs.{i}.depthwise.weight": (d, 1, 3),
                f"{trm}.convs.{i}.pointwise.weight": (d, d, 1),
                f"{trm}.convs.{i}.pointwise.bias": (d,),
                f"{trm}.norms.{i}.weight": (d,),
                f"{trm}.norms.{i}.bias": (d,),
                f"{trm}.lin1.{i}.weight": (inner, d),
                f"{trm}.lin1.{i}.bias": (inner,),
                f"{trm}.lin2.{i}.weight": (d, inner),
                f"{trm}.lin2.{i}.bias": (d,),
            }
    return shapes


def convert_weights(weights: Mapping[str, Tensor], config: CRTConfig, where: str) -> dict[str, Tensor]:
    """Convert the public layout to our names and shapes, in float32. Raises ArtifactError that lists every mismatch."""
    expected = public_shapes(config)
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in weights]
    problems += [f"unexpected {name} {list(weights[name].shape)}" for name in weights if name not in expected]
    problems += [
        f"{name} is {list(weights[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if problems:
        raise ArtifactError(f"{where}: does not fit the public CRT layout:\n  " + "\n  ".join(sorted(problems)))
    converted: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        for pattern, replacement in _RENAMED:
            name = re.sub(pattern, replacement, name)
        converted[name] = tensor.detach().to(torch.float32)
    converted["loop_encodings"] = converted["loop_encodings"].reshape(config.loops, config.hidden_size)
    converted["attention.qkv.weight"] = torch.cat([converted.pop(f"{name}_proj.weight") for name in "qkv"])
    return {
        name: (tensor.squeeze(-1) if name.endswith("pointwise.weight") else tensor).contiguous()
        for name, tensor in converted.items()
    }
