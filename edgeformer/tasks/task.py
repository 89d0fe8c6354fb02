"""Interface of a task: data, scoring, golden inputs, and the files that clients of its models read.

The defaults are those of a task that reads a whole text and returns one row of numbers, with labelled texts as data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import DataConfig, FileTokenizer, TokenizerConfig
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.golden import TOKEN_TYPES, Golden, GoldenError, Tokens
from edgeformer.artifacts.manifest import Parity, Precision, Vocabulary
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import ModelConfig, Recipe
from edgeformer.artifacts.scores import EvaluationRow, Score
from edgeformer.artifacts.units import markdown
from edgeformer.data.batching import IGNORED, collate, cut_batches, ordered_batches
from edgeformer.data.encoding import Encoded, Prepared, decode_labels, encode
from edgeformer.data.rows import LabelledTexts, Text, check_unchanged
from edgeformer.data.tokenization import (
    TextBounds,
    cuts_left,
    load_language_tokenizer,
    load_tokenizer,
    special_ids,
)
from edgeformer.tasks.early_exit import EarlyExit, ExitRecords, exit_logits
from edgeformer.tasks.metric import Array, Arrays, Meter, Metric, RowsMeter, ScoreColumn, measure_parity, token_losses

if TYPE_CHECKING:
    from edgeformer.data.sources import Columns
    from edgeformer.data.trimming import Keeping, Trimmed
    from edgeformer.tasks.scoring import TextPredictor

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

Run = Callable[[Arrays], Arrays]
"""Inputs by name → outputs by name: the ``run`` method of a session."""

Axes = Mapping[str, tuple[str, ...]]
"""Input → size of each axis: ``batch``, ``seq`` or an empty string (fixed). Empty for text: [batch, seq]."""

GOLDEN_ROWS = 64
EVALUATION_ROWS, EVALUATION_TOKENS = 128, 8192
"""Rows per call, or tokens per call for models that return losses per token."""
LOGITS_BYTES = 256 * 10**6
"""Maximum size of one call's logits in bytes: 1,273 tokens of a vocabulary of 50,257."""

MAX_SCORE_DROP: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.001, "int8": 0.003, "int4": 0.01}
"""Largest allowed drop of the metric of label tasks against FP32 on the same rows."""

MAX_TRIMMED_SCORE_DROP = 0.005
"""Largest allowed drop for an artifact with a trimmed vocabulary, at any precision."""


@dataclass(frozen=True)
class TextAnswer:
    """Result for one text or pair of texts. ``keys``: fields of the JSON output, besides the text."""

    keys: ClassVar[tuple[str, ...]]

    text: Text

    def as_dict(self) -> dict[str, object]:
        """Return the result for JSON output; the second text of a pair is ``pair``."""
        texts = {"text": self.text} if isinstance(self.text, str) else {"text": self.text[0], "pair": self.text[1]}
        return {**texts, **{name: getattr(self, name) for name in self.keys}}


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
    """Origin of a trained model's data: set → fingerprint recorded by training; other data is refused.

    ``as_trained``: split the text into rows as in training. Exported graphs read every document as one row.
    """

    trained_on: Mapping[str, str] = field(default_factory=dict)
    as_trained: bool = False


