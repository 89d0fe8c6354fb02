"""The HTTP side: routes, limits and refusals. Imports starlette: import this file only where something is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from edgeformer.formats.errors import EdgeformerError
from edgeformer.stages.serving.engine import Engine, OverloadedError
from edgeformer.stages.serving.limits import Limits
from edgeformer.stages.serving.messages import RefusedError, openapi, read_request
from edgeformer.stages.serving.metrics import Metrics
from edgeformer.stages.serving.served import Served
from edgeformer.tasks.prediction import Unanswered

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
