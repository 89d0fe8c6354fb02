"""Rank documents for queries with a reranker or an embedding model, and compare texts by their vectors.

The search is exact: every document is scored. A file is read as a stream, so memory does not grow with it.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from edgeformer.artifacts.data_config import DataSection, Similarity
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.bundle import Bundle
from edgeformer.data.encoding import require_unicode
from edgeformer.data.rows import Prompted, Row, Text, join_pair, text_parts
from edgeformer.data.unlabelled import Unlabelled
from edgeformer.inference.predict import Predictor, open_predictor
from edgeformer.inference.predict_file import FileSummary, answer_file, choose_columns
from edgeformer.run import Location, Run
from edgeformer.tasks.arrays import Float64s
from edgeformer.tasks.embedding import (
    QuantizationLoss,
    VectorKind,
    VectorStore,
    check_vector_kind,
    measure_of,
    similarities,
    stored_units,
)
from edgeformer.tasks.task import Answer, Task, Unanswered


@dataclass(frozen=True)
class RankedDocument:
    """A document in the ranking of a query."""

    rank: int  # from 1
    score: float  # a reranker's, or the similarity of both vectors: for most models their cosine
    row: int  # from 1, without the header of a table
    text: str
    values: Mapping[str, object] = field(default_factory=dict)  # columns of its row


@dataclass(frozen=True)
class Ranking:
    """The best documents of a query, best first; of equal scores the first row."""

    query: str
    documents: list[RankedDocument]


@dataclass(frozen=True)
class RankedFile:
    """Rankings of all queries. ``summary`` counts documents; ``loss`` is of quantised vectors."""

    rankings: list[Ranking]
    summary: FileSummary
    loss: QuantizationLoss | None


@dataclass(frozen=True)
class RankOptions:
    """Queries, and how documents are ranked for them."""

    queries: Sequence[str]
    top: int = 10  # documents of each ranking
    vectors: VectorKind = "float32"  # of an embedding model
    columns: str | None = "none"  # of the documents' rows in the rankings: ``all``, ``none`` or names; None: all


def check_rankable(owner: Bundle | Run, options: RankOptions, *, is_stream: bool = False) -> None:
    """Raise InputError if a model cannot rank texts for these options; ``is_stream``: they can be read only once."""
    for query in options.queries:
        require_unicode("--query", query)
        if not query.strip():
            raise InputError("--query: the query is empty; give a question or words to search for")
    _check_can_rank(owner.task, owner.data)
    check_vector_kind(owner.name, owner.data, options.vectors)
    if owner.task.has_scores and options.vectors != "float32":
        raise InputError(f"--vectors: {owner.name} is a reranker and computes no vectors; leave out --vectors")
    if owner.task.has_scores and is_stream and len(options.queries) > 1:
        raise InputError(
            "--query: a reranker reads the documents once per query, and standard input can be read only once; "
            "give one query, or --file FILE"
        )


def _check_can_rank(task: Task, data: DataSection) -> None:
    if not (task.has_vectors or task.has_scores):
        raise InputError(
            f"query: a {task.noun} cannot rank texts; use an embedding model, or a reranker (a model with one output "
            "that reads a query and a document)"
        )
    if task.has_scores and (problem := task.answerer.pairs_problem(data, pairs=True)) is not None:
        raise InputError(f"query: {problem}")


def scoring_inputs(task: Task, data: DataSection, query: str, documents: Sequence[str]) -> list[Text]:
    """Return what a model reads to score documents: pairs, or the query and the documents with their prompts.

    Raises InputError if it makes neither vectors of texts nor scores of pairs.
    """
    _check_can_rank(task, data)
    if task.has_scores:
        return [(query, document) for document in documents]
    prompts: Mapping[str, str] = getattr(data, "prompts", {})
    kinds = [("query", query), *(("document", document) for document in documents)]
    # An empty text has no answer, with a prompt or without.
    return [Prompted(prompts.get(kind, ""), text) if text.strip() else text for kind, text in kinds]


def rank_documents(
    documents: Sequence[str], answers: Sequence[Answer], top: int, data: DataSection
) -> list[RankedDocument]:
    """Rank documents by the answers to :func:`scoring_inputs`. Raises InputError if a text has no answer."""
    failed = next((answer for answer in answers if isinstance(answer, Unanswered)), None)
    if failed is not None:
        raise InputError(f"{join_pair(failed.text)[:60]!r}: {failed.error}; leave out or replace this text")
    scored: Any = answers
    if len(answers) == len(documents):
        scores = [answer.score for answer in scored]
    else:
        vectors = np.stack([answer.vector for answer in scored])
        scores = similarities(vectors[:1], vectors[1:], measure_of(data))[0].tolist()
    ranked = heapq.nlargest(top, range(len(documents)), key=scores.__getitem__)
    return [RankedDocument(n, float(scores[i]), i + 1, documents[i]) for n, i in enumerate(ranked, start=1)]


def rank_file(model: Predictor, documents: Unlabelled, options: RankOptions, progress: Progress = SILENT) -> RankedFile:
    """Rank documents for options that passed :func:`check_rankable`. Raises InputError for a query, or DataError.

    Documents without an answer are counted and have no rank. A reranker reads the documents once for each query.
    """
    queries, data, has_scores = options.queries, model.answering.data, model.answering.task.has_scores
    columns = choose_columns(documents, options.columns, {}, as_table=False)
    store = VectorStore(options.vectors)
    best: list[list[RankedDocument]] = [[] for _ in queries]

    def rank(
        reader: Predictor, texts: Unlabelled, score: Callable[[list[Any]], Float64s], numbers: Sequence[int]
    ) -> FileSummary:
        """Read the documents once, and keep the best ones of the queries ``numbers``."""
        rows_before = 0

        def take(copied: Sequence[Mapping[str, object]], answers: Sequence[Answer]) -> None:
            nonlocal rows_before
            answered = [place for place, answer in enumerate(answers) if not isinstance(answer, Unanswered)]
            scores = score([answers[place] for place in answered]) if answered else np.empty((0, len(numbers)))
            parts = [text_parts(answer.text)[-1] for answer in answers]  # of a pair the document
            for number, scores_of_query in zip(numbers, scores.T.tolist(), strict=True):
                candidates = (
                    RankedDocument(0, value, rows_before + place + 1, parts[place], copied[place])
                    for place, value in zip(answered, scores_of_query, strict=True)
                )
                best[number] = heapq.nlargest(options.top, chain(best[number], candidates), key=attrgetter("score"))
            rows_before += len(answers)

        return answer_file(reader, texts, take, progress, columns)

    # 1. A reranker scores pairs, query by query
    if has_scores:
        for number, query in enumerate(queries):
            pairs = replace(documents, pairs=True, rows=partial(_rows_with, query, documents))
            summary = rank(model, pairs, lambda answers: np.array([[answer.score] for answer in answers]), [number])
    # 2. Vectors of documents are compared with those of all queries
    else:
        prompts, measure = getattr(data, "prompts", {}), measure_of(data)
        with_query, with_document = (
            replace(model, answering=replace(model.answering, prompt=prompts.get(kind, "")))
            for kind in ("query", "document")
        )
        query_answers = with_query.answer(queries)
        for answer in query_answers:
            if isinstance(answer, Unanswered):
                raise InputError(f"--query {answer.text!r}: {answer.error}; give another query")

        def stored(answers: Sequence[Any], store: VectorStore) -> Any:
            floats = store.add(answers)
            return stored_units(floats, options.vectors) if measure == "cosine" else floats

        query_vectors = stored(query_answers, VectorStore(options.vectors))
        compared_by: Similarity = "dot" if measure == "cosine" else measure
        summary = rank(
            with_document, documents, lambda answers: similarities(stored(answers, store), query_vectors, compared_by),
            range(len(queries)),
        )  # fmt: skip
    # 3. Number the best
    if summary.errors == summary.rows:
        raise DataError(
            f"{documents.name}: none of its {summary.rows:,} documents has a score; check the column of the texts"
        )
    rankings = [
        Ranking(query, [replace(document, rank=rank) for rank, document in enumerate(documents_of_query, start=1)])
        for query, documents_of_query in zip(queries, best, strict=True)
    ]
    return RankedFile(rankings, summary, None if has_scores else store.loss())


def _rows_with(query: str, documents: Unlabelled) -> Iterator[Row]:
    """Yield the documents as pairs with a query."""
    for row in documents.rows():
        document: Any = row.text  # a string, perhaps an Unreadable
        yield replace(row, text=(query, document))


@dataclass(frozen=True)
class Similarities:
    """Vectors of texts as JSON objects, and cosines and similarities by ``measure`` of every pair, [n][n]."""

    artifact: str
    predictions: list[dict[str, object]]
    cosines: list[list[float]]
    measure: Similarity  # by which the model's vectors are compared
    similarities: list[list[float]]


def compare_texts(
    location: Location, texts: Sequence[str], artifact: str | None = None, runtime: str | None = None
) -> Similarities:
    """Compute the vectors of texts and their similarities. Raises InputError for the texts or the model."""
    if not location.open_model().task.has_vectors:
        raise InputError(f"{location.name}: the model computes no vectors of texts; use an embedding model")
    with open_predictor(location, artifact, runtime=runtime, texts=texts) as model:
        answers: list[Any] = model.answer(texts)  # TextVector: the task's predictions are vectors
        for number, answer in enumerate(answers, start=1):
            if isinstance(answer, Unanswered):
                raise InputError(f"text {number} ({answer.text!r}): {answer.error}; give another text")
        measure = measure_of(model.answering.data)
        predictions, vectors = [answer.as_dict() for answer in answers], np.stack([answer.vector for answer in answers])
        cosines, similar = (similarities(vectors, vectors, each).tolist() for each in ("cosine", measure))
        return Similarities(model.id, predictions, cosines, measure, similar)
