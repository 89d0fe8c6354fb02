"""What a server did, as Prometheus reads it."""

from __future__ import annotations

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Metrics:
    """Counters, gauges and histograms of one server; every thread may change them."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "edgeformer_requests_total",
            "Requests for predictions, by the status of their response.",
            ["status"],
            registry=registry,
        )
        self.running = Gauge("edgeformer_requests_running", "Requests that have no response yet.", registry=registry)
        self.request_s = Histogram(
            "edgeformer_request_seconds",
            "From a request's first byte to its response.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.texts = Counter("edgeformer_texts_total", "Texts in responses.", registry=registry)
        self.unanswered = Counter("edgeformer_texts_without_answer_total", "Of these, empty ones.", registry=registry)
        self.waiting = Gauge("edgeformer_queue_texts", "Texts that wait.", registry=registry)
        self.call_rows = Histogram(
            "edgeformer_call_rows", "Texts in one call of the model.", registry=registry, buckets=_ROWS
        )
        self.call_s = Counter("edgeformer_call_seconds_total", "Time in the model.", registry=registry)
        resident = Gauge("process_resident_memory_bytes", "Resident memory of the server.", registry=registry)
        resident.set_function(lambda: psutil.Process().memory_info().rss)

    @property
    def responses(self) -> int:
        """How many requests were answered, whatever with."""
        return int(sum(sample.value for sample in next(iter(self.requests.collect())).samples))

    def text(self) -> str:
        """All of it."""
        return generate_latest(self._registry).decode()
