"""What the layers of pretrained encoders read besides the states: the padding mask, and relative positions.

Shapes: B rows, S tokens, H heads, D width of a head, d width, P largest bucket, R rows of a table of distances.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.models.blocks.layers import MASKED

sym_min: Any = torch.sym_min
"""As ``min``, also of the unknown number of tokens of a graph."""


class LayerInputs(nn.Module):
    """Keyword arguments of a layer besides the states. Here: the padding mask alone."""

    differs_by_layer = False

    def forward(self, h: Tensor, padding: Tensor | None, layer: int) -> dict[str, Any]:
        """h [B, S, d], padding [B, 1, 1, S] (added to the scores) or None, number of the layer → its arguments."""
        return {"attention_mask": padding}


class RotaryInputs(LayerInputs):
    """Angles of the positions (ModernBERT). Layers of the kind ``sliding_attention`` see ``window`` tokens to a side,
    and have other angles than those that see the whole text.
    """

    differs_by_layer = True

    def __init__(self, rotary: nn.Module, kinds: Sequence[str], window: int) -> None:
        super().__init__()
        self.rotary, self.kinds, self.window = rotary, tuple(kinds), window

    def forward(self, h: Tensor, padding: Tensor | None, layer: int) -> dict[str, Any]:
        mask, kind = padding, self.kinds[layer]
        positions = torch.arange(h.shape[1], device=h.device)
        if kind == "sliding_attention":
            outside = (positions[:, None] - positions[None, :]).abs() > self.window
            window_mask = outside.to(h.dtype)[None, None] * MASKED
            # The minimum, because the sum of two would exceed FP16.
            mask = window_mask if mask is None else torch.minimum(mask, window_mask)
        return {"attention_mask": mask, "position_embeddings": self.rotary(h, positions[None], kind)}


class BucketInputs(LayerInputs):
    """Base of inputs that depend on the distance of two tokens, of which large ones share a bucket.

    ``buckets``: bucket of every distance from -(max_positions - 1) on. They are stored, because runtimes round the
    logarithm in their own ways, and a bucket would change with the last bit.
    """

    def __init__(self, buckets: Tensor) -> None:
        super().__init__()
        self.register_buffer("buckets", buckets, persistent=False)
        self.buckets: Tensor

    def between_tokens(self, h: Tensor) -> Tensor:
        """Return the bucket of query position minus key position, int64 [S, S]."""
        positions = torch.arange(h.shape[1], device=h.device)
        distances = positions[:, None] - positions[None, :] + len(self.buckets) // 2
        return self.buckets.index_select(0, distances.flatten()).view_as(distances)


class BiasInputs(BucketInputs):
    """A number for each bucket and head, added to the scores (MPNet): ``weight`` [buckets, H]."""

    def __init__(self, weight: nn.Parameter, buckets: Tensor) -> None:
        super().__init__(buckets)
        self.weight = weight

    def forward(self, h: Tensor, padding: Tensor | None, layer: int) -> dict[str, Any]:
        bias = F.embedding(self.between_tokens(h), self.weight).permute(2, 0, 1)[None]  # [1, H, S, S]
        return {"attention_mask": bias if padding is None else bias + padding}


class DisentangledInputs(BucketInputs):
    """A vector for each bucket from -P to P - 1, which the layers project like states (DeBERTa): ``weight`` [2P, d].

    ``norm``, ``dropout``: of the vectors. A text of S tokens uses those from -S to S - 1 if buckets are
    ``is_reachable``: none is larger than its distance. Otherwise it uses all.
    """

    def __init__(
        self, weight: nn.Parameter, norm: nn.Module, buckets: Tensor, dropout: float, *, is_reachable: bool
    ) -> None:
        largest = len(weight) // 2
        super().__init__(buckets.clamp(-largest, largest - 1))
        self.weight, self.norm, self.dropout, self.is_reachable = weight, norm, nn.Dropout(dropout), is_reachable

    def forward(self, h: Tensor, padding: Tensor | None, layer: int) -> dict[str, Any]:
        largest = len(self.weight) // 2
        reach = sym_min(h.shape[1], largest) if self.is_reachable else largest
        vectors = self.dropout(self.norm(self.weight[None, largest - reach : largest + reach]))  # [1, R, d]
        return {"attention_mask": padding, "distances": (vectors, self.between_tokens(h) + reach)}


def disentangled_scores(
    attention: Any, query: Tensor, key: Tensor, distances: tuple[Tensor, Tensor], mask: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Return the scores of content with distances and of distances with content (DeBERTa, equation 4), plus the mask.

    Args:
        attention: its projections ``query`` and ``key`` serve vectors of distances, too.
        query, key: of the content, [B, H, S, D].
        distances: vectors [1, R, d], and the row of every pair of tokens, int64 [S, S].
        mask: [B, 1, 1, S].
        scale: factor on the scores; operands are multiplied by it, so that products do not overflow FP16.

    Returns:
        [B, H, S, S]
    """
    vectors, rows = distances
    heads, size = query.shape[1], query.shape[3]
    distance_query, distance_key = (
        project(vectors).view(1, -1, heads, size).transpose(1, 2) for project in (attention.query, attention.key)
    )
    rows = rows.expand(query.shape[0], heads, -1, -1)
    to_distance = ((query * scale) @ distance_key.transpose(-1, -2)).gather(-1, rows)
    from_distance = ((distance_query * scale) @ key.transpose(-1, -2)).gather(-2, rows)
    scores = to_distance + from_distance
    return scores if mask is None else scores + mask
