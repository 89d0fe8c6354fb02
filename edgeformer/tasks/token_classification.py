"""Token classification: labelled spans of characters in a text, such as names or personal data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import Probability, SpanData, Tag, parse_tag
from edgeformer.artifacts.golden import Golden
from edgeformer.artifacts.manifest import Parity, Precision
from edgeformer.artifacts.recipe import Recipe, TextTraining
from edgeformer.artifacts.scores import Score
from edgeformer.data.batching import IGNORED, collate
from edgeformer.data.rows import LabelledTexts, tag_runs
from edgeformer.data.spans import TokenRows, Windows, decode, encode_windows
from edgeformer.tasks.arrays import Array, Arrays, Batch, Float64s, Floats, Int64s, RowNumbers
from edgeformer.tasks.classification import softmax
from edgeformer.tasks.metric import Metric, RowsMeter, ScoreColumn, ratio, token_losses
from edgeformer.tasks.scoring import NO_NUMBER, NOTHING_LEFT, EncodedTexts, TextPredictor, unreadable_texts
from edgeformer.tasks.task import MAX_SCORE_DROP, Answer, Prediction, Run, Unanswered
from edgeformer.tasks.texts import TextTask

if TYPE_CHECKING:
    from edgeformer.data.rows import Text
    from edgeformer.data.sources import Columns
    from edgeformer.data.trimming import Keeping
    from edgeformer.tasks.task import Trim

_UNLIMITED = 2**40
"""``max_length`` for a vocabulary that is trimmed: texts are read to their end."""


class TokenTraining(TextTraining):
    """Training settings of token classification."""

    label_smoothing: Probability = 0.0
    select_by: Literal["loss", "f1"] = Field(
        "loss", description="validation metric that selects the epoch whose weights are kept"
    )


class TokenRecipe(Recipe):
    """Recipe for an encoder that finds labelled spans in a text."""

    per_token: ClassVar[bool] = True

    task: Literal["token-classification"]
    data: SpanData
    training: TokenTraining


class SpanScore(Score):
    """Scores on one labelled set. A span is right if its tokens and its label are, as in CoNLL's evaluation."""

    n: int = Field(description="labelled spans")
    precision: float
    recall: float
    f1: float = Field(description="over all spans (micro)")
    macro_f1: float = Field(description="mean F1 of the labels that occur")
    label_f1: dict[str, float] = Field(description="label → F1")
    loss: float = Field(description="mean cross-entropy of a token, nats")


def span_counts(predicted: Array, targets: Array, texts: Array, tags: Sequence[Tag]) -> dict[str, tuple[int, int, int]]:
    """Return label → right, predicted and labelled spans of tokens [n] in the order of their ``texts`` [n]."""
    ends = np.flatnonzero(np.diff(texts)) + 1
    spans = []
    for classes in (predicted, targets):
        pieces = np.split(classes, ends)
        spans.append(
            {
                (label, text, begin, end)
                for text, piece in enumerate(pieces)
                for label, begin, end in tag_runs(tags[number] for number in piece.tolist())
            }
        )
    counts = [Counter(span[0] for span in some) for some in (spans[0] & spans[1], *spans)]
    return {label: (counts[0][label], counts[1][label], counts[2][label]) for label in counts[1] | counts[2]}


def score(logits: Floats, answers: Int64s, data: SpanData) -> SpanScore:
    """Score logits [n, C] of tokens whose class and text are ``answers`` [n, 2]. Raises ValueError: n is 0."""
    if not len(answers):
        raise ValueError("cannot score an empty set")
    targets, texts = answers.T
    counts = span_counts(logits.argmax(axis=-1), targets, texts, [*map(parse_tag, data.classes)])
    right, predicted, labelled = np.array([*counts.values(), (0, 0, 0)]).sum(axis=0).tolist()
    label_f1 = {label: ratio(2 * hits, of + among) for label, (hits, of, among) in sorted(counts.items())}
    occurring = [label_f1[label] for label, (_, _, among) in counts.items() if among]
    return SpanScore(
        n=labelled, precision=ratio(right, predicted), recall=ratio(right, labelled),
        f1=ratio(2 * right, predicted + labelled), macro_f1=float(np.mean(occurring)) if occurring else 0.0,
        label_f1=label_f1, loss=float(token_losses(logits, targets).mean()),
    )  # fmt: skip


