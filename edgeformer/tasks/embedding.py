"""Embedding: one vector per text, such that texts of similar meaning have vectors of similar direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import FileTokenizer, PairsConfig
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.manifest import Parity, Precision, Vocabulary
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.recipe import Recipe, TrainingConfig
from edgeformer.artifacts.scores import EvaluationRow, Score
from edgeformer.data.encoding import Encoded, Prepared, encode
from edgeformer.data.rows import LabelledTexts, Text
from edgeformer.data.tokenization import load_tokenizer, special_ids
from edgeformer.tasks.early_exit import Departures, ExitNotes, exit_logits
from edgeformer.tasks.labels import GOLDEN_ROWS, OneAnswer
from edgeformer.tasks.metric import Array, Arrays, Meter, Metric, ScoreColumn
from edgeformer.tasks.parity import as_parity
from edgeformer.tasks.task import Float64s, Int64s, Origin, Prediction, TextReader

if TYPE_CHECKING:
    from edgeformer.data.sources import Columns
    from edgeformer.data.trimming import Keeping, Trimmed


# The part of a recipe that is the embedding task's own.


class EmbeddingRecipe(Recipe):
    """An encoder that makes one vector of a text. It was trained elsewhere: the ``training`` section is not used."""

    task: Literal["embedding"]
    data: PairsConfig
    training: TrainingConfig


# Scores of an embedding model from its vectors, and how close vectors are to those of torch FP32.


class EmbeddingScore(Score):
    """How good vectors are: by pairs that people have scored, or else by those of the model in FP32."""

    n: int = Field(description="pairs, or texts where there are no pairs")
    similarity: float = Field(
        description="`pairs`: Spearman's rank correlation of cosines with the scores; `fp32`: mean cosine with the "
        "vectors that the whole model computes in torch FP32; 0 where cosines are not finite or, of pairs, all equal"
    )
    compared_with: Literal["pairs", "fp32"]


def unit_rows(vectors: NDArray[np.floating]) -> Float64s:
    """Rows [n, d] scaled to length 1, in float64; one of zeros stays so."""
    wide = vectors.astype(np.float64)
    result: Float64s = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return result


def row_cosines(first: NDArray[np.floating], second: NDArray[np.floating]) -> Float64s:
    """Cosine of each row of ``first`` with the same row of ``second``, both [n, d] → [n]."""
    result: Float64s = (unit_rows(first) * unit_rows(second)).sum(axis=1)
    return result


def spearman(first: NDArray[np.number[Any]], second: NDArray[np.number[Any]]) -> float:
    """Rank correlation of two lists [n]; equal values share the mean of their ranks. NaN where one does not vary."""
    # Not scipy.stats.spearmanr: `evaluate` runs on devices, and the base installation has no scipy.
    ranks = [_ranks(values) for values in (first, second)]
    centred = [values - values.mean() for values in ranks]
    spread = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / spread if spread else float("nan")


def _ranks(values: NDArray[np.number[Any]]) -> Float64s:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    result: Float64s = (last - (count - 1) / 2)[place]
    return result


def pairs_score(vectors: NDArray[np.floating], scores: NDArray[np.int64]) -> EmbeddingScore:
    """Of flat pairs: rows 2i and 2i + 1 of ``vectors`` [2m, d] are pair i, and so of ``scores`` [2m]."""
    close = row_cosines(vectors[::2], vectors[1::2])
    found = _finite(spearman(close, scores[::2]) if np.isfinite(close).all() else float("nan"))
    return EmbeddingScore(n=len(vectors) // 2, similarity=found, loss=1 - found, compared_with="pairs")


def reference_score(vectors: NDArray[np.floating], reference: NDArray[np.floating]) -> EmbeddingScore:
    """Of ``vectors`` [n, d] against those of the whole model in FP32."""
    found = _finite(float(row_cosines(vectors, reference).mean()))
    return EmbeddingScore(n=len(vectors), similarity=found, loss=1 - found, compared_with="fp32")


def _finite(similarity: float) -> float:
    """JSON has no NaN, and what ranks nothing is no better than chance: 0."""
    return similarity if np.isfinite(similarity) else 0.0


def vector_parity(
    vectors: NDArray[np.float32], reference: NDArray[np.float32], precision: Precision, provider: str
) -> Parity:
    """Compare vectors [n, d] with torch FP32's.

    Top-1 agreement is that of a search: the share of rows to which, among all other rows of the reference, the same
    one is nearest.
    """
    error = np.abs(vectors - reference)
    agrees = _nearest_other(vectors, reference) == _nearest_other(reference, reference)
    return as_parity(error, float(reference.std()), agrees, precision, provider)


def _nearest_other(vectors: NDArray[np.floating], among: NDArray[np.floating]) -> NDArray[np.intp]:
    close = unit_rows(vectors) @ unit_rows(among).T
    np.fill_diagonal(close, -np.inf)
    found: NDArray[np.intp] = close.argmax(axis=1)
    return found


class PairsMeter(Meter):
    """Keeps the vectors of every row, which come longest first; the two of a pair are put together in the end.

    Args:
        exits: loops that answer, in rising order; fewer than two: there is one answer.
    """

    def __init__(self, exits: Sequence[int] = ()) -> None:
        self._names = {exit_logits(loop): loop for loop in exits} if len(exits) > 1 else {"logits": 0}
        self._vectors: dict[str, list[NDArray[Any]]] = {name: [] for name in self._names}
        self._rows: list[NDArray[np.int64]] = []
        self._scores: list[NDArray[np.int64]] = []

    def add(self, outputs: Arrays, batch: Arrays) -> None:
        """Count one batch: vectors [B, d] under ``logits`` (with several exits ``logits_exitN``), and ``rows`` [B]."""
        self._rows.append(batch["rows"])
        self._scores.append(batch["labels"])
        for name in self._names:
            self._vectors[name].append(outputs[name])

    def score(self, words: int | None = None) -> EmbeddingScore:
        """The last exit's score of all pairs so far. Raises ValueError where there is none."""
        return self._score(list(self._names)[-1])

    def earlier(self) -> dict[int, Score]:
        return {loop: self._score(name) for name, loop in list(self._names.items())[:-1]}

    def _score(self, name: str) -> EmbeddingScore:
        if not self._rows:
            raise ValueError("cannot score an empty set")
        order = np.argsort(np.concatenate(self._rows))
        return pairs_score(np.concatenate(self._vectors[name])[order], np.concatenate(self._scores)[order])


