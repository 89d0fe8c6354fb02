"""HTTP server of a bundle: messages, routes, limits, and running until it is stopped.

Imports uvicorn and starlette (extra ``serve``): import this module only to serve.
"""

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, ClassVar

import uvicorn
from jinja2 import Environment, PackageLoader
from prometheus_client import generate_latest
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from typing_extensions import Self

from edgeformer._version import __version__
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.data.encoding import require_unicode
from edgeformer.data.rows import Text, text_parts
from edgeformer.inference.generate import GenerateOptions, Writer
from edgeformer.inference.predict import Predictor
from edgeformer.inference.rank import RankedDocument, rank_documents, scoring_inputs
from edgeformer.run import Location
from edgeformer.serve.openai import CompletionService
from edgeformer.serve.queue import BatchingQueue, WritingQueue, open_served_predictor
from edgeformer.serve.service import Metrics, RefusedError, RequestMessage, ServeLimits, Service, read_message
from edgeformer.system.signals import handle_signals, switch_threads_often
from edgeformer.tasks.task import Unanswered


class PredictRequest(RequestMessage):
    """One text, or many; of a classifier of pairs the second texts, too."""

    text: str | None = Field(None, description="one text; alternative to texts")
    texts: list[str] | None = Field(None, min_length=1, description="many texts")
    pair: str | None = Field(None, description="with text: the second text of a pair")
    pairs: list[str] | None = Field(None, description="with texts: the second texts, one for each")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.text is None) == (self.texts is None):
            raise ValueError("give either text or texts")
        if (self.pair is not None and self.text is None) or (self.pairs is not None and self.texts is None):
            raise ValueError("give pair with text, and pairs with texts")
        if self.pairs is not None and len(self.pairs) != len(self.texts or ()):
            raise ValueError(f"there are {len(self.pairs)} pairs for {len(self.texts or ())} texts; give one for each")
        return self


class SpanMessage(BaseModel):
    """A labelled span of the text; offsets count Unicode code points."""

    start: int
    end: int = Field(description="behind the last character")
    label: str
    text: str
    probability: float


class PredictionMessage(BaseModel):
    """Answer to one text: a label, spans, a vector, or an error."""

    model_config = ConfigDict(extra="allow")

    text: str
    pair: str | None = None
    label: str | None = Field(None, description="classifiers: the likeliest label")
    probability: float | None = Field(None, description="classifiers: of that label")
    probabilities: dict[str, float] | None = Field(None, description="classifiers: of every label")
    spans: list[SpanMessage] | None = Field(None, description="token classifiers: in the order of the text")
    score: float | None = Field(None, description="regression models")
    vector: list[float] | None = Field(None, description="embedding models")
    truncated: bool | None = Field(None, description="only the beginning of the text was read")
    error: str | None = Field(None, description="reason for a missing answer, e.g. an empty text")


class PredictResponse(BaseModel):
    """Answers in the order of the texts."""

    run: str
    artifact: str
    predictions: list[PredictionMessage]


class RankRequest(RequestMessage):
    """A query and the documents that are ranked for it."""

    query: str
    documents: list[str] = Field(min_length=1)
    top: int = Field(10, ge=1, description="documents in the response")


class RankResponse(BaseModel):
    """The best documents, best first."""

    run: str
    artifact: str
    query: str
    documents: list[RankedDocument]


class Refusal(BaseModel):
    """Why there is no answer."""

    error: str


