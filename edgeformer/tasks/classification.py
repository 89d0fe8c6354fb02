"""Classification (paper A): one label per text. Also the base of all tasks that label texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from tokenizers import Tokenizer
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import DataConfig, PositiveFloat, Probability
from edgeformer.artifacts.manifest import DataFinding, Precision, Vocabulary
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import Recipe, TrainingConfig
from edgeformer.artifacts.scores import Score
from edgeformer.artifacts.units import markdown
from edgeformer.data.encoding import Encoded, Prepared
from edgeformer.data.rows import LabelledTexts, Text
from edgeformer.tasks.early_exit import ExitRecords
from edgeformer.tasks.metric import Array, Arrays, Meter, Metric, RowsMeter, ScoreColumn, token_losses
from edgeformer.tasks.task import (
    GOLDEN_ROWS,
    Float64s,
    Int64s,
    Origin,
    Prediction,
    TextReader,
    WholeTextTask,
    text_fields,
)

if TYPE_CHECKING:
    from edgeformer.data.sources import Columns
    from edgeformer.data.trimming import Keeping, Trimmed


class Distillation(Frozen):
    """What a student learns from its teacher in addition to the labels; losses are sums over rows, in nats."""

    weight: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.7, description="of the teacher's answers (KL divergence × temperature²); the labels get the rest"
    )
    temperature: PositiveFloat = Field(2.0, description="answers of both are divided by it first")
    states: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="of the squared distance between both models' states after every iteration"
    )


class ClassificationTraining(TrainingConfig):
    """Training settings of classification."""

    folders: ClassVar[tuple[str, ...]] = ("teacher",)

    label_smoothing: Probability = 0.0
    token_dropout: Probability = Field(
        0.0, description="share of input tokens replaced by [UNK] in training (never special tokens)"
    )
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="pretrained encoders: each layer learns at this share of the rate of the one behind it"
    )
    teacher: str | None = Field(None, description="a finished run, or its folder, whose answers are learned, too")
    teacher_sha256: str | None = Field(None, description="of its weights; filled in when training starts")
    distillation: Distillation = Distillation()
    select_by: Literal["loss", "accuracy"] = Field(
        "loss", description="the validation metric that picks the epoch whose weights are kept"
    )

    @model_validator(mode="after")
    def _distillation_has_teacher(self) -> Self:
        if self.teacher is None and self.distillation != Distillation():
            raise ValueError(
                "distillation: does nothing without a teacher; set teacher: to the folder of a finished run"
            )
        return self


class ClassificationRecipe(Recipe):
    """Recipe of paper A: an encoder that assigns one of several classes to a text."""

    task: Literal["classification"]
    data: DataConfig
    training: ClassificationTraining

    @property
    def classes(self) -> int:
        """Number of labels."""
        return len(self.data.labels)


class ClassificationScore(Score):
    """Scores on one labelled set. Two classes: of the second label; more: macro-averaged."""

    n: int
    accuracy: float
    precision: float
    recall: float
    f1: float
    loss: float = Field(description="mean cross-entropy, nats")


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the probabilities float64 [n, C] of logits [n, C]."""
    wide = logits.astype(np.float64)
    shifted = np.exp(wide - wide.max(axis=-1, keepdims=True))
    result: NDArray[np.float64] = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient as a Python float; 0 if the denominator is 0."""
    return float(numerator / denominator) if denominator else 0.0


def score(logits: NDArray[np.floating], labels: NDArray[np.int64]) -> ClassificationScore:
    """Compute accuracy, precision, recall, F1 and loss (paper A, "Loss Function").

    With two classes, precision, recall and F1 are those of the second label (SST-2: positive); with more they are
    macro-averaged. A ratio whose denominator is zero counts as 0.

    Args:
        logits: [n, C], n ≥ 1.
        labels: int64 [n] in 0…C−1.

    Raises:
        ValueError: n is 0.
    """
    if len(labels) == 0:
        raise ValueError("cannot score an empty set")
    predicted = logits.argmax(axis=-1)
    classes = logits.shape[-1]
    per_class = []
    for label in (1,) if classes == 2 else range(classes):
        hits = float(((predicted == label) & (labels == label)).sum())
        positives, actual = float((predicted == label).sum()), float((labels == label).sum())
        per_class.append((ratio(hits, positives), ratio(hits, actual), ratio(2 * hits, positives + actual)))
    precision, recall, f1 = np.mean(per_class, axis=0)
    return ClassificationScore(
        n=len(labels),
        accuracy=float((predicted == labels).mean()),
        precision=float(precision),
        recall=float(recall),
        f1=float(f1),
        loss=float(token_losses(logits, labels).mean()),
    )


@dataclass(frozen=True)
class LabelPrediction(Prediction):
    """The likeliest label of one text or pair.

    Attributes:
        probabilities: label → probability.
        loops: loops after which the row exited; None: no early exit.
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    loops: int | None = None

    def as_dict(self) -> dict[str, object]:
        names = ("label", "probability", "probabilities", "truncated", "loops")
        return {**text_fields(self.text), **{name: getattr(self, name) for name in names}}


