"""Training loss of a text encoder: cross-entropy or squared error, and distillation if the recipe names a teacher."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeformer.artifacts.errors import RecipeError
from edgeformer.artifacts.workspace import RECIPE_FILE, TOKENIZER_FILE
from edgeformer.data.rows import SCORE_UNIT
from edgeformer.data.tokenization import fingerprint, special_ids, tokenizer_from_file, with_current_cleaning
from edgeformer.models import model_spec_of, read_run_recipe
from edgeformer.models.adapter import Batch, Loss, Losses
from edgeformer.models.weights import MODEL_FOLDER, WEIGHTS, load_weights
from edgeformer.tasks import Prepared

_MAX_CACHED_ROWS = 1_000_000
"""Rows whose teacher logits are cached: about 250 bytes each with the key, 250 MB in total."""


def classification_loss(recipe: Any, prepared: Prepared | None) -> Loss:
    """Return the loss of a text encoder, summed over the rows; ``prepared`` is None if memory is planned without data.

    Labels [B] give cross-entropy, and so do ``targets`` [B, S] of tokens; labels 0 and 1 [B, C] of rows with several
    labels give binary cross-entropy, averaged over the labels; numbers of regression, in millionths, give the squared
    error. With ``training.teacher`` the loss is w·KL + (1 − w)·cross-entropy + s·(distance of the states): KL of
    student and teacher at temperature T, times T²; the squared distance of their states is averaged over real tokens
    and width. ``training.token_dropout`` replaces a share of the tokens, but no special ones, by [UNK].

    Raises:
        RecipeError: the teacher is missing, or has other tokens or labels.
    """
    training = recipe.training
    cross_entropy = nn.CrossEntropyLoss(label_smoothing=float(getattr(training, "label_smoothing", 0)), reduction="sum")
    dropout = float(getattr(training, "token_dropout", 0)) if prepared is not None else 0.0
    special, unk = torch.tensor(()), 0
    if dropout and prepared is not None:
        added = prepared.tokenizer.get_added_tokens_decoder()
        special = torch.tensor(sorted(token_id for token_id, token in added.items() if token.special))
        unk = special_ids(prepared.tokenizer).unk
    activation = getattr(recipe.data, "activation", None)  # of regression
    teacher = None if getattr(training, "teacher", None) is None else _Teacher(recipe, prepared)

    def loss(model: nn.Module, batch: Batch) -> Losses:
        ids, mask, labels = batch["input_ids"], batch.get("attention_mask"), batch.get("labels")
        if dropout:
            selected = torch.rand(ids.shape, device=ids.device) < dropout
            ids = torch.where(selected & ~torch.isin(ids, special.to(ids.device)), unk, ids)
        compares_states = teacher is not None and bool(training.distillation.states)
        logits, states = model(ids, mask, states=True) if compares_states else (model(ids, mask), [])
        if teacher is not None:
            # The teacher sees every row without any dropout.
            teacher_logits, teacher_states = teacher.outputs(batch, len(states))
        logits = logits.float()
        if labels is None:
            return Losses(cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()))
        if activation is not None:
            scores = logits[:, 0].sigmoid() if activation == "sigmoid" else logits[:, 0]
            label_loss = (scores - labels.float() * SCORE_UNIT).square().sum()
        elif labels.ndim == 1:
            label_loss = cross_entropy(logits, labels)
        else:
            summed = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
            label_loss = summed / labels.shape[1]
        if teacher is None:
            return Losses(label_loss)
        config = training.distillation
        student_log_p = F.log_softmax(logits / config.temperature, -1)
        teacher_log_p = F.log_softmax(teacher_logits / config.temperature, -1)
        divergence = F.kl_div(student_log_p, teacher_log_p, reduction="sum", log_target=True) * config.temperature**2
        total = (1 - config.weight) * label_loss + config.weight * divergence
        parts = {"cross_entropy": label_loss.detach(), "distillation": divergence.detach()}
        if compares_states:
            distance = logits.new_zeros(())
            for student_state, teacher_state in zip(states, teacher_states, strict=True):
                squared = (student_state.float() - teacher_state.float()).square().mean(-1)  # [B, S]
                if mask is None:
                    distance = distance + squared.mean(-1).sum()
                else:
                    distance = distance + ((squared * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum()
            total = total + config.states * distance
            parts["states"] = distance.detach()
        return Losses(total, parts)

    return loss


class _Teacher:
    """A trained classifier, whose logits are cached per row. Raises RecipeError if it does not fit the student's."""

    def __init__(self, recipe: Any, prepared: Prepared | None) -> None:
        folder = Path(recipe.training.teacher)
        where = f"training.teacher: {folder}"
        if not (folder / RECIPE_FILE).is_file():
            raise RecipeError(f"{where}: not a run; give the folder of a finished classification run")
        teacher: Any = read_run_recipe(folder)
        if teacher.task != recipe.task or teacher.data.labels != recipe.data.labels:
            raise RecipeError(
                f"{where}: its labels differ from those of this recipe ({', '.join(recipe.data.labels)}); use the "
                "same labels in the same order"
            )
        positions = teacher.model.max_positions
        if positions < recipe.data.max_length:
            raise RecipeError(f"{where}: accepts at most {positions} tokens; set data.max_length: {positions}")
        if recipe.training.distillation.states:
            remedy = "set training.distillation.states: 0"
            if {teacher.model.kind, recipe.model.kind} != {"pretrained"}:
                raise RecipeError(f"{where}: only the states of pretrained encoders can be compared; {remedy}")
            (states, width), (student_states, student_width) = (
                (model_spec_of(each).loops(each.model), each.model.sizes.width) for each in (teacher, recipe)
            )
            if width != student_width or states % student_states:
                raise RecipeError(
                    f"{where}: its {states} states of width {width} do not match {student_states} of width "
                    f"{student_width}; {remedy}, or fold into another number of layers"
                )
        self.model = model_spec_of(teacher).adapter.build(teacher).eval().requires_grad_(False)
        self._cache: dict[bytes, NDArray[np.float32]] | None = None
        if prepared is not None:
            tokenizer = tokenizer_from_file(folder / MODEL_FOLDER / TOKENIZER_FILE)
            if fingerprint(with_current_cleaning(tokenizer)) != fingerprint(prepared.tokenizer):
                raise RecipeError(f"{where}: tokenizes differently; use its tokenizer and its data.cleaning")
            load_weights(self.model, folder / MODEL_FOLDER / WEIGHTS)
            self._cache = {}

    @torch.no_grad()
    def outputs(self, batch: Batch, states: int) -> tuple[Tensor, list[Tensor]]:
        """Return logits [B, C], and a state [B, S, d] for each of ``states``; without states, logits are cached."""
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        self.model.to(ids.device)
        if states:
            logits, all_states = self.model(ids, mask, states=True)
            every = len(all_states) // states
            return logits.float(), all_states[every - 1 :: every]
        if self._cache is None:  # memory planning, on tensors without numbers
            return self.model(ids, mask).float(), []
        # 16 bytes identify the tokens of a row, however it is padded.
        tokens = ids.cpu().numpy()
        lengths = np.full(len(tokens), tokens.shape[1]) if mask is None else mask.sum(-1).cpu().numpy()
        rows = (row[:length].tobytes() for row, length in zip(tokens, lengths, strict=True))
        keys = [hashlib.blake2b(row, digest_size=16).digest() for row in rows]
        if all(key in self._cache for key in keys):
            cached = np.stack([self._cache[key] for key in keys])
            return torch.from_numpy(cached).to(ids.device), []
        logits = self.model(ids, mask).float()
        if len(self._cache) < _MAX_CACHED_ROWS:
            self._cache.update(zip(keys, logits.cpu().numpy().copy(), strict=True))
        return logits, []
