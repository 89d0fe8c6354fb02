"""Choosing token after token: which exit answers, what is drawn, when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeformer.backends.decoder import Decoder
from edgeformer.tasks.language_modeling.sampling import Sampler
from edgeformer.tasks.metric import top_probability

Logits = npt.NDArray[Any]


@dataclass(frozen=True)
class Step:
    """One token: what was drawn, and the loop that answered."""

    token: int
    loop: int


@dataclass(frozen=True)
class Transcript:
    """All steps, and the time in the model and in drawing (not in loading it)."""

    steps: tuple[Step, ...]
    prompt_seconds: float
    seconds: float


def decode(
    decoder: Decoder[Any],
    prompt: Sequence[int],
    stop: tuple[int, int],
    sampler: Sampler,
    thresholds: Mapping[int, float],
    on_token: Callable[[int], None],
) -> Transcript:
    """Read ``prompt``, then draw tokens until ``stop``.

    Args:
        decoder: at the start of a text; work done for earlier tokens is kept in it.
        prompt: at least one token.
        stop: the token that ends a text, and the largest number of tokens.
        sampler: draws them.
        thresholds: loop → smallest top probability that lets it answer, in rising order; a fixed exit is one loop with
            threshold 0. The last of them answers whoever is left.
        on_token: called with every token but the one that ends the text, as soon as it is drawn.
    """
    end, most = stop
    steps: list[Step] = []
    started = time.perf_counter()
    prompt_seconds, new = 0.0, list(prompt)
    while len(steps) < most:
        decoder.read(new)
        loop, logits = _answer(decoder, thresholds)
        token = sampler.pick(logits)
        steps.append(Step(token, loop))
        if len(steps) == 1:
            prompt_seconds = time.perf_counter() - started
        if token == end:
            break
        on_token(token)
        new = [token]
    return Transcript(tuple(steps), prompt_seconds, time.perf_counter() - started)


def _answer(decoder: Decoder[Any], thresholds: Mapping[int, float]) -> tuple[int, Logits]:
    """The first loop that is sure enough, and its logits."""
    last = max(thresholds)
    for loop in sorted(thresholds):
        decoder.advance(loop)
        logits = decoder.logits(loop)
        if loop == last or float(top_probability(np.asarray(logits)[None])[0]) >= thresholds[loop]:
            return loop, logits
    raise AssertionError("the last loop always answers")