# What an embedding model answers to one text, and how close texts are by it.


@dataclass(frozen=True)
class TextVector(Prediction):
    """The vector of one text, float32 [d]."""

    vector: NDArray[np.float32]

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), "vector": self.vector.tolist()}


def cosines(first: Sequence[TextVector], second: Sequence[TextVector]) -> NDArray[np.float64]:
    """Cosine of every vector of ``first`` with every one of ``second``, [len(first), len(second)]."""
    left, right = (unit_rows(np.stack([found.vector for found in one])) for one in (first, second))
    result: NDArray[np.float64] = left @ right.T
    return result


def nearest(asked: Sequence[TextVector], among: Sequence[TextVector], most: int) -> list[list[tuple[int, float]]]:
    """For each of ``asked`` up to ``most`` numbers of ``among`` with their cosines, the closest first."""
    found = cosines(asked, among)
    order = np.argsort(-found, axis=1, kind="stable")[:, :most]
    return [[(int(number), float(row[number])) for number in best] for row, best in zip(found, order, strict=True)]


# Embedding: data, metric, scoring and golden inputs of models that make one vector of a text.


COSINE_LOSS: dict[Precision, float] = {"fp32": 0.0001, "fp16": 0.0005, "int8": 0.02, "int4": 0.05}
"""What the mean cosine with the whole FP32 model's vectors may be below 1, where no scored pairs are known."""

PAIRS_LOSS: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.001, "int8": 0.01, "int4": 0.02}
"""Rank correlation that an artifact may lose against FP32 on the same pairs."""

TRIMMED_LOSS = {"fp32": 0.03, "pairs": 0.015}
"""The same for one with a trimmed vocabulary, whatever its precision, by what it is compared with."""

REFERENCE = "reference_exit{}"
"""Among the right answers: the whole FP32 model's vectors after an exit."""