class SpanMeter(RowsMeter):
    """Keeps the logits of all tokens that count, with the text of each."""

    def add(self, outputs: Arrays, batch: Arrays) -> None:
        is_counted = batch["targets"] != IGNORED
        rows = np.nonzero(is_counted)[0]
        answers = np.stack([batch["targets"][is_counted], batch["texts"][rows]], axis=1)
        logits = {name: output[is_counted] for name, output in outputs.items() if output.ndim == 3}
        super().add(logits, {"labels": answers, "rows": batch["rows"][rows]})


@dataclass(frozen=True)
class PredictedSpan:
    """A span of the original text: ``text[start:end]``. ``probability``: mean of its tokens'."""

    start: int
    end: int
    label: str
    text: str
    probability: float


@dataclass(frozen=True)
class SpansPrediction(Prediction):
    """The labelled spans of one text, in order; a text is never truncated."""

    keys = ("spans",)

    spans: tuple[PredictedSpan, ...]

    def as_dict(self) -> dict[str, object]:
        return {"text": self.text, "spans": [asdict(span) for span in self.spans]}


@dataclass(frozen=True)
class EncodedWindows(EncodedTexts):
    """Texts in windows: ``places`` has the index of a text once for each of its windows."""

    windows: Windows


@dataclass(frozen=True)
class TokenPredictor(TextPredictor):
    """Labelled spans of texts of any length."""

    def read(self, texts: Sequence[Text]) -> EncodedWindows:
        errors = unreadable_texts(texts)
        readable = [place for place in range(len(texts)) if place not in errors]
        data: Any = self.data
        windows = encode_windows(self.reader.tokenizer, [texts[place] for place in readable], data)
        for number, place in enumerate(readable):
            if not len(windows.tokens(number)):
                errors[place] = NOTHING_LEFT
        places = np.array(readable, dtype=np.int64)[windows.texts]
        cut = np.zeros(len(places), dtype=bool)
        return EncodedWindows(texts, windows.rows, cut, places, errors, windows)

    def example_outputs(self, outputs: Arrays) -> dict[str, NDArray[Any]]:
        examples = super().example_outputs(outputs)
        data: Any = self.data
        examples["logits"][..., next(number for number, name in enumerate(data.classes) if name != "O")] = 1
        return examples

    def answers(self, window: EncodedTexts, outputs: Arrays) -> list[Answer]:
        """Return the spans or the error of each text. ``outputs``: ``logits`` [tokens, C] of all windows."""
        assert isinstance(window, EncodedWindows)
        data: Any = self.data
        tags, answers = [*map(parse_tag, data.classes)], list[Answer]()
        numbers = {int(place): number for place, number in zip(window.places, window.windows.texts, strict=True)}
        for place, text in enumerate(window.texts):
            if place in window.errors:
                answers.append(Unanswered(text, window.errors[place]))
                continue
            tokens = window.windows.tokens(numbers[place])
            logits = outputs["logits"][tokens]
            if not np.isfinite(logits).all():
                answers.append(Unanswered(text, NO_NUMBER))
                continue
            content, spans = str(text), []
            predicted = [tags[best] for best in logits.argmax(axis=-1)]
            for span, places in decode(window.windows, numbers[place], content, predicted):
                mean = float(softmax(outputs["logits"][places]).max(axis=-1).mean())
                spans.append(PredictedSpan(*span, content[span.start : span.end], mean))
            answers.append(SpansPrediction(text, False, tuple(spans)))
        return answers


