"""Embedding: one vector per text; texts of similar meaning have vectors of similar direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import PairsConfig, Similarity
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import Parity, Precision
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import Recipe, TrainingConfig
from edgeformer.artifacts.scores import Score
from edgeformer.data.encoding import Encoded, Prepared, encode_prompted
from edgeformer.data.rows import LabelledTexts, Text, check_unchanged
from edgeformer.tasks.arrays import Array, Arrays, Batch, Bools, Float64s, Floats, Int64s, RowNumbers
from edgeformer.tasks.metric import Metric, ScoreColumn, as_parity, rank_correlation, spearman
from edgeformer.tasks.task import MAX_CORRELATION_DROP, Prediction, TextReader
from edgeformer.tasks.texts import GOLDEN_ROWS, TextTask

if TYPE_CHECKING:
    from edgeformer.data.sources import Columns
    from edgeformer.data.trimming import Keeping
    from edgeformer.tasks.task import Trim


class EmbeddingRecipe(Recipe):
    """Recipe of an imported encoder, which maps a text to one vector. Its ``training`` section is not used."""

    task: Literal["embedding"]
    data: PairsConfig
    training: TrainingConfig


class EmbeddingScore(Score):
    """Quality of vectors, measured on human-scored pairs or against the vectors of the FP32 model."""

    n: int = Field(description="pairs, or texts if there are no pairs")
    similarity: float = Field(
        description="`pairs`: Spearman's rank correlation of similarities (by default cosines) with the scores; "
        "`fp32`: mean cosine with the vectors of the whole model in torch FP32; 0 if they are not finite, or all equal"
    )
    compared_with: Literal["pairs", "fp32"]


def unit_rows(vectors: Floats) -> Float64s:
    """Scale rows [n, d] to length 1, in float64; rows of zeros stay zero."""
    wide = vectors.astype(np.float64)
    result: Float64s = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return result


def row_cosines(first: Floats, second: Floats) -> Float64s:
    """Return the cosine of each row of ``first`` with the same row of ``second``, both [n, d] → [n]."""
    result: Float64s = (unit_rows(first) * unit_rows(second)).sum(axis=1)
    return result


def measure_of(data: Any) -> Similarity:
    """Return how vectors of a model with this ``data`` are compared."""
    measure: Similarity = getattr(data, "similarity", "cosine")
    return measure


def similarities(first: Floats, second: Floats, measure: Similarity) -> Float64s:
    """Compare rows [n, d] with rows [m, d] → [n, m] as sentence-transformers does: a distance is negative."""
    if measure == "cosine":
        return np.asarray(unit_rows(first) @ unit_rows(second).T)
    first, second = first.astype(np.float64), second.astype(np.float64)
    if measure == "dot":
        return np.asarray(first @ second.T)
    order = 2 if measure == "euclidean" else 1
    return -np.stack([np.linalg.norm(first - row, ord=order, axis=1) for row in second], axis=1)


def pair_similarities(vectors: Floats, data: Any) -> Float64s:
    """Return the similarity of rows 2i and 2i + 1 of ``vectors`` [2m, d], [m]."""
    if (measure := measure_of(data)) == "cosine":
        return row_cosines(vectors[::2], vectors[1::2])
    pairs = zip(vectors[::2, None], vectors[1::2, None], strict=True)
    return np.array([similarities(first, second, measure)[0, 0] for first, second in pairs], dtype=np.float64)


def pairs_score(vectors: Floats, scores: NDArray[np.int64], data: Any = None) -> EmbeddingScore:
    """Score flat pairs: rows 2i and 2i + 1 of ``vectors`` [2m, d] and ``scores`` [2m] are pair i."""
    similar = pair_similarities(vectors, data)
    similarity = rank_correlation(similar, scores[::2]) if np.isfinite(similar).all() else 0.0
    return EmbeddingScore(n=len(similar), similarity=similarity, loss=1 - similarity, compared_with="pairs")


def vector_parity(vectors: Floats, reference: Floats, precision: Precision, provider: str) -> Parity:
    """Compare vectors [n, d] with those of torch FP32.

    Top-1 agreement is the share of rows whose nearest other row of the reference stays the same.
    """
    unit_reference = unit_rows(reference)
    nearest_rows = []
    for rows in (vectors, reference):
        cosine = unit_rows(rows) @ unit_reference.T
        np.fill_diagonal(cosine, -np.inf)
        nearest_rows.append(cosine.argmax(axis=1))
    error = np.abs(vectors - reference)
    return as_parity(error, float(reference.std()), nearest_rows[0] == nearest_rows[1], precision, provider)


@dataclass(frozen=True)
class TextVector(Prediction):
    """The vector of one text, float32 [d]."""

    keys = ("truncated", "vector")

    vector: NDArray[np.float32]


VectorKind = Literal["float32", "int8", "binary"]
"""Numbers of a stored vector. Of a vector with d numbers, int8 takes d bytes and binary d / 8."""


def check_vector_kind(name: str, data: Any, kind: VectorKind) -> None:
    """Raise InputError if quantised vectors would lose what a model's similarity compares; ``name``: the model's."""
    measure = measure_of(data)
    if kind != "float32" and measure != "cosine":
        raise InputError(
            f"--vectors {kind}: {name} compares vectors by {measure}, which needs their lengths, and {kind} vectors "
            "have only directions; leave it out"
        )


RECALL_AT, _LOSS_TEXTS = 10, 1000
"""Nearest texts that are compared, and texts that the loss of quantised vectors is measured on."""


def quantize_vectors(vectors: NDArray[np.float32], kind: VectorKind) -> NDArray[Any]:
    """Return vectors [n, d] as they are stored: int8 [n, d], or the signs as bits, uint8 [n, ⌈d / 8⌉].

    The scale of INT8 is each vector's own (its largest number becomes ±127), because cosines do not depend on it. A bit
    is 1 for a positive number; the first number is the highest bit of the first byte.
    """
    if kind == "int8":
        largest = np.abs(vectors).max(axis=1, keepdims=True)
        return np.asarray(np.rint(vectors * (127 / np.where(largest > 0, largest, 1))), dtype=np.int8)
    return np.asarray(np.packbits(vectors > 0, axis=1) if kind == "binary" else vectors)


def stored_units(vectors: NDArray[np.float32], kind: VectorKind) -> Float64s:
    """Return vectors [n, d] as a search compares them: quantised, of length 1; bits are −1 and 1.

    The cosine of two binary vectors is 1 − 2 · Hamming distance / d.
    """
    return unit_rows(np.where(vectors > 0, 1.0, -1.0) if kind == "binary" else quantize_vectors(vectors, kind))


@dataclass(frozen=True)
class QuantizationLoss:
    """Difference of the cosines of quantised vectors from those of the float32 vectors."""

    kind: VectorKind
    texts: int  # of which each is compared with all others
    rank_correlation: float | None  # Spearman's, of all cosines; None: there are fewer than three texts
    recall_at_10: float | None  # mean share of the nearest 10 texts that stay so; None: there are fewer than twelve

    def sentence(self) -> str:
        """Describe the loss for people."""
        if self.rank_correlation is None:
            return f"{self.kind} vectors: too few texts to compare them with float32"
        recall = f", recall@{RECALL_AT} {self.recall_at_10:.4f}" if self.recall_at_10 is not None else ""
        correlation = f"rank correlation of cosines {self.rank_correlation:.4f}"
        return f"{self.kind} vectors against float32 on {self.texts:,} texts: {correlation}{recall}"


@dataclass(eq=False)
class VectorStore:
    """Makes the stored vectors of answers, and measures the loss on the first ones."""

    kind: VectorKind
    _sample: list[NDArray[np.float32]] = field(default_factory=list, init=False)

    def add(self, answers: Sequence[Any]) -> NDArray[np.float32]:
        """Return the float32 vectors [n, d] of answers (one or more), and remember the first ones."""
        vectors = [answer.vector for answer in answers]
        self._sample += vectors[: _LOSS_TEXTS - len(self._sample)]
        return np.stack(vectors)

    def loss(self) -> QuantizationLoss | None:
        """Compare the vectors with float32; None: they are float32."""
        count = len(self._sample)
        if self.kind == "float32":
            return None
        if count < 3:
            return QuantizationLoss(self.kind, count, None, None)
        units = (unit_rows(np.stack(self._sample)), stored_units(np.stack(self._sample), self.kind))
        exact, stored = (vectors @ vectors.T for vectors in units)
        pairs, recall = np.triu_indices(count, 1), None
        correlation = spearman(exact[pairs], stored[pairs])
        if count >= RECALL_AT + 2:
            nearest = []
            for cosine in (exact, stored):
                np.fill_diagonal(cosine, -np.inf)
                nearest.append(np.argsort(-cosine, axis=1, kind="stable")[:, :RECALL_AT])
            recall = float((nearest[0][:, :, None] == nearest[1][:, None, :]).any(axis=2).mean())
        return QuantizationLoss(self.kind, count, correlation if isfinite(correlation) else None, recall)


MAX_COSINE_DROP: dict[Precision, float] = {"fp32": 0.0001, "fp16": 0.0005, "int8": 0.02, "int4": 0.05}
"""Largest allowed drop of the mean cosine with the vectors of the whole FP32 model, without scored pairs."""

MAX_TRIMMED_DROP = {"fp32": 0.03, "pairs": 0.015}
"""Largest allowed drop with a trimmed vocabulary, by the reference of the score, at any precision."""


class Embedding(TextTask):
    """One vector per text. Models are imported with their weights, not trained."""

    name = "embedding"
    noun = "text embedding model"
    recipe_type = EmbeddingRecipe
    score_type = EmbeddingScore
    metric = Metric("similarity", "similarity", 4)
    columns = (ScoreColumn("n", "pairs", None), metric, ScoreColumn("loss", "loss", 4))
    budget = None
    has_vectors = True
    agreement = "same nearest text"
    texts_per_row = 2
    row_noun = "pairs"
    reads_singly = True  # trained on pairs, but each text is read separately
    pipeline_tag = "sentence-similarity"
    golden_names = ("input_ids", "attention_mask"), ()
    score_note = (
        "Similarity: Spearman's rank correlation between the cosines of pairs and their scores; on golden inputs the "
        "mean cosine with the vectors of the whole model in FP32. Loss is 1 − similarity."
    )
    golden_note = "cosine with the FP32 vectors, which says nothing about the quality of the model"

    score_rows = staticmethod(pairs_score)
    parity = staticmethod(vector_parity)

    def prepare(self, recipe: EmbeddingRecipe, cache: Path, progress: Progress, /) -> Prepared[Encoded]:
        raise InputError(
            f"{recipe.name}: embedding models are not trained here; import one: edgeformer import hf PATH, or train a "
            "recipe with task: classification"
        )

    def available_sets(self, data: PairsConfig, /) -> dict[str, LabelledTexts]:
        names = [name for name in ("train",) if name in data.parts]
        names += ["validation", "test"] if data.parts.keys() - {"train"} else []
        return {name: self.set_texts(data, name) for name in names}

    def set_texts(self, data: PairsConfig, name: str, /) -> LabelledTexts:
        """Read one set: ``train`` is texts without scores, every other set is flat pairs."""
        from edgeformer.data.prepare import read_pairs, read_texts
        from edgeformer.data.splits import IMPORTED_SETS, missing_set, unknown_set

        part = next((part for part in IMPORTED_SETS.get(name, (name,)) if part in data.parts), None)
        if part is None:
            raise missing_set(name) if name in IMPORTED_SETS else unknown_set(name, [*IMPORTED_SETS, *data.parts])
        return read_texts(data.parts[part]) if name == "train" else read_pairs(data.parts[part], f"data.parts.{part}")

    def file_texts(self, data: PairsConfig, path: Path, columns: Columns | None = None, /) -> LabelledTexts:
        from edgeformer.data.prepare import read_pairs
        from edgeformer.data.sources import pairs_source

        scored = (source for part, sources in data.parts.items() if part != "train" for source in sources)
        like = next((source for source in scored if source.text_pair is not None), None)
        source = pairs_source(path, like, columns).model_copy(update={"skip_unlabelled": False})
        return read_pairs([source], str(path))

    def encode_rows(
        self, data: PairsConfig, reader: TextReader, texts: LabelledTexts, *, as_trained: bool = False
    ) -> Encoded:
        """Encode texts with the default prompt."""
        encoded, _ = encode_prompted(reader.tokenizer, texts.texts, data)
        return replace(encoded, labels=texts.labels, empty=texts.empty)

    def trim(self, data: PairsConfig, tokenizer: Tokenizer, trained_on: Mapping[str, str], keeping: Keeping) -> Trim:
        """Trim to the part ``train``; measure the effect on the other parts, or on every tenth text of ``train``."""
        from edgeformer.data.prepare import read_texts
        from edgeformer.data.streaming import Stream
        from edgeformer.data.trimming import trim_to_stream

        train = self.set_texts(data, "train")
        check_unchanged("train", train.fingerprint(), trained_on, "export without --vocab-trim")
        evaluation_sources = [source for part, sources in data.parts.items() if part != "train" for source in sources]
        if evaluation_sources:
            kept, evaluated = train, read_texts(evaluation_sources)
        else:
            is_tenth = np.arange(len(train)) % 10 == 9
            kept, evaluated = (train.take(np.flatnonzero(mask)) for mask in (~is_tenth, is_tenth))
        other_texts = evaluated if len(evaluated) else kept
        if data.prompts:
            kept = LabelledTexts.unlabelled([*kept.texts, *data.prompts.values()])
        return trim_to_stream(Stream.of_texts(kept), other_texts, tokenizer, data.max_length, keeping=keeping)

    def batch(self, rows: Encoded, numbers: RowNumbers, pad: int, *, pad_to: int | None = None) -> Batch:
        """Return input_ids, attention_mask int64 [B, S]; labels (scores in millionths) and row numbers, int64 [B]."""
        return {**super().batch(rows, numbers, pad), "rows": np.asarray(numbers, dtype=np.int64)}

    def row_figures(self, answers: Array, rows: Encoded, data: PairsConfig) -> Float64s:
        """Return similarity and score of every pair: [n / 2, 2]."""
        return np.stack([pair_similarities(answers, data), rows.labels[::2].astype(np.float64)], axis=1)

    def metric_of(self, figures: Float64s) -> float:
        return rank_correlation(*figures.T)

    def lost(
        self, score: EmbeddingScore, reference: EmbeddingScore, precision: Precision, *, trimmed: bool
    ) -> str | None:
        """Explain why the rank correlation on pairs, or the mean cosine with FP32 vectors, drops too far.

        On pairs a drop of 1 / n is always allowed: one pair that changes its rank is within chance. Vectors that rank
        nothing are always refused, also if those of FP32 rank nothing.
        """
        by_pairs = score.compared_with == "pairs"
        figure = "rank correlation" if by_pairs else "mean cosine with the vectors of FP32"
        rows = f"{reference.n:,} {'pairs' if by_pairs else 'texts'}"
        drop = reference.similarity - score.similarity
        if score.similarity == 0 or not isfinite(drop):
            return (
                f"{figure} is {score.similarity:g} on {rows}: its cosines are not finite, all equal, or unrelated to "
                "the reference"
            )
        limit = max(
            MAX_TRIMMED_DROP[score.compared_with] if trimmed else 0.0,
            (MAX_CORRELATION_DROP if by_pairs else MAX_COSINE_DROP)[precision],
            1 / reference.n if by_pairs else 0.0,
        )
        if drop <= limit:
            return None
        return f"{figure} {score.similarity:.4f} is {drop:.4f} below FP32 on {rows}; the limit is {limit:.4f}"

    def predictions(self, texts: Sequence[Text], answers: Arrays, cut: Bools, data: PairsConfig) -> list[TextVector]:
        rows = zip(texts, cut.tolist(), answers["logits"], strict=True)
        return [TextVector(text, truncated, vector) for text, truncated, vector in rows]

    def golden_rows(self, rows: Encoded, seed: int) -> NDArray[np.integer]:
        """Draw 64 different rows."""
        different = np.array([*{rows.row(number).tobytes(): number for number in range(len(rows))}.values()])
        return np.random.default_rng(seed).choice(different, min(GOLDEN_ROWS, len(different)), replace=False)

    def right_answers(self, answers: Arrays, references: Mapping[int, Array]) -> Arrays:
        """Return the vectors of the whole model, with which models with a trimmed vocabulary are compared, too."""
        return answers or {f"reference_exit{exit_}": vectors for exit_, vectors in references.items()}

    def golden_score(
        self, exit_: int, logits: Array, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> EmbeddingScore:
        """Score vectors [n, d] by their mean cosine with those of the whole model in FP32."""
        reference = answers[f"reference_exit{exit_}"]
        reference = reference if rows is None else reference[rows]
        mean = float(row_cosines(logits, reference).mean())
        similarity = mean if isfinite(mean) else 0.0
        return EmbeddingScore(n=len(logits), similarity=similarity, loss=1 - similarity, compared_with="fp32")

    def card_lines(self, recipe: EmbeddingRecipe) -> list[str]:
        data = recipe.data
        return [f"**Input:** one text of at most {data.max_length} tokens; compare vectors by {data.similarity}"]


TASK = Embedding()
