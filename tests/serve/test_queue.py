"""The batching queue without HTTP: order, limits, errors and closing."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.bundle import Bundle
from edgeformer.inference.predict import Predictor
from edgeformer.serve.queue import BatchingQueue, batch_by_length, open_served_predictor
from edgeformer.serve.service import Metrics, RefusedError, ServeLimits
from edgeformer.tasks.task import Unanswered
from tests.conftest import OLD_FORMAT


@pytest.fixture(scope="module")
def model() -> Iterator[Predictor]:
    with open_served_predictor(Bundle.open(OLD_FORMAT / "classifier-v1" / "bundle"), None) as opened:
        yield opened


class BlockedRun:
    """A session's ``run`` that blocks until ``go`` is set, and counts the rows of each call."""

    def __init__(self, model: Predictor) -> None:
        self._run = model.run
        self.entered, self.go = threading.Event(), threading.Event()
        self.rows: list[int] = []

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        self.entered.set()
        assert self.go.wait(30)
        if inputs["input_ids"].shape[1] > 20:
            raise EdgeformerError("not enough memory")
        self.rows.append(len(inputs["input_ids"]))
        return self._run(inputs)


@contextmanager
def blocked_queue(model: Predictor, limits: ServeLimits | None = None) -> Iterator[tuple[BatchingQueue, BlockedRun]]:
    """A queue whose first text, ``good``, is being run."""
    run = BlockedRun(model)
    with closing(BatchingQueue(replace(model, run=run), limits or ServeLimits(), Metrics())) as queue:
        queue.submit(["good"])
        assert run.entered.wait(30)
        yield queue, run


def label(answer: Any) -> tuple[str, float]:
    return answer.label, answer.probability


def test_waiting_requests_are_batched_and_each_gets_its_own_answers(model: Predictor) -> None:
    texts = [f"{'very ' * (number % 9)}good film {number}" for number in range(40)]
    with blocked_queue(model, ServeLimits(batch=16)) as (queue, run):
        futures = [queue.submit([text, ""]) for text in texts]
        run.go.set()
        for text, future in zip(texts, futures, strict=True):
            first, empty = future.result(30)
            assert first.text == text and label(first) == pytest.approx(label(model.answer([text])[0]), abs=1e-5)
            assert isinstance(empty, Unanswered)
    assert run.rows[0] == 1 and max(run.rows) > 4 and sum(run.rows) == 1 + len(texts)


def test_a_full_queue_refuses_with_a_retry_time(model: Predictor) -> None:
    with blocked_queue(model, ServeLimits(queue=3)) as (queue, run):
        waiting = [queue.submit(["good", "bad"]), queue.submit(["dull"])]
        with pytest.raises(RefusedError, match="the queue is full with 3 texts") as refused:
            queue.submit(["one more"])
        assert refused.value.retry_after_s >= 1
        run.go.set()
        assert [len(future.result(30)) for future in waiting] == [2, 1]
        assert len(queue.submit(["good"] * 5).result(30)) == 5  # an empty queue takes any single request


def test_closing_answers_the_accepted_requests(model: Predictor) -> None:
    with blocked_queue(model) as (queue, run):
        futures = [queue.submit([f"film {number}"]) for number in range(10)]
        closing = threading.Thread(target=queue.close)
        closing.start()
        while queue.healthy:
            pass
        with pytest.raises(RefusedError, match="stopping"):
            queue.submit(["late"])
        run.go.set()
        closing.join(30)
        assert [future.result(0)[0].text for future in futures] == [f"film {number}" for number in range(10)]


def test_a_cancelled_request_is_not_run(model: Predictor) -> None:
    with blocked_queue(model) as (queue, run):
        cancelled: Future[Any] = queue.submit(["never"])
        assert cancelled.cancel()
        run.go.set()
        assert queue.submit(["dull"]).result(30)
    assert sum(run.rows) == 2
    with pytest.raises(CancelledError):
        cancelled.result(0)


def test_an_error_reaches_only_the_request_that_causes_it(model: Predictor) -> None:
    with blocked_queue(model) as (queue, run):
        small, large = queue.submit(["bad film"]), queue.submit(["very " * 24])
        run.go.set()
        assert small.result(30)
        with pytest.raises(EdgeformerError, match="not enough memory"):
            large.result(30)
        assert queue.submit(["dull"]).result(30)


def test_rows_of_a_call_have_similar_lengths() -> None:
    lengths = np.array([3, 40, 4, 21, 20, 2, 19, 40], dtype=np.int64)
    batches = batch_by_length(lengths, 3)
    assert [lengths[batch].tolist() for batch in batches] == [[40, 40, 21], [20, 19], [4, 3, 2]]
    assert sorted(np.concatenate(batches).tolist()) == list(range(8))
    assert batch_by_length(np.array([], dtype=np.int64), 4) == []
    assert [len(batch) for batch in batch_by_length(np.full(5, 7), 2)] == [2, 2, 1]