MAX_SCORE_DROP: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.001, "int8": 0.003, "int4": 0.01}
"""Largest allowed drop of the metric against FP32 on the same rows."""

MAX_TRIMMED_SCORE_DROP = 0.005
"""Largest allowed drop for an artifact with a trimmed vocabulary, at any precision."""


class LabelTask(WholeTextTask):
    """Base of tasks with texts from labelled files and data sets; answers are logits of the labels, [n, C]."""

    pipeline_tag: ClassVar[str] = "text-classification"
    predicts: ClassVar[Literal["labels", "vectors"] | None] = "labels"
    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = ("input_ids", "attention_mask"), ("labels",)

    # edgeformer.data.prepare is imported in functions: predictions from a bundle need no data sets.

    def prepare(self, recipe: Any, cache: Path, progress: Progress) -> Prepared[Encoded]:
        from edgeformer.data.prepare import prepare

        return prepare(recipe.data, recipe.tokenizer, recipe.model.vocab_size, cache, progress)

    def local_data(self, data: Any, folder: Path) -> tuple[Any, list[str]]:
        from edgeformer.data.sources import local_parts

        return local_parts(data, folder)

    def set_name(self, data: Any, split: str) -> str:
        return data.test_set if split == "test" else split

    def read_set(self, data: Any, reader: TextReader, split: str, origin: Origin) -> Encoded:
        from edgeformer.data.prepare import prepare_test

        return prepare_test(data, reader.tokenizer, data.max_length, origin.cache, split, origin.trained_on)

    def read_file(
        self, data: Any, reader: TextReader, path: Path, columns: Columns | None = None, *, as_trained: bool = False
    ) -> Encoded:
        from edgeformer.data.prepare import encode_file

        return encode_file(path, data, reader.tokenizer, columns)

    def available_sets(self, data: Any) -> dict[str, LabelledTexts]:
        from edgeformer.data.sources import load_parts
        from edgeformer.data.splits import make_sets, set_parts

        names = [name for name, parts in set_parts(data).items() if parts]
        return make_sets(data, names, load_parts(data))

    def set_texts(self, data: Any, name: str) -> LabelledTexts:
        from edgeformer.data.prepare import set_texts

        return set_texts(data, name)

    def file_texts(self, data: Any, path: Path) -> LabelledTexts:
        from edgeformer.data.prepare import file_texts

        return file_texts(path, data)

    def findings(self, data: Any) -> Sequence[DataFinding]:
        from edgeformer.data.prepare import data_findings

        return data_findings(data)

    def trim(
        self, data: Any, tokenizer: Tokenizer, trained_on: Mapping[str, str], keeping: Keeping
    ) -> tuple[Trimmed, Vocabulary]:
        from edgeformer.data.trimming import trim_to_training

        return trim_to_training(data, tokenizer, trained_on, keeping)

    def criterion(self, score: Any, training: Any) -> float:
        """Return the validation loss, or the negative metric that ``training.select_by`` names."""
        return float(score.loss if training.select_by == "loss" else -getattr(score, training.select_by))

    def lost(self, score: Any, reference: Any, precision: Precision, *, trimmed: bool) -> str | None:
        """Explain why the metric drops too far; a drop of one row in ``n`` is within chance and always allowed."""
        value = getattr(score, self.metric.name)
        drop = getattr(reference, self.metric.name) - value
        limit = max(MAX_TRIMMED_SCORE_DROP if trimmed else MAX_SCORE_DROP[precision], 1.5 / reference.n)
        if drop <= limit:
            return None
        return (
            f"{self.metric_label()} {value:.4f} is {drop:.4f} below FP32's on {score.n:,} rows; "
            f"at most {limit:.4f} may be lost"
        )

    def golden_inputs(self, prepared: Prepared[Encoded], recipe: Any) -> dict[str, Int64s]:
        """Draw 64 rows of the validation set by the recipe's seed, with their labels."""
        validation = prepared.validation
        count = min(GOLDEN_ROWS, len(validation))
        rows = np.random.default_rng(recipe.seed).choice(len(validation), count, replace=False)
        return self.batch(validation, rows, prepared.pad)

    def client_config(self, prepared: Prepared[Encoded], recipe: Any) -> dict[str, object]:
        labels = recipe.data.labels
        return {
            "id2label": {str(number): label for number, label in enumerate(labels)},
            "label2id": {label: number for number, label in enumerate(labels)},
            **super().client_config(prepared, recipe),
        }

    def bundle_facts(self, recipe: Any, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"labels": recipe.data.labels, **super().bundle_facts(recipe, config)}

    def card_lines(self, recipe: Any) -> list[str]:
        data: DataConfig = recipe.data
        lines = [f"**Labels:** {', '.join(map(markdown, data.labels))}; at most {data.max_length} tokens"]
        omitted = [f"some rows of a source of the part {part}" for part in data.parts if data.sampled(part)]
        for key in ("longest", "shortest"):
            if (share := getattr(data, key)) is not None:
                omitted.append(f"the {key} {share:.4g} of the texts, by words")
        if data.balance is not None:
            omitted.append(f"equal numbers of each {data.balance.replace('-and-', ' of each ')}")
        omitted += [f"of the {name} set {amount:,}" for name, amount in data.rows.items()]
        return [*lines, f"**Only some rows:** {markdown('; '.join(omitted))}"] if omitted else lines


