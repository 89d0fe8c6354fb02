"""Independent implementation of CRT-Deep from the paper's equations and the public checkpoint layout."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from edgeformer.models.crt import CRTConfig
from edgeformer.models.crt.model import CRT

HEADS = 8
DILATIONS = (1, 2, 4, 8)


def small_config(**changes: Any) -> CRTConfig:
    """A CRT of about 30,000 parameters."""
    sizes: dict[str, Any] = {
        "kind": "crt", "vocab_size": 60, "hidden_size": 32, "embedding_size": 12, "embedding_cycles": 3, "ffn_size": 40,
        "loops": 4, "cycles": 5, "exits": (1, 3), "max_positions": 320,
    }  # fmt: skip
    return CRTConfig(**{**sizes, **changes})


def make_crt(**changes: Any) -> CRT:
    """A small CRT with the weights of seed 0, in evaluation mode."""
    torch.manual_seed(0)
    return CRT(small_config(**changes)).eval()


def public_weights(config: CRTConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return random float32 weights in the public layout."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    d, inner, words = config.hidden_size, config.ffn_size, config.vocab_size
    weights = {
        "embed.base_embedding.weight": draw(words, config.embedding_size),
        "embed.projection.weight": draw(d, config.embedding_size),
        "embed.projection.bias": 0.1 * draw(d),
        "pos_embed.weight": draw(config.max_positions, d),
        "loop_encodings": draw(config.loops, 1, 1, d),
        "lm_head.weight": draw(words, d),
        **{f"{name}_proj.weight": draw(d, d) for name in ("q", "k", "v", "out")},
    }
    for number in (1, 2):
        weights[f"norm{number}.weight"] = 1 + draw(d)
        weights[f"norm{number}.bias"] = draw(d)
    for loop in config.exits:
        weights[f"intermediate_heads.loop_{loop}.weight"] = draw(words, d)
    for prefix, cycles in (("embed.refine", config.embedding_cycles), ("trm", config.cycles)):
        for i in range(cycles):
            weights[f"{prefix}.convs.{i}.depthwise.weight"] = draw(d, 1, 3)
            weights[f"{prefix}.convs.{i}.pointwise.weight"] = draw(d, d, 1) / d**0.5
            weights[f"{prefix}.convs.{i}.pointwise.bias"] = draw(d)
            weights[f"{prefix}.norms.{i}.weight"] = 1 + draw(d)
            weights[f"{prefix}.norms.{i}.bias"] = draw(d)
            weights[f"{prefix}.lin1.{i}.weight"] = draw(inner, d)
            weights[f"{prefix}.lin1.{i}.bias"] = draw(inner)
            weights[f"{prefix}.lin2.{i}.weight"] = draw(d, inner)
            weights[f"{prefix}.lin2.{i}.bias"] = draw(d)
    return weights


class Oracle:
    """The public architecture in float64. Convolutions look ahead; with ``causal`` they are padded on the left only."""

    def __init__(self, weights: dict[str, Tensor], *, causal: bool = False) -> None:
        self.w = {name: tensor.double() for name, tensor in weights.items()}
        self.causal = causal
        self.loops = self.w["loop_encodings"].shape[0]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def _trm(self, h: Tensor, prefix: str) -> Tensor:
        w, i = self.w, 0
        while f"{prefix}.convs.{i}.depthwise.weight" in w:
            dilation = DILATIONS[i % 4]
            x = h.transpose(1, 2)  # [B, C, T]
            pad = (2 * dilation, 0) if self.causal else (dilation, dilation)
            depthwise = w[f"{prefix}.convs.{i}.depthwise.weight"]
            x = F.conv1d(F.pad(x, pad), depthwise, dilation=dilation, groups=depthwise.shape[0])
            x = F.conv1d(F.gelu(x), w[f"{prefix}.convs.{i}.pointwise.weight"], w[f"{prefix}.convs.{i}.pointwise.bias"])
            x = self._norm(x.transpose(1, 2), f"{prefix}.norms.{i}")
            x = F.gelu(x @ w[f"{prefix}.lin1.{i}.weight"].T + w[f"{prefix}.lin1.{i}.bias"])
            h = h + x @ w[f"{prefix}.lin2.{i}.weight"].T + w[f"{prefix}.lin2.{i}.bias"]
            i += 1
        return h

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        head = size // HEADS
        q, k, v = ((x @ self.w[f"{n}_proj.weight"].T).view(batch, length, HEADS, head).transpose(1, 2) for n in "qkv")
        scores = q @ k.transpose(-1, -2) * head**-0.5
        mixed = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")).softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(batch, length, size) @ self.w["out_proj.weight"].T

    def states(self, ids: Tensor) -> dict[int, Tensor]:
        """Return loop → hidden state [B, T, C] after it."""
        w = self.w
        x = w["embed.base_embedding.weight"][ids] @ w["embed.projection.weight"].T + w["embed.projection.bias"]
        x = self._trm(x, "embed.refine") + w["pos_embed.weight"][: ids.shape[1]]
        states = {}
        for loop in range(self.loops):
            x = x + w["loop_encodings"][loop, 0, 0]
            x = self._norm(x + self._attention(x), "norm1")
            x = self._norm(x + self._trm(x, "trm"), "norm2")
            states[loop + 1] = x
        return states

    def logits(self, ids: Tensor) -> dict[int, Tensor]:
        """Return loop → logits [B, T, V] of every exit that has a head, and of the last loop."""
        logits = {}
        for loop, x in self.states(ids).items():
            head = "lm_head" if loop == self.loops else f"intermediate_heads.loop_{loop}"
            if f"{head}.weight" in self.w:
                logits[loop] = x @ self.w[f"{head}.weight"].T
        return logits
