"""Training a language model: next-token loss at every exit (paper B, eq. 4 and 5)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeformer.data.batching import ordered_batches
from edgeformer.data.language import PreparedText, TextRows, text_batch
from edgeformer.families.crt.loss import CHUNK_TOKENS, IGNORED, exit_losses, weighted
from edgeformer.families.crt.model import CRT
from edgeformer.formats.language_recipe import LanguageRecipe
from edgeformer.formats.scores import LanguageScore
from edgeformer.stages.training.batches import Batch, as_tensors
from edgeformer.stages.training.objective import Losses, Score
from edgeformer.tasks.language_modeling import LanguageMeter

EVALUATION_TOKENS = 8192
"""Tokens that are scored at the same time."""


class LanguageObjective:
    """:class:`~edgeformer.stages.training.objective.Objective` of paper B."""

    def __init__(self, recipe: LanguageRecipe, data: PreparedText, model: CRT) -> None:
        self._config, self._data = recipe.training, data
        self._model = model  # for its heads; the loop passes the same model as Accelerate wrapped it
        self._pad_to = recipe.data.sequence_length if recipe.training.score_padding else None
        model.checkpointing = recipe.training.checkpointing

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Inputs of every training row."""
        return self._data.train.lengths

    @property
    def tests(self) -> tuple[str, ...]:
        """Names of the test sets."""
        return tuple(self._data.tests)

    def batch(self, rows: NDArray[np.int64], device: torch.device) -> Batch:
        """input_ids, targets and, for packed rows, positions: int64 [B, S]."""
        return self._batch(self._data.train, rows, device)

    def _batch(self, texts: TextRows, rows: NDArray[np.int64], device: torch.device) -> Batch:
        return as_tensors(text_batch(texts, rows, self._data.boundary, pad_to=self._pad_to), device)

    def weight(self, batch: Batch) -> int:
        """Tokens to be predicted."""
        return int((batch["targets"] != IGNORED).sum())

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        """Cross-entropy summed over the tokens, weighted over the exits; parts: every exit by itself."""
        states = model(batch["input_ids"], batch.get("positions"))
        losses = exit_losses(self._model, states, batch["targets"], chunked=self._config.chunked_loss)
        parts = {f"loss_exit{loop}": loss for loop, loss in losses.items() if loop != self._model.loops}
        total = weighted(losses, self._config.exit_weight)
        return Losses(total, {**parts, "loss_final": losses[self._model.loops]})

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, name: str, device: torch.device) -> LanguageScore:
        """Scores on all tokens of the set, at every exit and with early exit."""
        assert isinstance(model, CRT)
        model.eval()
        texts = self._data.validation if name == "validation" else self._data.tests[name]
        meter = LanguageMeter(model.exits)
        longest = int(texts.lengths.max(initial=1))
        for rows in ordered_batches(texts.lengths, max(1, EVALUATION_TOKENS // longest)):
            batch = self._batch(texts, rows, device)
            counted = batch["targets"] != IGNORED
            targets = batch["targets"][counted]
            losses, confidence = {}, {}
            for loop, state in model(batch["input_ids"], batch.get("positions")).items():
                losses[loop], confidence[loop] = _token_losses(model.head_of(loop), state[counted], targets)
            meter.add(losses, confidence)
        # Padding that counts as text belongs to no word.
        return meter.score(None if self._pad_to else texts.words)

    def criterion(self, score: Score) -> float:
        """Validation loss of the final head."""
        return score.loss

    def record(self, score: Score) -> dict[str, float]:
        """val_loss, val_perplexity, val_loss_exitN, and what early exit does."""
        assert isinstance(score, LanguageScore)
        values = {"val_loss": score.loss, "val_perplexity": score.perplexity}
        values |= {f"val_loss_exit{loop}": exit_.loss for loop, exit_ in score.exits.items()}
        if score.early_exit is not None:
            values["early_exit_loss"] = score.early_exit.loss
            values["early_exit_mean_loops"] = score.early_exit.mean_loops
        return values

    def describe(self, score: Score) -> str:
        """Perplexity of every exit."""
        assert isinstance(score, LanguageScore)
        exits = ", ".join(f"loop {loop} {exit_.perplexity:.2f}" for loop, exit_ in score.exits.items())
        return f"validation loss {score.loss:.4f}, perplexity per token: {exits}"


def _token_losses(head: nn.Linear, x: Tensor, targets: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cross-entropy and top probability of every token, float64 [n]; x [n, C], targets [n]."""
    losses, confidence = [], []
    for part, wanted in zip(torch.split(x, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), strict=True):
        logits = head(part).float()
        log_sum = logits.logsumexp(-1)
        losses.append(log_sum - logits.gather(-1, wanted[:, None])[:, 0])
        confidence.append((logits.amax(-1) - log_sum).exp())
    return torch.cat(losses).double().cpu().numpy(), torch.cat(confidence).double().cpu().numpy()
