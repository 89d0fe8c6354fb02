"""Training loss of a classifier: cross-entropy, and distillation from a teacher if the recipe names one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeformer.artifacts.errors import RecipeError
from edgeformer.artifacts.workspace import RECIPE_FILE, TOKENIZER_FILE
from edgeformer.data.tokenization import fingerprint, special_ids, tokenizer_from_file, with_current_cleaning
from edgeformer.models import model_spec_of, read_run_recipe
from edgeformer.models.adapter import Batch, BuildTarget, Loss, Losses
from edgeformer.models.weights import MODEL_FOLDER, WEIGHTS, load_weights
from edgeformer.tasks import Prepared

_MAX_CACHED_ROWS = 1_000_000
"""Rows whose teacher logits are cached: about 250 bytes each with the key, 250 MB in total."""


def classification_loss(recipe: Any, prepared: Prepared | None) -> Loss:
    """Return the loss for models from input_ids and attention_mask [B, S] to logits [B, C], summed over the rows.

    Labels [B] give cross-entropy; labels 0 and 1 [B, C] of rows with several labels give binary cross-entropy, averaged
    over the labels. With ``training.teacher`` the loss is w·KL + (1 − w)·cross-entropy + s·(distance of the states):
    KL between student and teacher at temperature T, times T²; for the states see :func:`_state_distance`.

    Args:
        recipe: its ``training`` has ``label_smoothing``, ``token_dropout`` (share of tokens replaced by [UNK]),
            ``teacher`` and ``distillation``.
        prepared: names the special tokens, which token dropout skips; None: no token dropout, no teacher weights.

    Raises:
        RecipeError: the teacher is missing, or has other tokens or labels.
    """
    training = recipe.training
    cross_entropy = nn.CrossEntropyLoss(label_smoothing=float(getattr(training, "label_smoothing", 0)), reduction="sum")

    def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
        if labels.ndim == 1:
            return cross_entropy(logits, labels)
        summed = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
        return summed / labels.shape[1]

    drop_tokens = _token_dropout(float(getattr(training, "token_dropout", 0)), prepared)
    distillation = None if getattr(training, "teacher", None) is None else _Distillation(recipe, prepared)

    def loss(model: nn.Module, batch: Batch) -> Losses:
        ids, mask = drop_tokens(batch["input_ids"]), batch.get("attention_mask")
        if distillation is None:
            return Losses(label_loss(model(ids, mask).float(), batch["labels"]))
        return distillation.losses(model, ids, batch, label_loss)

    return loss


def _token_dropout(share: float, prepared: Prepared | None) -> Callable[[Tensor], Tensor]:
    if not share or prepared is None:
        return lambda ids: ids
    added = prepared.tokenizer.get_added_tokens_decoder()
    special = torch.tensor(sorted(token_id for token_id, token in added.items() if token.special))
    unk = special_ids(prepared.tokenizer).unk

    def drop(ids: Tensor) -> Tensor:
        selected = torch.rand(ids.shape, device=ids.device) < share
        return torch.where(selected & ~torch.isin(ids, special.to(ids.device)), unk, ids)

    return drop


class _Distillation:
    """A teacher and the loss against it. The teacher sees every row without any dropout."""

    def __init__(self, recipe: Any, prepared: Prepared | None) -> None:
        folder = Path(recipe.training.teacher)
        self._where, self._config = f"training.teacher: {folder}", recipe.training.distillation
        if not (folder / RECIPE_FILE).is_file():
            raise RecipeError(f"{self._where}: is no run; name the folder of a finished classification run")
        teacher_recipe = read_run_recipe(folder)
        self._check_compatible(teacher_recipe, recipe)
        self.model, _ = model_spec_of(teacher_recipe).adapter.build(teacher_recipe, BuildTarget())
        self.model.eval().requires_grad_(False)
        self._cache: dict[bytes, NDArray[np.float32]] | None = None
        if prepared is not None:
            tokenizer = tokenizer_from_file(folder / MODEL_FOLDER / TOKENIZER_FILE)
            if fingerprint(with_current_cleaning(tokenizer)) != fingerprint(prepared.tokenizer):
                raise RecipeError(f"{self._where}: reads other tokens; use its tokenizer and its data.cleaning")
            load_weights(self.model, folder / MODEL_FOLDER / WEIGHTS)
            self._cache = {}

    def _check_compatible(self, teacher: Any, student: Any) -> None:
        """Raise RecipeError if the teacher's recipe does not fit the student's."""
        if teacher.task != student.task or teacher.data.labels != student.data.labels:
            labels = ", ".join(student.data.labels)
            raise RecipeError(f"{self._where}: its labels are not those of this recipe ({labels})")
        positions = teacher.model.max_positions
        if positions < student.data.max_length:
            raise RecipeError(f"{self._where}: takes {positions} tokens; set data.max_length: {positions}")
        if not self._config.states:
            return
        remedy = "set training.distillation.states: 0"
        shapes = [model_spec_of(recipe).adapter.state_shape(recipe) for recipe in (teacher, student)]
        if shapes[0] is None or shapes[1] is None:
            raise RecipeError(f"{self._where}: states can be compared between pretrained encoders only; {remedy}")
        (teacher_states, teacher_width), (student_states, student_width) = shapes[0], shapes[1]
        if teacher_width != student_width:
            raise RecipeError(
                f"{self._where}: its states are {teacher_width} wide, the student's {student_width}; {remedy}"
            )
        if teacher_states % student_states:
            raise RecipeError(
                f"{self._where}: has {teacher_states} stages, of which none stands for each of {student_states} "
                f"iterations; {remedy}, or fold into another number"
            )

    def losses(
        self, model: nn.Module, ids: Tensor, batch: Batch, label_loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Losses:
        """Compute the student's loss; ``ids`` [B, S] are its tokens after token dropout."""
        config, mask, states = self._config, batch.get("attention_mask"), list[Tensor]()
        if config.states:
            logits, states = model(ids, mask, states=True)
        else:
            logits = model(ids, mask)
        teacher_logits, teacher_states = self._teacher_outputs(batch, len(states))
        logits, temperature = logits.float(), config.temperature
        cross_entropy = label_loss(logits, batch["labels"])
        student_log_p = F.log_softmax(logits / temperature, -1)
        teacher_log_p = F.log_softmax(teacher_logits / temperature, -1)
        divergence = F.kl_div(student_log_p, teacher_log_p, reduction="sum", log_target=True) * temperature**2
        total = (1 - config.weight) * cross_entropy + config.weight * divergence
        parts = {"cross_entropy": cross_entropy.detach(), "distillation": divergence.detach()}
        if config.states:
            pairs = zip(states, teacher_states, strict=True)
            distances = (_state_distance(student, teacher, mask) for student, teacher in pairs)
            distance = sum(distances, start=logits.new_zeros(()))
            total = total + config.states * distance
            parts["states"] = distance.detach()
        return Losses(total, parts)

    @torch.no_grad()
    def _teacher_outputs(self, batch: Batch, states: int) -> tuple[Tensor, list[Tensor]]:
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


def _state_distance(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """Return the squared distance of states [B, S, d], averaged over real tokens and width, summed over rows."""
    squared = (student.float() - teacher.float()).square().mean(-1)  # [B, S]
    if mask is None:
        return squared.mean(-1).sum()
    return ((squared * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum()
