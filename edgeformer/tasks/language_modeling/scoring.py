"""Scores of a language model from per-token losses: every exit by itself, and early exit by confidence (paper B)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgeformer.data.batching import IGNORED
from edgeformer.formats.scores import EarlyExitScore, ExitScore, Score
from edgeformer.tasks.early_exit import ExitNotes, exit_logits, first_exits
from edgeformer.tasks.metric import Meter, token_losses, top_probability

Float64s = NDArray[np.float64]
TokenValues = Mapping[int, NDArray[np.floating]]
"""Loop → one number for each predicted token, [n]."""

_LARGEST_LOSS = 709.0  # exp of more is no float any more, and not JSON


class LanguageScore(Score):
    """Scores of a language model on one set; loss and perplexity are those of the final head, per token."""

    loss: float = Field(description="nats per predicted token: the sum over all of them divided by their number")
    perplexity: float = Field(description="exp(loss)")
    n: int = Field(description="tokens predicted")
    words: int | None = Field(None, description="words of the text, each paragraph's end counted as one")
    word_perplexity: float | None = Field(
        None, description="exp(total nats / words): comparable across tokenizers and with published tables"
    )
    exits: dict[str, ExitScore] = Field(description="loop → score of the exit after it; the last loop included")
    early_exit: EarlyExitScore | None = None

    @property
    def by_exit(self) -> dict[int, ExitScore]:
        return {loop: self.exits[str(loop)] for loop in sorted(map(int, self.exits))}

    @property
    def leaving_early(self) -> EarlyExitScore | None:
        return self.early_exit


def exit_thresholds(
    exits: Sequence[int], start: float = 0.92, floor: float = 0.80, decay: float = 0.98
) -> dict[int, float]:
    """Loop → smallest top probability that lets a token leave there: max(floor, start · decay^(loop − 1)).

    Paper B, eq. 6; its step counts loops from zero in the released code, so loop 1 has ``start`` itself.
    """
    return {loop: max(floor, start * decay ** (loop - 1)) for loop in exits}


class LanguageMeter(Meter):
    """Adds up the losses of all tokens of a set, batch by batch.

    Args:
        exits: loops after which a head answers, in rising order, the last loop among them.
        notes: is told of every token at every exit; None: nobody asks for other thresholds than paper B's.
    """

    def __init__(self, exits: Sequence[int], notes: ExitNotes | None = None) -> None:
        if not exits or list(exits) != sorted(set(exits)):
            raise ValueError(f"exits must rise, not {list(exits)}")
        self._exits = tuple(exits)
        self._thresholds = exit_thresholds(self._exits[:-1])
        self._tokens = 0
        self._sums = dict.fromkeys(self._exits, 0.0)
        self._early_sum = 0.0
        self._left = dict.fromkeys(self._exits, 0)
        self._with_confidence: bool | None = None
        self._notes = notes

    def add(self, outputs: Mapping[str, NDArray[Any]], batch: Mapping[str, NDArray[Any]]) -> None:
        """Count ``targets`` [B, S] by logits [B, S, V], or by losses and perhaps confidence [B, S]."""
        targets = batch["targets"]
        counted = targets != IGNORED
        if "logits" in outputs:
            self.add_tokens({self._exits[-1]: _losses(outputs["logits"], targets, counted)})
        elif exit_logits(self._exits[-1]) in outputs:
            logits = {loop: outputs[exit_logits(loop)] for loop in self._exits}
            self.add_tokens(
                {loop: _losses(found, targets, counted) for loop, found in logits.items()},
                {loop: _confidence(found, counted) for loop, found in logits.items()},
            )
        else:
            losses = {loop: outputs[f"loss_exit{loop}"][counted].astype(np.float64) for loop in self._exits}
            sure = {
                loop: outputs[f"confidence_exit{loop}"][counted].astype(np.float64)
                for loop in self._exits
                if f"confidence_exit{loop}" in outputs
            }
            cosine = {
                loop: outputs[f"cosine_exit{loop}"][counted] for loop in self._exits if f"cosine_exit{loop}" in outputs
            }
            self.add_tokens(losses, sure or None, cosine)

    def add_tokens(
        self, losses: TokenValues, confidence: TokenValues | None = None, cosine: TokenValues | None = None
    ) -> None:
        """Count tokens: loop → loss in nats, top probability and cosine, of every predicted token, [n] each.

        The last loop's confidence does not matter: whoever is left answers there. Cosines are for the notes alone.

        Raises:
            ValueError: an exit without its losses or confidence, arrays of other lengths, or confidence for some
                batches only.
        """
        counts = {len(losses[loop]) for loop in self._exits if loop in losses}
        if not losses.keys() >= set(self._exits) or len(counts) != 1:
            raise ValueError(f"needs the losses of the same tokens at each of the exits {self._exits}")
        if self._with_confidence not in (None, confidence is not None):
            raise ValueError("either every batch comes with confidence, or none")
        self._with_confidence = confidence is not None
        for loop in self._exits:
            self._sums[loop] += float(np.asarray(losses[loop], dtype=np.float64).sum())
        self._tokens += counts.pop()
        if confidence is None:
            return
        self._leave(losses, confidence)
        if self._notes is not None:
            for loop in self._exits:
                sure = confidence[loop] if loop in confidence else np.ones(len(losses[loop]))
                self._notes.add(loop, losses[loop], sure, cosine=(cosine or {}).get(loop))

    def _leave(self, losses: TokenValues, confidence: TokenValues) -> None:
        everyone = len(losses[self._exits[-1]])
        for loop in self._thresholds:
            if loop not in confidence or len(confidence[loop]) != everyone:
                raise ValueError(f"needs the confidence of the same tokens at exit {loop}")
        nobody = np.zeros(everyone)  # at an exit without a threshold
        sure = np.stack([confidence[loop] if loop in self._thresholds else nobody for loop in self._exits])
        first = first_exits(self._exits, sure, self._thresholds)
        for place, loop in enumerate(self._exits):
            leaving = first == place
            self._early_sum += float(losses[loop][leaving].sum(dtype=np.float64))
            self._left[loop] += int(leaving.sum())

    def score(self, words: int | None = None) -> LanguageScore:
        if not self._tokens:
            raise ValueError("cannot score an empty set")
        exits = {str(loop): _exit_score(self._sums[loop] / self._tokens) for loop in self._exits}
        total, full = self._sums[self._exits[-1]], exits[str(self._exits[-1])]
        early = None
        if self._with_confidence:
            early = EarlyExitScore(
                **_exit_score(self._early_sum / self._tokens).model_dump(),
                mean_loops=sum(loop * count for loop, count in self._left.items()) / self._tokens,
                share={str(loop): count / self._tokens for loop, count in self._left.items()},
                thresholds={str(loop): threshold for loop, threshold in self._thresholds.items()},
            )
        return LanguageScore(
            loss=full.loss,
            perplexity=full.perplexity,
            n=self._tokens,
            words=words,
            word_perplexity=perplexity_of(total / words) if words else None,
            exits=exits,
            early_exit=early,
        )


def perplexity_of(loss: float) -> float:
    """exp(loss), or the largest that is still a number in JSON."""
    return math.exp(min(loss, _LARGEST_LOSS))


def _exit_score(loss: float) -> ExitScore:
    return ExitScore(loss=loss, perplexity=perplexity_of(loss))


def _confidence(logits: NDArray[Any], counted: NDArray[np.bool_]) -> Float64s:
    return np.concatenate([top_probability(row[there]) for row, there in zip(logits, counted, strict=True)])


def _losses(logits: NDArray[Any], targets: NDArray[Any], counted: NDArray[np.bool_]) -> Float64s:
    """Row by row: all counted logits at once would be one more copy of them."""
    rows = zip(logits, targets, counted, strict=True)
    return np.concatenate([token_losses(row[there], wanted[there]) for row, wanted, there in rows])
