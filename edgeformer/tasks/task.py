"""Interface of a task in three parts: rows (its data), scorer (its metric) and answerer (its predictions).

:class:`~edgeformer.tasks.texts.TextTask`, :class:`~edgeformer.tasks.tokens.TokenTask` and
:class:`~edgeformer.tasks.tensors.TensorTask` implement them for models that answer texts, predict the next token, or
have any inputs. A task subclasses one of them, in one file. ``recipe`` and ``data`` arguments are of its own types.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.golden import TOKEN_TYPES, Golden, GoldenError, Tokens
from edgeformer.artifacts.manifest import Parity, Precision, Vocabulary
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import ModelConfig, Recipe
from edgeformer.artifacts.scores import EvaluationRow, Score
from edgeformer.data.batching import IGNORED
from edgeformer.data.encoding import Prepared
from edgeformer.data.rows import LabelledTexts, Text, check_unchanged
from edgeformer.data.tokenization import TextBounds, special_ids
from edgeformer.tasks.arrays import Array, Arrays, Batch, Float64s, Int64s, RowNumbers
from edgeformer.tasks.early_exit import EarlyExit, ExitRecords, exit_logits
from edgeformer.tasks.metric import Meter, Metric, ScoreColumn, measure_parity

if TYPE_CHECKING:
    from edgeformer.data.sources import Columns
    from edgeformer.data.trimming import Keeping, Trimmed
    from edgeformer.tasks.texts import TextTask

    Trim = tuple[Trimmed, Vocabulary]


Run = Callable[[Arrays], Arrays]
"""Inputs by name → outputs by name: the ``run`` method of a session."""

ReadConfig = Callable[[], Mapping[str, Any]]
"""Reads tokenizer_config.json."""

Axes = Mapping[str, tuple[str, ...]]
"""Input → size of each axis: ``batch``, ``seq`` or an empty string (fixed). Empty for text: [batch, seq]."""

MAX_SCORE_DROP: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.001, "int8": 0.003, "int4": 0.01}
"""Largest allowed drop of the metric of label tasks against FP32 on the same rows."""

MAX_CORRELATION_DROP: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.001, "int8": 0.01, "int4": 0.02}
"""Largest allowed drop of a rank correlation, and of nDCG, against FP32 on the same rows."""

MAX_TRIMMED_SCORE_DROP = 0.005
"""Largest allowed drop for an artifact with a trimmed vocabulary, at any precision."""


@dataclass(frozen=True)
class TextAnswer:
    """Result for one text or pair of texts. ``keys``: fields of the JSON output, besides the text."""

    keys: ClassVar[tuple[str, ...]]

    text: Text

    def as_dict(self) -> dict[str, object]:
        """Return the result for JSON output, arrays and tuples as lists; the second text of a pair is ``pair``."""
        result: dict[str, object] = {"text": self.text}
        if not isinstance(self.text, str):
            result = {"text": self.text[0], "pair": self.text[1]}
        for name in self.keys:
            value = getattr(self, name)
            value = value.tolist() if isinstance(value, np.ndarray) else value
            result[name] = list(value) if isinstance(value, tuple) else value
        return result


@dataclass(frozen=True)
class Prediction(TextAnswer):
    """A prediction. ``truncated``: the model read only the beginning of the text."""

    truncated: bool


@dataclass(frozen=True)
class Unanswered(TextAnswer):
    """No prediction, for the reason ``error``."""

    keys = ("error",)

    error: str


Answer = Prediction | Unanswered


@dataclass(frozen=True)
class TextReader:
    """Text input of a trained model: tokenizer, padding token, vocabulary size; ``bounds``: of a language model."""

    tokenizer: Tokenizer
    pad: int
    vocabulary: int
    bounds: TextBounds | None = None


@dataclass(frozen=True)
class Origin:
    """Origin of a trained model's data: set → fingerprint recorded by training; other data is refused."""

    trained_on: Mapping[str, str] = field(default_factory=dict)
    as_trained: bool = False  # split the text into rows as in training; exported graphs read a document as one row


