"""Choosing the next token from a language model's logits: temperature, top-k, nucleus, seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import ArtifactError, InputError

_SORTED_FIRST = 1024
"""Number of likeliest tokens of a larger vocabulary that are sorted first."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: temperature, then ``top_k``, then ``top_p``.

    Attributes:
        temperature: 0: always the likeliest token; 1: the model's own probabilities.
        top_k: keep only the k likeliest tokens; None: all.
        top_p: keep only the smallest set of likeliest tokens whose probability reaches p; None: all.
        seed: seed of the random numbers.

    Raises:
        InputError: a value is out of its range.
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
    """Draws tokens in sequence; the same seed and the same logits give the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = np.random.default_rng(sampling.seed)

    def pick(self, logits: NDArray[np.floating]) -> int:
        """Draw the next token from logits [V]. Raises ArtifactError as :meth:`candidates`."""
        tokens, probabilities = self.candidates(logits)
        if len(tokens) == 1:
            return int(tokens[0])
        ends = np.cumsum(probabilities)  # inverse transform sampling
        index = int(np.searchsorted(ends, self._generator.random() * ends[-1], side="right"))
        return int(tokens[min(index, len(tokens) - 1)])

    def candidates(self, logits: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the tokens that may be chosen and their probabilities, which sum to 1; logits [V].

        Among equally likely tokens at the limit, those with the smaller numbers are kept.

        Raises:
            ArtifactError: no logit is finite, or one is NaN.
        """
        wide = logits.astype(np.float64)
        largest = wide.max()
        if not np.isfinite(largest):
            raise ArtifactError(f"the model's largest logit is {largest}, not a number to choose by; it is damaged")
        if self._sampling.temperature == 0:
            return np.array([wide.argmax()], dtype=np.int64), np.ones(1)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the likeliest to −∞, as intended
            scaled = (wide - largest) / self._sampling.temperature
        k, p = self._sampling.top_k, self._sampling.top_p
        if k is None or k >= len(scaled):
            tokens = np.arange(len(scaled))
        else:
            limit = np.partition(scaled, -k)[-k]
            above = np.flatnonzero(scaled > limit)
            equal = np.flatnonzero(scaled == limit)[: k - len(above)]
            tokens = np.sort(np.concatenate((above, equal)))
        probabilities = np.exp(scaled[tokens])
        tokens, probabilities = tokens[probabilities > 0], probabilities[probabilities > 0]
        if p is not None and p < 1:
            kept = _top_p(probabilities / probabilities.sum(), p)
            tokens, probabilities = tokens[kept], probabilities[kept]
        return tokens, probabilities / probabilities.sum()


def _top_p(shares: NDArray[np.float64], p: float) -> NDArray[np.int64]:
    """Return the rising indices of the fewest likeliest tokens whose shares sum to p or more; at least one.

    Sorting a large vocabulary takes longer than many a model's forward pass, so the likeliest 1,024 tokens are sorted
    first and all tokens only if these do not reach p. The result is the same to the last bit of the sums.
    """
    subset = np.arange(len(shares))
    if len(shares) > _SORTED_FIRST:
        limit = np.partition(shares, -_SORTED_FIRST)[-_SORTED_FIRST]
        subset = np.flatnonzero(shares >= limit)  # includes all ties with the last token
    order = subset[np.argsort(-shares[subset], kind="stable")]
    sums = np.cumsum(shares[order])
    if len(subset) < len(shares) and sums[-1] < p:
        order = np.argsort(-shares, kind="stable")
        sums = np.cumsum(shares[order])
    return np.sort(order[: int(np.searchsorted(sums, p, side="left")) + 1])
