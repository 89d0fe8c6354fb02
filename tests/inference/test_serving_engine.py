"""The engine that makes batches, without HTTP: order, bounds, errors, its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.bundle import Bundle
from edgeformer.inference.serving_engine import Engine, Limits, OverloadedError, Served, served, similar
from edgeformer.inference.serving_metrics import Metrics
from edgeformer.tasks.task import Unanswered

OLD = Path(__file__).parents[1] / "old_format"


@pytest.fixture(scope="module")
def model() -> Iterator[Served]:
    with served(Bundle.open(OLD / "classifier-v1" / "bundle"), None) as found:
        yield found


class Held:
    """A session's run that waits until it may go on, and notes the calls."""

    def __init__(self, model: Served) -> None:
        self._run = model.run
        self.entered, self.go = threading.Event(), threading.Event()
        self.rows: list[int] = []

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        self.entered.set()
        assert self.go.wait(30)
        self.rows.append(len(inputs["input_ids"]))
        return self._run(inputs)


def label(answer: Any) -> tuple[str, float]:
    return answer.label, answer.probability


def alone(model: Served, text: str) -> tuple[str, float]:
    window = model.answering.read([text])
    return label(model.answering.answers(window, model.answering.run(model.run, window))[0])


def test_what_waits_is_answered_together_and_each_gets_its_own(model: Served) -> None:
    held = Held(model)
    texts = [f"{'very ' * (number % 9)}good film {number}" for number in range(40)]
    with Engine(model.answering, held, Limits(batch=16), Metrics()) as engine:
        futures = [engine.submit([texts[0]])]
        assert held.entered.wait(30)
        futures += [engine.submit([text, ""]) for text in texts[1:]]
        held.go.set()
        for text, future in zip(texts, futures, strict=True):
            first, *rest = future.result(30)
            assert first.text == text and label(first) == pytest.approx(alone(model, text), abs=1e-5)
            assert all(isinstance(answer, Unanswered) for answer in rest)
    assert held.rows[0] == 1 and max(held.rows) > 4 and sum(held.rows) == len(texts)


def test_without_batches_every_request_is_a_call(model: Served) -> None:
    held = Held(model)
    held.go.set()
    with Engine(model.answering, held, Limits(batch=1), Metrics()) as engine:
        wait([engine.submit(["good", "bad film"]), engine.submit(["dull"])], 30)
    assert held.rows == [1, 1, 1]


def test_a_full_queue_refuses_and_says_when_to_come_again(model: Served) -> None:
    held = Held(model)
    with Engine(model.answering, held, Limits(queue=3), Metrics()) as engine:
        first = engine.submit(["good"])
        assert held.entered.wait(30)
        waiting = [engine.submit(["good", "bad"]), engine.submit(["dull"])]
        with pytest.raises(OverloadedError, match="3 texts are waiting") as refused:
            engine.submit(["one more"])
        assert refused.value.retry_after_s >= 1
        held.go.set()
        assert [len(future.result(30)) for future in (first, *waiting)] == [1, 2, 1]
        assert len(engine.submit(["good"] * 5).result(30)) == 5  # an empty queue takes any single request


def test_its_end_answers_what_was_accepted(model: Served) -> None:
    held = Held(model)
    engine = Engine(model.answering, held, Limits(), Metrics())
    futures = [engine.submit([f"film {number}"]) for number in range(10)]
    ending = threading.Thread(target=engine.close)
    ending.start()
    while engine.healthy:
        pass
    with pytest.raises(OverloadedError, match="stopping"):
        engine.submit(["late"])
    held.go.set()
    ending.join(30)
    assert [future.result(0)[0].text for future in futures] == [f"film {number}" for number in range(10)]


def test_who_has_gone_costs_no_call(model: Served) -> None:
    held = Held(model)
    with Engine(model.answering, held, Limits(), Metrics()) as engine:
        first = engine.submit(["good"])
        assert held.entered.wait(30)
        gone: Future[Any] = engine.submit(["never"])
        assert gone.cancel()
        held.go.set()
        first.result(30)
        assert engine.submit(["dull"]).result(30)
    assert sum(held.rows) == 2
    with pytest.raises(CancelledError):
        gone.result(0)


def test_an_error_is_only_of_the_request_that_causes_it(model: Served) -> None:
    entered, go = threading.Event(), threading.Event()

    def run(inputs: Mapping[str, Any]) -> Any:
        entered.set()
        assert go.wait(30)
        if inputs["input_ids"].shape[1] > 10:
            raise EdgeformerError("not enough memory")
        return model.run(inputs)

    with Engine(model.answering, run, Limits(), Metrics()) as engine:
        first = engine.submit(["good"])
        assert entered.wait(30)
        small, large = engine.submit(["bad film"]), engine.submit(["very " * 12])
        go.set()
        assert first.result(30) and small.result(30)
        with pytest.raises(EdgeformerError, match="not enough memory"):
            large.result(30)
        assert engine.submit(["dull"]).result(30)


def test_rows_of_a_call_are_of_similar_length() -> None:
    lengths = np.array([3, 40, 4, 21, 20, 2, 19, 40], dtype=np.int64)
    batches = similar(lengths, 3)
    assert [lengths[batch].tolist() for batch in batches] == [[40, 40, 21], [20, 19], [4, 3, 2]]
    assert sorted(np.concatenate(batches).tolist()) == list(range(8))
    assert similar(np.array([], dtype=np.int64), 4) == []
    assert [len(batch) for batch in similar(np.full(5, 7), 2)] == [2, 2, 1]


def test_a_language_model_has_nothing_to_serve() -> None:
    opening = served(Bundle.open(OLD / "language-v1" / "bundle"), None)
    with (
        pytest.raises(InputError, match="has no labels, so there is nothing to serve; use edgeformer generate"),
        opening,
    ):
        pass


def test_metrics_are_in_the_format_of_prometheus() -> None:
    metrics = Metrics()
    metrics.requests.labels(200).inc()
    metrics.request_s.observe(0.003)
    metrics.call_rows.observe(3)
    metrics.call_s.inc(0.25)
    lines = metrics.text().splitlines()
    assert 'edgeformer_requests_total{status="200"} 1.0' in lines and "edgeformer_requests_running 0.0" in lines
    assert 'edgeformer_request_seconds_bucket{le="0.0025"} 0.0' in lines
    assert 'edgeformer_request_seconds_bucket{le="0.005"} 1.0' in lines
    assert 'edgeformer_request_seconds_bucket{le="+Inf"} 1.0' in lines
    assert 'edgeformer_call_rows_bucket{le="4.0"} 1.0' in lines and "edgeformer_call_seconds_total 0.25" in lines
    names = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in names} == typed