def openapi(service: Service, limits: ServeLimits) -> dict[str, object]:
    """Return the OpenAPI 3.1 document of the server."""
    messages: list[Any] = [service.refusal]
    for request, response, _ in service.posts.values():
        messages += [request, response]
    _, document = models_json_schema(
        [(message, "validation") for message in messages], ref_template="#/components/schemas/{model}"
    )

    def body(description: str, model: type[BaseModel]) -> dict[str, object]:
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        return {"description": description, "content": {"application/json": {"schema": schema}}}

    refusals = {
        "408": "the body did not arrive in time",
        "413": f"the body is larger than {limits.body_bytes:,} bytes",
        "415": "the Content-Type is not application/json",
        **service.refusals,
        "500": "the model failed, e.g. for lack of memory",
        "503": "the server is overloaded or stopping; Retry-After says when to try again",
        "504": f"no answer within {limits.timeout_s:g} s",
    }
    refused = {status: body(text, service.refusal) for status, text in refusals.items()}
    paths: dict[str, object] = {}
    for path, (request, response, summary) in service.posts.items():
        operation = {
            "summary": summary,
            "description": f"At most {limits.texts:,} texts of {limits.characters:,} characters.",
            "requestBody": {**body("request", request), "required": True},
            "responses": {**refused, "200": body("the answer", response)},
        }
        paths[path] = {"post": operation}
    gets = {"/healthz": "Health; 503 while the server stops", "/metrics": "Metrics for Prometheus"}
    for path, text in (*gets.items(), *((path, "The model") for path in service.documents)):
        paths[path] = {"get": {"summary": text, "responses": {"200": {"description": text}}}}
    info = {"title": f"edgeformer serve: {service.name}", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": document["$defs"]}}


class PredictService(Service):
    """Answers texts with a model that is not a language model, in batches."""

    queue: BatchingQueue
    page = "predict"
    example = "curl ADDRESS/predict -H 'Content-Type: application/json' -d '{\"text\": \"TEXT\"}'"
    posts: ClassVar = {
        "/predict": (PredictRequest, PredictResponse, "Answer one text or many, in the order of the texts"),
        "/rank": (RankRequest, RankResponse, "Rank documents for a query, best first"),
    }
    refusal = Refusal
    refusals: ClassVar = {"422": "the request is invalid or exceeds a limit"}

    def __init__(self, model: Predictor, queue: BatchingQueue, limits: ServeLimits, metrics: Metrics) -> None:
        self._model, self._limits, self._metrics = model, limits, metrics
        self.name, self.id, self.queue = model.name, model.id, queue

    def error(self, status: int, message: str, error: Exception | None = None) -> dict[str, object]:
        return {"error": message}

    async def answer(self, request: Request, body: bytes) -> Response:
        model, limits = self._model, self._limits
        task, data = model.answering.task, model.answering.data
        ranking: RankRequest | None = None
        rows: list[Text]
        # 1. Read the request
        try:
            if request.url.path == "/rank":
                ranking = read_message(RankRequest, body, 422, most_problems=5)
                rows = scoring_inputs(task, data, ranking.query, ranking.documents)
            else:
                content = read_message(PredictRequest, body, 422, most_problems=5)
                texts = content.texts or [str(content.text)]
                pairs = content.pairs if content.pair is None else [content.pair]
                rows = [*texts] if pairs is None else [*zip(texts, pairs, strict=True)]
                if (mismatch := task.pairs_problem(data, pairs=pairs is not None)) is not None:
                    raise InputError(f"pairs: {mismatch}")
            if len(rows) > limits.texts:
                raise InputError(
                    f"texts: has {len(rows):,} texts, and the limit is {limits.texts:,}; send several requests"
                )
            for number, row in enumerate(rows):
                for part in text_parts(row):
                    if len(part) > limits.characters:
                        excess = f"{len(part):,} characters, and the limit is {limits.characters:,}"
                        raise InputError(f"texts[{number}]: has {excess}; shorten it")
                    require_unicode(f"texts[{number}]", part)
        except InputError as error:
            raise RefusedError(422, str(error)) from None
        # 2. Wait for the answers
        try:
            answers = await asyncio.wait_for(asyncio.wrap_future(self.queue.submit(rows)), limits.timeout_s)
        except asyncio.TimeoutError:
            raise RefusedError(504, f"there was no answer within {limits.timeout_s:g} s; send fewer texts") from None
        # 3. Send them, or the ranking
        self._metrics.texts.inc(len(answers))
        self._metrics.unanswered.inc(sum(isinstance(answer, Unanswered) for answer in answers))
        named = {"run": model.name, "artifact": model.id}
        if ranking is None:
            return JSONResponse({**named, "predictions": [answer.as_dict() for answer in answers]})
        try:
            ranked = rank_documents(ranking.documents, answers, ranking.top, data)
        except InputError as error:  # a text is empty
            raise RefusedError(422, str(error)) from None
        return JSONResponse(RankResponse(**named, query=ranking.query, documents=ranked).model_dump())


_PAGES, _SHARED = files(__package__) / "page", files("edgeformer") / "web" / "site"
"""Pages of servers, and the folder of what they share with the page of ``edgeformer page`` (not imported here)."""
_PAGE_TYPES = {"css": "text/css", "js": "text/javascript"}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def application(
    service: Service, limits: ServeLimits, metrics: Metrics, hosts: Sequence[str],
    origins: Sequence[str],
) -> Starlette:  # fmt: skip
    """Return the ASGI application; ``hosts`` (against DNS rebinding) and ``origins`` are as in ``ServeOptions``."""
    # 1. Requests to the model
    running = 0

    async def read_body(request: Request) -> bytes:
        # A page of another site can send forms and plain text without a preflight request, but not JSON.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "send JSON with the header Content-Type: application/json")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limits.body_bytes:
                raise RefusedError(413, f"the body is larger than {limits.body_bytes:,} bytes; send fewer texts")
        return bytes(body)

    async def answer(request: Request) -> Response:
        try:
            if running > limits.connections:
                raise RefusedError(503, f"the limit of {limits.connections:,} requests is reached", retry_after_s=1)
            try:
                body = await asyncio.wait_for(read_body(request), limits.timeout_s)
            except asyncio.TimeoutError:
                raise RefusedError(408, f"the body did not arrive within {limits.timeout_s:g} s") from None
            return await service.answer(request, body)
        except RefusedError as error:
            if error.retry_after_s is None:
                return JSONResponse(service.error(error.status, str(error), error), error.status)
            message = f"{error}; try again in {error.retry_after_s} s"
            headers = {"Retry-After": str(error.retry_after_s)}
            return JSONResponse(service.error(error.status, message, error), error.status, headers)
        except EdgeformerError as error:  # of the model, for instance too little memory
            return JSONResponse(service.error(500, str(error)), 500)

    class Post:
        """ASGI application of a request, which runs until the last byte of its response."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal running
            started, status = time.perf_counter(), 500
            metrics.running.inc()
            running += 1
            try:
                response = await answer(Request(scope, receive))
                status = response.status_code
                await response(scope, receive, send)
            except ClientDisconnect:
                status = 499  # counted as proxies count it; the response goes to no client
                await Response(status_code=400)(scope, receive, send)
            finally:
                running -= 1
                metrics.running.dec()
                metrics.requests.labels(status).inc()
                metrics.request_s.observe(time.perf_counter() - started)

    # 2. Health, metrics, documents and the page
    async def health(_: Request) -> Response:
        is_healthy = service.queue.healthy
        facts = {"status": "ok" if is_healthy else "stopping", "run": service.name, "artifact": service.id}
        return JSONResponse({**facts, **service.facts}, 200 if is_healthy else 503)

    async def show_metrics(_: Request) -> Response:
        return PlainTextResponse(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    async def page(request: Request) -> Response:
        if name := request.url.path.lstrip("/"):
            content = (_SHARED if name in ("page.css", "show.js") else _PAGES).joinpath(name).read_bytes()
            return Response(content, media_type=_PAGE_TYPES[name.rpartition(".")[2]], headers=_PAGE_HEADERS)
        template = Environment(
            loader=PackageLoader("edgeformer.serve", "page"), autoescape=True, keep_trailing_newline=True
        )
        html = template.get_template(f"{service.page}.html").render(page=service.page)
        return Response(html, media_type="text/html", headers=_PAGE_HEADERS)

    async def document(request: Request) -> Response:
        path = request.url.path
        return JSONResponse(openapi(service, limits) if path == "/openapi.json" else service.documents[path])

    # 3. Their routes
    routes = [
        *(Route(path, Post(), methods=["POST"]) for path in service.posts),
        Route("/healthz", health),
        Route("/metrics", show_metrics),
        *(Route(path, document) for path in ("/openapi.json", *service.documents)),
        *(Route(f"/{name}", page) for name in ("", "page.css", "show.js", "server.js", f"{service.page}.js")),
    ]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)] if hosts else []
    if origins:
        methods, headers = ["GET", "POST"], ["content-type", "authorization"]
        cors = Middleware(CORSMiddleware, allow_origins=[*origins], allow_methods=methods, allow_headers=headers)
        middleware.append(cors)
    return Starlette(routes=routes, middleware=middleware)


@dataclass(frozen=True)
class ServeOptions:
    """Address, artifact and limits of a server.

    ``hosts``: accepted Host headers in addition to those of this machine; if empty, a server that listens at more than
    the loopback address accepts any. ``cosine`` is as in :class:`GenerateOptions`.
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    artifact: str | None = None  # None: the first that runs here; of a language model as in GenerateOptions
    runtime: str | None = None  # or one of its providers; None: the usual one
    chat_template: str | None = None  # of a language model's chats, in Jinja; None: the model's
    limits: ServeLimits = field(default_factory=ServeLimits)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()  # sites whose pages may read the answers
    cosine: float | None = None


@contextmanager
def open_service(location: Location, options: ServeOptions, metrics: Metrics) -> Iterator[Service]:
    """Open the model and start its queue. Raises InputError, ArtifactError."""
    limits = options.limits
    if location.open_model().task.can_write:
        chosen = GenerateOptions(artifact=options.artifact, runtime=options.runtime, cosine=options.cosine)
        with closing(Writer(location, chosen)) as writer, closing(WritingQueue(writer, limits, metrics)) as writing:
            yield CompletionService(writer, writing, limits, options.chat_template)
        return
    for flag, value in (("--chat-template", options.chat_template), ("--cosine", options.cosine)):
        if value is not None:
            raise InputError(f"{flag}: {location.name} is no language model; leave it out")
    with (
        open_served_predictor(location.open_bundle(), options.artifact, options.runtime) as model,
        closing(BatchingQueue(model, limits, metrics)) as queue,
    ):
        yield PredictService(model, queue, limits, metrics)


class _Server(uvicorn.Server):
    """Gives accepted requests ``timeout_s`` when it stops, and one second more for their last bytes."""

    service: Service
    timeout_s: float

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self.timeout_s, self.service.queue.expire)
        await super().shutdown(sockets)


