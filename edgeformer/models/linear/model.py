"""Linear classifier with a table of n-gram weights that a graph of integer operators can look up.

An n-gram of token numbers becomes four residues, together a hash of 48 bits. A perfect hash function gives every stored
n-gram a row of its own in the table of weights: two residues select a displacement, which moves the other two to a free
row (Belazzougui, Botelho, Dietzfelbinger: Hash, displace, and compress, 2009). The row also stores 8 bits of a residue,
its fingerprint, by which all but 1 in 256 of the n-grams that are not stored are ignored. A row takes 1.5 bytes besides
its weights. All integers stay below 2²⁴, because some runtimes (OpenVINO on CPUs) compute them in FP32.

Shapes: B rows, S tokens, T = S × orders n-grams, K columns of weights.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.models.linear import LinearConfig

PRIMES = (4093, 4091, 4079, 4073)
"""Moduli of the residues, the largest primes below √2²⁴: two residues fit 24 bits, and so does (a + b) · factor."""
_FACTORS = (1687, 2029, 1229, 1543)
_EXACT = 2**24
"""Up to here FP32 has every integer."""
_FINGERPRINTS = 256
_SPARE_ROWS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Rows of the table without an n-gram, as shares of those with one: the first share that suffices is used."""
_ROWS_PER_DISPLACEMENT = 4
_TRIALS = 32
"""Displacements that are tried together."""


class Readout(nn.Module):
    """Sums of weights [B, K] and number of n-grams [B, 1] → logits [B, C]; the first class is 0 where K = C − 1."""

    keeps_float32 = True

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, sums: Tensor, count: Tensor) -> Tensor:
        scores = sums / count.clamp_min(1).sqrt()
        return F.pad(scores, (len(self.bias) - scores.shape[-1], 0)) + self.bias


