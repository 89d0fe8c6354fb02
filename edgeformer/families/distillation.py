"""The loss of a classifier's training: cross-entropy, and what a teacher adds to it where the recipe names one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.data.tokenization import fingerprint, special_ids, tokenizer_from_file
from edgeformer.families import family_of, read_recipe_of
from edgeformer.families.network import Batch, Loss, Losses, Place
from edgeformer.families.saving import MODEL_FOLDER, WEIGHTS, load_weights
from edgeformer.formats.errors import RecipeError
from edgeformer.formats.workspace import RECIPE_FILE, TOKENIZER_FILE
from edgeformer.tasks import Prepared

_MOST_CACHED = 2_000_000
"""Rows whose answers are kept: 100 bytes each with the key."""


def classification_loss(recipe: Any, prepared: Prepared | None) -> Loss:
    """Cross-entropy summed over the rows, for models from input_ids and attention_mask to logits [B, C].

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
    summed = nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="sum")
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
        where = f"training.teacher: {folder}"
        if not (folder / RECIPE_FILE).is_file():
            raise RecipeError(f"{where}: is no run; name the folder of a finished classification run")
        own = read_recipe_of(folder)
        if own.task != recipe.task or getattr(own.data, "labels", None) != recipe.data.labels:
            raise RecipeError(f"{where}: its labels are not those of this recipe ({', '.join(recipe.data.labels)})")
        self.model, _ = family_of(own).network.build(own, Place())
        self.model.eval().requires_grad_(False)
        if prepared is not None:
            tokens = tokenizer_from_file(folder / MODEL_FOLDER / TOKENIZER_FILE)
            if fingerprint(tokens) != fingerprint(prepared.tokenizer):
                raise RecipeError(f"{where}: reads other tokens; use its tokenizer and its data.cleaning")
            load_weights(self.model, folder / MODEL_FOLDER / WEIGHTS)
        self._how = recipe.training.distillation
        if self._how.states and not all(_shows_states(network) for network in (own, recipe)):
            raise RecipeError(
                f"{where}: states can be compared between pretrained encoders only; set training.distillation.states: 0"
            )
        self._known: dict[bytes, Tensor] = {}

    def losses(self, model: nn.Module, ids: Tensor, batch: Batch, summed: nn.Module) -> Losses:
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
            if len(found) % states:
                raise RecipeError(
                    f"training.distillation.states: a teacher of {len(found)} stages has none that stands for each "
                    f"of {states} iterations; set it to 0, or fold into another number"
                )
            every = len(found) // states
            return _Answers(logits.float(), found[every - 1 :: every])
        real = torch.ones_like(ids) if mask is None else mask
        keys = [row[seen.bool()].numpy().tobytes() for row, seen in zip(ids.cpu(), real.cpu(), strict=True)]
        if all(key in self._known for key in keys):
            return _Answers(torch.stack([self._known[key] for key in keys]).to(ids.device), [])
        logits = self.model(ids, mask).float()
        if len(self._known) < _MOST_CACHED:
            self._known.update(zip(keys, logits.cpu(), strict=True))
        return _Answers(logits, [])


def _shows_states(recipe: Any) -> bool:
    return bool(family_of(recipe).network.shows_states)


def _distance(ours: Tensor, theirs: Tensor, mask: Tensor | None) -> Tensor:
    """Squared distance of states [B, S, d], averaged over real tokens and width, summed over rows."""
    squared = (ours.float() - theirs.float()).square().mean(-1)
    if mask is None:
        return squared.mean(-1).sum()
    return ((squared * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum()
