"""What tasks have in common whose models read a whole text and give one answer: a label, or a vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import FileTokenizer
from edgeformer.artifacts.golden import GoldenError
from edgeformer.artifacts.manifest import DataFinding, Parity, Precision, Vocabulary
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import TrainingConfig
from edgeformer.artifacts.units import markdown
from edgeformer.data.batching import collate, ordered_batches
from edgeformer.data.encoding import Encoded, Prepared, encode
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.tokenization import load_tokenizer, special_ids
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.tasks.metric import Array, Arrays
from edgeformer.tasks.task import Int64s, Origin, Task, TextReader

if TYPE_CHECKING:
    from edgeformer.artifacts.data_config import DataConfig
    from edgeformer.data.sources import Columns
    from edgeformer.data.trimming import Keeping, Trimmed


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


# What tasks have in common that give texts labels: one of them, or several.


LOSS: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.001, "int8": 0.003, "int4": 0.01}
"""What an artifact of each precision may lose of the task's metric against FP32 on the same rows."""

TRIMMED_LOSS = 0.005
"""The same for one with a trimmed vocabulary, whatever its precision."""


def most_lost(precision: Precision, rows: int, *, trimmed: bool) -> float:
    """Of the metric, on so many rows: one row more or less is no loss that could be told from chance."""
    return max(TRIMMED_LOSS if trimmed else LOSS[precision], 1.5 / rows)


def _fewer_rows(data: DataConfig) -> list[str]:
    """What the recipe leaves out of its data, in words."""
    found = [f"some rows of a source of the part {part}" for part in data.parts if data.sampled(part)]
    for key in ("longest", "shortest"):
        if (share := getattr(data, key)) is not None:
            found.append(f"the {key} {share:.4g} of the texts, by words")
    if data.balance is not None:
        found.append(f"equal numbers of each {data.balance.replace('-and-', ' of each ')}")
    return found + [f"of the {name} set {amount:,}" for name, amount in data.rows.items()]


class TextLabels(OneAnswer):
    """Texts from labelled files and data sets; answers are logits of the labels, [n, C]."""

    pipeline_tag: ClassVar[str] = "text-classification"
    predicts: ClassVar[Literal["labels", "vectors"] | None] = "labels"
    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = ("input_ids", "attention_mask"), ("labels",)

    def prepare(self, recipe: Any, cache: Path, progress: Progress) -> Prepared[Encoded]:
        from edgeformer.data.prepare import prepare  # answering from a bundle reads no data sets

        return prepare(recipe.data, recipe.tokenizer, recipe.model.vocab_size, cache, progress)

    def local_data(self, data: Any, folder: Path) -> tuple[Any, list[str]]:
        from edgeformer.data.sources import local_parts

        return local_parts(data, folder)

    def set_name(self, data: Any, split: str) -> str:
        return data.test_set if split == "test" else split

    def read_set(self, data: Any, reader: TextReader, split: str, origin: Origin) -> Encoded:
        from edgeformer.data.prepare import prepare_test

        return prepare_test(data, reader.tokenizer, data.max_length, origin.cache, split, origin.trained_on)

    def known_sets(self, data: Any) -> dict[str, LabelledTexts]:
        from edgeformer.data.sources import load_parts
        from edgeformer.data.splits import draw, set_parts

        parts = load_parts(data)
        names = [name for name, drawn_from in set_parts(data).items() if drawn_from]
        return draw(data, names, parts)

    def set_texts(self, data: Any, name: str) -> LabelledTexts:
        from edgeformer.data.prepare import set_texts

        return set_texts(data, name)

    def file_texts(self, data: Any, path: Path) -> LabelledTexts:
        from edgeformer.data.prepare import file_texts

        return file_texts(path, data)

    def encode_rows(self, data: Any, reader: TextReader, texts: LabelledTexts) -> Encoded:
        return encode(texts, reader.tokenizer, data.max_length)

    def findings(self, data: Any) -> Sequence[DataFinding]:
        from edgeformer.data.prepare import look

        return look(data)

    def read_file(
        self,
        data: Any,
        reader: TextReader,
        path: Path,
        columns: Columns | None = None,
        *,
        as_trained: bool = False,
    ) -> Encoded:
        from edgeformer.data.prepare import encode_file

        return encode_file(path, data, reader.tokenizer, columns)

    def reader(self, tokenizer: Path, data: Any, vocabulary: int) -> TextReader:
        config = FileTokenizer(kind="file", path=str(tokenizer))
        found = load_tokenizer(config, cleaning=data.cleaning, vocab_size=vocabulary, training_texts=None)
        return TextReader(found, special_ids(found).pad, vocabulary)

    def trim(
        self, data: Any, tokenizer: Tokenizer, trained_on: Mapping[str, str], keeping: Keeping
    ) -> tuple[Trimmed, Vocabulary]:
        from edgeformer.data.trimming import trim_to_training

        return trim_to_training(data, tokenizer, trained_on, keeping)

    def golden_inputs(self, prepared: Prepared[Encoded], recipe: Any) -> dict[str, Int64s]:
        """64 rows of the validation set, drawn by the recipe's seed, with their labels."""
        validation = prepared.validation
        count = min(GOLDEN_ROWS, len(validation))
        rows = np.random.default_rng(recipe.seed).choice(len(validation), count, replace=False)
        return self.batch(validation, rows, prepared.pad)

    def client_config(self, prepared: Prepared[Encoded], recipe: Any) -> dict[str, object]:
        labels = recipe.data.labels
        return {
            "id2label": {str(number): label for number, label in enumerate(labels)},
            "label2id": {label: number for number, label in enumerate(labels)},
            "max_length": recipe.data.max_length,
            "pad_token_id": prepared.pad,
        }

    def bundle_facts(self, recipe: Any, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "labels": recipe.data.labels,
            "max_length": recipe.data.max_length,
            "pad_id": int(config["pad_token_id"]),
        }

    def card_lines(self, recipe: Any) -> list[str]:
        labels = f"**Labels:** {', '.join(map(markdown, recipe.data.labels))}; at most {recipe.data.max_length} tokens"
        fewer = "; ".join(_fewer_rows(recipe.data))
        return [labels, *([f"**Only some rows:** {markdown(fewer)}"] if fewer else [])]

    def selected_by(self, training: TrainingConfig) -> str:
        return str(getattr(training, "select_by", "loss"))
