"""Classification: data, metric, scoring and golden inputs of models that put a text into one of several classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgeformer.data.encoding import Encoded, Prepared
from edgeformer.data.rows import LabelledTexts, Text
from edgeformer.data.tokenization import load_tokenizer, special_ids
from edgeformer.formats.data_config import DataConfig, FileTokenizer
from edgeformer.formats.escaping import markdown
from edgeformer.formats.manifest import DataFinding, Precision, Vocabulary
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipe import Recipe, TrainingConfig
from edgeformer.formats.scores import EvaluationRow, Score
from edgeformer.tasks.classification.prediction import LabelPrediction, label_predictions
from edgeformer.tasks.classification.recipe import ClassificationRecipe, ClassificationTraining
from edgeformer.tasks.classification.scoring import ClassificationMeter, ClassificationScore, score
from edgeformer.tasks.early_exit import Departures, ExitNotes
from edgeformer.tasks.metric import Array, Arrays, Metric, ScoreColumn
from edgeformer.tasks.one_answer import GOLDEN_ROWS, OneAnswer
from edgeformer.tasks.task import Int64s, Origin, TextReader

if TYPE_CHECKING:
    from edgeformer.data.sources import Columns
    from edgeformer.data.trimming import Trimmed

LOSS: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.001, "int8": 0.003}
"""Accuracy that an artifact of each precision may lose against FP32 on the same rows."""

TRIMMED_LOSS = 0.005
"""The same for one with a trimmed vocabulary, whatever its precision."""


class Classification(OneAnswer):
    """One label per text."""

    name: ClassVar[str] = "classification"
    noun: ClassVar[str] = "classifier"
    recipe_type: ClassVar[type[Recipe]] = ClassificationRecipe
    score_type: ClassVar[type[Score]] = ClassificationScore
    metric: ClassVar[Metric] = Metric("accuracy", True, 4, 0.0, 1.0, "--min-accuracy")
    columns: ClassVar[tuple[ScoreColumn, ...]] = (
        ScoreColumn("n", "rows", None),
        ScoreColumn("accuracy", "accuracy", 4),
        ScoreColumn("precision", "precision", 4),
        ScoreColumn("recall", "recall", 4),
        ScoreColumn("f1", "F1", 4),
        ScoreColumn("loss", "loss", 4),
    )
    pipeline_tag: ClassVar[str] = "text-classification"
    predicts: ClassVar[Literal["labels", "vectors"] | None] = "labels"
    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = ("input_ids", "attention_mask"), ("labels",)
    score_note: ClassVar[str] = (
        "Two classes: precision, recall and F1 are those of the second label. More: macro-averaged."
    )
    few: ClassVar[str] = f"{LOSS['int8']:.1%} of accuracy cannot be told from one row more or less there"

    def prepare(self, recipe: ClassificationRecipe, cache: Path, progress: Progress) -> Prepared[Encoded]:
        from edgeformer.data.prepare import prepare  # answering from a bundle reads no data sets

        return prepare(recipe.data, recipe.tokenizer, recipe.model.vocab_size, cache, progress)

    def local_data(self, data: DataConfig, folder: Path) -> tuple[DataConfig, list[str]]:
        from edgeformer.data.folders import local_parts

        return local_parts(data, folder)

    def set_name(self, data: DataConfig, split: str) -> str:
        return data.test_set if split == "test" else split

    def read_set(self, data: DataConfig, reader: TextReader, split: str, origin: Origin) -> Encoded:
        from edgeformer.data.prepare import prepare_test

        return prepare_test(data, reader.tokenizer, data.max_length, origin.cache, split, origin.trained_on)

    def known_sets(self, data: DataConfig) -> dict[str, LabelledTexts]:
        from edgeformer.data.sources import load_parts
        from edgeformer.data.splits import draw, set_parts

        parts = load_parts(data)
        names = [name for name, drawn_from in set_parts(data).items() if drawn_from]
        return draw(data, names, parts)

    def findings(self, data: DataConfig) -> Sequence[DataFinding]:
        from edgeformer.data.prepare import look

        return look(data)

    def read_file(
        self,
        data: DataConfig,
        reader: TextReader,
        path: Path,
        columns: Columns | None = None,
        *,
        as_trained: bool = False,
    ) -> Encoded:
        from edgeformer.data.prepare import encode_file

        return encode_file(path, data, reader.tokenizer, columns)

    def reader(self, tokenizer: Path, data: DataConfig, vocabulary: int) -> TextReader:
        config = FileTokenizer(kind="file", path=str(tokenizer))
        found = load_tokenizer(config, cleaning=data.cleaning, vocab_size=vocabulary, training_texts=None)
        return TextReader(found, special_ids(found).pad, vocabulary)

    def trim(
        self, data: DataConfig, tokenizer: Tokenizer, trained_on: Mapping[str, str], frequent: int = 0
    ) -> tuple[Trimmed, Vocabulary]:
        from edgeformer.data.trimming import trim_to_training

        return trim_to_training(data, tokenizer, trained_on, frequent)

    def meter(self, exits: Sequence[int] = (), notes: ExitNotes | None = None) -> ClassificationMeter:
        return ClassificationMeter(exits, notes)

    def departures(self, found: Departures) -> dict[str, float | None]:
        return {"loss": found.loss, "accuracy": found.right}

    def criterion(self, score: ClassificationScore, training: ClassificationTraining) -> float:
        """Validation loss, or accuracy with ``training.select_by: accuracy``."""
        return score.loss if training.select_by == "loss" else -score.accuracy

    def record(self, score: ClassificationScore) -> dict[str, float]:
        return {"val_loss": score.loss, "val_accuracy": score.accuracy, "val_f1": score.f1}

    def describe(self, score: ClassificationScore) -> str:
        return f"validation loss {score.loss:.4f}, accuracy {score.accuracy:.4f}"

    def rows(
        self, artifact: str, split: str, score: ClassificationScore, *, leaks: bool = False
    ) -> list[EvaluationRow]:
        return [EvaluationRow(artifact=artifact, split=split, leaks=leaks, **score.model_dump())]

    def lost(
        self, found: ClassificationScore, reference: ClassificationScore, precision: Precision, *, trimmed: bool
    ) -> str | None:
        """Accuracy; on ``n`` rows one more or less is no loss that could be told from chance, so much is allowed."""
        drop = reference.accuracy - found.accuracy
        bar = max(TRIMMED_LOSS if trimmed else LOSS[precision], 1.5 / reference.n)
        if drop > bar:
            most = f"at most {bar:.4f} may be lost"
            return f"accuracy {found.accuracy:.4f} is {drop:.4f} below FP32's on {found.n:,} rows; {most}"
        return None

    def golden_inputs(self, prepared: Prepared[Encoded], recipe: ClassificationRecipe) -> dict[str, Int64s]:
        """64 rows of the validation set, drawn by the recipe's seed, with their labels."""
        validation = prepared.validation
        count = min(GOLDEN_ROWS, len(validation))
        rows = np.random.default_rng(recipe.seed).choice(len(validation), count, replace=False)
        return self.batch(validation, rows, prepared.pad)

    def golden_score(
        self, exit_: int, logits: Array, answers: Arrays, rows: Int64s | None = None
    ) -> ClassificationScore:
        return score(logits, answers["labels"] if rows is None else answers["labels"][rows])

    def predictions(
        self, texts: Sequence[Text], answers: Arrays, cut: NDArray[np.bool_], data: DataConfig
    ) -> list[LabelPrediction]:
        return label_predictions(texts, answers, cut, data.labels)

    def client_config(self, prepared: Prepared[Encoded], recipe: ClassificationRecipe) -> dict[str, object]:
        labels = recipe.data.labels
        return {
            "id2label": {str(number): label for number, label in enumerate(labels)},
            "label2id": {label: number for number, label in enumerate(labels)},
            "max_length": recipe.data.max_length,
            "pad_token_id": prepared.pad,
        }

    def bundle_facts(self, recipe: ClassificationRecipe, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "labels": recipe.data.labels,
            "max_length": recipe.data.max_length,
            "pad_id": int(config["pad_token_id"]),
        }

    def card_lines(self, recipe: ClassificationRecipe) -> list[str]:
        return [f"**Labels:** {', '.join(map(markdown, recipe.data.labels))}; at most {recipe.data.max_length} tokens"]

    def selected_by(self, training: TrainingConfig) -> str:
        return str(getattr(training, "select_by", "loss"))