class Classification(LabelTask):
    """One label per text."""

    name: ClassVar[str] = "classification"
    noun: ClassVar[str] = "classifier"
    recipe_type: ClassVar[type[Recipe]] = ClassificationRecipe
    score_type: ClassVar[type[Score]] = ClassificationScore
    metric: ClassVar[Metric] = Metric("accuracy", True, 4, 0.0, 1.0, "--min-accuracy", is_share=True)
    columns: ClassVar[tuple[ScoreColumn, ...]] = (
        ScoreColumn("n", "rows", None),
        ScoreColumn("accuracy", "accuracy", 4),
        ScoreColumn("precision", "precision", 4),
        ScoreColumn("recall", "recall", 4),
        ScoreColumn("f1", "F1", 4),
        ScoreColumn("loss", "loss", 4),
    )
    score_note: ClassVar[str] = (
        "Two classes: precision, recall and F1 are those of the second label. More: macro-averaged."
    )
    few: ClassVar[str] = f"{MAX_SCORE_DROP['int8']:.1%} of accuracy is less than one of these rows"

    def meter(self, exits: Sequence[int] = (), records: ExitRecords | None = None, data: Any = None) -> Meter:
        return RowsMeter(score, exits, records)

    def row_figures(self, answers: Array, rows: Encoded, data: Any) -> Float64s:
        """Return 1 for a right answer, else 0: [n, 1]."""
        right: NDArray[np.bool_] = answers.argmax(axis=-1) == rows.labels
        return right[:, None].astype(np.float64)

    def metric_of(self, figures: Float64s) -> float:
        return float(figures.mean())

    def record(self, score: ClassificationScore) -> dict[str, float]:
        return {**super().record(score), "val_f1": score.f1}

    def golden_score(
        self, exit_: int, logits: Array, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> ClassificationScore:
        return score(logits, answers["labels"] if rows is None else answers["labels"][rows])

    def predictions(
        self, texts: Sequence[Text], answers: Arrays, cut: NDArray[np.bool_], data: DataConfig
    ) -> list[LabelPrediction]:
        loops = answers["loops"].tolist() if "loops" in answers else [None] * len(texts)
        rows = zip(texts, softmax(answers["logits"]).tolist(), cut.tolist(), loops, strict=True)
        predictions = []
        for text, probabilities, truncated, exit_loop in rows:
            by_label = dict(zip(data.labels, probabilities, strict=True))
            best = max(by_label, key=by_label.__getitem__)
            predictions.append(LabelPrediction(text, truncated, best, by_label[best], by_label, exit_loop))
        return predictions


TASK = Classification()
