"""Regression: one number per text or pair of texts, such as a rating, or the relevance of a document to a query."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import Self

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.manifest import Parity, Precision
from edgeformer.artifacts.recipe import Recipe, TextTraining
from edgeformer.artifacts.scores import Score
from edgeformer.data.encoding import Encoded
from edgeformer.data.rows import SCORE_UNIT, Text
from edgeformer.tasks.arrays import Array, Arrays, Bools, Float64s, Floats, Int64s
from edgeformer.tasks.metric import Metric, ScoreColumn, as_parity, rank_correlation
from edgeformer.tasks.multilabel import probabilities
from edgeformer.tasks.task import MAX_CORRELATION_DROP, Prediction
from edgeformer.tasks.texts import GOLDEN_ROWS, TextTask

Activation = Literal["identity", "sigmoid"]

TOP = 10
"""Documents of a query that nDCG and MRR look at."""


class RegressionData(DataConfig):
    """Data of a model with one output. The label column holds numbers.

    If at least half of the rows of a set are pairs that share their first text, the pairs are queries and documents,
    and the numbers are relevance: the set is also scored by nDCG and MRR. Splits keep equal first texts together.
    """

    labels: ClassVar[tuple[str, ...]] = ()  # type: ignore[misc]

    activation: Activation = Field("identity", description="function that makes the score of the model's output")

    def label_names(self, number: int) -> list[str]:
        return [f"{number * SCORE_UNIT:g}"]

    @model_validator(mode="after")
    def _balances_sources_only(self) -> Self:
        if self.balance in ("label", "label-and-source"):
            raise ValueError("balance: rows with numbers have no labels; balance: source is possible")
        return self


class RegressionTraining(TextTraining):
    """Training settings of regression. The loss is the squared error."""

    select_by: Literal["loss", "spearman"] = Field(
        "loss", description="validation metric that selects the epoch whose weights are kept"
    )


class RegressionRecipe(Recipe):
    """Recipe for an encoder that assigns a number to a text or a pair of texts."""

    task: Literal["regression"]
    data: RegressionData
    training: RegressionTraining


class RegressionScore(Score):
    """Scores on one set with numbers; 0 for a correlation with numbers that are all equal."""

    n: int
    spearman: float = Field(description="rank correlation of the model's scores with the numbers")
    pearson: float = Field(description="linear correlation")
    r2: float = Field(description="1 − squared error / variance of the numbers; 0: as good as answering their mean")
    rmse: float = Field(description="root of the mean squared error")
    ndcg: float | None = Field(description=f"queries and documents: mean nDCG@{TOP} of the queries")
    mrr: float | None = Field(description=f"mean reciprocal rank of the first relevant document, 0 beyond rank {TOP}")
    queries: int | None = Field(description="queries with a relevant document, of which these are the means")
    loss: float = Field(description="mean squared error")


def scores_of(logits: Floats, activation: Activation) -> Float64s:
    """Return the scores float64 [n] of outputs [n, 1]."""
    outputs = logits.reshape(-1).astype(np.float64)
    return probabilities(outputs) if activation == "sigmoid" else outputs


def ranking_scores(scores: Float64s, relevance: Float64s, queries: Int64s) -> tuple[Float64s, Float64s]:
    """Return nDCG@10 and the reciprocal rank of every query with a relevant document, float64 [queries] each.

    The gain of a document is its relevance, at least 0. Among equal scores the least relevant documents come first: a
    model that gives all documents one score gets no credit for the order of the file. Arguments are of the rows, [n];
    ``queries``: the number of each row's query.
    """
    discounts = 1 / np.log2(np.arange(2, TOP + 2))
    gains = np.maximum(relevance, 0)
    order = np.lexsort((gains, -scores, queries))
    ndcg, reciprocal_ranks = [], []
    for ranked in np.split(gains[order], np.flatnonzero(np.diff(queries[order])) + 1):
        if ranked.any():
            ideal, top = np.sort(ranked)[::-1][:TOP], ranked[:TOP]
            ndcg.append(top @ discounts[: len(top)] / (ideal @ discounts[: len(top)]))
            reciprocal_ranks.append(1 / (1 + np.flatnonzero(top)[0]) if top.any() else 0.0)
    return np.array(ndcg), np.array(reciprocal_ranks)


def score(logits: Floats, labels: Int64s, data: Any) -> RegressionScore:
    """Score outputs [n, 1] against numbers in millionths [n], or [n, 2] with the number of each row's query.

    Raises ValueError: n is 0.
    """
    if not len(labels):
        raise ValueError("cannot score an empty set")
    scores = scores_of(logits, data.activation)
    targets: Float64s = labels.reshape(len(labels), -1)[:, 0] * np.float64(SCORE_UNIT)
    squared_error, variance = float(np.square(scores - targets).mean()), float(targets.var())
    spread = float(scores.std()) * float(targets.std())
    covariance = float(((scores - scores.mean()) * (targets - targets.mean())).mean())
    ndcg = mrr = None
    queries = 0
    if labels.ndim == 2:
        by_query, reciprocal_ranks = ranking_scores(scores, targets, labels[:, 1])
        queries = len(by_query)
        if queries:
            ndcg, mrr = float(by_query.mean()), float(reciprocal_ranks.mean())
    return RegressionScore(
        n=len(labels), spearman=rank_correlation(scores, targets), pearson=covariance / spread if spread else 0.0,
        r2=1 - squared_error / variance if variance else 0.0, rmse=squared_error**0.5, ndcg=ndcg, mrr=mrr,
        queries=queries or None, loss=squared_error,
    )  # fmt: skip


def score_parity(logits: Floats, reference: Floats, precision: Precision, provider: str) -> Parity:
    """Compare outputs [n, 1] with those of torch FP32.

    Top-1 agreement is the share of rows that do not rank below the row before them in the reference's order.
    """
    order = np.argsort(reference[:, 0], kind="stable")
    agrees = np.diff(logits[order, 0], prepend=-np.inf) >= 0
    return as_parity(np.abs(logits - reference), float(reference.std()), agrees, precision, provider)


MAX_R2_DROP: dict[Precision, float] = {"fp32": 0.0, "fp16": 0.001, "int8": 0.02, "int4": 0.04}
"""Largest allowed drop of R²: of the variance that the scores explain."""

MAX_TRIMMED_DROP = 0.015
"""Largest allowed drop of each figure with a trimmed vocabulary, at any precision."""


@dataclass(frozen=True)
class ScorePrediction(Prediction):
    """The score of one text or pair."""

    keys = ("score", "truncated")

    score: float


class Regression(TextTask):
    """One number per text or pair. Labels of a set are millionths, int64 [n]; of queries and documents [n, 2]."""

    name = "regression"
    noun = "regression model"
    recipe_type = RegressionRecipe
    has_scores = True
    score_type = RegressionScore
    metric = Metric("spearman", "Spearman", 4, lowest=-1.0)
    columns = (
        ScoreColumn("n", "rows", None), metric, ScoreColumn("pearson", "Pearson", 4), ScoreColumn("r2", "R²", 4),
        ScoreColumn("rmse", "RMSE", 4), ScoreColumn("ndcg", f"nDCG@{TOP}", 4), ScoreColumn("mrr", f"MRR@{TOP}", 4),
        ScoreColumn("loss", "loss", 4),
    )  # fmt: skip
    recorded = ("rmse",)
    score_note = (
        f"Correlations are of the model's scores with the numbers of the rows. nDCG@{TOP} and MRR@{TOP} are means over "
        "the queries, if rows are queries and documents. Loss is the mean squared error."
    )
    golden_note = "they show how close scores are to those of FP32"

    score_rows = staticmethod(score)
    parity = staticmethod(score_parity)

    def row_figures(self, answers: Array, rows: Encoded, data: RegressionData) -> Float64s:
        """Return score and number of every row, [n, 2]."""
        targets = rows.labels.reshape(len(rows), -1)[:, 0] * SCORE_UNIT
        return np.stack([scores_of(answers, data.activation), targets], axis=1)

    def metric_of(self, figures: Float64s) -> float:
        return rank_correlation(*figures.T)

    def lost(
        self, score: RegressionScore, reference: RegressionScore, precision: Precision, *, trimmed: bool
    ) -> str | None:
        """Explain which figure drops too far against FP32 on the same rows; None: none does.

        Queries and documents are judged by nDCG, other rows by R², and both by the rank correlation. A drop of 1 / n
        (n: rows or queries) is within chance.
        """
        drops = [("Spearman", reference.spearman, score.spearman, MAX_CORRELATION_DROP[precision], reference.n)]
        if reference.ndcg is not None and score.ndcg is not None and reference.queries is not None:
            limit = MAX_CORRELATION_DROP[precision]
            drops.append((f"nDCG@{TOP}", reference.ndcg, score.ndcg, limit, reference.queries))
        else:
            drops.append(("R²", reference.r2, score.r2, MAX_R2_DROP[precision], reference.n))
        for name, expected, value, limit, count in drops:
            limit = max(MAX_TRIMMED_DROP if trimmed else limit, 1 / count)
            if not expected - value <= limit:
                return (
                    f"{name} {value:.4f} is {expected - value:.4f} below FP32's on {score.n:,} rows; at most "
                    f"{limit:.4f} may be lost"
                )
        return None

    def with_answers(self, rows: Encoded, logits: Array, data: RegressionData) -> Encoded:
        return replace(rows, labels=np.rint(scores_of(logits, data.activation) / SCORE_UNIT).astype(np.int64))

    def predictions(
        self, texts: Sequence[Text], answers: Arrays, cut: Bools, data: RegressionData
    ) -> list[ScorePrediction]:
        scores = scores_of(answers["logits"], data.activation).tolist()
        return [ScorePrediction(*row) for row in zip(texts, cut.tolist(), scores, strict=True)]

    def golden_rows(self, rows: Encoded, seed: int) -> NDArray[np.integer]:
        """Draw 64 rows; of queries and documents all documents of the drawn queries."""
        if rows.labels.ndim == 1:
            return super().golden_rows(rows, seed)
        queries = np.random.default_rng(seed).permutation(np.unique(rows.labels[:, 1]))
        return np.concatenate([np.flatnonzero(rows.labels[:, 1] == query) for query in queries])[:GOLDEN_ROWS]

    def answer_config(self, data: RegressionData) -> dict[str, object]:
        """Return the keys by which transformers and sentence-transformers make the same scores of the outputs."""
        name = {"identity": "linear.Identity", "sigmoid": "activation.Sigmoid"}[data.activation]
        functions = {"activation_fn": f"torch.nn.modules.{name}"}
        names = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
        return {"problem_type": "regression", "sentence_transformers": functions, **names}

    def card_lines(self, recipe: RegressionRecipe) -> list[str]:
        data = recipe.data
        return [f"**Score:** {data.activation} of the output; at most {data.max_length} tokens"]


TASK = Regression()