class Embedding(OneAnswer):
    """One vector per text. Models are imported with their weights; none is trained here."""

    name: ClassVar[str] = "embedding"
    noun: ClassVar[str] = "sentence encoder"
    recipe_type: ClassVar[type[Recipe]] = EmbeddingRecipe
    score_type: ClassVar[type[Score]] = EmbeddingScore
    metric: ClassVar[Metric] = Metric("similarity", True, 4, 0.0, 1.0, "--min-similarity")
    columns: ClassVar[tuple[ScoreColumn, ...]] = (
        ScoreColumn("n", "pairs", None),
        ScoreColumn("similarity", "similarity", 4),
        ScoreColumn("loss", "loss", 4),
    )
    predicts: ClassVar[Literal["labels", "vectors"] | None] = "vectors"
    has_confidence: ClassVar[bool] = False
    pipeline_tag: ClassVar[str] = "sentence-similarity"
    golden_names: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = ("input_ids", "attention_mask"), ()
    score_note: ClassVar[str] = (
        "Similarity: Spearman's rank correlation of the cosines of pairs with their scores; on golden inputs the mean "
        "cosine with the vectors of the whole model in FP32. Loss is 1 − similarity."
    )
    few: ClassVar[str] = "they say how close vectors are to FP32's, not how good they are"

    def prepare(self, recipe: EmbeddingRecipe, cache: Path, progress: Progress) -> Prepared[Encoded]:
        raise InputError(
            f"{recipe.name}: embedding models are not trained here; import one with edgeformer import hf PATH, or "
            "train a recipe with task: classification"
        )

    def local_data(self, data: PairsConfig, folder: Path) -> tuple[PairsConfig, list[str]]:
        from edgeformer.data.sources import imported_parts

        parts, notes = imported_parts(folder, scored=True)
        return data.model_copy(update={"parts": parts}), notes

    def set_name(self, data: PairsConfig, split: str) -> str:
        return split

    def read_set(self, data: PairsConfig, reader: TextReader, split: str, origin: Origin) -> Encoded:
        pairs = self._pairs(data, split)
        if pairs.fingerprint() != origin.trained_on.get(split, pairs.fingerprint()):
            raise DataError(
                f"the {split} set is not the one that this model was imported with; its data changed since. Restore "
                "the data, or score a file of its own with --data FILE"
            )
        return encode(pairs, reader.tokenizer, data.max_length, origin.cache)

    def _pairs(self, data: PairsConfig, split: str) -> LabelledTexts:
        from edgeformer.data.prepare import pair_part, read_pairs

        part = pair_part(data, split)
        return read_pairs(data.parts[part], f"data.parts.{part}")

    def read_file(
        self,
        data: PairsConfig,
        reader: TextReader,
        path: Path,
        columns: Columns | None = None,
        *,
        as_trained: bool = False,
    ) -> Encoded:
        from edgeformer.data.prepare import pairs_file

        return encode(pairs_file(path, data, columns), reader.tokenizer, data.max_length)

    def known_sets(self, data: PairsConfig) -> dict[str, LabelledTexts]:
        from edgeformer.data.prepare import read_texts

        train = {"train": read_texts(data.parts["train"])} if "train" in data.parts else {}
        scored = ("validation", "test") if data.parts.keys() - {"train"} else ()
        return train | {name: self._pairs(data, name) for name in scored}

    def set_texts(self, data: PairsConfig, name: str) -> LabelledTexts:
        """As :func:`known_sets` reads it: ``train`` is texts without scores, every other set is pairs."""
        from edgeformer.data.prepare import pair_part, read_texts

        return read_texts(data.parts[pair_part(data, "train")]) if name == "train" else self._pairs(data, name)

    def file_texts(self, data: PairsConfig, path: Path) -> LabelledTexts:
        from edgeformer.data.prepare import pairs_file

        return pairs_file(path, data)

    def encode_rows(self, data: PairsConfig, reader: TextReader, texts: LabelledTexts) -> Encoded:
        return encode(texts, reader.tokenizer, data.max_length)

    def reader(self, tokenizer: Path, data: PairsConfig, vocabulary: int) -> TextReader:
        config = FileTokenizer(kind="file", path=str(tokenizer))
        found = load_tokenizer(config, cleaning="none", vocab_size=vocabulary, training_texts=None)
        return TextReader(found, special_ids(found).pad, vocabulary)

    def trim(
        self, data: PairsConfig, tokenizer: Tokenizer, trained_on: Mapping[str, str], keeping: Keeping
    ) -> tuple[Trimmed, Vocabulary]:
        """To the texts of the part ``train``; its effect is seen on the other parts, else on every tenth text."""
        from edgeformer.data.prepare import pair_part, read_texts
        from edgeformer.data.trimming import trim_to_texts

        train = read_texts(data.parts[pair_part(data, "train")])
        if train.fingerprint() != trained_on.get("train", train.fingerprint()):
            raise DataError(
                "data.parts.train: is not the text that this model was imported with; restore it, or export without "
                "--vocab-trim"
            )
        others = [source for part, sources in data.parts.items() if part != "train" for source in sources]
        if others:
            return trim_to_texts(tokenizer, train, read_texts(others), data.max_length, keeping)
        tenth = np.arange(len(train)) % 10 == 9
        kept, held_out = (train.take(np.flatnonzero(which)) for which in (~tenth, tenth))
        return trim_to_texts(tokenizer, kept, held_out if len(held_out) else kept, data.max_length, keeping)

    def batch(
        self, rows: Encoded, numbers: NDArray[np.integer], pad: int, *, pad_to: int | None = None
    ) -> dict[str, Int64s]:
        """input_ids, attention_mask int64 [B, S]; labels (scores in millionths) and rows, their numbers, int64 [B]."""
        return {**super().batch(rows, numbers, pad), "rows": np.asarray(numbers, dtype=np.int64)}

    def meter(self, exits: Sequence[int] = (), notes: ExitNotes | None = None, data: Any = None) -> PairsMeter:
        """A vector has no probability, so nothing is noted for early exit."""
        return PairsMeter(exits)

    def row_figures(self, answers: Array, rows: Encoded, data: PairsConfig) -> Float64s:
        """Cosine and score of every pair: [n / 2, 2]."""
        return np.stack([row_cosines(answers[::2], answers[1::2]), rows.labels[::2].astype(np.float64)], axis=1)

    def metric_of(self, figures: Float64s) -> float:
        correlation = spearman(figures[:, 0], figures[:, 1])
        return correlation if isfinite(correlation) else 0.0

    def departures(self, found: Departures) -> dict[str, float | None]:
        return {"loss": found.loss}

    def criterion(self, score: EmbeddingScore, training: Any) -> float:
        return score.loss

    def record(self, score: EmbeddingScore) -> dict[str, float]:
        return {"val_loss": score.loss, "val_similarity": score.similarity}

    def describe(self, score: EmbeddingScore) -> str:
        return f"validation similarity {score.similarity:.4f}"

    def rows(self, artifact: str, split: str, score: EmbeddingScore, *, leaks: bool = False) -> list[EvaluationRow]:
        figures = score.model_dump(exclude={"compared_with"})
        return [EvaluationRow(artifact=artifact, split=split, leaks=leaks, **figures)]

    def lost(
        self, found: EmbeddingScore, reference: EmbeddingScore, precision: Precision, *, trimmed: bool
    ) -> str | None:
        """Rank correlation on pairs; without them, cosine with the whole model's vectors.

        A pair that changes its rank is no loss that could be told from chance, so 1 / n is always allowed on pairs.
        Vectors that rank nothing are always lost, also where those of FP32 do no better.
        """
        by_pairs = found.compared_with == "pairs"
        least = 1 / reference.n if by_pairs else 0.0
        bars = PAIRS_LOSS if by_pairs else COSINE_LOSS
        bar = max(TRIMMED_LOSS[found.compared_with] if trimmed else 0.0, bars[precision], least)
        drop = reference.similarity - found.similarity
        what = "rank correlation" if by_pairs else "mean cosine with the vectors of FP32"
        rows = f"{reference.n:,} {'pairs' if by_pairs else 'texts'}"
        if found.similarity == 0 or not isfinite(drop):
            why = "cosines are not finite, all equal, or in no relation to what they are compared with"
            return f"{what} is {found.similarity:g} on {rows}: its {why}"
        if drop > bar:
            return f"{what} {found.similarity:.4f} is {drop:.4f} below FP32's on {rows}; at most {bar:.4f} may be lost"
        return None

    def predictions(
        self, texts: Sequence[Text], answers: Arrays, cut: NDArray[np.bool_], data: PairsConfig
    ) -> list[TextVector]:
        found = zip(texts, cut.tolist(), answers["logits"], strict=True)
        return [TextVector(text, truncated, vector) for text, truncated, vector in found]

    def golden_inputs(self, prepared: Prepared[Encoded], recipe: EmbeddingRecipe) -> dict[str, Int64s]:
        """64 different rows of the validation set, drawn by the recipe's seed."""
        rows = prepared.validation
        different = np.array([*{rows.row(number).tobytes(): number for number in range(len(rows))}.values()])
        count = min(GOLDEN_ROWS, len(different))
        drawn = np.random.default_rng(recipe.seed).choice(different, count, replace=False)
        batch = self.batch(rows, drawn, prepared.pad)
        return {name: batch[name] for name in self.golden_names[0]}

    def right_answers(self, answers: Arrays, references: Mapping[int, Array]) -> Arrays:
        """The whole model's own vectors; a model that was made of it (with a trimmed vocabulary) is held to them."""
        return answers or {REFERENCE.format(exit_): vectors for exit_, vectors in references.items()}

    def golden_score(
        self, exit_: int, logits: Array, answers: Arrays, rows: Int64s | None = None, data: Any = None
    ) -> EmbeddingScore:
        reference = answers[REFERENCE.format(exit_)]
        return reference_score(logits, reference if rows is None else reference[rows])

    def parity(self, logits: Array, reference: Array, precision: Precision, provider: str) -> Parity:
        return vector_parity(logits, reference, precision, provider)

    def client_config(self, prepared: Prepared[Encoded], recipe: EmbeddingRecipe) -> dict[str, object]:
        return {"max_length": recipe.data.max_length, "pad_token_id": prepared.pad}

    def bundle_facts(self, recipe: EmbeddingRecipe, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"max_length": recipe.data.max_length, "pad_id": int(config["pad_token_id"])}

    def card_lines(self, recipe: EmbeddingRecipe) -> list[str]:
        return [f"**Input:** one text of at most {recipe.data.max_length} tokens; compare vectors by their cosine"]


TASK = Embedding()