class LinearClassifier(nn.Module):
    """Σ weight of each stored n-gram / √(number of them) + bias. IDF is part of the weights.

    ``columns``: weights of an n-gram; ``classes`` − 1 where only differences between logits matter.
    """

    inputs = ("input_ids",)
    optional = ("attention_mask",)
    exits = range(1, 2)

    def __init__(self, config: LinearConfig, classes: int, columns: int) -> None:
        super().__init__()
        self.orders, self.max_positions = config.ngrams, config.max_positions
        self.slots = slots = config.slots or 1
        self.groups = max(1, slots // _ROWS_PER_DISPLACEMENT)
        self.weights = nn.Parameter(torch.zeros(slots, columns))
        self.readout = Readout(classes)
        self.displacements: Tensor
        self.fingerprints: Tensor
        self.primes: Tensor
        self.factors: Tensor
        self.register_buffer("primes", torch.tensor(PRIMES, dtype=torch.int32), persistent=False)
        self.register_buffer("factors", torch.tensor(_FACTORS, dtype=torch.int32), persistent=False)
        self.register_buffer("displacements", torch.zeros(self.groups, 1, dtype=torch.int16))
        self.register_buffer("fingerprints", torch.zeros(slots, 1, dtype=torch.uint8))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits float32 [B, classes]; without a mask every token is real."""
        return self.readout(*self.sums(input_ids, attention_mask))

    def sums(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the summed weights of the stored n-grams float32 [B, K], and their number float32 [B, 1]."""
        slots, is_stored = self.look_up(*self.residues(input_ids, attention_mask))
        stored = is_stored.float()[:, None]  # [B, 1, T]
        rows = F.embedding(slots, self.weights).float()  # [B, T, K]
        return (stored @ rows)[:, 0], stored.sum(-1)

    def every_exit(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the logits [B, classes] and the summed weights [B, K]."""
        sums, count = self.sums(input_ids, attention_mask)
        return self.readout(sums, count), sums

    def residues(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the residues of the n-grams at every position, int32 [B, T, 4], and whether they are real, [B, T]."""
        shortest, longest = self.orders
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        tokens = input_ids.int()[..., None] % self.primes  # [B, S, 4]
        later, later_mask = F.pad(tokens, (0, 0, 0, longest - 1)), F.pad(mask, (0, longest - 1))
        residues = tokens * self.factors % self.primes
        parts = [(residues, mask)] if shortest == 1 else []
        for order in range(2, longest + 1):
            last_token = slice(order - 1, order - longest or None)  # S positions
            residues = (residues + later[:, last_token]) * self.factors % self.primes
            if order >= shortest:
                parts.append((residues, later_mask[:, last_token]))
        all_residues, is_real = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
        return all_residues, is_real > 0

    def look_up(self, residues: Tensor, is_real: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of every n-gram, int32 [B, T], and whether the n-gram is stored there, bool [B, T]."""
        first, second, third, fourth = (residues[..., place] for place in range(4))
        group = (first * PRIMES[1] + second) % self.groups
        displacement = F.embedding(group, self.displacements)[..., 0].int()
        slots = ((third * PRIMES[3] + fourth) % self.slots + displacement * first) % self.slots
        fingerprint = F.embedding(slots, self.fingerprints)[..., 0].int()
        return slots, is_real & (fingerprint == second % _FINGERPRINTS)

    def fill(self, table: NgramTable) -> None:
        """Store the hash function of a table with as many rows."""
        self.displacements.copy_(torch.from_numpy(table.displacements[:, None]))
        self.fingerprints.copy_(torch.from_numpy(table.fingerprints[:, None]))


@dataclass(frozen=True)
class NgramTable:
    """Perfect hash function of n-grams. ``displacements``: int16 [groups]; ``fingerprints``: uint8 [slots]."""

    displacements: NDArray[np.int16]
    fingerprints: NDArray[np.uint8]

    @classmethod
    def build(cls, residues: NDArray[np.int64]) -> NgramTable:
        """Place n-grams by their residues [n, 4]. Raises EdgeformerError if no displacements can be found."""
        for share in _SPARE_ROWS:
            if (table := cls._place(residues, len(residues) + math.ceil(share * len(residues)))) is not None:
                return table
        raise EdgeformerError(f"no hash function was found for {len(residues):,} n-grams; raise model.minimum_count")

    @classmethod
    def _place(cls, residues: NDArray[np.int64], slots: int) -> NgramTable | None:
        """Place the n-grams in ``slots`` rows, the largest groups first; None: a group finds no free rows.

        Groups with an n-gram that no displacement moves come before all others.
        """
        groups = max(1, slots // _ROWS_PER_DISPLACEMENT)
        first, second, third, fourth = residues.T
        group = (first * PRIMES[1] + second) % groups
        starts = (third * PRIMES[3] + fourth) % slots
        order = np.argsort(group, kind="stable")
        sizes = np.bincount(group, minlength=groups)
        ends = np.cumsum(sizes)
        max_displacement = min((_EXACT - slots) // PRIMES[0], 2**15) - _TRIALS
        is_taken = np.zeros(slots, dtype=bool)
        displacements = np.zeros(groups, dtype=np.int16)
        fingerprints = np.zeros(slots, dtype=np.uint8)
        has_fixed = np.bincount(group, weights=first == 0, minlength=groups) > 0
        for number in np.lexsort((-sizes, ~has_fixed))[: np.count_nonzero(sizes)].tolist():
            members = order[ends[number] - sizes[number] : ends[number]]
            for trial in itertools.count(0, _TRIALS):
                if trial > max_displacement:
                    return None
                places = (starts[members] + np.arange(trial, trial + _TRIALS)[:, None] * first[members]) % slots
                is_free = ~is_taken[places].any(axis=1)
                if len(members) > 1:
                    by_place = np.sort(places, axis=1)
                    is_free &= (by_place[:, 1:] != by_place[:, :-1]).all(axis=1)
                if is_free.any():
                    best = int(is_free.argmax())
                    displacements[number] = trial + best
                    is_taken[places[best]] = True
                    fingerprints[places[best]] = second[members] % _FINGERPRINTS
                    break
        return cls(displacements, fingerprints)
