"""Checkpoints of the public CRT code, renamed and reshaped to our layout (listed in docs/guides/own-model.md)."""

import re
from collections.abc import Mapping

import torch
from pydantic import ValidationError
from torch import Tensor

from edgeformer.artifacts.base import first_problem
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.models.crt import CRTConfig
from edgeformer.models.crt.model import CRT

WRAPPERS = ("model_state_dict", "model", "state_dict")
"""Keys under which training checkpoints store the weights."""
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.)+")
"""Name prefixes of DistributedDataParallel and torch.compile."""
_RENAMED = (
    (r"^tokens\.", "embed.base_embedding."),
    (r"^(projection|refine)\.", r"embed.\1."),
    (r"^positions\.", "pos_embed."),
    (r"^head\.", "lm_head."),
    (r"^attention\.out\.", "out_proj."),
    (r"^exit_heads\.", "intermediate_heads.loop_"),
    (r"\.cycles\.(\d+)\.norm\.", r".norms.\1."),
    (r"\.cycles\.(\d+)\.(lin[12])\.", r".\2.\1."),
    (r"\.cycles\.", ".convs."),
)
"""Regular expression in our layout → replacement in the public one."""
ATTENTION_HEADS = 8
"""Number of heads in the public code; no tensor's shape shows it."""


def extract_state_dict(content: object, where: str) -> dict[str, Tensor]:
    """Return the name → tensor mapping of a checkpoint, bare or in a training checkpoint. Raises ArtifactError."""
    weights = content
    if isinstance(content, Mapping):
        weights = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), content)
    if not isinstance(weights, Mapping) or not weights or not all(isinstance(v, Tensor) for v in weights.values()):
        raise ArtifactError(
            f"{where}: has no state dict; expected name → tensor, at the top or under {', '.join(map(repr, WRAPPERS))}"
        )
    return {_PREFIXES.sub("", str(name)): tensor for name, tensor in weights.items()}


def infer_config(weights: Mapping[str, Tensor], where: str) -> CRTConfig:
    """Derive the configuration from the tensors' shapes, or raise ArtifactError. The public code is not causal."""

    def size(name: str, dimension: int, dimensions: int) -> int:
        tensor = weights.get(name)
        if tensor is None:
            raise ArtifactError(f"{where}: not a CRT checkpoint: {name} is missing")
        if tensor.ndim != dimensions:
            raise ArtifactError(f"{where}: {name} has {tensor.ndim} dimensions, not {dimensions}")
        return int(tensor.shape[dimension])

    def numbers(pattern: str) -> list[int]:
        return sorted({int(match[1]) for name in weights if (match := re.match(pattern, name))})

    exits = numbers(r"intermediate_heads\.loop_(\d+)\.weight$")
    hidden = size("lm_head.weight", 1, 2)
    if hidden % ATTENTION_HEADS:
        raise ArtifactError(
            f"{where}: width {hidden} is not a multiple of the {ATTENTION_HEADS} heads of the public code"
        )
    try:
        return CRTConfig(
            kind="crt", vocab_size=size("lm_head.weight", 0, 2), hidden_size=hidden,
            embedding_size=size("embed.base_embedding.weight", 1, 2),
            embedding_cycles=max(numbers(r"embed\.refine\.convs\.(\d+)\."), default=-1) + 1,
            attention_heads=ATTENTION_HEADS, ffn_size=size("trm.lin1.0.weight", 0, 2),
            loops=size("loop_encodings", 0, 4), cycles=max(numbers(r"trm\.convs\.(\d+)\."), default=-1) + 1,
            exits=tuple(exits), heads="separate" if exits else "tied", max_positions=size("pos_embed.weight", 0, 2),
            causal=False,
        )  # fmt: skip
    except ValidationError as error:
        raise ArtifactError(
            f"{where}: not a CRT checkpoint: the sizes of its tensors are inconsistent: {first_problem(error)}"
        ) from None


def convert_weights(weights: Mapping[str, Tensor], config: CRTConfig, where: str) -> dict[str, Tensor]:
    """Convert the public layout to our names and shapes, in float32. Raises ArtifactError that lists every mismatch."""
    with torch.device("meta"):
        ours = CRT(config).state_dict()
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}  # public name → our name, and public shape
    for name, tensor in ours.items():
        public, shape = name, tuple(tensor.shape)
        for pattern, replacement in _RENAMED:
            public = re.sub(pattern, replacement, public)
        if name == "attention.qkv.weight":
            layout |= {f"{part}_proj.weight": (name, (shape[0] // 3, shape[1])) for part in "qkv"}
        elif name == "loop_encodings":
            layout[public] = name, (shape[0], 1, 1, shape[1])
        else:
            layout[public] = name, ((*shape, 1) if name.endswith("pointwise.weight") else shape)
    problems = [f"missing {name} {list(shape)}" for name, (_, shape) in layout.items() if name not in weights]
    problems += [f"unexpected {name} {list(weights[name].shape)}" for name in weights if name not in layout]
    problems += [
        f"{name} is {list(weights[name].shape)}, not {list(shape)}"
        for name, (_, shape) in layout.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if problems:
        raise ArtifactError(f"{where}: does not fit the public CRT layout:\n  " + "\n  ".join(sorted(problems)))
    converted: dict[str, Tensor] = {}
    for public, (name, _) in layout.items():
        tensor = weights[public].detach().to(torch.float32)
        if name == "loop_encodings":
            tensor = tensor[:, 0, 0]
        elif name.endswith("pointwise.weight"):
            tensor = tensor[..., 0]
        converted[name] = torch.cat((converted[name], tensor)) if name in converted else tensor.contiguous()
    return converted
