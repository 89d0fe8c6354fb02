"""Folding: of a pretrained stack some layers are kept, and each is applied several times; and what each application may
keep for itself (own biases and norms, or low-rank adapters)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.models.norms import LayerNorm
from edgeformer.models.pretrained import FoldConfig
from edgeformer.models.pretrained.model import Parts, Turn

Weights = Mapping[str, Tensor]
"""Parameters of a layer by name."""


def folded(parts: Parts, fold: FoldConfig, turn: Turn, *, trained: bool) -> Parts:
    """The parts with ``fold.layers`` layers that are shared by all iterations.

    Where there are as many applications as the source had layers, what an application has for itself is made of the
    layer that stood in its place: its biases and norms, or as much of the difference to the shared matrix as the rank
    holds. Else all begin alike.

    Args:
        parts: of the source, whose layers must all be different ones; they become the folded ones' in place.
        fold: what is wanted.
        turn: what the layers will look at to know which application is computed.
        trained: the weights mean something; else nothing is made of them that takes long.
    """
    stack: list[Weights] = [dict(layer.named_parameters()) for layer in parts.layers]
    count, order = len(stack), fold.order_of_layers()
    kept = [parts.layers[number * count // fold.layers] for number in range(fold.layers)]
    places = [[place for place, which in enumerate(order) if which == number] for number in range(fold.layers)]
    if fold.init == "average":
        for layer, own in zip(kept, places, strict=True):
            _average(layer, [stack[place * count // len(order)] for place in own])
    if fold.own != "none":
        for layer, own in zip(kept, places, strict=True):
            alike = [dict(layer.named_parameters())] * len(own)
            one_each = trained and len(order) == count
            _individual(layer, [stack[place] for place in own] if one_each else alike, fold, turn)
    return replace(parts, layers=kept, order=order)


def _average(layer: nn.Module, sources: Sequence[Weights]) -> None:
    """Give a layer the mean of several layers' weights, as parameters of its own."""
    for name in sources[0]:
        owner, _, last = name.rpartition(".")
        mean = torch.stack([source[name].detach() for source in sources]).mean(0)
        setattr(layer.get_submodule(owner), last, nn.Parameter(mean))


def _individual(layer: nn.Module, stood: Sequence[Weights], fold: FoldConfig, turn: Turn, prefix: str = "") -> None:
    """Give every application what is its own, in place.

    Args:
        stood: of every application, the weights that it is made of, by names that begin with ``prefix``.
    """
    for name, child in list(layer.named_children()):
        own = [{key: told[f"{prefix}{name}.{key}"] for key, _ in child.named_parameters()} for told in stood]
        if isinstance(child, nn.Linear) and fold.own == "norms":
            setattr(layer, name, OwnBias(child, own, turn))
        elif isinstance(child, nn.Linear):
            setattr(layer, name, AdaptedLinear(child, own, fold.rank, turn))
        elif isinstance(child, LayerNorm) and fold.own == "norms":
            setattr(layer, name, OwnNorm(child, own, turn))
        else:
            _individual(child, stood, fold, turn, f"{prefix}{name}.")


class OwnBias(nn.Module):
    """y = W x + b_t: the matrix is shared, every application t has a bias of its own.

    Shapes: weight [out, in], bias [applications, out].
    """

    own_parts = ("bias",)

    def __init__(self, shared: nn.Linear, stood: Sequence[Weights], turn: Turn) -> None:
        super().__init__()
        self.weight, self.turn = shared.weight, turn
        self.bias = nn.Parameter(torch.stack([weights["bias"].detach() for weights in stood]))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        return F.linear(x, self.weight, self.turn.of(self.bias))


class OwnNorm(nn.Module):
    """Layer normalisation with scale and shift of every application, in float32.

    Shapes: weight, bias [applications, size].
    """

    keeps_float32 = True
    own_parts = ("weight", "bias")

    def __init__(self, shared: LayerNorm, stood: Sequence[Weights], turn: Turn) -> None:
        super().__init__()
        self.shape, self.eps, self.turn = shared.normalized_shape, shared.eps, turn
        self.weight = nn.Parameter(torch.stack([weights["weight"].detach() for weights in stood]))
        self.bias = nn.Parameter(torch.stack([weights["bias"].detach() for weights in stood]))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] → the same shape and type."""
        wide = x if x.dtype == torch.float64 else x.float()
        scale, shift = self.turn.of(self.weight), self.turn.of(self.bias)
        return F.layer_norm(wide, self.shape, scale, shift, self.eps).to(x.dtype)


class AdaptedLinear(nn.Module):
    """y = W x + b + U_t (D_t x): matrix and bias are shared, every application t adds a low-rank matrix.

    Shapes: weight [out, in], bias [out], down [applications, rank, in], up [applications, out, rank].
    """

    own_parts = ("down", "up")

    def __init__(self, shared: nn.Linear, stood: Sequence[Weights], rank: int, turn: Turn) -> None:
        super().__init__()
        self.weight, self.bias, self.turn = shared.weight, shared.bias, turn
        rank = min(rank, *shared.weight.shape)
        pairs = [_low_rank(shared.weight, weights["weight"], rank) for weights in stood]
        self.down = nn.Parameter(torch.stack([down for down, _ in pairs]))
        self.up = nn.Parameter(torch.stack([up for _, up in pairs]))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] → [..., out]."""
        low = F.linear(x, self.turn.of(self.down))
        return F.linear(x, self.weight, self.bias) + F.linear(low, self.turn.of(self.up))


@torch.no_grad()
def _low_rank(shared: Tensor, wanted: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """down [rank, in] and up [out, rank]: their product is nearest to what is wanted beyond the shared [out, in].

    Where that is the shared one itself, ``up`` is zero and ``down`` random, so that both can be learned.
    """
    rows, columns = shared.shape
    if wanted is shared:
        return torch.randn(rank, columns) * columns**-0.5, torch.zeros(rows, rank)
    u, s, v = torch.linalg.svd(wanted - shared, full_matrices=False)
    root = s[:rank].sqrt()
    return root[:, None] * v[:rank], u[:, :rank] * root
