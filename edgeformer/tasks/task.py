"""Prediction: what a model answers to one text, or to a pair of texts; Unanswered: why there is no answer to one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.golden import Golden, Tokens
from edgeformer.artifacts.manifest import DataFinding, Parity, Precision, Vocabulary
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import Recipe, TrainingConfig
from edgeformer.artifacts.scores import EvaluationRow, Score
from edgeformer.data.encoding import Prepared, Rows
from edgeformer.data.rows import LabelledTexts, Text
from edgeformer.tasks.early_exit import Departures, ExitNotes
from edgeformer.tasks.metric import Array, Arrays, Meter, Metric, ScoreColumn
from edgeformer.tasks.parity import measure_parity

if TYPE_CHECKING:
    from edgeformer.data.sources import Columns
    from edgeformer.data.trimming import Keeping, Trimmed


@dataclass(frozen=True)
class Prediction:
    """What every task's answers have.

    Attributes:
        text: as it was given; of a pair both.
        truncated: the model read its beginning only.
    """

    text: Text
    truncated: bool

    def as_dict(self) -> dict[str, object]:
        """For JSON output; the second text of a pair is ``pair``."""
        return {**said(self.text), "truncated": self.truncated}


@dataclass(frozen=True)
class Unanswered:
    """A text, or a pair, that a model was not asked about, or has no answer to.

    Attributes:
        text: as it was given; of a pair both.
        error: why, for a person.
    """

    text: Text
    error: str

    def as_dict(self) -> dict[str, object]:
        """For JSON output."""
        return {**said(self.text), "error": self.error}


Answer = Prediction | Unanswered
"""What every text gets."""


def said(text: Text) -> dict[str, object]:
    """The text, or both texts of a pair, as keys of JSON."""
    return {"text": text} if isinstance(text, str) else {"text": text[0], "pair": text[1]}


# How a trained model reads text, and what is known of the text that it was trained on.


@dataclass(frozen=True)
class TextReader:
    """How a trained model reads text: its tokenizer, the token that fills up rows, and how many tokens it knows."""

    tokenizer: Tokenizer
    pad: int
    vocabulary: int


@dataclass(frozen=True)
class Origin:
    """What is known of a trained model's data.

    Attributes:
        cache: where encoded sets are kept; None: nowhere.
        trained_on: set → fingerprint, as training recorded it; other data cut by the same protocol is refused.
        as_trained: cut the text as training did. Exported graphs read every document by itself.
    """

    cache: Path | None = None
    trained_on: Mapping[str, str] = field(default_factory=dict)
    as_trained: bool = False


class OwnData(ABC):
    """What a task does with files that a user has. ``data`` is of the task's own type."""

    @abstractmethod
    def local_data(self, data: Any, folder: Path) -> tuple[Any, list[str]]:
        """``--data DIR``: the same data section on the files of a folder, and notes. Raises DataError."""

    def known_sets(self, data: Any) -> dict[str, LabelledTexts]:
        """The texts of every set that is there for a model which was trained elsewhere. Raises DataError."""
        return {}

    def set_texts(self, data: Any, name: str) -> LabelledTexts:
        """Read one set, not encoded: ``train``, ``validation`` or a test set by its own name.

        Pairs of an embedding model are flat: rows 2i and 2i + 1 are pair i. A language model's labels are all 0.

        Raises:
            DataError: it cannot be read, or nothing is known of it.
            InputError: a task without texts.
        """
        raise InputError("this model reads no text")

    def file_texts(self, data: Any, path: Path) -> LabelledTexts:
        """Read a labelled or plain file, not encoded; with the columns and labels of ``data``. Raises as set_texts."""
        raise InputError("this model reads no text")

    def encode_rows(self, data: Any, reader: TextReader, texts: LabelledTexts) -> Rows:
        """Encode such texts as exported artifacts read them. Labels are indices into those of ``data``."""
        raise InputError("this model reads no text")

    def findings(self, data: Any) -> Sequence[DataFinding]:
        """What the owner of the data should know of it, which is read for that. Raises DataError."""
        return ()

    @abstractmethod
    def read_file(
        self, data: Any, reader: TextReader, path: Path, columns: Columns | None = None, *, as_trained: bool = False
    ) -> Rows:
        """Encode a labelled or plain file as the model's own sets were.

        Args:
            columns: those that the user named; None: there is no way to name any.

        Raises:
            DataError: the file, its columns or its rows.
        """


