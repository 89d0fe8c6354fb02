"""Connections that nobody uses: a time limit for heads, which uvicorn has none for. Imports uvicorn."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.bundle import Bundle
from edgeformer.inference.serving_engine import Engine, Limits, OverloadedError, Served, served
from edgeformer.inference.serving_messages import RefusedError, openapi, read_request
from edgeformer.inference.serving_metrics import Metrics
from edgeformer.system.signals import switching_often
from edgeformer.tasks.task import Unanswered

_Protocol: Any = object if TYPE_CHECKING else AutoHTTPProtocol  # which of them is uvicorn's choice


def protocol_within(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol with limits for what comes before a request, and after its answer.

    A connection without a request must send a whole head in ``limits.timeout_s``, and its client must take an answer in
    the same time, or it is closed. Where more than ``limits.waiting`` have sent no head, so is the one that was silent
    for longest: a process has a limited number of connections, and there must be one for who asks how the server is.
    """

    class Protocol(_Protocol):  # type: ignore[misc]
        _waiting: ClassVar[dict[Protocol, asyncio.TimerHandle]] = {}  # in the order in which they began to wait
        _taking: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._wait()
            if len(self._waiting) > limits.waiting:
                self._waiting.pop(oldest := next(iter(self._waiting))).cancel()
                oldest.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._came()
            else:  # no head, or half a one
                self._wait()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._taking = _later(limits.timeout_s, self.transport)

        def resume_writing(self) -> None:
            super().resume_writing()
            _cancel(self._taking)

        def connection_lost(self, exc: Exception | None) -> None:
            self._came()
            _cancel(self._taking)
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self not in self._waiting:
                self._waiting[self] = _later(limits.timeout_s, self.transport)

        def _came(self) -> None:
            _cancel(self._waiting.pop(self, None))

    return Protocol


def _later(seconds: float, transport: asyncio.Transport) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


# The HTTP side: routes, limits and refusals. Imports starlette: import this file only where something is served.


