"""One thread that owns a session and answers what waits, many texts in one call where many wait.

Nobody waits for company: while a call runs, others queue up, and the next call takes them together. So a lone text is
answered at once, and the busier the server, the larger its batches.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from edgeformer.data.batching import Int64s
from edgeformer.data.rows import Text
from edgeformer.formats.errors import EdgeformerError
from edgeformer.stages.serving.limits import Limits
from edgeformer.stages.serving.metrics import Metrics
from edgeformer.tasks.answering import Answering
from edgeformer.tasks.calls import Run
from edgeformer.tasks.metric import Arrays
from edgeformer.tasks.prediction import Answer


class OverloadedError(EdgeformerError):
    """Too many texts wait, or the server stops.

    Args:
        message: which of them.
        retry_after_s: when there may be room again, in whole seconds.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass
class _Request:
    texts: Sequence[Text]
    answers: Future[list[Answer]] = field(default_factory=Future)


class Engine:
    """Answers requests in the order in which they came. Use it as a context manager: its end answers what waits.

    Args:
        answering: how the model answers.
        run: of a session that only this engine's thread calls.
        limits: of batch and queue.
        metrics: are told what was done.
    """

    def __init__(self, answering: Answering, run: Run, limits: Limits, metrics: Metrics) -> None:
        self._answering, self._run, self._limits, self._metrics = answering, run, limits, metrics
        self._waiting: deque[_Request] = deque()
        self._texts = 0
        self._changed = threading.Condition()
        self._closing = False
        self._seconds_per_text = 0.0
        self._thread = threading.Thread(target=self._work, name="inference", daemon=True)
        self._thread.start()

    def submit(self, texts: Sequence[Text]) -> Future[list[Answer]]:
        """Queue one request; its future has an answer per text.

        A future that is cancelled before its turn costs nothing.

        Raises:
            OverloadedError: the queue has no room for it, or the engine is being closed.
        """
        request = _Request(texts)
        with self._changed:
            if self._closing:
                raise OverloadedError("the server is stopping", 1)
            # One request that is larger than the queue must have a way in.
            if self._texts and self._texts + len(texts) > self._limits.queue:
                raise OverloadedError(f"{self._texts:,} texts are waiting", self._retry_after_s())
            self._waiting.append(request)
            self._texts += len(texts)
            self._metrics.waiting.set(self._texts)
            self._changed.notify()
        return request.answers

    @property
    def healthy(self) -> bool:
        """It takes requests, and its thread lives."""
        return not self._closing and self._thread.is_alive()

    def close(self) -> None:
        """Take no more, answer what waits, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _retry_after_s(self) -> int:
        return max(1, round(self._texts * self._seconds_per_text))

    def _work(self) -> None:
        while taken := self._take():
            try:
                self._answer(taken)
            except Exception:  # of one of them: the others have their answers by themselves
                for request in taken:
                    self._answer_alone(request)

    def _take(self) -> list[_Request]:
        """The requests of the next calls; nothing when the engine is closed and all are answered."""
        taken: list[_Request] = []
        count = 0
        with self._changed:
            while not taken:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return []
                while self._waiting and (not count or count + len(self._waiting[0].texts) <= self._limits.window):
                    request = self._waiting.popleft()
                    self._texts -= len(request.texts)
                    if request.answers.set_running_or_notify_cancel():
                        taken.append(request)
                        count += len(request.texts)
            self._metrics.waiting.set(self._texts)
        return taken

    def _answer(self, requests: list[_Request]) -> None:
        started = time.perf_counter()
        texts = [text for request in requests for text in request.texts]
        window = self._answering.read(texts)
        batches = similar(window.encoded.lengths, self._limits.batch)
        outputs = self._answering.run(self._counted, window, batches)
        answers = self._answering.answers(window, outputs)
        self._seconds_per_text = (time.perf_counter() - started) / len(texts)
        place = 0
        for request in requests:
            request.answers.set_result(answers[place : place + len(request.texts)])
            place += len(request.texts)

    def _answer_alone(self, request: _Request) -> None:
        try:
            self._answer([request])
        except Exception as error:  # whatever it is, who asked must hear of it, and the next ones are served
            request.answers.set_exception(error)

    def _counted(self, inputs: Arrays) -> Arrays:
        started = time.perf_counter()
        outputs = self._run(inputs)
        self._metrics.call_s.inc(time.perf_counter() - started)
        self._metrics.call_rows.observe(len(inputs["input_ids"]))
        return outputs


def similar(lengths: Int64s, most: int) -> list[Int64s]:
    """Row numbers of each call, longest first: at most ``most`` rows, none less than half as long as the longest."""
    order = np.argsort(-lengths, kind="stable").astype(np.int64)
    batches: list[Int64s] = []
    start = 0
    for place in range(1, len(order) + 1):
        if place == len(order) or place - start == most or 2 * lengths[order[place]] < lengths[order[start]]:
            batches.append(order[start:place])
            start = place
    return batches
