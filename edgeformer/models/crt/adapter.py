"""CRT-Deep's torch half, and the probe for leaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edgeformer.artifacts.manifest import AttentionUse, Causality
from edgeformer.models.adapter import Batch, Loss, Losses, ModelAdapter, Place, count_parameters
from edgeformer.models.crt.cache import CachedLoops
from edgeformer.models.crt.graphs import CRTExits, compose_decode, compose_exits, trace_pieces
from edgeformer.models.crt.loss import TokenLosses, chunked_loss, whole_loss
from edgeformer.models.crt.model import CRT, attention
from edgeformer.models.tracing import Graphs, Piece
from edgeformer.tasks import Prepared

_LENGTHS, _TRIALS = (2, 17, 64, 128), 4
TOLERANCE = 1e-4
"""Of an output's spread. Rounding moves outputs by about 1e-6 of it, the published convolutions by 1e-2 and more."""


class CRTAdapter(ModelAdapter):
    """See :class:`~edgeformer.models.adapter.Network`."""

    def build(self, recipe: Any, place: Place) -> tuple[CRT, AttentionUse]:
        """CRT-Deep with fresh weights; its attention is torch's SDPA, of whole rows or of each document."""
        asked = recipe.model.attention
        return build_crt(recipe.model), AttentionUse(requested=asked, used=asked)

    def batch(self, recipe: Any, arrays: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """With ``documents``, where each of them begins, and their end."""
        if recipe.model.attention != "varlen":
            return arrays
        positions = arrays["positions"].ravel()
        return {**arrays, "documents": np.append(np.flatnonzero(positions == 0), len(positions))}

    def loss(self, model: CRT, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy summed over the tokens, weighted over the exits (paper B, eq. 5); parts: every exit."""
        training = recipe.training
        model.checkpointing = training.checkpointing

        def loss(wrapped: nn.Module, batch: Batch) -> Losses:
            apart = {"documents": batch["documents"]} if "documents" in batch else {}
            states = wrapped(batch["input_ids"], batch.get("positions"), **apart)
            measure = chunked_loss if training.chunked_loss else whole_loss
            total, losses = measure(model, states, batch["targets"], training.exit_weight)
            parts = {f"loss_exit{loop}": loss for loop, loss in losses.items() if loop != model.loops}
            return Losses(total, {**parts, "loss_final": losses[model.loops]})

        return loss

    def scorer(self, model: CRT) -> TokenLosses:
        """Losses and confidence of every exit."""
        return TokenLosses(model)

    def exits(self, model: CRT) -> CRTExits:
        return CRTExits(model)

    def needed(self, model: CRT) -> dict[int, int]:
        """No head but the exit's own, no encoding of a loop behind it."""
        heads = count_parameters(model.exit_heads) + count_parameters(model.head)
        shared, width = count_parameters(model) - heads, model.loop_encodings.shape[1]
        unused = {loop: (model.loops - loop) * width for loop in model.exits}
        return {loop: shared + count_parameters(model.head_of(loop)) - unused[loop] for loop in model.exits}

    def trace(self, model: CRT, inputs: Sequence[str], *, steps: bool) -> Graphs:
        """The block is traced once, however deep the loop; a model that looks ahead gets no graph with caches."""
        pieces, parts = trace_pieces(model)
        exits, decode = compose_exits(model, pieces), compose_decode(model, parts) if parts else None
        return Graphs(exits, parts if steps else {}, decode, shared_weights=True)

    def whole(self, model: CRT) -> nn.Module:
        return Piece(model, model.logits)

    def causality(self, model: CRT, seed: int = 0) -> Causality:
        return probe_causality(model, seed)

    def decoder(self, model: CRT) -> CachedLoops:
        return CachedLoops(model)

    def as_on_cuda(self, model: CRT) -> None:
        """Attention in the matrices' type, which a CPU computes in float32."""
        model.attention.attend = attention


def build_crt(config: Any) -> CRT:
    """CRT-Deep with fresh weights, from a :class:`~edgeformer.models.crt.CRTConfig`."""
    return CRT(**config.model_dump(exclude={"kind", "attention"}))


@torch.inference_mode()
def probe_causality(model: CRT, seed: int = 0) -> Causality:
    """Change the tokens after t, and no output up to t, at any exit, may move.

    Every length is tried with a few random t, and with the last position but one, where only the very next token
    changes. The model is probed in evaluation mode, without autocast, and left in the mode it was in.

    Raises:
        ValueError: a change reaches no output at all, so that the probe could not have seen a leak.
    """
    generator = torch.Generator().manual_seed(seed)
    was_training, words, device = model.training, model.tokens.num_embeddings, model.tokens.weight.device
    lengths = sorted({min(length, model.max_positions) for length in _LENGTHS})
    largest = dict.fromkeys(model.exits, 0.0)
    reach, seen = 0, 0.0
    model.eval()
    try:
        for length in lengths:
            places = torch.randint(0, length - 1, (_TRIALS,), generator=generator).tolist()
            for last_kept in sorted({*places, length - 2}):
                before = torch.randint(0, words, (1, length), generator=generator)
                shift = torch.randint(1, words, (1, length), generator=generator)
                shift[:, : last_kept + 1] = 0  # every token behind becomes a different one
                plain, changed = model(before.to(device)), model(((before + shift) % words).to(device))
                for loop, state in plain.items():
                    # The largest change at each position over the spread of all outputs, [T].
                    one, other = state.float(), changed[loop].float()
                    moved = ((one - other).abs().amax(-1)[0] / one.std().clamp_min(1e-12)).cpu()
                    largest[loop] = max(largest[loop], float(moved[: last_kept + 1].max()))
                    seen = max(seen, float(moved[last_kept + 1 :].max()))
                    early = (moved[: last_kept + 1] > TOLERANCE).nonzero()
                    if len(early):
                        reach = max(reach, last_kept + 1 - int(early[0]))
    finally:
        model.train(was_training)
    if seen <= TOLERANCE:
        raise ValueError("changed tokens change no output at all; the model's weights are degenerate")
    return Causality(
        leaks=max(largest.values()) > TOLERANCE,
        largest_change={str(loop): value for loop, value in largest.items()},
        reach=reach,
        lengths=tuple(lengths),
        trials=_TRIALS,
        tolerance=TOLERANCE,
    )


ADAPTER = CRTAdapter()