# What a measuring process gives a model that reads text: real inputs at a stated shape.
#
# They are the bundle's golden rows, cut or repeated. Never zeros, never random tokens, which would falsify
# confidence exits and lookups.


Run = Callable[[Arrays], Arrays]
"""Inputs by name → outputs by name: a session's ``run``."""

Axes = Mapping[str, tuple[str, ...]]
"""Input → what sizes each of its axes: ``batch``, ``seq``, or nothing (it is fixed). Empty: of text, [batch, seq]."""


def fit_row(row: Tokens, seq: int) -> Tokens:
    """One row cut or repeated: the first token (such as [CLS]) stays first, those after it repeat.

    Args:
        row: token ids, int64 [k].
        seq: tokens of the result.
    """
    if row.size >= seq:
        return row[:seq]
    body = row[1:] if row.size > 1 else row
    return np.concatenate([row[:1], np.resize(body, seq - 1)])


def make_buffers(golden: Golden, batch: int, seq: int, count: int = 8) -> list[dict[str, Tokens]]:
    """Different inputs of shape [batch, seq], nothing padded, the golden rows used in turn.

    Several buffers in rotation keep a cache from answering instead of the artifact.

    Args:
        golden: of the bundle; the model takes an attention mask where it has one (classifiers).
        batch: rows of an input.
        seq: tokens of each row.
        count: how many inputs.
    """
    buffers: list[dict[str, Tokens]] = []
    rows = golden.texts()
    for number in range(count):
        picked = [rows[(number * batch + offset) % len(rows)] for offset in range(batch)]
        ids = np.ascontiguousarray(np.stack([fit_row(row, seq) for row in picked]), dtype=np.int64)
        mask = {"attention_mask": np.ones_like(ids)} if golden.padded else {}
        buffers.append({"input_ids": ids, **mask})
    return buffers


class TextCalls:
    """Golden inputs as calls of a session: as models do it that read text. Other tasks do it their own way."""

    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]

    def axes(self, data: Any) -> Axes:
        """How the inputs of a model with this data section are sized."""
        return {}

    def fit_shape(self, data: Any, batch: int, seq: int) -> tuple[int, int]:
        """The batch size and length that a model can take instead of what is asked for: where its own are fixed."""
        return batch, seq

    def shape_notes(self, data: Any) -> list[str]:
        """What a reader of a report must be told of the inputs; nothing of text."""
        return []

    def input_shapes(self, data: Any, batch: int, seq: int) -> dict[str, tuple[int, ...]]:
        """Input → sizes in a call, where batch size and length do not tell them; nothing of text."""
        return {}

    def calls(self, golden: Golden, axes: Axes, shape: tuple[int, int], count: int) -> list[dict[str, Array]]:
        """Different inputs of one shape, of the golden inputs cut or repeated.

        Args:
            axes: from :meth:`axes`.
            shape: batch size and length.
            count: how many inputs.
        """
        return [dict(call) for call in make_buffers(golden, *shape, count)]

    def golden_outputs(self, golden: Golden, run: Run, most: int | None) -> Any:
        """What a model computes of the golden inputs, as :meth:`golden_parity` takes it: logits of all rows.

        In as few calls as it takes: INT8 graphs scale their activations by the whole batch, so that another batch is
        another (if similar) answer.

        Args:
            most: rows that one call takes; None: any number.

        Raises:
            GoldenError: an input is not there.
            ArtifactError: it has no logits.
        """
        inputs = golden.inputs(self.golden_names[0])
        pieces = []
        for start in range(0, len(golden), most or len(golden)):
            outputs = run({name: array[start : start + (most or len(golden))] for name, array in inputs.items()})
            if "logits" not in outputs:
                names = ", ".join(outputs) or "none"
                raise ArtifactError(f"it has no output `logits`, but {names}; export the run again")
            pieces.append(outputs["logits"])
        return np.concatenate(pieces)