class Task:
    """One task: data, scoring, golden inputs, and the files that clients of its models read.

    ``recipe`` and ``data`` arguments are of the task's own types.
    """

    name: ClassVar[str]  # in recipes and manifests
    noun: ClassVar[str]  # name of a model of this task, such as ``classifier``
    recipe_type: ClassVar[type[Recipe]]  # without the ``model`` section of a model family
    score_type: ClassVar[type[Score]]
    metric: ClassVar[Metric]  # metric for comparing two models
    columns: ClassVar[tuple[ScoreColumn, ...]]  # figures of a score in tables
    recorded: ClassVar[tuple[str, ...]] = ()  # figures of a score in metrics.jsonl besides loss and metric
    unit: ClassVar[str] = "rows"  # what ``n`` of a score counts: ``rows``, ``tokens``, ``spans`` or ``calls``
    trained: ClassVar[bool] = True  # recipes can name it; else its models are ONNX files without a recipe
    reads_text: ClassVar[bool] = True  # its models come with a tokenizer
    writes_text: ClassVar[bool] = False  # step and decode artifacts keep a cache of earlier tokens
    can_trim: ClassVar[bool] = True  # unused tokens can be removed from the vocabulary: the model predicts no tokens
    phase: ClassVar[Literal["steady", "decode"]] = "steady"  # call that latency budgets limit
    predicts: ClassVar[Literal["labels", "scores", "vectors", "spans"] | None] = None
    """What its models answer; None: they read no texts, or write them."""
    has_confidence: ClassVar[bool] = True  # its outputs have a top probability, which early exit needs
    exit_schedule: ClassVar[EarlyExit | None] = None  # early-exit thresholds of the task's paper
    pipeline_tag: ClassVar[str] = "text-classification"  # name of the task on model hubs
    use: ClassVar[str] = "predict"  # the edgeformer command that runs such a model, for messages
    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = ("input_ids", "attention_mask"), ("labels",)
    """Arrays of the golden inputs: graph inputs and targets."""
    length_key: ClassVar[str] = "max_length"  # key of config.json
    pad_key: ClassVar[str] = "pad_token_id"  # key of config.json
    score_note: ClassVar[str]  # explanation of its scores, for the model card
    golden_note: ClassVar[str]  # limits of scores on the golden inputs, for a note

    # Data: read, split, encode, batch. edgeformer.data.prepare is imported in functions: predictions from a bundle need
    # no data sets.

    def prepare(self, recipe: Any, cache: Path, progress: Progress) -> Prepared[Any]:
        """Read, split and encode the data of a recipe. Raises DataError, MissingDependencyError."""
        from edgeformer.data.prepare import prepare

        return prepare(recipe.data, recipe.tokenizer, recipe.model.vocab_size, cache, progress)

    def local_data(self, data: Any, folder: Path, /) -> tuple[Any, list[str]]:
        """Return the data section with the files of ``--data DIR`` instead of its own, and notes. Raises DataError."""
        from edgeformer.data.sources import local_parts

        return local_parts(data, folder)

    def set_name(self, data: Any, split: str, /) -> str:
        """Return the name of the set that ``split`` selects: ``test`` is the test set of the protocol."""
        return getattr(data, "test_set", split) if split == "test" else split

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

    def read_file(
        self, data: Any, reader: TextReader, path: Path, columns: Columns | None = None, *, as_trained: bool = False
    ) -> Any:
        """Encode a labelled or plain file as the model's sets; ``columns``: None: detect them. Raises DataError."""
        return self.encode_rows(data, reader, self.file_texts(data, path, columns), as_trained=as_trained)

    def available_sets(self, data: Any) -> dict[str, LabelledTexts]:
        """Return the texts of every set that exists for an imported model. Raises DataError."""
        from edgeformer.data.sources import load_parts
        from edgeformer.data.splits import make_sets, set_parts

        names = [name for name, parts in set_parts(data).items() if parts]
        return make_sets(data, names, load_parts(data))

    def set_texts(self, data: Any, name: str) -> LabelledTexts:
        """Read one set without encoding it: ``train``, ``validation`` or a test set by name.

        Pairs of an embedding model are flat: rows 2i and 2i + 1 are pair i. Raises InputError (no such set), DataError.
        """
        from edgeformer.data.prepare import set_texts

        return set_texts(data, name)

    def file_texts(self, data: Any, path: Path, columns: Columns | None = None) -> LabelledTexts:
        """Read a file without encoding it, with the columns and labels of ``data``. Raises as :meth:`set_texts`."""
        from edgeformer.data.prepare import file_texts

        return file_texts(path, data, columns)

    def encode_rows(self, data: Any, reader: TextReader, texts: LabelledTexts, *, as_trained: bool = False) -> Any:
        """Encode texts of :meth:`set_texts` or :meth:`file_texts`. ``as_trained``: see :class:`Origin`."""
        return decode_labels(encode(texts, reader.tokenizer, data.max_length), data, texts.texts)

    def reader(
        self,
        tokenizer: Path | TokenizerConfig,
        data: Any,
        vocabulary: int,
        described: Mapping[str, Any] = MappingProxyType({}),
    ) -> TextReader:
        """Load the tokenizer file of a trained model, or the tokenizer of a recipe. Raises DataError.

        ``described``: its tokenizer_config.json.
        """
        config = FileTokenizer(kind="file", path=str(tokenizer)) if isinstance(tokenizer, Path) else tokenizer
        if self.writes_text:
            loaded = load_language_tokenizer(config, vocab_size=vocabulary, training_texts=None, is_padded=True)
            bounds = TextBounds.of(loaded, described)
            return TextReader(loaded, bounds.boundary, vocabulary, bounds)
        cleaning = getattr(data, "cleaning", "none")  # data of imported encoders has no cleaning step
        loaded = load_tokenizer(config, cleaning=cleaning, vocab_size=vocabulary, training_texts=None)
        return TextReader(loaded, special_ids(loaded).pad, vocabulary)

    def trim(
        self, data: Any, tokenizer: Tokenizer, trained_on: Mapping[str, str], keeping: Keeping
    ) -> tuple[Trimmed, Vocabulary]:
        """Remove the tokens that the training text does not use, and measure the effect. Raises EdgeformerError."""
        if not self.can_trim:
            raise InputError(
                "--vocab-trim: only the vocabulary of a classifier or embedding model can be trimmed, because a "
                "language model predicts its whole vocabulary; leave it out"
            )
        from edgeformer.data.trimming import trim_to_training

        return trim_to_training(data, tokenizer, trained_on, keeping)

    def batch(
        self, rows: Any, numbers: NDArray[np.integer], pad: int, *, pad_to: int | None = None
    ) -> dict[str, Int64s]:
        """Return input_ids, attention_mask [B, S] and labels [B, …] of the rows ``numbers``, padded to the longest.

        ``pad_to``: pad to this many tokens and count padding as text (reproduces a defect of published code).
        """
        return {**collate(rows, numbers, pad), "labels": rows.labels[numbers]}

    def weight(self, batch: Arrays) -> int:
        """Return the number of rows or predicted tokens that count in the loss of a batch."""
        return int((batch["targets"] != IGNORED).sum()) if "targets" in batch else len(batch["labels"])

    def example(self, recipe: Any, rows: int) -> dict[str, Int64s]:
        """Return a batch of zeros with ``rows`` rows of the recipe's full length, for memory planning."""
        length = recipe.data.tokens_at_once
        if self.unit == "tokens":
            names = ["input_ids", "targets", *(["positions"] if recipe.data.mode == "packed" else [])]
            return {name: np.zeros((rows, length), dtype=np.int64) for name in names}
        offsets = length * np.arange(rows + 1, dtype=np.int64)
        encoded = Encoded(np.zeros(rows * length, dtype=np.int32), offsets, np.zeros(rows, dtype=np.int64), 0)
        return self.batch(decode_labels(encoded, recipe.data), np.arange(rows), 0)

    def evaluation_rows(self, longest: int) -> int:
        """Return how many rows training evaluates in one call if the longest has ``longest`` tokens."""
        return max(1, EVALUATION_TOKENS // max(1, longest)) if self.unit == "tokens" else EVALUATION_ROWS

    def call_batches(
        self, rows: Any, max_rows: int, vocabulary: int, *, losses: bool = False, first: int | None = None
    ) -> list[Int64s]:
        """Return row numbers of batches of at most ``max_rows`` rows whose outputs fit memory, longest rows first.

        ``vocabulary``: its size times the number of exits. ``losses``: the model returns losses instead of logits.
        ``first``: use only this many rows from the start.
        """
        lengths = rows.lengths[:first]
        if self.unit != "tokens":
            return ordered_batches(lengths, max_rows)
        return cut_batches(lengths, max_rows, EVALUATION_TOKENS if losses else max(1, LOGITS_BYTES // (4 * vocabulary)))

    # Scoring: meters, metric, selection of the kept weights, limits of a score drop, predictions.

    score_rows: Callable[..., Score]
    """Score outputs [n, …] of rows with labels [n, …] and a data section; absent in tasks with a meter of their
    own."""

    def meter(self, exits: Sequence[int] = (), records: ExitRecords | None = None, data: Any = None) -> Meter:
        """Return a new meter of the outputs after the loops ``exits``, ascending; empty: one output.

        ``records`` receives every answer at every exit, for early exit.
        """
        records = records if self.has_confidence else None
        return RowsMeter(lambda logits, labels: self.score_rows(logits, labels, data), exits, records)

    def settled(self, recipe: Any, validation: Any) -> Any:
        """Return the recipe with the label thresholds that were best on the validation set, if it states none."""
        if getattr(recipe.data, "thresholds", validation) is not None:
            return recipe
        data = recipe.data.model_copy(update={"thresholds": validation.thresholds})
        return recipe.model_copy(update={"data": data})

    def row_answers(self, outputs: Arrays, batch: Arrays, data: Any) -> Array:
        """Return the input of :meth:`row_figures` from one call: logits [B, …], or the summed loss of each row [B]."""
        if self.unit != "tokens":
            return outputs["logits"]
        rows = zip(outputs["logits"], batch["targets"], batch["targets"] != IGNORED, strict=True)
        return np.array([token_losses(logits[mask], targets[mask]).sum() for logits, targets, mask in rows])

    row_figures: Callable[[Array, Any, Any], Float64s]
    """Compute figures [n, k] per row (embeddings: per pair) from :meth:`row_answers` of all rows, in their order, the
    rows and the data section."""

    metric_of: Callable[[Float64s], float]
    """Compute the metric from the figures of some rows; resampling may repeat rows."""

    def criterion(self, score: Any, training: Any) -> float:
        """Return the value that selects the kept epoch, smaller is better: the loss, or the negative metric."""
        name = getattr(training, "select_by", "loss")
        return float(score.loss if name == "loss" else -getattr(score, name))

    def record(self, score: Any) -> dict[str, float]:
        """Return a validation score as figures for metrics.jsonl."""
        values = {"val_loss": score.loss, f"val_{self.metric.name}": getattr(score, self.metric.name)}
        values |= {f"val_{name}": getattr(score, name) for name in self.recorded}
        values |= {f"val_loss_exit{loop}": exit_.loss for loop, exit_ in score.by_exit.items()}
        if (early := score.leaving_early) is not None:
            values |= {"early_exit_loss": early.loss, "early_exit_mean_loops": early.mean_loops}
        return values

    def describe(self, score: Any) -> str:
        """Return a validation score as one line of text."""
        if score.by_exit:
            exits = ", ".join(f"loop {loop} {exit_.perplexity:.2f}" for loop, exit_ in score.by_exit.items())
            return f"validation loss {score.loss:.4f}, perplexity per token: {exits}"
        heading = next(column.heading for column in self.columns if column.key == self.metric.name)
        return f"validation loss {score.loss:.4f}, {heading} {getattr(score, self.metric.name):.4f}"

    def rows(self, artifact: str, split: str, score: Any, *, leaks: bool = False) -> list[EvaluationRow]:
        """Return a score as rows of evaluation.json, without times: the full model first, then each earlier exit."""
        figures: dict[str, Any] = {column.key: getattr(score, column.key) for column in self.columns}
        full = EvaluationRow(artifact=artifact, split=split, leaks=leaks, **figures)
        earlier = list(score.by_exit.items())[:-1]
        changes = ({"exit": loop, **exit_.model_dump(), "word_perplexity": None} for loop, exit_ in earlier)
        return [full, *(full.model_copy(update=update) for update in changes)]

    def lost(self, score: Any, reference: Any, precision: Precision, *, trimmed: bool) -> str | None:
        """Explain why the score drop against FP32 on the same rows exceeds its limit; None: it does not.

        A drop of one row in ``n`` is always allowed, as noise. For graphs without text, parity limits the error.
        """
        if not self.reads_text:
            return None
        value = getattr(score, self.metric.name)
        drop = getattr(reference, self.metric.name) - value
        limit = max(MAX_TRIMMED_SCORE_DROP if trimmed else MAX_SCORE_DROP[precision], 1.5 / max(1, reference.n))
        if drop <= limit:
            return None
        heading = next(column.heading for column in self.columns if column.key == self.metric.name)
        on = f"{score.n:,} {self.unit}"
        return f"{heading} {value:.4f} is {drop:.4f} below FP32 on {on}; the limit is {limit:.4f}"

    def predictor(self, reader: TextReader, data: Any, max_rows: int | None = None) -> TextPredictor:
        """Return what reads texts for a model and makes answers of its outputs; ``max_rows``: of a call."""
        from edgeformer.tasks.scoring import TextPredictor  # which imports this module

        return TextPredictor(self, reader, data, max_rows)

    def predictions(
        self, texts: Sequence[Text], answers: Arrays, cut: NDArray[np.bool_], data: Any
    ) -> Sequence[Prediction]:
        """Return one prediction per text or pair. Raises InputError if models of this task make none.

        ``answers``: ``logits`` [n, C], and ``loops`` [n] if rows could exit early. ``cut``: texts were truncated, [n].
        """
        raise InputError(f"a {self.noun} has no labels; use edgeformer {self.use}")

    # Golden inputs: export and devices check them, benchmarks run them.

    parity: Callable[[Array, Array, Precision, str], Parity] = staticmethod(measure_parity)
    """Compare logits [n, C] computed with a provider with those of torch FP32; n counts rows or tokens."""

    def input_names(self, model: ModelConfig) -> tuple[str, ...]:
        """Return the inputs of a model's graphs, in the order of its arguments."""
        return (*self.golden_names[0], TOKEN_TYPES) if model.reads_types else self.golden_names[0]

    def golden_rows(self, rows: Any, seed: int) -> NDArray[np.integer]:
        """Draw the numbers of validation rows for the golden inputs; by default of 64."""
        return np.random.default_rng(seed).choice(len(rows), min(GOLDEN_ROWS, len(rows)), replace=False)

    def golden_inputs(self, prepared: Any, recipe: Any) -> dict[str, Int64s]:
        """Return the graph inputs and targets of :meth:`golden_rows`, int64 [n, …]."""
        rows = prepared.validation
        batch = self.batch(rows, self.golden_rows(rows, recipe.seed), prepared.pad)
        batch.setdefault(TOKEN_TYPES, np.zeros_like(batch["input_ids"]))
        return {name: batch[name] for name in (*self.input_names(recipe.model), *self.golden_names[1])}

    def golden_answers(self, references: Mapping[int, Array]) -> dict[str, Array]:
        """Return the arrays of torch FP32 logits that golden.npz stores. ``references``: exit → logits [n, C]."""
        by_exit = {exit_logits(exit_): logits for exit_, logits in references.items()}
        return {"logits": references[max(references)], **by_exit}

    def with_answers(self, rows: Any, logits: Array, data: Any) -> Any:
        """Return the rows with the model's own answers as labels, for an imported model without labelled data."""
        return replace(rows, labels=logits.argmax(axis=-1).astype(np.int64))

    def counted_logits(self, logits: Array, answers: Arrays) -> Array:
        """Return the logits [n, C] that parity and scores count, of all golden inputs: those of rows, or of tokens."""
        return logits.reshape(-1, logits.shape[-1])

    def right_answers(self, answers: Arrays, references: Mapping[int, Array]) -> Arrays:
        """Return the arrays that :meth:`golden_score` compares with: ``answers`` of the run, or torch FP32's logits."""
        return answers

    def golden_score(
        self, exit_: int, logits: Any, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> Score:
        """Score logits [n, C] of an exit on the golden inputs, or on the ``rows`` of them."""
        return self.score_rows(logits, answers["labels"] if rows is None else answers["labels"][rows], data)

    def golden_parity(
        self, golden: Arrays, logits: Any, exit_: int | None, precision: Precision, provider: str
    ) -> Parity:
        """Compare :meth:`golden_outputs` of an artifact (decode graphs: of the last positions) with golden.npz.

        ``exit_``: loop of the exit; None: the only or last one. Raises GoldenError: an array is missing or differs.
        """
        name = "logits" if exit_ is None else exit_logits(exit_)
        if name not in golden:
            raise GoldenError(f"golden.npz has no {name!r}, because an older version wrote it; export the run again")
        if golden[name].shape != logits.shape:
            raise GoldenError(
                f"golden.npz has logits {golden[name].shape}, but the artifact computes {logits.shape}; export the "
                "run again"
            )
        return self.parity(logits, golden[name], precision, provider)

    def golden_outputs(self, golden: Golden, run: Run, max_rows: int | None) -> Any:
        """Run a model on the golden inputs, ``max_rows`` (None: all) at once, and return the logits of all rows.

        INT8 graphs scale activations by the whole batch, so calls are as large as possible. Raises ArtifactError.
        """
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

    def axes(self, data: Any) -> Axes:
        """Return the axes of each input, see :data:`Axes`; empty for text."""
        inputs = getattr(data, "inputs", {})
        return {name: tuple(axis.takes or "" for axis in axes) for name, axes in inputs.items()}

    def fit_shape(self, data: Any, batch: int, seq: int) -> tuple[int, int]:
        """Replace the requested batch size and length where the model's own are fixed."""
        if self.reads_text:
            return batch, seq
        return (
            batch if data.takes("batch") else data.size_of("batch") or 1,
            seq if data.takes("seq") else data.size_of("seq") or 1,
        )

    def shape_notes(self, data: Any) -> list[str]:
        """Return notes on the input shapes for reports; none for text."""
        if self.reads_text:
            return []
        letters = {"batch": "B", "seq": "S"}
        shapes = {
            name: ", ".join(letters.get(axis.takes or "", str(axis.size)) for axis in axes)
            for name, axes in data.inputs.items()
        }
        inputs = ", ".join(f"{name} [{shape}]" for name, shape in shapes.items())
        legend = [f"{letters[role]}: {role}" for role in ("batch", "seq") if data.takes(role)]
        note = (
            f" ({', '.join(legend)} of a row)"
            if legend
            else "; all sizes are fixed, so --batch and --seq have no effect"
        )
        return [f"inputs: {inputs}{note}"]

    def input_shapes(self, data: Any, batch: int, seq: int) -> dict[str, tuple[int, ...]]:
        """Return input → shape if batch size and length do not determine it; empty for text."""
        sizes, inputs = {"batch": batch, "seq": seq}, getattr(data, "inputs", {})
        return {name: tuple(sizes.get(a.takes or "", a.size) for a in axes) for name, axes in inputs.items()}

    def calls(self, golden: Golden, axes: Axes, shape: tuple[int, int], count: int) -> list[dict[str, Array]]:
        """Make ``count`` different inputs of one shape (batch size, length) from the golden inputs."""
        return [dict(call) for call in make_buffers(golden, *shape, count)]

    # Files that clients of its models read.

    def class_names(self, data: Any) -> tuple[str, ...]:
        """Return the names of the model's outputs, in order; empty: they have none."""
        return tuple(data.labels) if self.predicts == "labels" else ()

    def client_config(self, prepared: Any, recipe: Any) -> dict[str, object]:
        """Return the keys of a run's config.json that belong to the task."""
        config: dict[str, object] = {}
        if labels := self.class_names(recipe.data):
            config["id2label"] = {str(number): label for number, label in enumerate(labels)}
            config["label2id"] = {label: number for number, label in enumerate(labels)}
        lengths = {self.length_key: recipe.data.tokens_at_once, self.pad_key: prepared.pad}
        return {**config, **lengths, **self.answer_config(recipe.data)}

    def answer_config(self, data: Any) -> dict[str, object]:
        """Return the keys of config.json for interpreting outputs."""
        thresholds = getattr(data, "effective_thresholds", None)
        return {} if thresholds is None else {"problem_type": "multi_label_classification", "thresholds": thresholds}

    def tokenizer_config(self, prepared: Any, recipe: Any) -> dict[str, object]:
        """Return tokenizer_config.json in the format of Hugging Face clients."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": recipe.data.tokens_at_once}
        token_of = prepared.tokenizer.id_to_token
        if self.writes_text:
            boundary = token_of(prepared.pad)
            return {**config, "model_input_names": ["input_ids"], "bos_token": boundary, "eos_token": boundary}
        special = special_ids(prepared.tokenizer)
        return {
            **config,
            "model_input_names": [*self.input_names(recipe.model)],
            **({"truncation_side": "left"} if cuts_left(prepared.tokenizer) else {}),
            "pad_token": token_of(special.pad),
            "unk_token": token_of(special.unk),
            "cls_token": token_of(special.cls),
        }

    def bundle_facts(self, recipe: Any, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of bundle.json: labels, max_length, pad_id. ``config``: config.json of the run."""
        names = self.class_names(recipe.data)
        labels = {"labels": names} if names else {}
        return {**labels, "max_length": recipe.data.tokens_at_once, "pad_id": int(config[self.pad_key])}

    def card_lines(self, recipe: Any) -> list[str]:
        """Return Markdown list items for the model card, such as labels and lengths."""
        data: DataConfig = recipe.data
        lines = [f"**Labels:** {', '.join(map(markdown, data.labels))}; at most {data.max_length} tokens"]
        omitted = [f"some rows of a source of part {part}" for part in data.parts if data.sampled(part)]
        for key in ("longest", "shortest"):
            if (share := getattr(data, key)) is not None:
                omitted.append(f"the {key} {share:.4g} of the texts, by words")
        if data.balance is not None:
            omitted.append(f"equal numbers of each {data.balance.replace('-and-', ' of each ')}")
        omitted += [f"of the {name} set {amount:,}" for name, amount in data.rows.items()]
        if omitted:
            lines.append(f"**Only some rows:** {markdown('; '.join(omitted))}")
        if (thresholds := getattr(data, "effective_thresholds", None)) is not None:
            limits = (f"{markdown(label)} {threshold:.3f}" for label, threshold in thresholds.items())
            lines.append(f"**Assigned from probability:** {', '.join(limits)}")
        return lines


def max_call_tokens(task: Task, max_positions: int | None, max_length: int | None) -> int | None:
    """Return the largest number of tokens in one call of a model; None: unlimited. Generation exceeds max_length."""
    truncation = max_length if task.reads_text and not task.writes_text else None
    return min((length for length in (max_positions, truncation) if length is not None), default=None)


def make_buffers(golden: Golden, batch: int, seq: int, count: int = 8) -> list[dict[str, Tokens]]:
    """Make ``count`` different text inputs of shape [batch, seq] from the golden rows in turn, cut or repeated.

    Real text keeps confidence exits and embedding lookups realistic; different buffers defeat caches.
    """
    rows: list[Tokens] = []
    for row in golden.texts():
        repeated = row[1:] if row.size > 1 else row  # the first token ([CLS]) is not repeated
        padding = np.resize(repeated, max(0, seq - row.size))
        rows.append(np.concatenate([row, padding])[:seq])
    buffers: list[dict[str, Tokens]] = []
    for number in range(count):
        batch_rows = [rows[(number * batch + offset) % len(rows)] for offset in range(batch)]
        ids = np.ascontiguousarray(np.stack(batch_rows), dtype=np.int64)
        further = {"attention_mask": np.ones_like(ids), TOKEN_TYPES: np.zeros_like(ids)}
        buffers.append({"input_ids": ids, **{name: further[name] for name in further if name in golden.arrays}})
    return buffers
