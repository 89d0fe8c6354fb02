"""What a server did, in the text format that Prometheus reads."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter

import psutil

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts = bounds, [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*(f"{bound:g}" for bound in self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """Counts; every thread may tell it something."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._responses: Counter[int] = Counter()
        self._texts = self._unanswered = self._waiting = self._running = 0
        self._calls, self._call_s, self._request_s = _Histogram(_ROWS), 0.0, _Histogram(_SECONDS)

    def began(self) -> None:
        """A request for predictions came in."""
        with self._lock:
            self._running += 1

    def ended(self, status: int, seconds: float) -> None:
        """And got its response."""
        with self._lock:
            self._running -= 1
            self._responses[status] += 1
            self._request_s.add(seconds)

    def answered(self, texts: int, unanswered: int) -> None:
        """Texts of a response, and how many of them have an error in place of an answer."""
        with self._lock:
            self._texts += texts
            self._unanswered += unanswered

    def waiting(self, texts: int) -> None:
        """So many texts are in the queue."""
        with self._lock:
            self._waiting = texts

    def called(self, rows: int, seconds: float) -> None:
        """The model was called once."""
        with self._lock:
            self._calls.add(rows)
            self._call_s += seconds

    @property
    def responses(self) -> int:
        """How many requests were answered, whatever with."""
        return self._responses.total()

    def text(self) -> str:
        """All of it."""
        with self._lock:
            lines = [
                *_head("requests_total", "counter", "Requests for predictions, by the status of their response."),
                *(f'edgeformer_requests_total{{status="{s}"}} {n}' for s, n in sorted(self._responses.items())),
                *_value("requests_running", "gauge", "Requests that have no response yet.", self._running),
                *_head("request_seconds", "histogram", "From a request's first byte to its response."),
                *self._request_s.lines("edgeformer_request_seconds"),
                *_value("texts_total", "counter", "Texts in responses.", self._texts),
                *_value("texts_without_answer_total", "counter", "Of these, empty ones.", self._unanswered),
                *_value("queue_texts", "gauge", "Texts that wait.", self._waiting),
                *_head("call_rows", "histogram", "Texts in one call of the model."),
                *self._calls.lines("edgeformer_call_rows"),
                *_value("call_seconds_total", "counter", "Time in the model.", round(self._call_s, 6)),
            ]
        resident = psutil.Process().memory_info().rss
        lines += ["# TYPE process_resident_memory_bytes gauge", f"process_resident_memory_bytes {resident}"]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, what: str) -> list[str]:
    return [f"# HELP edgeformer_{name} {what}", f"# TYPE edgeformer_{name} {kind}"]


def _value(name: str, kind: str, what: str, value: float) -> list[str]:
    return [*_head(name, kind, what), f"edgeformer_{name} {value}"]
