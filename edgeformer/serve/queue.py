"""Queues in front of a model: one that answers waiting texts in batches, and one that writes text after text."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from edgeformer.bundle import Bundle
from edgeformer.data.rows import Int64s, Text
from edgeformer.inference.generate import TextPiece, Writer
from edgeformer.inference.predict import Predictor, check_answerable, open_predictor
from edgeformer.inference.sampling import Sampling
from edgeformer.run import Location
from edgeformer.serve.service import Metrics, RefusedError, RequestQueue, ServeLimits
from edgeformer.tasks.arrays import Arrays
from edgeformer.tasks.task import Answer


@contextmanager
def open_served_predictor(bundle: Bundle, artifact: str | None, runtime: str | None = None) -> Generator[Predictor]:
    """Open an artifact (None: the first that runs here) to answer whole texts. Raises InputError, ArtifactError."""
    location = Location(None, bundle.folder, opened=bundle)
    check_answerable(location, None, pairs=None)
    with open_predictor(location, artifact, runtime=runtime) as model:
        model.answer(["a text"])  # the first call allocates memory, which no client should wait for
        yield model


class _QueuedTexts(NamedTuple):
    texts: Sequence[Text]
    answers: Future[list[Answer]]


class BatchingQueue(RequestQueue):
    """Answers requests in the order of their arrival, in one thread that calls the model.

    While a call runs, new requests queue up, and the next call takes them together. A single text is therefore answered
    at once, and the batches grow with the load. Only the queue's thread may call ``model``.
    """

    def __init__(self, model: Predictor, limits: ServeLimits, metrics: Metrics) -> None:
        self._model, self._limits, self._metrics = model, limits, metrics
        self._max_rows = min(limits.batch, model.answering.max_rows or limits.batch)
        self._queue: deque[_QueuedTexts] = deque()
        self._queued_texts = 0
        self._changed = threading.Condition()
        self._closing = False
        self._seconds_per_text = 0.0
        self._thread = threading.Thread(target=self._work, name="inference", daemon=True)
        self._thread.start()

    def submit(self, texts: Sequence[Text]) -> Future[list[Answer]]:
        """Queue one request, whose future may be cancelled. Raises RefusedError (503) if full or closing."""
        request = _QueuedTexts(texts, Future())
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
            requests: list[_QueuedTexts] = []
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
                    except Exception as error:  # for the client; the queue goes on
                        request.answers.set_exception(error)

    def _answer(self, requests: list[_QueuedTexts]) -> None:
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


class WritingQueue(RequestQueue):
    """Writes texts in the order of their requests, one at a time, in a thread that alone uses the model."""

    def __init__(self, writer: Writer, limits: ServeLimits, metrics: Metrics) -> None:
        self._writer, self._limits, self._metrics = writer, limits, metrics
        self._executor = ThreadPoolExecutor(1, "inference")
        self._closing = threading.Event()
        self._unfinished = 0

    @property
    def healthy(self) -> bool:
        return not self._closing.is_set()

    async def write(
        self, ids: Sequence[int], max_tokens: int, sampling: Sampling, stop: Sequence[str]
    ) -> AsyncGenerator[TextPiece]:
        """Yield the pieces of :meth:`Writer.write`; closing the iterator stops the writing behind the current token.

        Raises RefusedError: the queue is full or closed, or the turn does not come in time.
        """
        if not self.healthy:
            raise RefusedError(503, "the server is stopping", 1)
        if self._unfinished > self._limits.queue:
            raise RefusedError(503, f"the queue is full with {self._limits.queue:,} requests", 1)
        loop, events, stopped = asyncio.get_running_loop(), asyncio.Queue[TextPiece | Exception](), threading.Event()

        def work() -> None:
            try:
                for piece in self._writer.write(ids, max_tokens, sampling, stop):
                    if stopped.is_set():
                        return
                    if not self.healthy:
                        raise RefusedError(503, "the server is stopping", 1)
                    self._metrics.tokens.inc()
                    loop.call_soon_threadsafe(events.put_nowait, piece)
            except Exception as error:  # for the client; the queue goes on
                if not stopped.is_set():
                    loop.call_soon_threadsafe(events.put_nowait, error)

        self._count(+1)
        task, timeout_s = self._executor.submit(work), self._limits.timeout_s
        try:
            try:
                event = await asyncio.wait_for(events.get(), timeout_s)
            except asyncio.TimeoutError:
                raise RefusedError(
                    504, f"there was no token within {timeout_s:g} s; try again later, or shorten the prompt"
                ) from None
            while True:
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.stopped is not None:
                    return
                event = await events.get()
        finally:
            stopped.set()
            task.cancel()  # if it waits
            self._count(-1)

    def _count(self, change: int) -> None:
        self._unfinished += change
        self._metrics.waiting.set(max(0, self._unfinished - 1))

    def expire(self) -> None:
        """Accept no more requests, and end every text behind its current token, with an error."""
        self._closing.set()

    def close(self) -> None:
        """Stop writing, and end the thread."""
        self.expire()
        self._executor.shutdown(cancel_futures=True)
