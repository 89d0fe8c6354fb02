"""What a server takes on at once: every bound that keeps its memory and its answers' age finite."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.data.batching import Int64s
from edgeformer.data.rows import Text
from edgeformer.inference.serving_metrics import Metrics
from edgeformer.tasks.metric import Arrays
from edgeformer.tasks.scoring import in_pieces, most_rows
from edgeformer.tasks.task import Answer, Run
from edgeformer.tasks.text_answers import Answering


@dataclass(frozen=True)
class Limits:
    """Bounds of a server.

    Attributes:
        batch: texts of one call of the model; 1: every text by itself.
        queue: texts that wait; more are refused, with the time after which to try again.
        timeout_s: from a whole request to its answer; as long may a head, a body, or the taking of an answer need.
        texts: of one request.
        characters: of one text.
        body_bytes: of one request.
        connections: with a request for predictions; more are refused.
        waiting: connections that have sent no whole head; where there are more, the oldest of them is closed.
    """

    batch: int = 32
    queue: int = 1024
    timeout_s: float = 30.0
    texts: int = 128
    characters: int = 20_000
    body_bytes: int = 1 << 20
    connections: int = 256
    waiting: int = 512

    @property
    def window(self) -> int:
        """Texts among which those of similar length are found for one call."""
        return 2 * self.batch if self.batch > 1 else 1


# What is served: an artifact of a bundle that answers whole texts. Never torch.


@dataclass(frozen=True)
class Served:
    """An opened artifact.

    Attributes:
        name: of the run.
        artifact: its id.
        labels: the labels; empty: it has none.
        answering: how it answers.
        run: its session's, for any number of rows.
    """

    name: str
    artifact: str
    labels: tuple[str, ...]
    answering: Answering
    run: Run


@contextmanager
def served(bundle: Bundle, wanted: str | None) -> Generator[Served]:
    """Open an artifact.

    Args:
        bundle: of a classifier or an embedding model.
        wanted: an artifact's id; None: the first that runs here.

    Raises:
        InputError: a model without labels or vectors, an unknown artifact, or one that takes a text token by token.
        ArtifactError: none can run here, or a file is damaged.
    """
    task = bundle.task
    if task.predicts is None or not task.reads_text:
        why = "which has no labels" if task.reads_text else "which reads no text"
        raise InputError(
            f"{bundle.name}: is a {task.noun}, {why}, so there is nothing to serve; use edgeformer {task.use}"
        )
    entry = _entry(bundle, wanted)
    answering = Answering(task, bundle.reader(entry), bundle.data)
    labels = tuple(map(str, bundle.manifest.labels or ()))
    with bundle.session(entry) as session:
        run = in_pieces(session.run, most_rows(entry))
        example = answering.read(["a text"])  # the first call pays for every allocation, before anybody waits
        answering.run(run, example)
        yield Served(bundle.name, entry.id, labels, answering, run)


def _entry(bundle: Bundle, wanted: str | None) -> ArtifactManifest:
    whole = bundle.built("full", "exit", "step")
    if wanted is not None:
        entry = bundle.artifact(wanted)
        if entry not in whole:
            raise InputError(f"--artifact {wanted}: {entry.role}, {entry.status}; it does not answer whole texts")
        return entry
    reasons = [f"{entry.id}: {reason}" for entry in whole if (reason := bundle.cannot_run(entry)) is not None]
    found = next((entry for entry in whole if bundle.cannot_run(entry) is None), None)
    if found is None:
        raise ArtifactError(f"{bundle.folder}: no artifact can run here ({'; '.join(reasons) or 'none was built'})")
    return found


# One thread that owns a session and answers what waits, many texts in one call where many wait.
#
# Nobody waits for company: while a call runs, others queue up, and the next call takes them together. So a lone text
# is
# answered at once, and the busier the server, the larger its batches.


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
