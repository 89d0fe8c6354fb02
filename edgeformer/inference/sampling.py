"""Choice of the next token from logits: temperature, top-k and top-p."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import ArtifactError, InputError

_SORTED_FIRST = 1024


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: temperature, then ``top_k``, then ``top_p``.

    Attributes:
        temperature: 0: always the likeliest token; 1: the model's own probabilities.
        top_k: keep only the k likeliest tokens; None: all.
        top_p: keep only the smallest set of likeliest tokens whose probability reaches p; None: all.
        seed: the same seed draws the same text.

    Raises:
        InputError: a value is out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"--temperature {self.temperature}: must be 0 (always the most probable token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"--top-k {self.top_k}: must be at least 1; leave it out to sample from all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(
                f"--top-p {self.top_p}: must be above 0 and at most 1; leave it out to sample from all tokens"
            )
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed {self.seed}: must be from 0 to {2**32 - 1}")

    def pick(self, logits: NDArray[np.floating], generator: "np.random.Generator") -> int:
        """Draw the next token from logits [V] by inverse transform sampling. Raises ArtifactError."""
        tokens, probabilities = self.candidates(logits)
        if len(tokens) == 1:  # needs no random number
            return int(tokens[0])
        ends = np.cumsum(probabilities)
        index = int(np.searchsorted(ends, generator.random() * ends[-1], side="right"))
        return int(tokens[min(index, len(tokens) - 1)])

    def candidates(self, logits: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the tokens that may be chosen, in rising order, and their probabilities, which sum to 1; logits [V].

        Among equally likely tokens at the limit, those with the smaller numbers are kept. Raises ArtifactError: no
        logit is finite, or one is NaN.
        """
        wide = logits.astype(np.float64)
        largest = wide.max()
        if not np.isfinite(largest):
            raise ArtifactError(
                f"the largest logit of the model is {largest}; the model is damaged, so export it again"
            )
        if self.temperature == 0:
            return np.array([wide.argmax()], dtype=np.int64), np.ones(1)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the likeliest to −∞, as intended
            scaled = (wide - largest) / self.temperature
        tokens, k, p = np.arange(len(scaled)), self.top_k, self.top_p
        if k is not None and k < len(scaled):
            limit = np.partition(scaled, -k)[-k]
            above = np.flatnonzero(scaled > limit)
            equal = np.flatnonzero(scaled == limit)[: k - len(above)]
            tokens = np.sort(np.concatenate((above, equal)))
        probabilities = np.exp(scaled if k is None else scaled[tokens])
        possible = probabilities > 0
        if not possible.all():
            tokens, probabilities = tokens[possible], probabilities[possible]
        if p is not None and p < 1:  # the fewest likeliest tokens whose shares sum to p or more; at least one
            shares = probabilities / probabilities.sum()
            # Sorting a large vocabulary takes longer than many a model's forward pass, so the likeliest tokens (with
            # all ties of the last one) are sorted first, and all tokens only if these do not reach p.
            limit = np.partition(shares, -_SORTED_FIRST)[-_SORTED_FIRST] if len(shares) > _SORTED_FIRST else 0.0
            for subset in (np.flatnonzero(shares >= limit), np.arange(len(shares))):
                order = subset[np.argsort(-shares[subset], kind="stable")]
                sums = np.cumsum(shares[order])
                if sums[-1] >= p:
                    break
            kept = np.sort(order[: int(np.searchsorted(sums, p, side="left")) + 1])
            tokens, probabilities = tokens[kept], probabilities[kept]
        return tokens, probabilities / probabilities.sum()
