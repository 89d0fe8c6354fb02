"""Choosing token after token: which exit answers, what is drawn, when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgeformer.tasks.language_modeling.sampling import Sampler
from edgeformer.tasks.language_modeling.scoring import top_probability

Logits = npt.NDArray[Any]


class DecodingSession(Protocol):
    """One text being read and written. Works done for earlier tokens is kept."""

    provider: str
    """What computes: ``torch-cpu``…"""

    def read(self, ids: Sequence[int]) -> None:
        """Take in the next tokens. Raises InputError where the text gets longer than the model takes."""

    def advance(self, loop: int) -> None:
        """Compute the newest token up to ``loop``, further than it was computed before."""

    def logits(self, loop: int) -> Logits:
        """Logits float32 [V] of the token after the newest one; ``loop`` is the one that was advanced to last."""


@dataclass(frozen=True)
class Step:
    """One token: what was drawn, and the loop that answered."""

    token: int
    loop: int


@dataclass(frozen=True)
class Decoded:
    """All steps, and the time in the model and in drawing (not in loading it)."""

    steps: tuple[Step, ...]
    prompt_seconds: float
    seconds: float


def decode(
    session: DecodingSession,
    prompt: Sequence[int],
    stop: tuple[int, int],
    sampler: Sampler,
    thresholds: Mapping[int, float],
    on_token: Callable[[int], None],
) -> Decoded:
    """Read ``prompt``, then draw tokens until ``stop``.

    Args:
        stop: the token that ends a text, and the largest number of tokens.
        thresholds: loop → smallest top probability that lets it answer, in rising order; a fixed exit is one loop with
            threshold 0. The last of them answers whoever is left.
        on_token: called with every token but the one that ends the text, as soon as it is drawn.
    """
    end, most = stop
    steps: list[Step] = []
    started = time.perf_counter()
    prompt_seconds, new = 0.0, list(prompt)
    while len(steps) < most:
        session.read(new)
        loop, logits = _answer(session, thresholds)
        token = sampler.pick(logits)
        steps.append(Step(token, loop))
        if len(steps) == 1:
            prompt_seconds = time.perf_counter() - started
        if token == end:
            break
        on_token(token)
        new = [token]
    return Decoded(tuple(steps), prompt_seconds, time.perf_counter() - started)


def _answer(session: DecodingSession, thresholds: Mapping[int, float]) -> tuple[int, Logits]:
    """The first loop that is sure enough, and its logits."""
    last = max(thresholds)
    for loop in sorted(thresholds):
        session.advance(loop)
        logits = session.logits(loop)
        if loop == last or float(top_probability(np.asarray(logits)[None])[0]) >= thresholds[loop]:
            return loop, logits
    raise AssertionError("the last loop always answers")
