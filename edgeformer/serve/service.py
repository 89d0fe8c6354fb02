"""What a server serves: a model that answers requests, its limits and metrics, and refused requests.

Imports starlette and prometheus-client (extra ``serve``).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import ClassVar, TypeVar

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from edgeformer.artifacts.errors import InputError

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class ServeLimits:
    """Limits of a server, which bound its memory and the age of its answers."""

    batch: int = 32  # texts per call of the model; 1: no batches
    queue: int = 1024  # waiting texts, or requests to a language model; more are refused
    timeout_s: float = 30.0  # until the answer or a language model's first token is there; also for a body
    texts: int = 128  # per request
    characters: int = 20_000  # per text
    body_bytes: int = 1 << 20  # per request
    connections: int = 256  # with a request for predictions; more are refused


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


class RequestMessage(BaseModel):
    """A part of a request: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RefusedError(InputError):
    """A request that gets an error response of this status; ``param``, ``code``: as in OpenAI's interface."""

    def __init__(
        self, status: int, message: str, retry_after_s: int | None = None, *, param: str | None = None,
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.retry_after_s, self.param, self.code = status, retry_after_s, param, code


def read_message(kind: type[M], body: bytes, status: int, most_problems: int) -> M:
    """Parse the JSON body of a request.

    Raises RefusedError of this ``status``, with at most so many problems, and the key that is wrong first.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems, keys = [], []
        for problem in error.errors()[:most_problems]:
            location, message = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
            problems.append(f"{location}: {message}" if location else message)
            keys.append(location or (message.partition(":")[0] if problem["type"] == "value_error" else None))
        raise RefusedError(status, "; ".join(problems), param=keys[0]) from None


class RequestQueue(ABC):
    """Requests that wait for the model, and the thread that alone uses it."""

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Whether it accepts requests."""

    @abstractmethod
    def close(self) -> None:
        """Accept no more requests, and end the thread."""

    def expire(self) -> None:  # noqa: B027 - most requests end in time by themselves
        """End the requests that still run: the server stops, and their time is over."""


class Service(ABC):
    """A model behind a server."""

    name: str  # of the run
    id: str  # of the artifact
    queue: RequestQueue  # in front of the model
    page: ClassVar[str]  # name of the files of its page
    example: ClassVar[str]  # command that asks the server at ADDRESS
    posts: ClassVar[Mapping[str, tuple[type[BaseModel], type[BaseModel], str]]]
    """Path → messages of request and response, and what it does."""
    documents: Mapping[str, object] = MappingProxyType({})  # path → a JSON document to read
    refusal: ClassVar[type[BaseModel]]  # message of an error
    refusals: ClassVar[Mapping[str, str]]  # status → reason, of statuses that other services lack
    facts: Mapping[str, object] = MappingProxyType({})  # what /healthz says beside name and id

    @abstractmethod
    def error(self, status: int, message: str, error: Exception | None = None) -> dict[str, object]:
        """Return the body of an error response."""

    @abstractmethod
    async def answer(self, request: Request, body: bytes) -> Response:
        """Answer a request. Raises RefusedError, or ClientDisconnect."""
