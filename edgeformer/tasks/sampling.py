"""Choosing the next token from a language model's logits: temperature, top-k, nucleus, seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import ArtifactError, InputError

_LIKELIEST = 1024
"""Tokens of a larger vocabulary that are sorted first."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. ``top_k`` acts first, then ``top_p`` on what it leaves; both after the temperature.

    ``temperature``  0: always the likeliest token; 1: the model's own probabilities
    ``top_k``        only the k likeliest tokens; None: all
    ``top_p``        only the smallest set of likeliest tokens whose probability reaches p; None: all

    Raises:
        InputError: a value out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature must be 0 (always the likeliest token) or more, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be at least 1, not {self.top_k}; leave it out for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, not {self.top_p}; leave it out for all tokens")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed must be in 0…{2**32 - 1}, not {self.seed}")


class Sampler:
    """Draws tokens one after the other; the same seed and the same logits give the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = np.random.default_rng(sampling.seed)

    def pick(self, logits: NDArray[np.floating]) -> int:
        """The next token, given logits [V]. Raises ArtifactError where they are no numbers."""
        tokens, probabilities = self.candidates(logits)
        if len(tokens) == 1:
            return int(tokens[0])
        # Cumulated, each candidate owns a stretch of [0, total): one as long as its probability.
        ends = np.cumsum(probabilities)
        place = int(np.searchsorted(ends, self._generator.random() * ends[-1], side="right"))
        return int(tokens[min(place, len(tokens) - 1)])

    def candidates(self, logits: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens that may be chosen, and their probabilities (which sum to 1); logits [V].

        Among equally likely tokens at the edge of what is kept, those with the smaller numbers are.

        Raises:
            ArtifactError: no finite logit, or one that is not a number.
        """
        wide = logits.astype(np.float64)
        largest = wide.max()
        if not np.isfinite(largest):
            raise ArtifactError(f"the model's largest logit is {largest}, not a number to choose by; it is damaged")
        if self._sampling.temperature == 0:
            return np.array([wide.argmax()], dtype=np.int64), np.ones(1)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the likeliest to −∞, as it should
            scaled = (wide - largest) / self._sampling.temperature
        tokens = _top_k(scaled, self._sampling.top_k)
        probabilities = np.exp(scaled[tokens])
        tokens, probabilities = tokens[probabilities > 0], probabilities[probabilities > 0]
        if self._sampling.top_p is not None and self._sampling.top_p < 1:
            kept = _top_p(probabilities / probabilities.sum(), self._sampling.top_p)
            tokens, probabilities = tokens[kept], probabilities[kept]
        return tokens, probabilities / probabilities.sum()


def _top_p(shares: NDArray[np.float64], p: float) -> NDArray[np.int64]:
    """Numbers of the fewest likeliest that sum to p or more, rising; at least one.

    Sorting a whole vocabulary takes longer than many a model's token, and the first hundreds mostly reach p: only where
    these do not is all of it sorted. What is kept is the same, to the last bit of the sums.
    """
    among = np.arange(len(shares))
    if len(shares) > _LIKELIEST:
        edge = np.partition(shares, -_LIKELIEST)[-_LIKELIEST]
        among = np.flatnonzero(shares >= edge)  # with all that are as likely as the last one
    order = among[np.argsort(-shares[among], kind="stable")]
    sums = np.cumsum(shares[order])
    if len(among) < len(shares) and sums[-1] < p:
        order = np.argsort(-shares, kind="stable")
        sums = np.cumsum(shares[order])
    return np.sort(order[: int(np.searchsorted(sums, p, side="left")) + 1])


def _top_k(scaled: NDArray[np.float64], k: int | None) -> NDArray[np.int64]:
    """Numbers of the k largest, rising."""
    if k is None or k >= len(scaled):
        return np.arange(len(scaled))
    edge = np.partition(scaled, -k)[-k]
    above = np.flatnonzero(scaled > edge)
    level = np.flatnonzero(scaled == edge)[: k - len(above)]
    return np.sort(np.concatenate((above, level)))
