"""Training loss of a text encoder: cross-entropy or squared error, and distillation if the recipe names a teacher."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.artifacts.errors import RecipeError
from edgeformer.artifacts.golden import TOKEN_TYPES
from edgeformer.artifacts.workspace import MODEL_FOLDER, TOKENIZER_FILE
from edgeformer.data.batching import IGNORED
from edgeformer.data.rows import SCORE_UNIT
from edgeformer.data.tokenization import fingerprint, special_ids, tokenizer_from_file, with_current_cleaning
from edgeformer.models import model_spec_of, read_run_recipe
from edgeformer.models.weights import WEIGHTS, load_weights
from edgeformer.tasks import Prepared

Batch = Mapping[str, Tensor]
"""The task's arrays by name, int64 [B, …]."""


@dataclass(frozen=True)
class Losses:
    """Loss of a micro-batch in nats, summed over its rows or tokens, and named parts of it for the log."""

    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)


Loss = Callable[[nn.Module, Batch], Losses]
"""(model, perhaps wrapped for mixed precision; micro-batch) → losses with gradients."""


def classification_loss(recipe: Any, prepared: Prepared | None) -> Loss:
    """Return the loss of a text encoder, summed over the rows; ``prepared`` is None if memory is planned without data.

    Labels [B] give cross-entropy, and so do ``targets`` [B, S] of tokens; labels 0 and 1 [B, C] of rows with several
    labels give binary cross-entropy, averaged over the labels; numbers of regression, in millionths, give the squared
    error. With ``training.teacher`` the loss is w·KL + (1 − w)·cross-entropy + s·(distance of the states): KL of
    student and teacher, whose logits are ``teacher_logits`` [B, C] of the batch, at temperature T, times T². Rows
    without a label have no cross-entropy, and w is 1. The squared distance of the states is averaged over real tokens
    and width. ``training.token_dropout`` replaces a share of the tokens, but no special ones, by [UNK]. Raises
    RecipeError: states cannot be compared with those of the teacher.
    """
    # 1. Read the settings
    training = recipe.training
    cross_entropy = nn.CrossEntropyLoss(label_smoothing=float(getattr(training, "label_smoothing", 0)), reduction="sum")
    dropout = float(getattr(training, "token_dropout", 0)) if prepared is not None else 0.0
    special, unk = torch.tensor(()), 0
    if dropout and prepared is not None:
        added = prepared.tokenizer.get_added_tokens_decoder()
        special = torch.tensor(sorted(token_id for token_id, token in added.items() if token.special))
        unk = special_ids(prepared.tokenizer).unk
    activation = getattr(recipe.data, "activation", None)  # of regression
    config = None if getattr(training, "teacher", None) is None else training.distillation

    # 2. Load the teacher whose states are compared
    teacher: Any = None
    if config is not None and config.states:
        folder = Path(training.teacher)  # its states have the sizes of the student's
        where, remedy = f"training.teacher: {folder}", "set training.distillation.states: 0"
        source: Any = read_run_recipe(folder)
        if {source.model.kind, recipe.model.kind} != {"pretrained"}:
            raise RecipeError(f"{where}: only the states of pretrained encoders can be compared; {remedy}")
        (states, width), (student_states, student_width) = (
            (model_spec_of(each).loops(each.model), each.model.sizes.width) for each in (source, recipe)
        )
        if width != student_width or states % student_states:
            raise RecipeError(
                f"{where}: its {states} states of width {width} do not match {student_states} of width "
                f"{student_width}; {remedy}, or fold into another number of layers"
            )
        teacher = load_teacher(recipe, prepared, f", or {remedy}")

    # 3. Define the loss
    def loss(model: nn.Module, batch: Batch) -> Losses:
        ids, mask, labels = batch["input_ids"], batch.get("attention_mask"), batch.get("labels")
        types = {TOKEN_TYPES: batch[TOKEN_TYPES]} if recipe.model.reads_types and TOKEN_TYPES in batch else {}
        if dropout:
            selected = torch.rand(ids.shape, device=ids.device) < dropout
            ids = torch.where(selected & ~torch.isin(ids, special.to(ids.device)), unk, ids)
        logits, states = (model(ids, mask, **types), []) if teacher is None else model(ids, mask, **types, states=True)
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
        if config is None:
            return Losses(label_loss)
        # Memory is planned without data, so without the teacher's logits.
        teacher_logits = batch.get("teacher_logits", logits.detach())
        student_log_p = F.log_softmax(logits / config.temperature, -1)
        teacher_log_p = F.log_softmax(teacher_logits / config.temperature, -1)
        row_divergence = F.kl_div(student_log_p, teacher_log_p, reduction="none", log_target=True).sum(-1)
        divergence = row_divergence.sum() * config.temperature**2
        weights = torch.where(labels == IGNORED, 1.0, config.weight)
        total = (1 - config.weight) * label_loss + (weights * row_divergence).sum() * config.temperature**2
        parts = {"cross_entropy": label_loss.detach(), "distillation": divergence.detach()}
        if teacher is not None:
            with torch.no_grad():  # the teacher sees every row without any dropout
                _, all_states = teacher.to(ids.device)(batch["input_ids"], mask, batch.get(TOKEN_TYPES), states=True)
            every = len(all_states) // len(states)
            teacher_states = all_states[every - 1 :: every]
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


def load_teacher(recipe: Any, prepared: Prepared | None, remedy: str = "") -> nn.Module:
    """Return the teacher of a recipe, which reads the student's tokens; its weights are random without ``prepared``.

    Raises RecipeError, with a further ``remedy``: it does another task, has another tokenizer, or accepts fewer tokens.
    """
    folder = Path(recipe.training.teacher)
    where, teacher = f"training.teacher: {folder}", read_run_recipe(folder)
    if teacher.task != recipe.task or teacher.model.vocab_size != recipe.model.vocab_size:
        raise RecipeError(
            f"{where}: does {teacher.task} with {teacher.model.vocab_size:,} tokens; the student does {recipe.task} "
            f"with {recipe.model.vocab_size:,} (model.vocab_size){remedy}"
        )
    positions = teacher.model.max_positions
    if positions < recipe.data.tokens_at_once:
        key = recipe.data.length_key
        raise RecipeError(f"{where}: accepts at most {positions} tokens; set data.{key}: {positions}{remedy}")
    model = model_spec_of(teacher).adapter.build(teacher).eval().requires_grad_(False)
    if prepared is not None:
        tokenizer = tokenizer_from_file(folder / MODEL_FOLDER / TOKENIZER_FILE)
        if fingerprint(with_current_cleaning(tokenizer)) != fingerprint(prepared.tokenizer):
            raise RecipeError(f"{where}: tokenizes differently; use its tokenizer and its data.cleaning{remedy}")
        load_weights(model, folder / MODEL_FOLDER / WEIGHTS)
    return model