def longest_call(task: Task, max_positions: int | None, max_length: int | None) -> int | None:
    """Tokens of the longest call that a model ever gets: what it takes, and no more than its texts are cut to.

    Args:
        task: of the model. What writes text goes on behind the length that it was trained with.
        max_positions: tokens that the model takes; None: any number.
        max_length: tokens that its texts are cut to; None: not known.

    Returns:
        None: any number.
    """
    cut_to = max_length if task.reads_text and not task.writes_text else None
    return min((length for length in (max_positions, cut_to) if length is not None), default=None)


# What a task is to the rest of the house: its recipe, its data, its metric, how it is scored, its golden inputs.


Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]


class Task(OwnData, TextCalls, ABC):
    """One task. Where a method takes ``recipe`` or ``data`` it is of this task's own type.

    Attributes:
        name: as recipes and manifests name it.
        noun: what a model of this task is called: ``classifier``.
        recipe_type: the recipe, still without a family's ``model``.
        score_type: its scores.
        metric: what it is judged by.
        columns: the figures of its scores in tables.
        unit: what a score's ``n`` counts: ``rows`` or ``tokens``.
        phase: which call a latency budget is about: a whole input, or one decoded token.
        trained: whether recipes can name it; else its models are somebody else's files.
        reads_text: whether its models come with a tokenizer.
        writes_text: whether it generates: its step and decode artifacts keep what they computed for earlier tokens.
        can_trim: whether its vocabulary can be trimmed.
        predicts: what :meth:`predictions` are made of, ``labels`` or ``vectors``; None: it has none.
        has_confidence: whether its answers have a top probability, by which rows and tokens can leave early.
        pipeline_tag: how model hubs call it.
        use: the command that uses such a model, for messages.
        golden_names: names in :meth:`golden_inputs`: of what goes into the graphs, and of the right answers.
        score_note: what a reader of its scores must know.
        few: what the golden inputs alone cannot tell of a score, for a note.
    """

    name: ClassVar[str]
    noun: ClassVar[str]
    recipe_type: ClassVar[type[Recipe]]
    score_type: ClassVar[type[Score]]
    metric: ClassVar[Metric]
    columns: ClassVar[tuple[ScoreColumn, ...]]
    unit: ClassVar[str]
    phase: ClassVar[Literal["steady", "decode"]]
    trained: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True
    writes_text: ClassVar[bool] = False
    can_trim: ClassVar[bool] = False
    predicts: ClassVar[Literal["labels", "vectors"] | None] = None
    has_confidence: ClassVar[bool] = True
    pipeline_tag: ClassVar[str]
    use: ClassVar[str]
    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]
    score_note: ClassVar[str]
    few: ClassVar[str]

    # Data

    @abstractmethod
    def prepare(self, recipe: Any, cache: Path, progress: Progress) -> Prepared:
        """Read, split and encode a recipe's data. Raises DataError, MissingDependencyError."""

    @abstractmethod
    def set_name(self, data: Any, split: str) -> str:
        """The set's own name: ``test`` is the protocol's."""

    @abstractmethod
    def read_set(self, data: Any, reader: TextReader, split: str, origin: Origin) -> Rows:
        """Encode one set of a trained model's data.

        Args:
            split: ``test`` (the protocol's own), ``validation``, or a test set by name.

        Raises:
            InputError: no such set.
            DataError: it cannot be read, or is not what training saw.
        """

    @abstractmethod
    def reader(self, tokenizer: Path, data: Any, vocabulary: int) -> TextReader:
        """A trained model's own tokenizer. Raises DataError."""

    def trim(
        self, data: Any, tokenizer: Tokenizer, trained_on: Mapping[str, str], keeping: Keeping
    ) -> tuple[Trimmed, Vocabulary]:
        """The tokenizer with only the tokens that the training text uses, and what that does to other text.

        Args:
            trained_on: set → fingerprint, as training recorded it.
            keeping: which tokens stay.

        Raises:
            InputError: the vocabulary of such a model cannot be trimmed.
            DataError: the text is not there, or is not what training saw; a tokenizer that cannot be trimmed.
        """
        raise InputError(
            "--vocab-trim: only vocabularies of classifiers and embedding models can be trimmed; a language model's is "
            "what it predicts, so without some tokens it is another model, whose perplexity compares with nothing"
        )

    # Batches

    @abstractmethod
    def batch(
        self, rows: Any, numbers: NDArray[np.integer], pad: int, *, pad_to: int | None = None
    ) -> dict[str, Int64s]:
        """The rows ``numbers`` as int64 arrays with one row each: inputs and right answers, padded to the longest.

        Args:
            pad_to: pad to this many tokens, and count padding as text (a defect that is reproduced on request).
        """

    @abstractmethod
    def weight(self, batch: Arrays) -> int:
        """How much of a batch counts in its loss: rows, or predicted tokens."""

    @abstractmethod
    def example(self, recipe: Any, rows: int) -> dict[str, Int64s]:
        """A batch of ``rows`` rows at the recipe's full length, for planning memory: shapes count, values do not."""

    @abstractmethod
    def evaluation_rows(self, longest: int) -> int:
        """Rows that training evaluates at a time, where the longest has ``longest`` tokens."""

    @abstractmethod
    def call_batches(
        self, rows: Any, most: int, vocabulary: int, *, losses: bool = False, first: int | None = None
    ) -> list[Int64s]:
        """Row numbers of batches for one call each, longest first: at most ``most`` rows, whose answers fit memory.

        Args:
            rows: of a set.
            most: rows per call.
            vocabulary: tokens that the model knows; of one that answers at several exits, times their number.
            losses: the model answers with losses instead of logits.
            first: only so many of the first rows; None: all.
        """

    def words(self, rows: Any, *, cut: bool = False) -> int | None:
        """Words that a set spells, where the score wants them; ``cut``: None where rows were cut."""
        return None

    # Scores

    @abstractmethod
    def meter(self, exits: Sequence[int] = (), notes: ExitNotes | None = None, data: Any = None) -> Meter:
        """A fresh meter.

        Args:
            exits: loops that answer, in rising order; empty: the model has one answer.
            notes: is told of every answer at every one of ``exits``, for early exit.
            data: the model's own data section.
        """

    def settled(self, recipe: Any, validation: Any) -> Any:
        """The recipe with what the task decides by ``validation``, the kept weights' score, where it is left out."""
        return recipe

    def exit_thresholds(self, exits: Sequence[int]) -> Mapping[int, float] | None:
        """The thresholds by which the task's paper lets answers leave, loop → top probability; None: it has none.

        Args:
            exits: loops before the last one.
        """
        return None

    def row_answers(self, outputs: Arrays, batch: Arrays) -> Array:
        """Return what is kept of a call's answers to compare two models row by row, [B, …].

        Args:
            outputs: ``logits`` among them.
            batch: the inputs with the right answers, as :meth:`batch` makes them.
        """
        return outputs["logits"]

    @abstractmethod
    def row_figures(self, answers: Array, rows: Any, data: Any) -> Float64s:
        """Return figures [n, k] of every row (embeddings: of every pair), of which :meth:`metric_of` makes the metric.

        Args:
            answers: of all ``rows`` in their order, as :meth:`row_answers` has them.
            data: the model's own data section.
        """

    @abstractmethod
    def metric_of(self, figures: Float64s) -> float:
        """Compute the task's metric from the figures of some rows, each of which may stand there several times."""

    @abstractmethod
    def departures(self, found: Departures) -> dict[str, float | None]:
        """Early exit's figures as keys of evaluation.json: the loss, and the task's metric under its name."""

    @abstractmethod
    def criterion(self, score: Any, training: Any) -> float:
        """What picks the epoch whose weights are kept; smaller is better."""

    @abstractmethod
    def record(self, score: Any) -> dict[str, float]:
        """A validation score as figures for metrics.jsonl, each key beginning with ``val_`` or the name of its part."""

    @abstractmethod
    def describe(self, score: Any) -> str:
        """A validation score in a line for people."""

    @abstractmethod
    def rows(self, artifact: str, split: str, score: Any, *, leaks: bool = False) -> list[EvaluationRow]:
        """A score as rows of evaluation.json, without times: the full model's first, then one per earlier exit."""

    @abstractmethod
    def lost(self, found: Any, reference: Any, precision: Precision, *, trimmed: bool) -> str | None:
        """What an artifact loses against FP32 on the same rows beyond its bar; None when it is within."""

    # Predictions

    def predictions(
        self, texts: Sequence[Text], answers: Arrays, cut: NDArray[np.bool_], data: Any
    ) -> Sequence[Prediction]:
        """What a model's answers say of texts.

        Args:
            texts: as they were given, or pairs of texts.
            answers: ``logits`` [n, C], and ``loops`` [n] where rows could leave early.
            cut: texts that were longer than the model reads, bool [n].

        Raises:
            InputError: a model of this task answers nothing of the kind.
        """
        raise InputError(f"a {self.noun} has no labels; use edgeformer {self.use}")

    # Golden inputs

    @abstractmethod
    def golden_inputs(self, prepared: Any, recipe: Any) -> dict[str, Int64s]:
        """Real validation inputs with their right answers, int64 [n, …], for export and device to check by."""

    @abstractmethod
    def golden_answers(self, references: Mapping[int, Array]) -> dict[str, Array]:
        """What golden.npz keeps of torch FP32's logits. ``references``: exit → as the model gives them."""

    @abstractmethod
    def golden_score(
        self, exit_: int, logits: Any, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> Score:
        """Score logits [n, C] of an exit on the golden inputs, or on ``rows`` of them; ``data``: the model's own."""

    def right_answers(self, answers: Arrays, references: Mapping[int, Array]) -> Arrays:
        """What :meth:`golden_score` scores against.

        Args:
            answers: those of the run's golden inputs; of a model that was made of another one, that one's.
            references: exit → torch FP32's logits.
        """
        return answers

    def parity(self, logits: Array, reference: Array, precision: Precision, provider: str) -> Parity:
        """Compare logits [n, C], computed with ``provider``, with torch FP32's; n counts rows or tokens."""
        return measure_parity(logits, reference, precision, provider)

    @abstractmethod
    def golden_parity(
        self, golden: Arrays, logits: Any, exit_: int | None, precision: Precision, provider: str
    ) -> Parity:
        """Compare an artifact's logits on the golden inputs with what golden.npz keeps.

        Args:
            logits: as a session gives them, or :meth:`golden_outputs`; of a decode graph perhaps for the last positions
                only.
            exit_: the loop that answered; None: the only or last one.

        Raises:
            GoldenError: golden.npz lacks what is needed, or is of other shapes.
        """

    # What clients need

    @abstractmethod
    def client_config(self, prepared: Any, recipe: Any) -> dict[str, object]:
        """The task's keys of a run's config.json."""

    def answer_config(self, data: Any) -> dict[str, object]:
        """A config.json's keys that say how answers are read; ``data``: the model's own section."""
        return {}

    @abstractmethod
    def tokenizer_config(self, prepared: Any, recipe: Any) -> dict[str, object]:
        """tokenizer_config.json, as Hugging Face clients read it."""

    @abstractmethod
    def bundle_facts(self, recipe: Any, config: Mapping[str, Any]) -> dict[str, Any]:
        """What bundle.json says of such a model: labels, max_length, pad_id. ``config``: the run's config.json."""

    @abstractmethod
    def card_lines(self, recipe: Any) -> list[str]:
        """Markdown list items of a model card that are the task's: labels, lengths."""

    def selected_by(self, training: TrainingConfig) -> str:
        """What validation figure picked the kept weights, in a word."""
        return "loss"
