"""Serving: limits, metrics, the model behind a server, and the engine that batches waiting requests."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from edgeformer.artifacts.errors import InputError
from edgeformer.bundle import Bundle
from edgeformer.data.rows import Int64s, Text
from edgeformer.inference.predict import Predictor, check_answerable, open_predictor
from edgeformer.run import Location
from edgeformer.tasks.metric import Arrays
from edgeformer.tasks.task import Answer


@dataclass(frozen=True)
class Limits:
    """Limits of a server, which bound its memory and the age of its answers.

    Attributes:
        batch: texts per call of the model; 1: no batches.
        queue: waiting texts, or requests to a language model; more are refused, with the time after which to try again.
        timeout_s: from a complete request to its answer, or to the first token of a language model; also for a body.
        texts, body_bytes: per request.
        characters: per text.
        connections: with a request for predictions; more are refused.
    """

    batch: int = 32
    queue: int = 1024
    timeout_s: float = 30.0
    texts: int = 128
    characters: int = 20_000
    body_bytes: int = 1 << 20
    connections: int = 256


class Metrics:
    """Prometheus counters, gauges and histograms of one server; safe to change from any thread."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter(
            "edgeformer_requests_total", "Requests for predictions, by the status of their response.", ["status"]
        )
        self.running = gauge("edgeformer_requests_running", "Requests in progress.")
        self.request_s = histogram(
            "edgeformer_request_seconds",
            "Time from the first byte of a request to its response.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
        )
        self.tokens = counter("edgeformer_tokens_total", "Tokens that a language model wrote.")
        self.texts = counter("edgeformer_texts_total", "Texts in responses.")
        self.unanswered = counter("edgeformer_texts_without_answer_total", "Texts without an answer, e.g. empty ones.")
        self.waiting = gauge("edgeformer_queue_texts", "Texts in the queue.")
        self.call_rows = histogram(
            "edgeformer_call_rows", "Texts in one call of the model.", buckets=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
        )
        self.call_s = counter("edgeformer_call_seconds_total", "Time in the model.")
        resident = gauge("process_resident_memory_bytes", "Resident memory of the server.")
        resident.set_function(lambda: psutil.Process().memory_info().rss)


@contextmanager
def open_served_predictor(bundle: Bundle, artifact: str | None, runtime: str | None = None) -> Generator[Predictor]:
    """Open an artifact (None: the first that runs here) to answer whole texts. Raises InputError, ArtifactError."""
    location = Location(None, bundle.folder, opened=bundle)
    check_answerable(location, None, pairs=None)
    with open_predictor(location, artifact, runtime=runtime) as model:
        model.answer(["a text"])  # the first call allocates memory, which no client should wait for
        yield model


