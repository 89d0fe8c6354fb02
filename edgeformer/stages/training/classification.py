"""Training a classifier: cross-entropy on labelled rows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeformer.data.batching import collate, ordered_batches
from edgeformer.data.prepare import PreparedData
from edgeformer.formats.recipe import ClassificationRecipe
from edgeformer.formats.scores import ClassificationScore
from edgeformer.stages.training.batches import Batch, as_tensors
from edgeformer.stages.training.objective import Losses, Score
from edgeformer.tasks.classification import score

EVALUATION_BATCH = 128


class ClassificationObjective:
    """:class:`~edgeformer.stages.training.objective.Objective` of paper A."""

    def __init__(self, recipe: ClassificationRecipe, data: PreparedData) -> None:
        self._config, self._data = recipe.training, data
        self._loss = nn.CrossEntropyLoss(label_smoothing=self._config.label_smoothing, reduction="sum")
        added = data.tokenizer.get_added_tokens_decoder()
        self._special = torch.tensor(sorted(number for number, token in added.items() if token.special))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every training row."""
        return self._data.train.lengths

    @property
    def tests(self) -> tuple[str, ...]:
        """Names of the test sets."""
        return tuple(self._data.tests)

    def batch(self, rows: NDArray[np.int64], device: torch.device) -> Batch:
        """input_ids, attention_mask int64 [B, S]; labels int64 [B]."""
        train = self._data.train
        arrays = collate(train, rows, self._data.special.pad)
        return as_tensors({**arrays, "labels": train.labels[rows]}, device)

    def weight(self, batch: Batch) -> int:
        """Rows."""
        return len(batch["labels"])

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        """Cross-entropy summed over the rows."""
        ids = batch["input_ids"]
        if self._config.token_dropout:
            ids = drop_tokens(ids, self._config.token_dropout, self._data.special.unk, self._special)
        logits = model(ids, attention_mask(batch))
        return Losses(self._loss(logits.float(), batch["labels"]), {})

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, name: str, device: torch.device) -> ClassificationScore:
        """Scores on all rows of the set."""
        model.eval()
        encoded = self._data.validation if name == "validation" else self._data.tests[name]
        logits = np.empty((len(encoded), 0), dtype=np.float32)
        for rows in ordered_batches(encoded.lengths, EVALUATION_BATCH):
            batch = as_tensors(collate(encoded, rows, self._data.special.pad), device)
            output = model(batch["input_ids"], attention_mask(batch)).cpu().numpy()
            if not logits.size:
                logits = np.empty((len(encoded), output.shape[-1]), dtype=np.float32)
            logits[rows] = output
        return score(logits, encoded.labels)

    def criterion(self, score: Score) -> float:
        """Validation loss, or accuracy with ``training.select_by: accuracy``."""
        assert isinstance(score, ClassificationScore)
        return score.loss if self._config.select_by == "loss" else -score.accuracy

    def record(self, score: Score) -> dict[str, float]:
        """val_loss, val_accuracy, val_f1."""
        assert isinstance(score, ClassificationScore)
        return {"val_loss": score.loss, "val_accuracy": score.accuracy, "val_f1": score.f1}

    def describe(self, score: Score) -> str:
        """Loss and accuracy."""
        assert isinstance(score, ClassificationScore)
        return f"validation loss {score.loss:.4f}, accuracy {score.accuracy:.4f}"


def attention_mask(batch: Batch) -> Tensor | None:
    """The batch's mask; None where no row is padded, which lets SDPA take its fastest path."""
    mask = batch["attention_mask"]
    return None if bool(mask.all()) else mask


def drop_tokens(ids: Tensor, share: float, unk_id: int, special: Tensor) -> Tensor:
    """``ids`` with about ``share`` of the ordinary tokens replaced by [UNK].

    Args:
        special: ids that are never replaced ([CLS], [SEP], [PAD], …).
    """
    chosen = (torch.rand(ids.shape, device=ids.device) < share) & ~torch.isin(ids, special.to(ids.device))
    return torch.where(chosen, unk_id, ids)
