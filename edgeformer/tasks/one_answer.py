"""What tasks have in common whose models read a whole text and give one answer: a label, or a vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.batching import collate, ordered_batches
from edgeformer.data.encoding import Encoded, Prepared
from edgeformer.data.tokenization import special_ids
from edgeformer.formats.golden import GoldenError
from edgeformer.formats.manifest import Parity, Precision
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.tasks.metric import Array, Arrays
from edgeformer.tasks.task import Int64s, Task

GOLDEN_ROWS = 64
EVALUATION_ROWS = 128


class OneAnswer(Task):
    """One answer per text, from its tokens and a mask of the real ones."""

    unit: ClassVar[str] = "rows"
    phase: ClassVar[Literal["steady", "decode"]] = "steady"
    can_trim: ClassVar[bool] = True
    use: ClassVar[str] = "predict"

    def batch(
        self, rows: Encoded, numbers: NDArray[np.integer], pad: int, *, pad_to: int | None = None
    ) -> dict[str, Int64s]:
        """input_ids, attention_mask int64 [B, S]; labels int64 [B]."""
        return {**collate(rows, numbers, pad), "labels": rows.labels[numbers]}

    def weight(self, batch: Arrays) -> int:
        return len(batch["labels"])

    def example(self, recipe: Any, rows: int) -> dict[str, Int64s]:
        ids = np.zeros((rows, recipe.data.max_length), dtype=np.int64)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": np.zeros(rows, dtype=np.int64)}

    def evaluation_rows(self, longest: int) -> int:
        return EVALUATION_ROWS

    def call_batches(
        self, rows: Encoded, most: int, vocabulary: int, *, losses: bool = False, first: int | None = None
    ) -> list[Int64s]:
        return ordered_batches(rows.lengths[:first], most)

    def golden_answers(self, references: Mapping[int, Array]) -> dict[str, Array]:
        """Answers [n, C] of every exit; ``logits`` are those of the last."""
        found = {exit_logits(exit_): logits for exit_, logits in references.items()}
        return {"logits": references[max(references)], **found}

    def golden_parity(
        self, golden: Arrays, logits: Array, exit_: int | None, precision: Precision, provider: str
    ) -> Parity:
        name = "logits" if exit_ is None else exit_logits(exit_)
        if name not in golden:
            raise GoldenError(f"golden.npz holds no {name!r}; it is of an older version: export the run again")
        if golden[name].shape != logits.shape:
            raise GoldenError(f"golden.npz has logits {golden[name].shape}, the artifact computes {logits.shape}")
        return self.parity(logits, golden[name], precision, provider)

    def tokenizer_config(self, prepared: Prepared[Encoded], recipe: Any) -> dict[str, object]:
        name, special = prepared.tokenizer.id_to_token, special_ids(prepared.tokenizer)
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": recipe.data.max_length,
            "model_input_names": ["input_ids", "attention_mask"],
            "pad_token": name(special.pad),
            "unk_token": name(special.unk),
            "cls_token": name(special.cls),
        }