class RefusedError(InputError):
    """A request that gets an error response of this status.

    Args:
        retry_after_s: when it may succeed.
        param, code: the key that is wrong, and the kind of error, in OpenAI's form.
    """

    def __init__(
        self, status: int, message: str, retry_after_s: int | None = None, *, param: str | None = None,
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.retry_after_s, self.param, self.code = status, retry_after_s, param, code


class Service(ABC):
    """A model behind a server.

    Attributes:
        name, id: of the run and of the artifact.
        page: name of the files of its page.
        posts: path → messages of request and response, and what it does.
        documents: path → a JSON document to read.
        refusal: message of an error; ``refusals``: status → reason, of statuses that other services lack.
        facts: what /healthz says beside name and id.
    """

    name: str
    id: str
    page: ClassVar[str]
    posts: ClassVar[Mapping[str, tuple[type[BaseModel], type[BaseModel], str]]]
    documents: Mapping[str, object] = MappingProxyType({})
    refusal: ClassVar[type[BaseModel]]
    refusals: ClassVar[Mapping[str, str]]
    facts: Mapping[str, object] = MappingProxyType({})

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Whether it accepts requests."""

    @abstractmethod
    def example(self, address: str) -> str:
        """Return a command that asks the server at an address."""

    @abstractmethod
    def error(self, status: int, message: str, error: Exception | None = None) -> dict[str, object]:
        """Return the body of an error response."""

    def expire(self) -> None:  # noqa: B027 - most requests end in time by themselves
        """End the requests that still run: the server stops, and their time is over."""

    @abstractmethod
    async def answer(self, request: Request, body: bytes) -> Response:
        """Answer a request. Raises RefusedError, or ClientDisconnect."""


class _Request(NamedTuple):
    texts: Sequence[Text]
    answers: Future[list[Answer]]


class Engine:
    """Answers requests in the order of their arrival, in one thread that calls the model.

    While a call runs, new requests queue up, and the next call takes them together. A single text is therefore answered
    at once, and the batches grow with the load. Only the engine's thread may call ``model``.
    """

    def __init__(self, model: Predictor, limits: Limits, metrics: Metrics) -> None:
        self._model, self._limits, self._metrics = model, limits, metrics
        self._max_rows = min(limits.batch, model.answering.max_rows or limits.batch)
        self._queue: deque[_Request] = deque()
        self._queued_texts = 0
        self._changed = threading.Condition()
        self._closing = False
        self._seconds_per_text = 0.0
        self._thread = threading.Thread(target=self._work, name="inference", daemon=True)
        self._thread.start()

    def submit(self, texts: Sequence[Text]) -> Future[list[Answer]]:
        """Queue one request, whose future may be cancelled. Raises RefusedError (503) if full or closing."""
        request = _Request(texts, Future())
        with self._changed:
            if self._closing:
                raise RefusedError(503, "the server is stopping", 1)
            # An empty queue accepts any request, also one that is larger than the queue.
            if self._queued_texts and self._queued_texts + len(texts) > self._limits.queue:
                retry_after_s = max(1, round(self._queued_texts * self._seconds_per_text))
                raise RefusedError(503, f"the queue is full with {self._queued_texts:,} texts", retry_after_s)
            self._queue.append(request)
            self._queued_texts += len(texts)
            self._metrics.waiting.set(self._queued_texts)
            self._changed.notify()
        return request.answers

    @property
    def healthy(self) -> bool:
        """Whether it accepts requests, and its thread runs."""
        return not self._closing and self._thread.is_alive()

    def close(self) -> None:
        """Accept no more requests, answer those in the queue, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        # Calls take texts of similar length, so the requests of two calls are taken together.
        max_texts = 2 * self._limits.batch if self._limits.batch > 1 else 1
        while True:
            requests: list[_Request] = []
            count = 0
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                while self._queue and (not count or count + len(self._queue[0].texts) <= max_texts):
                    request = self._queue.popleft()
                    self._queued_texts -= len(request.texts)
                    if request.answers.set_running_or_notify_cancel():
                        requests.append(request)
                        count += len(request.texts)
                self._metrics.waiting.set(self._queued_texts)
            try:
                self._answer(requests)
            except Exception:  # caused by one of the requests: each gets its own answer or error
                for request in requests:
                    try:
                        self._answer([request])
                    except Exception as error:  # for the client; the engine goes on
                        request.answers.set_exception(error)

    def _answer(self, requests: list[_Request]) -> None:
        started = time.perf_counter()
        answering = self._model.answering
        texts = [text for request in requests for text in request.texts]
        if not texts:  # every request was cancelled
            return
        window = answering.read(texts)
        batches = batch_by_length(window.encoded.lengths, self._max_rows)

        def run_and_count(inputs: Arrays) -> Arrays:
            called = time.perf_counter()
            outputs = self._model.run(inputs)
            self._metrics.call_s.inc(time.perf_counter() - called)
            self._metrics.call_rows.observe(len(inputs["input_ids"]))
            return outputs

        answers = answering.answers(window, answering.run(run_and_count, window, batches))
        self._seconds_per_text = (time.perf_counter() - started) / len(texts)
        start = 0
        for request in requests:
            request.answers.set_result(answers[start : start + len(request.texts)])
            start += len(request.texts)


def batch_by_length(lengths: Int64s, max_rows: int) -> list[Int64s]:
    """Return the row numbers of each call, longest rows first. No row is shorter than half the longest of its call."""
    order = np.argsort(-lengths, kind="stable").astype(np.int64)
    batches: list[Int64s] = []
    start = 0
    for place in range(1, len(order) + 1):
        if place == len(order) or place - start == max_rows or 2 * lengths[order[place]] < lengths[order[start]]:
            batches.append(order[start:place])
            start = place
    return batches
