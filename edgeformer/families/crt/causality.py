"""The causality probe: change the tokens after t, and no output up to t may move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgeformer.families.crt.model import CRT
from edgeformer.formats.manifest import Causality

TOLERANCE = 1e-4
"""Of an output's spread. Rounding moves outputs by about 1e-6 of it, the published convolutions by 1e-2 and more."""


@torch.inference_mode()
def probe_causality(
    model: CRT, lengths: Sequence[int] = (2, 17, 64, 128), *, trials: int = 4, seed: int = 0
) -> Causality:
    """Compare outputs up to t, at every exit, before and after all tokens behind t are replaced by other random ones.

    Every length is tried with ``trials`` random t, and with the last position but one, where only the very next token
    changes. The model is probed in evaluation mode, without autocast, and left in the mode it was in.

    Raises:
        ValueError: a change reaches no output at all, so that the probe could not have seen a leak.
    """
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    lengths = sorted({min(length, model.max_positions) for length in lengths if length >= 2})
    largest = dict.fromkeys(model.exits, 0.0)
    reach, seen = 0, 0.0
    model.eval()
    try:
        for length in lengths:
            places = torch.randint(0, length - 1, (trials,), generator=generator).tolist()
            for last_kept in sorted({*places, length - 2}):
                before, after = _inputs(model, length, last_kept, generator)
                plain, changed = model(before), model(after)
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
        trials=trials,
        tolerance=TOLERANCE,
    )


def _inputs(model: CRT, length: int, last_kept: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random tokens [1, length], and the same with every token behind ``last_kept`` replaced by a different one."""
    words, device = model.tokens.num_embeddings, model.tokens.weight.device
    before = torch.randint(0, words, (1, length), generator=generator)
    shift = torch.randint(1, words, (1, length), generator=generator)
    shift[:, : last_kept + 1] = 0
    return before.to(device), ((before + shift) % words).to(device)