def serve(location: Location, options: ServeOptions, ready: Callable[[Service, str], None]) -> int:
    """Answer until SIGTERM or Ctrl-C, finish the accepted requests, and return the number of responses.

    ``ready`` is called with the model and the server's address once it listens. Raises InputError, ArtifactError.
    """
    metrics = Metrics()
    # Requests on the machine itself (health checks); older versions of starlette cut [::1]:8000 at its first colon.
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]", "::1", "[", *options.hosts)
    if options.host not in ("127.0.0.1", "localhost", "::1"):
        hosts = (*hosts, options.host) if options.hosts else ()
    with (
        open_service(location, options, metrics) as service,
        _listen(options.host, options.port) as listener,
        switch_threads_often(),
    ):
        config = uvicorn.Config(
            application(service, options.limits, metrics, hosts, options.origins), log_config=None, access_log=False,
            lifespan="off", server_header=False, ws="none",
            timeout_graceful_shutdown=round(options.limits.timeout_s) + 1,
        )  # fmt: skip
        host, port = listener.getsockname()[:2]
        ready(service, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        server = _Server(config)
        server.service, server.timeout_s = service, options.limits.timeout_s
        # uvicorn raises the signal that stopped it again at its end; ignored, so that this process ends with 0.
        with handle_signals(("SIGINT", "SIGTERM"), lambda *_: None):
            server.run([listener])
    return int(sum(sample.value for sample in next(iter(metrics.requests.collect())).samples))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server_socket = socket.create_server((host, port), family=family, backlog=1024)
        # asyncio disables Nagle's algorithm only if the socket's protocol is TCP by name. With it every answer would
        # wait 40 ms for the client's ACK.
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=server_socket.detach())
    except OSError as error:
        reason = error.strerror or error
        if error.errno == errno.EADDRINUSE:
            reason = "another program uses this port; choose another one, or 0 for a free one"
        raise InputError(f"--host {host} --port {port}: {reason}") from None