class TokenClassification(TextTask):
    """Labelled spans in a text, from a class for every token."""

    name = "token-classification"
    noun = "token classifier"
    recipe_type = TokenRecipe
    score_type = SpanScore
    metric = Metric("f1", "F1", 4)
    columns = (
        ScoreColumn("n", "spans", None), metric, ScoreColumn("precision", "precision", 4),
        ScoreColumn("recall", "recall", 4), ScoreColumn("macro_f1", "macro F1", 4), ScoreColumn("loss", "loss", 4),
    )  # fmt: skip
    recorded = ("macro_f1",)
    unit = "spans"
    reads_singly = True
    meter_type = SpanMeter
    predictor_type = TokenPredictor
    pipeline_tag = "token-classification"
    golden_names = ("input_ids", "attention_mask"), ("targets",)
    score_note = (
        "F1, precision and recall of spans (micro): a span is right if all its tokens and its label are. Loss is in "
        "nats per token."
    )
    golden_note = f"{MAX_SCORE_DROP['int8']:.1%} of F1 is less than one span in them"

    score_rows = staticmethod(score)

    def answer_config(self, data: SpanData) -> dict[str, object]:
        return {"problem_type": None}  # Hugging Face's problem types are of models with one answer per text

    def file_texts(self, data: SpanData, path: Path, columns: Columns | None = None, /) -> LabelledTexts:
        from edgeformer.data.sources import SPANS

        known = data if data.parts else data.model_copy(update={"parts": {"test": (SPANS,)}})
        return super().file_texts(known, path, columns)

    def trim(self, data: SpanData, tokenizer: Tokenizer, trained_on: Mapping[str, str], keeping: Keeping) -> Trim:
        return super().trim(data.model_copy(update={"max_length": _UNLIMITED}), tokenizer, trained_on, keeping)

    def batch(self, rows: TokenRows, numbers: RowNumbers, pad: int, *, pad_to: int | None = None) -> Batch:
        """Return input_ids, attention_mask and targets int64 [B, S]; rows and texts (first row of each) int64 [B]."""
        windows = np.asarray(numbers, dtype=np.int64)
        targets = collate(replace(rows, ids=rows.targets.astype(np.int32)), windows, IGNORED)["input_ids"]
        texts = windows - rows.labels[windows]
        return {**collate(rows, windows, pad), "targets": targets, "rows": windows, "texts": texts}

    def example(self, recipe: TokenRecipe, rows: int) -> Batch:
        names = ("input_ids", "attention_mask", "targets")
        return {name: np.zeros((rows, recipe.data.max_length), dtype=np.int64) for name in names}

    def row_answers(self, outputs: Arrays, batch: Arrays, data: SpanData) -> Float64s:
        """Return right, predicted and labelled spans of each row (window), [B, 3]; NaN if a logit is no number."""
        tags, figures = [*map(parse_tag, data.classes)], []
        for logits, targets in zip(outputs["logits"], batch["targets"], strict=True):
            counted = targets != IGNORED
            counts = span_counts(logits[counted].argmax(-1), targets[counted], np.zeros(counted.sum()), tags)
            is_finite = np.isfinite(logits[counted]).all()
            figures.append(np.array([*counts.values(), (0, 0, 0)]).sum(axis=0) if is_finite else np.full(3, np.nan))
        return np.array(figures, dtype=np.float64)

    def row_figures(self, answers: Array, rows: TokenRows, data: SpanData) -> Float64s:
        """Return twice the right spans, and predicted plus labelled spans, of each text: [texts, 2]."""
        by_text = np.add.reduceat(answers, np.flatnonzero(rows.labels == 0), axis=0)
        return np.stack([2 * by_text[:, 0], by_text[:, 1] + by_text[:, 2]], axis=1)

    def with_answers(self, rows: TokenRows, logits: Array, data: SpanData) -> TokenRows:
        return replace(rows, targets=np.where(rows.targets == IGNORED, IGNORED, logits.argmax(axis=-1)))

    def counted_logits(self, logits: Array, answers: Arrays) -> Array:
        counted: Array = logits[answers["targets"] != IGNORED]
        return counted

    def golden_outputs(self, golden: Golden, run: Run, max_rows: int | None) -> Array:
        return self.counted_logits(super().golden_outputs(golden, run, max_rows), golden.arrays)

    def golden_parity(
        self, golden: Arrays, logits: Array, exit_: int | None, precision: Precision, provider: str
    ) -> Parity:
        counted = {name: self.counted_logits(array, golden) for name, array in golden.items() if array.ndim == 3}
        return super().golden_parity(counted, logits, exit_, precision, provider)

    def golden_score(
        self, exit_: int, logits: Array, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> SpanScore:
        counted = answers["targets"] != IGNORED
        return score(logits, np.stack([answers["targets"][counted], np.nonzero(counted)[0]], axis=1), data)


TASK = TokenClassification()
