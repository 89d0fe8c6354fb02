"""Tasks of models that answer whole texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import DataConfig, FileTokenizer
from edgeformer.artifacts.errors import DataError
from edgeformer.artifacts.golden import TOKEN_TYPES
from edgeformer.artifacts.manifest import Precision
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.scores import Score
from edgeformer.artifacts.units import markdown
from edgeformer.data.batching import collate, cut_batches
from edgeformer.data.encoding import Encoded, Prepared, decode_labels
from edgeformer.data.rows import LabelledTexts, Text, number_labels
from edgeformer.data.tokenization import load_tokenizer, special_ids
from edgeformer.tasks.arrays import Array, Arrays, Batch, Bools, Float64s, Int64s, RowNumbers
from edgeformer.tasks.early_exit import ExitRecords
from edgeformer.tasks.metric import Meter, RowsMeter, ratio
from edgeformer.tasks.scoring import TextPredictor
from edgeformer.tasks.task import MAX_SCORE_DROP, MAX_TRIMMED_SCORE_DROP, Prediction, ReadConfig, RowSource, TextReader

if TYPE_CHECKING:
    from edgeformer.data.sources import Columns
    from edgeformer.data.trimming import Keeping
    from edgeformer.tasks.task import Trim

GOLDEN_ROWS = 64
EVALUATION_ROWS = 128


class TextTask(RowSource):
    """A model that answers whole texts. The defaults are those of one row of numbers for each labelled text."""

    budget: ClassVar[str | None] = "classification"
    can_trim: ClassVar[bool] = True
    can_answer: ClassVar[bool] = True
    reads_singly: ClassVar[bool] = False  # reads single texts, whatever its training data has
    meter_type: ClassVar[type[RowsMeter]] = RowsMeter
    predictor_type: ClassVar[type[TextPredictor]] = TextPredictor

    score_rows: Callable[..., Score]
    """Score outputs [n, …] of rows with labels [n, …] and a data section."""

    def prepare(self, recipe: Any, cache: Path, progress: Progress, /) -> Prepared[Any]:
        from edgeformer.data.prepare import prepare

        return prepare(recipe.data, recipe.tokenizer, recipe.model.vocab_size, cache, progress)

    def set_texts(self, data: Any, name: str, /) -> LabelledTexts:
        from edgeformer.data.prepare import set_texts

        return set_texts(data, name)

    def file_texts(self, data: Any, path: Path, columns: Columns | None = None, /) -> LabelledTexts:
        from edgeformer.data.sources import label_columns, read, replacement_source

        skipped: list[str] = []
        source = replacement_source(path, data.parts, columns, labels=label_columns(data.labels))
        rows = read(source, data.labels, data.separator, skipped=skipped)
        texts = LabelledTexts.of(number_labels(rows, data.labels, data.label_values or ()))
        if not len(texts):
            raise DataError(f"{path}: no row has a text")
        return replace(texts, empty=len(skipped))

    def sampled_rows(self, texts: LabelledTexts, max_rows: int, max_words: int, /) -> NDArray[np.int64]:
        size = self.texts_per_row
        count = len(texts) // size
        rows = np.unique(np.linspace(0, count - 1, min(count, max_rows)).astype(np.int64))
        return (size * rows[:, None] + np.arange(size, dtype=np.int64)).reshape(-1)

    def reader(self, tokenizer: Any, data: Any, vocabulary: int, described: ReadConfig = dict, /) -> TextReader:
        config = FileTokenizer(kind="file", path=str(tokenizer)) if isinstance(tokenizer, Path) else tokenizer
        cleaning = getattr(data, "cleaning", "none")  # data of imported encoders has no cleaning step
        loaded = load_tokenizer(config, cleaning=cleaning, vocab_size=vocabulary, training_texts=None)
        return TextReader(loaded, special_ids(loaded).pad, vocabulary)

    def encode_rows(self, data: Any, reader: TextReader, texts: LabelledTexts, *, as_trained: bool = False) -> Any:
        from edgeformer.data.prepare import encode_stored

        return decode_labels(encode_stored(texts, reader.tokenizer, data), data, texts.texts)

    def trim(self, data: Any, tokenizer: Tokenizer, trained_on: Mapping[str, str], keeping: Keeping) -> Trim:
        from edgeformer.data.trimming import trim_to_training

        return trim_to_training(data, tokenizer, trained_on, keeping)

    def batch(self, rows: Any, numbers: RowNumbers, pad: int, *, pad_to: int | None = None) -> Batch:
        return {**collate(rows, numbers, pad), "labels": rows.labels[numbers]}

    def example(self, recipe: Any, rows: int) -> Batch:
        length = recipe.data.tokens_at_once
        offsets = length * np.arange(rows + 1, dtype=np.int64)
        encoded = Encoded(np.zeros(rows * length, dtype=np.int32), offsets, np.zeros(rows, dtype=np.int64), 0)
        return self.batch(decode_labels(encoded, recipe.data), np.arange(rows), 0)

    def rows_at_once(self, longest: int) -> int:
        return EVALUATION_ROWS

    def call_batches(
        self, rows: Any, max_rows: int, vocabulary: int, *, losses: bool = False, first: int | None = None
    ) -> list[Int64s]:
        return cut_batches(rows.lengths[:first], max_rows)

    def golden_rows(self, rows: Any, seed: int) -> NDArray[np.integer]:
        """Draw the numbers of validation rows for the golden inputs; by default of 64."""
        return np.random.default_rng(seed).choice(len(rows), min(GOLDEN_ROWS, len(rows)), replace=False)

    def golden_inputs(self, prepared: Any, recipe: Any) -> Batch:
        rows = prepared.validation
        batch = self.batch(rows, self.golden_rows(rows, recipe.seed), prepared.pad)
        batch.setdefault(TOKEN_TYPES, np.zeros_like(batch["input_ids"]))
        return {name: batch[name] for name in (*self.input_names(recipe.model), *self.golden_names[1])}

    def meter(self, exits: Sequence[int] = (), records: ExitRecords | None = None, data: Any = None) -> Meter:
        records = records if self.confidence is not None else None
        return self.meter_type(lambda logits, labels: self.score_rows(logits, labels, data), exits, records)

    def row_answers(self, outputs: Arrays, batch: Arrays, data: Any) -> Array:
        return outputs["logits"]

    def metric_of(self, figures: Float64s) -> float:
        """Compute F1 from :meth:`row_figures` [n, 2], in the default: twice the hits, and predicted plus right ones."""
        return ratio(*figures.sum(axis=0))

    def lost(self, score: Any, reference: Any, precision: Precision, *, trimmed: bool) -> str | None:
        # A drop of one row in n is always allowed, as noise.
        value = getattr(score, self.metric.name)
        drop = getattr(reference, self.metric.name) - value
        limit = max(MAX_TRIMMED_SCORE_DROP if trimmed else MAX_SCORE_DROP[precision], 1.5 / max(1, reference.n))
        if drop <= limit:
            return None
        on = f"{score.n:,} {self.unit}"
        return f"{self.metric.heading} {value:.4f} is {drop:.4f} below FP32 on {on}; the limit is {limit:.4f}"

    def golden_score(
        self, exit_: int, logits: Any, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> Score:
        return self.score_rows(logits, answers["labels"] if rows is None else answers["labels"][rows], data)

    def predictor(self, reader: TextReader, data: Any, max_rows: int | None = None) -> TextPredictor:
        """Return what reads texts for a model and makes answers of its outputs; ``max_rows``: of a call."""
        return self.predictor_type(self, reader, data, max_rows)

    def predictions(self, texts: Sequence[Text], answers: Arrays, cut: Bools, data: Any) -> Sequence[Prediction]:
        """Return one prediction per text or pair, unless :meth:`predictor` makes them otherwise.

        ``answers``: ``logits`` [n, C], and ``loops`` [n] if rows could exit early. ``cut``: texts were truncated, [n].
        """
        raise NotImplementedError

    def with_answers(self, rows: Any, logits: Array, data: Any) -> Any:
        """Return the rows with the model's own answers as labels, for an imported model without labelled data."""
        return replace(rows, labels=logits.argmax(axis=-1).astype(np.int64))

    def reads_pairs(self, data: Any) -> bool | None:
        """Return whether a model reads pairs of texts, as its training data has them; None: mixed or unknown data."""
        if self.reads_singly:
            return False
        has_pair = {source.text_pair is not None for part in data.parts.values() for source in part}
        return has_pair.pop() if len(has_pair) == 1 else None

    def pairs_problem(self, data: Any, *, pairs: bool) -> str | None:
        """Explain why a model cannot read pairs (``pairs``) or single texts; None: it can."""
        if self.reads_pairs(data) in (None, pairs):
            return None
        if pairs:
            remedy = "give both texts separately" if self.reads_singly else "leave out the second texts"
            return f"this {self.noun} reads single texts; {remedy}"
        return f"this {self.noun} reads pairs of texts; add the second text of each pair"

    def max_call_tokens(self, max_positions: int | None, max_length: int | None) -> int | None:
        return min((length for length in (max_positions, max_length) if length is not None), default=None)

    def card_lines(self, recipe: Any) -> list[str]:
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
        return lines
