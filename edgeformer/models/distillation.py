"""The loss of a classifier's training: cross-entropy, and what a teacher adds to it where the recipe names one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeformer.artifacts.errors import RecipeError
from edgeformer.artifacts.workspace import RECIPE_FILE, TOKENIZER_FILE
from edgeformer.data.tokenization import cleaning_as_now, fingerprint, special_ids, tokenizer_from_file
from edgeformer.models import model_spec_of, read_recipe_of
from edgeformer.models.adapter import Batch, Loss, Losses, Place
from edgeformer.models.weights import MODEL_FOLDER, WEIGHTS, load_weights
from edgeformer.tasks import Prepared

_MOST_CACHED = 1_000_000
"""Rows whose answers are kept: about 250 bytes each with the key, a quarter of a gigabyte in all."""


def classification_loss(recipe: Any, prepared: Prepared | None) -> Loss:
    """Cross-entropy summed over the rows, for models from input_ids and attention_mask to logits [B, C].

    Of rows with several labels, whose labels are 0 and 1 [B, C], binary cross-entropy, averaged over the labels.

    With ``training.teacher`` it is w·KL + (1 − w)·cross-entropy + s·(distance of the states), all summed over the rows:
    KL of the answers at temperature T, times T²; the states after every iteration, as their squared distance from the
    teacher's at the same depth, averaged over real tokens and width.

    Args:
        recipe: its ``training`` has ``label_smoothing``, ``token_dropout`` (the share of tokens that becomes [UNK]),
            ``teacher`` and ``distillation``.
        prepared: says which tokens are special and are never dropped; None: no token is, and nothing is loaded.

    Raises:
        RecipeError: the teacher is no such run, or reads other tokens or answers with other labels.
    """
    training = recipe.training
    smoothing = float(getattr(training, "label_smoothing", 0))
    of_one = nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="sum")

    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        if labels.ndim == 1:
            found: Tensor = of_one(logits, labels)
            return found
        each = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
        return each / labels.shape[1]

    dropped = _token_dropout(float(getattr(training, "token_dropout", 0)), prepared)
    taught = None if getattr(training, "teacher", None) is None else _Teaching(recipe, prepared)

    def loss(model: nn.Module, batch: Batch) -> Losses:
        ids, mask = dropped(batch["input_ids"]), batch.get("attention_mask")
        if taught is None:
            return Losses(summed(model(ids, mask).float(), batch["labels"]))
        return taught.losses(model, ids, batch, summed)

    return loss


def _token_dropout(share: float, prepared: Prepared | None) -> Callable[[Tensor], Tensor]:
    if not share or prepared is None:
        return lambda ids: ids
    added = prepared.tokenizer.get_added_tokens_decoder()
    special = torch.tensor(sorted(number for number, token in added.items() if token.special))
    unk = special_ids(prepared.tokenizer).unk

    def drop(ids: Tensor) -> Tensor:
        chosen = torch.rand(ids.shape, device=ids.device) < share
        return torch.where(chosen & ~torch.isin(ids, special.to(ids.device)), unk, ids)

    return drop


@dataclass
class _Answers:
    """Of the teacher: logits [B, C], and the states [B, S, d] that the student is compared with."""

    logits: Tensor
    states: list[Tensor]


class _Teaching:
    """A teacher, and how its answers become a loss. It sees every row as it is, without dropout of any kind."""

    def __init__(self, recipe: Any, prepared: Prepared | None) -> None:
        folder = Path(recipe.training.teacher)
        self._where, self._how = f"training.teacher: {folder}", recipe.training.distillation
        if not (folder / RECIPE_FILE).is_file():
            raise RecipeError(f"{self._where}: is no run; name the folder of a finished classification run")
        own = read_recipe_of(folder)
        self._check(own, recipe)
        self.model, _ = model_spec_of(own).adapter.build(own, Place())
        self.model.eval().requires_grad_(False)
        self._known: dict[bytes, NDArray[np.float32]] | None = None
        if prepared is not None:
            tokens = tokenizer_from_file(folder / MODEL_FOLDER / TOKENIZER_FILE)
            if fingerprint(cleaning_as_now(tokens)) != fingerprint(prepared.tokenizer):
                raise RecipeError(f"{self._where}: reads other tokens; use its tokenizer and its data.cleaning")
            load_weights(self.model, folder / MODEL_FOLDER / WEIGHTS)
            self._known = {}

    def _check(self, own: Any, recipe: Any) -> None:
        """Whether the teacher can answer what the student asks. Raises RecipeError."""
        if own.task != recipe.task or own.data.labels != recipe.data.labels:
            labels = ", ".join(recipe.data.labels)
            raise RecipeError(f"{self._where}: its labels are not those of this recipe ({labels})")
        if own.model.max_positions < recipe.data.max_length:
            raise RecipeError(
                f"{self._where}: takes {own.model.max_positions} tokens; set data.max_length: {own.model.max_positions}"
            )
        if not self._how.states:
            return
        off = "set training.distillation.states: 0"
        theirs, ours = (model_spec_of(one).adapter.state_shape(one) for one in (own, recipe))
        if theirs is None or ours is None:
            raise RecipeError(f"{self._where}: states can be compared between pretrained encoders only; {off}")
        (stages, width), (wanted, wide) = theirs, ours
        if width != wide:
            raise RecipeError(f"{self._where}: its states are {width} wide, the student's {wide}; {off}")
        if stages % wanted:
            raise RecipeError(
                f"{self._where}: has {stages} stages, of which none stands for each of {wanted} iterations; {off}, or "
                "fold into another number"
            )

    def losses(self, model: nn.Module, ids: Tensor, batch: Batch, summed: Callable[[Tensor, Tensor], Tensor]) -> Losses:
        how, mask, states = self._how, batch.get("attention_mask"), list[Tensor]()
        if how.states:
            logits, states = model(ids, mask, states=True)
        else:
            logits = model(ids, mask)
        answers = self._answers(batch, len(states))
        logits, hot = logits.float(), how.temperature
        right = summed(logits, batch["labels"])
        ours, theirs = F.log_softmax(logits / hot, -1), F.log_softmax(answers.logits / hot, -1)
        apart = F.kl_div(ours, theirs, reduction="sum", log_target=True) * hot**2
        total = (1 - how.weight) * right + how.weight * apart
        parts = {"cross_entropy": right.detach(), "distillation": apart.detach()}
        if how.states:
            distance = sum(
                (_distance(one, two, mask) for one, two in zip(states, answers.states, strict=True)),
                start=logits.new_zeros(()),
            )
            total = total + how.states * distance
            parts["states"] = distance.detach()
        return Losses(total, parts)

    @torch.no_grad()
    def _answers(self, batch: Batch, states: int) -> _Answers:
        """What the teacher says of a batch; without states what it said before is kept."""
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        self.model.to(ids.device)
        if states:
            logits, found = self.model(ids, mask, states=True)
            every = len(found) // states
            return _Answers(logits.float(), found[every - 1 :: every])
        if self._known is None:  # memory is planned, on tensors without numbers
            return _Answers(self.model(ids, mask).float(), [])
        keys = _keys(ids, mask)
        if all(key in self._known for key in keys):
            kept = np.stack([self._known[key] for key in keys])
            return _Answers(torch.from_numpy(kept).to(ids.device), [])
        logits = self.model(ids, mask).float()
        if len(self._known) < _MOST_CACHED:
            self._known.update(zip(keys, logits.cpu().numpy().copy(), strict=True))
        return _Answers(logits, [])


def _keys(ids: Tensor, mask: Tensor | None) -> list[bytes]:
    """What tells rows apart, however they are padded, in 16 bytes each."""
    tokens = ids.cpu().numpy()
    lengths = np.full(len(tokens), tokens.shape[1]) if mask is None else mask.sum(-1).cpu().numpy()
    rows = (row[:length].tobytes() for row, length in zip(tokens, lengths, strict=True))
    return [hashlib.blake2b(row, digest_size=16).digest() for row in rows]


def _distance(ours: Tensor, theirs: Tensor, mask: Tensor | None) -> Tensor:
    """Squared distance of states [B, S, d], averaged over real tokens and width, summed over rows."""
    squared = (ours.float() - theirs.float()).square().mean(-1)
    if mask is None:
        return squared.mean(-1).sum()
    return ((squared * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum()