_PAGE = files(__package__) / "page"
_KINDS = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
_ONLY_OURS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Application:
    """What every route needs.

    Args:
        served: the model.
        engine: that answers with it.
        limits: of a request.
        metrics: of the server.
    """

    def __init__(self, served: Served, engine: Engine, limits: Limits, metrics: Metrics) -> None:
        self._served, self._engine, self._limits, self._metrics = served, engine, limits, metrics
        self._running = 0

    def asgi(self, hosts: Sequence[str], origins: Sequence[str]) -> Starlette:
        """The application.

        Args:
            hosts: names by which it may be asked for, else another site's name could be pointed at this machine; empty:
                any.
            origins: sites whose pages may read the answers; empty: none but its own.
        """
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)] if hosts else []
        if origins:
            methods, headers = ["GET", "POST"], ["content-type"]
            cors = Middleware(CORSMiddleware, allow_origins=[*origins], allow_methods=methods, allow_headers=headers)
            middleware.append(cors)
        routes = [
            Route("/predict", self._predict, methods=["POST"]),
            Route("/healthz", self._health),
            Route("/metrics", self._show_metrics),
            Route("/openapi.json", self._openapi),
            Route("/", _page("page.html")),
            *(Route(f"/{name}", _page(name)) for name in ("page.css", "page.js")),
        ]
        return Starlette(routes=routes, middleware=middleware)

    async def _predict(self, request: Request) -> Response:
        started = time.perf_counter()
        self._metrics.running.inc()
        self._running += 1
        status = 500
        try:
            response = await self._answer(request)
            status = response.status_code
        except ClientDisconnect:
            status = 499  # what proxies note where the client has gone; nobody reads the response
            response = Response(status_code=400)
        finally:
            self._running -= 1
            self._metrics.running.dec()
            self._metrics.requests.labels(status).inc()
            self._metrics.request_s.observe(time.perf_counter() - started)
        return response

    async def _answer(self, request: Request) -> Response:
        try:
            if self._running > self._limits.connections:
                raise OverloadedError(f"{self._limits.connections:,} requests are in work", 1)
            body = await self._body_in_time(request)
            texts = read_request(body, self._limits, self._served.answering)
            future = asyncio.wrap_future(self._engine.submit(texts))
            answers = await asyncio.wait_for(future, self._limits.timeout_s)
        except RefusedError as error:
            return _refusal(error.status, str(error))
        except OverloadedError as error:
            again = {"Retry-After": str(error.retry_after_s)}
            return _refusal(503, f"{error}; try again in {error.retry_after_s} s", again)
        except asyncio.TimeoutError:
            return _refusal(504, f"no answer within {self._limits.timeout_s:g} s")
        except EdgeformerError as error:  # the model's: not enough memory for instance
            return _refusal(500, str(error))
        self._metrics.texts.inc(len(answers))
        self._metrics.unanswered.inc(sum(isinstance(answer, Unanswered) for answer in answers))
        found = [answer.as_dict() for answer in answers]
        return JSONResponse({"run": self._served.name, "artifact": self._served.artifact, "predictions": found})

    async def _body_in_time(self, request: Request) -> bytes:
        try:
            return await asyncio.wait_for(self._body(request), self._limits.timeout_s)
        except asyncio.TimeoutError:
            raise RefusedError(408, f"the body did not come within {self._limits.timeout_s:g} s") from None

    async def _body(self, request: Request) -> bytes:
        """The body, never more of it than is allowed. Raises RefusedError."""
        # A page of another site can send forms and plain text without asking first, but no JSON.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "send JSON, with the header Content-Type: application/json")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._limits.body_bytes:
                raise RefusedError(413, f"the body is larger than {self._limits.body_bytes:,} bytes; send fewer texts")
        return bytes(body)

    async def _health(self, _: Request) -> Response:
        well = self._engine.healthy
        facts = {"status": "ok" if well else "stopping", "run": self._served.name, "artifact": self._served.artifact}
        return JSONResponse(facts, 200 if well else 503)

    async def _show_metrics(self, _: Request) -> Response:
        return PlainTextResponse(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _openapi(self, _: Request) -> Response:
        return JSONResponse(openapi(self._served.name, self._limits))


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = (_PAGE / name).read_text(encoding="utf-8")

    async def show(_: Request) -> Response:
        return Response(content, media_type=_KINDS[name], headers=_ONLY_OURS)

    return show


# Serving a bundle until somebody stops it. Imports uvicorn: import this file only where something is served.


_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServeOptions:
    """Where and what is served.

    Attributes:
        host: address to listen at.
        port: 0: a free one.
        artifact: an id; None: the first that runs here.
        limits: of requests.
        hosts: names by which it may be asked for, beside those of this machine; without any, a server that does not
            listen at the loopback address alone can be asked for by every name.
        origins: sites whose pages may read the answers.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    artifact: str | None = None
    limits: Limits = field(default_factory=Limits)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


def serve(bundle: Bundle, options: ServeOptions, ready: Callable[[Served, str], None]) -> int:
    """Answer until SIGTERM or Ctrl-C, then finish what was accepted.

    Args:
        bundle: of a classifier or an embedding model.
        options: where and how.
        ready: is told the model, and the address of the server, when it listens.

    Returns:
        How many requests for predictions were answered.

    Raises:
        InputError: the address cannot be had, or the model cannot be served.
        ArtifactError: no artifact can run here, or a file is damaged.
    """
    metrics = Metrics()
    with (
        served(bundle, options.artifact) as model,
        _listening(options.host, options.port) as listening,
        Engine(model.answering, model.run, options.limits, metrics) as engine,
        switching_often(),
    ):
        application = Application(model, engine, options.limits, metrics).asgi(_hosts(options), options.origins)
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            http=protocol_within(options.limits),
            ws="none",
            timeout_graceful_shutdown=round(options.limits.timeout_s) + 1,
        )
        ready(model, _address(listening))
        _until_stopped(uvicorn.Server(config), listening)
    return metrics.responses


def _until_stopped(server: uvicorn.Server, listening: socket.socket) -> None:
    """Run it. A signal that stopped it well, which it raises again at its end, ends this process as if it had not."""
    if threading.current_thread() is not threading.main_thread():
        server.run([listening])
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        server.run([listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=1024)
        # Named as TCP, or asyncio leaves Nagle's algorithm on: every answer would wait 40 ms for the client's ACK.
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=made.detach())
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"--port {port}: another program listens there; choose another one, or 0 for a free one"
            ) from None
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}") from None


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _hosts(options: ServeOptions) -> tuple[str, ...]:
    # Of [::1]:8000 older versions of starlette take what is before the first colon.
    here = ("localhost", "127.0.0.1", "[::1]", "::1", "[")
    if options.host in _LOOPBACK:
        return (*here, *options.hosts)
    return (*here, *options.hosts, options.host) if options.hosts else ()  # a health check asks from here