class Scorer(Protocol):
    """Metric of a task: scores of outputs, how they compare, and their numerical parity with torch FP32."""

    score_type: ClassVar[type[Score]]
    metric: ClassVar[Metric]  # for comparing two models
    columns: ClassVar[tuple[ScoreColumn, ...]]  # figures of a score in tables
    recorded: ClassVar[tuple[str, ...]] = ()  # figures of a score in metrics.jsonl besides loss and metric
    unit: ClassVar[str] = "rows"  # what ``n`` of a score counts: ``rows``, ``tokens``, ``spans`` or ``calls``
    score_note: ClassVar[str]  # explanation of its scores, for the model card
    golden_note: ClassVar[str]  # limits of scores on the golden inputs, for a note
    agreement: ClassVar[str] = "top-1 agreement"  # with FP32, in tables
    confidence: Callable[[Array], Float64s] | None = None
    """Compute the confidence [n] of logits [n, C], which early exit compares; None: these outputs have none."""
    exit_schedule: ClassVar[EarlyExit | None] = None  # early-exit thresholds of the task's paper

    def meter(self, exits: Sequence[int] = (), records: ExitRecords | None = None, data: Any = None) -> Meter:
        """Return a new meter of the outputs after the loops ``exits``, ascending; empty: one output.

        ``records`` receives every answer at every exit, for early exit.
        """

    def row_answers(self, outputs: Arrays, batch: Arrays, data: Any) -> Array:
        """Return the input of :meth:`row_figures` from one call: logits [B, …], or the summed loss of each row [B]."""

    def row_figures(self, answers: Array, rows: Any, data: Any) -> Float64s:
        """Compute figures [n, k] per row (embeddings: per pair) from :meth:`row_answers` of all rows in their order."""

    def metric_of(self, figures: Float64s) -> float:
        """Compute the metric from the figures of some rows; resampling may repeat rows."""

    def lost(self, score: Any, reference: Any, precision: Precision, *, trimmed: bool) -> str | None:
        """Explain why the score drop against FP32 on the same rows exceeds its limit; None: parity alone limits it."""
        return None

    def settled(self, recipe: Any, validation: Any) -> Any:
        """Return the recipe with what its score on the validation set decides; by default unchanged."""
        return recipe

    def criterion(self, score: Any, training: Any) -> float:
        """Return the value that selects the kept epoch, smaller is better: the loss, or the negative metric."""
        name = getattr(training, "select_by", "loss")
        return float(score.loss if name == "loss" else -getattr(score, name))

    def record(self, score: Any) -> dict[str, float]:
        """Return a validation score as figures for metrics.jsonl."""
        return {f"val_{name}": getattr(score, name) for name in ("loss", self.metric.name, *self.recorded)}

    def describe(self, score: Any) -> str:
        """Return a validation score as one line of text."""
        return f"validation loss {score.loss:.4f}, {self.metric.heading} {getattr(score, self.metric.name):.4f}"

    def evaluation_rows(self, artifact: str, split: str, score: Any, *, leaks: bool) -> list[EvaluationRow]:
        """Return a score as rows of evaluation.json, without times: the full model first, then each earlier exit."""
        figures: dict[str, Any] = {column.name: getattr(score, column.name) for column in self.columns}
        return [EvaluationRow(artifact=artifact, split=split, leaks=leaks, **figures)]

    parity: Callable[[Array, Array, Precision, str], Parity] = staticmethod(measure_parity)
    """Compare logits [n, C] computed with a provider with those of torch FP32; n counts rows or tokens."""

    def golden_answers(self, references: Mapping[int, Array]) -> dict[str, Array]:
        """Return the arrays of torch FP32 logits that golden.npz stores. ``references``: exit → logits [n, C]."""
        by_exit = {exit_logits(exit_): logits for exit_, logits in references.items()}
        return {"logits": references[max(references)], **by_exit}

    def right_answers(self, answers: Arrays, references: Mapping[int, Array]) -> Arrays:
        """Return the arrays that :meth:`golden_score` compares with: ``answers`` of the run, or torch FP32's logits."""
        return answers

    def counted_logits(self, logits: Array, answers: Arrays) -> Array:
        """Return the logits [n, C] that parity and scores count, of all golden inputs: those of rows, or of tokens."""
        return logits.reshape(-1, logits.shape[-1])

    def golden_outputs(self, golden: Golden, run: Run, max_rows: int | None) -> Any:
        """Run a model on the golden inputs, ``max_rows`` (None: all) at once, and return the logits of all rows.

        INT8 graphs scale activations by the whole batch, so calls are as large as possible. Raises ArtifactError.
        """

    def golden_score(
        self, exit_: int, logits: Any, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> Score:
        """Score logits [n, C] of an exit on the golden inputs, or on the ``rows`` of them."""

    def stored_score(self, golden: Golden, exit_: int, outputs: Any, data: Any) -> Score:
        """Score :meth:`golden_outputs` with the answers in golden.npz. Raises GoldenError: there are none."""

    def golden_parity(
        self, golden: Arrays, logits: Any, exit_: int | None, precision: Precision, provider: str
    ) -> Parity:
        """Compare :meth:`golden_outputs` of an artifact (decode graphs: of the last positions) with golden.npz.

        ``exit_``: loop of the exit; None: the only or last one. Raises GoldenError: an array is missing or differs.
        """


class Task(Scorer):
    """One task: names of its models, their scores, and the shapes of their inputs, by default those of text."""

    name: ClassVar[str]  # in recipes and manifests
    noun: ClassVar[str]  # name of a model of this task, such as ``classifier``
    recipe_type: ClassVar[type[Recipe]]  # without the ``model`` section of a model family
    budget: ClassVar[str | None] = None  # task whose budget applies if a device profile has none for this one
    pipeline_tag: ClassVar[str] = "text-classification"  # name of the task on model hubs
    use: ClassVar[str] = "predict"  # the edgeformer command that runs such a model, for messages
    can_answer: ClassVar[bool] = False  # answers whole texts, see :attr:`answerer`
    can_write: ClassVar[bool] = False  # predicts the next token, and so continues texts
    can_trim: ClassVar[bool] = False  # works without the tokens that its training text does not use
    has_vectors: ClassVar[bool] = False  # answers have a ``vector``, whose similarity to a query's ranks texts
    has_scores: ClassVar[bool] = False  # answers have a ``score``, which ranks documents in pairs with a query
    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = ("input_ids", "attention_mask"), ("labels",)
    """Arrays of the golden inputs: graph inputs and targets."""

    @property
    def rows(self) -> RowSource:
        """Data of its models. Raises InputError for graphs that read no texts."""
        if isinstance(self, RowSource):
            return self
        raise InputError(f"a {self.noun} has no texts and labels to score; use profile, verify or export")

    @property
    def answerer(self) -> TextTask:
        """Predictions of its models. Raises InputError if they make none."""
        if self.can_answer:
            return cast("TextTask", self)
        raise InputError(f"a {self.noun} has no labels; use edgeformer {self.use}")

    def input_names(self, model: ModelConfig) -> tuple[str, ...]:
        """Return the inputs of a model's graphs, in the order of its arguments."""
        return (*self.golden_names[0], TOKEN_TYPES) if model.reads_types else self.golden_names[0]

    def answer_config(self, data: Any) -> dict[str, object]:
        """Return the keys of config.json for interpreting outputs."""
        return {}

    def card_lines(self, recipe: Any) -> list[str]:
        """Return Markdown list items for the model card, such as labels and lengths."""
        return []

    def max_call_tokens(self, max_positions: int | None, max_length: int | None) -> int | None:
        """Return the largest number of tokens in one call of a model; None: unlimited."""
        return max_positions

    def axes(self, data: Any) -> Axes:
        """Return the axes of each input, see :data:`Axes`."""
        return {}

    def fit_shape(self, data: Any, batch: int, seq: int) -> tuple[int, int]:
        """Replace the requested batch size and length where the model's own are fixed."""
        return batch, seq

    def shape_notes(self, data: Any) -> list[str]:
        """Return notes on the input shapes for reports."""
        return []

    def input_shapes(self, data: Any, batch: int, seq: int) -> dict[str, tuple[int, ...]]:
        """Return input → shape if batch size and length do not determine it; empty for text."""
        return {}

    def calls(self, golden: Golden, axes: Axes, shape: tuple[int, int], count: int) -> list[dict[str, Array]]:
        """Make ``count`` different inputs of one shape (batch size, length) from the golden inputs.

        By default from the golden rows in turn, cut or repeated: real text keeps confidence exits and embedding lookups
        realistic, and different inputs defeat caches.
        """
        (batch, seq), rows = shape, list[Tokens]()
        for row in golden.texts():
            repeated = row[1:] if row.size > 1 else row  # the first token ([CLS]) is not repeated
            padding = np.resize(repeated, max(0, seq - row.size))
            rows.append(np.concatenate([row, padding])[:seq])
        calls: list[dict[str, Array]] = []
        for number in range(count):
            batch_rows = [rows[(number * batch + offset) % len(rows)] for offset in range(batch)]
            ids = np.ascontiguousarray(np.stack(batch_rows), dtype=np.int64)
            further = {"attention_mask": np.ones_like(ids), TOKEN_TYPES: np.zeros_like(ids)}
            calls.append({"input_ids": ids, **{name: further[name] for name in further if name in golden.arrays}})
        return calls


class RowSource(Task):
    """Data of a task whose models read text: sets of texts, their rows, and batches of rows."""

    texts_per_row: ClassVar[int] = 1  # 2: pairs, of which each text is read separately
    row_noun: ClassVar[str] = "rows"

    @abstractmethod
    def prepare(self, recipe: Any, cache: Path, progress: Progress, /) -> Prepared[Any]:
        """Read, split and encode the data of a recipe. Raises DataError, MissingDependencyError."""

    def set_name(self, data: Any, split: str, /) -> str:
        """Return the name of the set that ``split`` selects: ``test`` is the test set of the protocol."""
        return getattr(data, "test_set", split) if split == "test" else split

    def available_sets(self, data: Any, /) -> dict[str, LabelledTexts]:
        """Return the texts of every set that exists for an imported model. Raises DataError."""
        from edgeformer.data.sources import load_parts
        from edgeformer.data.splits import make_sets, set_parts

        names = [name for name, parts in set_parts(data).items() if parts]
        return make_sets(data, names, load_parts(data))

    @abstractmethod
    def set_texts(self, data: Any, name: str, /) -> LabelledTexts:
        """Read one set without encoding it: ``train``, ``validation`` or a test set by name.

        Pairs of an embedding model are flat: rows 2i and 2i + 1 are pair i. Raises InputError (no such set), DataError.
        """

    @abstractmethod
    def file_texts(self, data: Any, path: Path, columns: Columns | None = None, /) -> LabelledTexts:
        """Read a file without encoding it, with the labels of ``data``; ``columns``: None: detect them.

        Raises as :meth:`set_texts`.
        """

    @abstractmethod
    def sampled_rows(self, texts: LabelledTexts, max_rows: int, max_words: int, /) -> NDArray[np.int64]:
        """Return the numbers of at most ``max_rows`` texts, evenly spaced; of running text the first ``max_words``."""

    @abstractmethod
    def reader(self, tokenizer: Any, data: Any, vocabulary: int, described: ReadConfig = dict, /) -> TextReader:
        """Load a tokenizer file (a path), or the tokenizer of a recipe. Raises DataError.

        ``described`` reads its tokenizer_config.json.
        """

    @abstractmethod
    def encode_rows(self, data: Any, reader: TextReader, texts: LabelledTexts, *, as_trained: bool = False) -> Any:
        """Encode texts of :meth:`set_texts` or :meth:`file_texts`. ``as_trained``: see :class:`Origin`."""

    def read_set(self, data: Any, reader: TextReader, split: str, origin: Origin) -> Any:
        """Encode one set of a trained model's data: ``test`` (of the protocol), ``validation`` or a test set by name.

        Raises InputError (no such set, or ``train``) or DataError (it cannot be read, or differs from training's).
        """
        name = self.set_name(data, split)
        if name == "train":
            raise InputError("--split train: the training set is not scored; use another set")
        texts = self.set_texts(data, name)
        check_unchanged(name, texts.fingerprint(), origin.trained_on, "score a file: --data FILE")
        return self.encode_rows(data, reader, texts, as_trained=origin.as_trained)

    @abstractmethod
    def batch(self, rows: Any, numbers: RowNumbers, pad: int, *, pad_to: int | None = None) -> Batch:
        """Return inputs [B, S] and labels [B, …] or targets [B, S] of the rows ``numbers``, padded to the longest.

        ``pad_to``: pad to this many tokens and count padding as text (reproduces a defect of published code).
        """

    def weight(self, batch: Arrays) -> int:
        """Return the number of rows or predicted tokens that count in the loss of a batch."""
        return int((batch["targets"] != IGNORED).sum()) if "targets" in batch else len(batch["labels"])

    @abstractmethod
    def example(self, recipe: Any, rows: int) -> Batch:
        """Return a batch of zeros with ``rows`` rows of the recipe's full length, for memory planning."""

    @abstractmethod
    def rows_at_once(self, longest: int) -> int:
        """Return how many rows training evaluates in one call if the longest has ``longest`` tokens."""

    @abstractmethod
    def call_batches(
        self, rows: Any, max_rows: int, vocabulary: int, *, losses: bool = False, first: int | None = None
    ) -> list[Int64s]:
        """Return row numbers of batches of at most ``max_rows`` rows whose outputs fit memory, longest rows first.

        ``vocabulary``: its size times the number of exits. ``losses``: the model returns losses instead of logits.
        ``first``: use only this many rows from the start.
        """

    def judged_rows(self, rows: Any) -> int:
        """Return how many rows of a set, from its start, export scores artifacts on; by default all."""
        return len(rows)

    @abstractmethod
    def golden_inputs(self, prepared: Any, recipe: Any) -> Batch:
        """Return graph inputs and targets of some validation rows, int64 [n, …], for export, devices and benchmarks."""

    @abstractmethod
    def trim(self, data: Any, tokenizer: Tokenizer, trained_on: Mapping[str, str], keeping: Keeping) -> Trim:
        """Remove the tokens that the training text does not use, and measure the effect. Raises EdgeformerError."""

    def client_config(self, prepared: Any, recipe: Any) -> dict[str, object]:
        """Return the keys of a run's config.json that belong to the task."""
        config: dict[str, object] = {}
        if labels := recipe.data.classes:
            config["id2label"] = {str(number): label for number, label in enumerate(labels)}
            config["label2id"] = {label: number for number, label in enumerate(labels)}
        lengths = {"max_length": recipe.data.tokens_at_once, "pad_token_id": prepared.pad}
        return {**config, **lengths, **self.answer_config(recipe.data)}

    def tokenizer_config(self, prepared: Any, recipe: Any) -> dict[str, object]:
        """Return tokenizer_config.json in the format of Hugging Face clients."""
        special, token_of = special_ids(prepared.tokenizer), prepared.tokenizer.id_to_token
        side = (prepared.tokenizer.truncation or {}).get("direction")
        return {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": recipe.data.tokens_at_once,
            "model_input_names": [*self.input_names(recipe.model)],
            **({"truncation_side": side} if side == "left" else {}),
            "pad_token": token_of(special.pad), "unk_token": token_of(special.unk), "cls_token": token_of(special.cls),
        }  # fmt: skip

    def golden_outputs(self, golden: Golden, run: Run, max_rows: int | None) -> Array:
        types = (TOKEN_TYPES,) if TOKEN_TYPES in golden.arrays else ()
        inputs = golden.inputs((*self.golden_names[0], *types))
        step = max_rows or len(golden)
        pieces = []
        for start in range(0, len(golden), step):
            outputs = run({name: array[start : start + step] for name, array in inputs.items()})
            if "logits" not in outputs:
                names = ", ".join(outputs) or "none"
                raise ArtifactError(f"has no output `logits`, but {names}; export the run again")
            pieces.append(outputs["logits"])
        return np.concatenate(pieces)

    def stored_score(self, golden: Golden, exit_: int, outputs: Array, data: Any) -> Score:
        right = {name: golden.arrays[name] for name in self.golden_names[1] if name in golden.arrays}
        reference = golden.arrays.get(exit_logits(exit_))
        answers = self.right_answers(right, {} if reference is None else {exit_: reference})
        return self.golden_score(exit_, outputs.reshape(-1, outputs.shape[-1]), answers, None, data)

    def golden_parity(
        self, golden: Arrays, logits: Any, exit_: int | None, precision: Precision, provider: str
    ) -> Parity:
        name = "logits" if exit_ is None else exit_logits(exit_)
        if name not in golden:
            raise GoldenError(f"golden.npz has no {name!r}, because an older version wrote it; export the run again")
        if golden[name].shape != logits.shape:
            raise GoldenError(
                f"golden.npz has logits {golden[name].shape}, but the artifact computes {logits.shape}; export the "
                "run again"
            )
        return self.parity(logits, golden[name], precision, provider)
