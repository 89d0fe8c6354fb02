"""Choice of tokens from logits, and loop self-speculation: an early exit drafts tokens, and all loops verify them.

Speculation is lossless: greedy text is the same token for token, and sampled text has the same distribution (Leviathan
et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1). A looped model drafts with its
own first loops (LoopSpec, arXiv 2609.17184). The states of drafted tokens wait in front of the next loop, see
:mod:`edgeformer.runtimes.decoder`, so one pass of the remaining loops verifies all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.tasks.metric import top_probability

if TYPE_CHECKING:
    from edgeformer.runtimes.decoder import Decoder

_SORTED_FIRST = 1024

Candidates = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Tokens in rising order, and their probabilities, which sum to 1."""


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

    def pick(self, logits: NDArray[np.floating], generator: np.random.Generator) -> int:
        """Draw the next token from logits [V]. Raises ArtifactError."""
        return draw(*self.candidates(logits), generator)

    def candidates(self, logits: NDArray[np.floating]) -> Candidates:
        """Return the tokens that may be chosen, in rising order, and their probabilities, which sum to 1; logits [V].

        Among equally likely tokens at the limit, those with the smaller numbers are kept.

        Raises:
            ArtifactError: no logit is finite, or one is NaN.
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


def draw(tokens: NDArray[np.int64], probabilities: NDArray[np.float64], generator: np.random.Generator) -> int:
    """Draw a token by inverse transform sampling; one candidate needs no random number."""
    if len(tokens) == 1:
        return int(tokens[0])
    ends = np.cumsum(probabilities)
    index = int(np.searchsorted(ends, generator.random() * ends[-1], side="right"))
    return int(tokens[min(index, len(tokens) - 1)])


def probabilities_of(tokens: NDArray[np.int64], candidates: Candidates) -> NDArray[np.float64]:
    """Return the probability of each of ``tokens``; 0 for tokens that are no candidates."""
    choices, probabilities = candidates
    places = np.minimum(np.searchsorted(choices, tokens), len(choices) - 1)
    return np.where(choices[places] == tokens, probabilities[places], 0.0)


def accept(
    drafts: Sequence[int],
    proposals: Sequence[Candidates],
    targets: Iterable[Candidates],
    generator: np.random.Generator,
) -> list[int]:
    """Return the accepted drafts and one more token, whose joint distribution is that of ``targets``.

    A draft x is accepted with probability min(1, p(x) / q(x)). A rejected one is replaced by a draw from
    max(0, p − q), normalised; if all are accepted, the last target draws one more token.

    Args:
        proposals: q, of which each draft was drawn.
        targets: p, of each draft's place and of the one after the last; read up to the first rejection.
    """
    tokens, remaining = list[int](), iter(targets)
    for draft, proposal in zip(drafts, proposals, strict=True):
        target = next(remaining)
        p, q = (float(probabilities_of(np.array([draft]), which)[0]) for which in (target, proposal))
        if p >= q or generator.random() * q < p:
            tokens.append(draft)
            continue
        choices, probabilities = target
        residual = np.maximum(probabilities - probabilities_of(choices, proposal), 0.0)
        # Of equal distributions nothing is left but rounding.
        return [*tokens, draw(choices, residual if residual.any() else probabilities, generator)]
    return [*tokens, draw(*next(remaining), generator)]


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted.

    Attributes:
        drafts: largest number of drafted tokens per verification.
        exit: loop whose exit drafts; None: the first exit.
        threshold: drafting stops at a token whose top probability at that exit is below it; 0: never.

    Raises:
        InputError: a value is out of its range.
    """

    drafts: int
    exit: int | None = None
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if self.drafts < 1:
            raise InputError(f"--speculate {self.drafts}: must be at least 1 token")
        if not 0 <= self.threshold <= 1:
            raise InputError(f"--draft-threshold {self.threshold}: must be a probability, from 0 to 1")

    def draft_exit(self, exits: Sequence[int], name: str) -> int:
        """Return the loop that drafts, of a model's exits. Raises InputError if it is no exit before the last one."""
        if len(exits) < 2:
            raise InputError(f"--speculate: {name} has no exit before its last loop, which could draft; leave it out")
        exit_ = self.exit or exits[0]
        if exit_ not in exits[:-1]:
            earlier = ", ".join(map(str, exits[:-1]))
            raise InputError(f"--speculate, --exit {exit_}: tokens are drafted at an exit before the last: {earlier}")
        return exit_


class Speculator:
    """Writes one text with a decoder, several tokens per verification.

    Attributes:
        rounds, drafted, accepted: verifications, drafted tokens, and those that were accepted.
        accepted_first: in the first round, which reads the prompt.
    """

    def __init__(
        self,
        decoder: Decoder[Any],
        exit_: int,
        speculation: Speculation,
        sampling: Sampling,
        generator: np.random.Generator,
    ) -> None:
        if not decoder.can_forget:
            raise InputError(
                "--speculate: rejected tokens must be dropped from the caches, which this artifact cannot do; use a "
                "step artifact, or the weights, of a model of kind decoder"
            )
        self._decoder, self._exit, self._speculation = decoder, exit_, speculation
        self._sampling, self._generator = sampling, generator
        self.rounds = self.drafted = self.accepted = self.accepted_first = 0

    def write(self, unread: Sequence[int], longest: int) -> list[int]:
        """Read tokens, and return the next ones, 1 to ``longest``; the last of them has to be read next."""
        decoder, drafts, proposals = self._decoder, list[int](), list[Candidates]()
        decoder.read(unread)
        while len(drafts) < min(self._speculation.drafts, longest - 1):
            decoder.advance(self._exit)
            logits = decoder.logits(self._exit)
            # Whether a token is drafted may depend on its distribution, but not on the token: that would be biased.
            if self._speculation.threshold and top_probability(logits[None])[0] < self._speculation.threshold:
                break
            proposals.append(self._sampling.candidates(logits))
            drafts.append(draw(*proposals[-1], self._generator))
            decoder.read(drafts[-1:])
        decoder.advance(decoder.loops)
        logits = decoder.newest_logits(len(drafts) + 1)[0]
        tokens = accept(drafts, proposals, map(self._sampling.candidates, logits), self._generator)
        decoder.forget(len(drafts) + 1 - len(tokens))
        self.rounds += 1
        self.drafted += len(drafts)
        self.accepted += len(tokens) - 1
        if self.rounds == 1:
            self.accepted_first = self.accepted
        return tokens

    def counts(self) -> dict[str, int]:
        """Return the exit that drafts, and the counts so far."""
        return {"exit": self._exit, "rounds": self.rounds, "drafted": self.drafted, "accepted": self.accepted}
