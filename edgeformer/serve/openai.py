"""Language models behind the interface of OpenAI: messages, chat templates, and routes."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any, ClassVar, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from pydantic import BaseModel, Field, model_validator
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.inference.generate import TextPiece, Writer
from edgeformer.inference.sampling import Sampling
from edgeformer.serve.queue import WritingQueue
from edgeformer.serve.service import RefusedError, RequestMessage, ServeLimits, Service, read_message

DEFAULT_COMPLETION_TOKENS = 16
"""Limit of new tokens of a completion that names none, as in OpenAI's interface; a chat has no such limit."""

_NEUTRAL = {
    "n": ("1",), "best_of": ("1",), "echo": ("false",), "suffix": ('""',), "logprobs": ("false",),
    "top_logprobs": ("0",), "presence_penalty": ("0", "0.0"), "frequency_penalty": ("0", "0.0"), "logit_bias": ("{}",),
    "tools": ("[]",), "tool_choice": ('"none"',), "response_format": ('{"type": "text"}',), "store": ("false",),
}  # fmt: skip
"""Keys of OpenAI's interface that are not supported → values (JSON) that change nothing."""
_FinishReason = Literal["stop", "length"] | None
_FINISH_REASONS: Mapping[str | None, _FinishReason] = {
    None: None, "boundary": "stop", "stop": "stop", "max_tokens": "length",
}  # fmt: skip
"""Why a text ends behind a token, as in :class:`TextPiece` → OpenAI's word for it."""


class StreamOptions(RequestMessage):
    """What a stream contains besides text."""

    include_usage: bool | None = Field(None, description="end with a chunk that has the token counts")


class _Request(RequestMessage):
    model: str | None = Field(None, description="the id in /v1/models")
    max_tokens: int | None = Field(None, ge=1, description="new tokens at most")
    temperature: float | None = Field(None, ge=0, le=2, description="0: always the likeliest token. Default: 1")
    top_p: float | None = Field(None, gt=0, le=1, description="only the likeliest tokens of this total probability")
    top_k: int | None = Field(None, ge=1, description="only the k likeliest tokens (not in OpenAI's interface)")
    seed: int | None = Field(None, ge=0, lt=2**32, description="the same seed draws the same text")
    stop: str | list[str] | None = Field(None, description="texts in front of which the text ends, at most 16")
    stream: bool | None = Field(None, description="send pieces of the text as server-sent events")
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="ignored")

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_keys(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        for key in document.keys() & _NEUTRAL.keys():
            if document[key] is not None and json.dumps(document[key]) not in _NEUTRAL[key]:
                raise ValueError(f"{key}: only {_NEUTRAL[key][0]} is supported; leave it out")
        return {key: value for key, value in document.items() if key not in _NEUTRAL}


class CompletionRequest(_Request):
    """A text to continue."""

    prompt: str | list[str] = Field(description="one text")


class TextPart(RequestMessage):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(RequestMessage):
    """A message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = Field(None, description="ignored")

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Request):
    """A chat, whose next message is written."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="the newer name of max_tokens")


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int = Field(description="new tokens, with the one that ends the text")
    total_tokens: int


class CompletionChoice(BaseModel):
    index: Literal[0] = 0
    text: str
    logprobs: None = None
    finish_reason: _FinishReason


class Completion(BaseModel):
    """The continuation of a prompt, or a piece of it in a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatAnswer(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: Literal[0] = 0
    message: ChatAnswer
    logprobs: None = None
    finish_reason: _FinishReason


class ChatCompletion(BaseModel):
    """The next message of a chat. In a stream, ``object`` is chat.completion.chunk, and a choice has ``delta``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ErrorFacts(BaseModel):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = None
    code: str | None = None


class ErrorMessage(BaseModel):
    """Why there is no answer."""

    error: ErrorFacts


class _GenerationTag(jinja2.ext.Extension):
    """Transformers' ``{% generation %}``, which marks the model's own messages for training: its content is kept."""

    tags = {"generation"}  # noqa: RUF012 — as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A chat template of Hugging Face's form (Jinja), which writes a chat as the model's training data did.

    ``source`` may come from anywhere: it runs in Jinja's sandbox. It can name the special ``tokens``, as ``bos_token``.
    Raises InputError: it is no template.
    """

    def __init__(self, source: str, tokens: Mapping[str, Any]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(str(form)),
        }
        self._tokens = {name: token for name, token in tokens.items() if name.endswith("_token") and token}
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # text from anywhere: a wrong tag, or too many nested ones
            raise InputError(f"the chat template cannot be read: {error}; correct it") from None

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text in front of the next message. Raises RefusedError: the template does not take these."""
        documents = [{"role": message.role, "content": message.text} for message in messages]
        try:
            return self._template.render(
                messages=documents, add_generation_prompt=True, tools=None, documents=None, **self._tokens
            )
        except Exception as error:  # a template can fail in any way
            raise RefusedError(
                400, f"messages: the chat template of the model refuses them: {error}; change them", param="messages"
            ) from None


def _refuse(message: object) -> None:
    raise jinja2.TemplateError(str(message))


class CompletionService(Service):
    """Answers requests in OpenAI's form with one language model, which is opened here.

    ``template``: of chats; None: the model's.
    """

    queue: WritingQueue
    page = "write"
    example = (
        "curl -N ADDRESS/v1/completions -H 'Content-Type: application/json' "
        """-d '{"prompt": "TEXT", "stream": true}'"""
    )
    posts: ClassVar = {
        "/v1/completions": (CompletionRequest, Completion, "Continue a text"),
        "/v1/chat/completions": (ChatRequest, ChatCompletion, "Write the next message of a chat"),
    }
    refusal = ErrorMessage
    refusals: ClassVar = {"400": "the request is invalid or exceeds a limit", "404": "another model is asked for"}

    def __init__(self, writer: Writer, queue: WritingQueue, limits: ServeLimits, template: str | None = None) -> None:
        config = writer.tokenizer_config
        source = template if template is not None else config.get("chat_template")
        self._template: ChatTemplate | None = None
        self._no_chat, facts = f"{writer.name} has no chat template", dict[str, object]()
        try:
            self._template = ChatTemplate(source, config) if isinstance(source, str) else None
        except InputError as error:
            if template is not None:
                raise
            self._no_chat = f"{writer.name}: {error}"
            facts["chat_reason"] = self._no_chat
        added = writer.tokenizer.get_added_tokens_decoder().values()
        self._special = [token.content for token in added if token.special]
        for _ in writer.write(writer.encode("a"), 1, Sampling(0)):
            pass  # the first call allocates memory, which no client should wait for
        self.name, self.id, self.queue = writer.name, writer.artifact, queue
        model = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "edgeformer"}
        listed = {"object": "list", "data": [model]}
        self.documents = {"/v1/models": listed, f"/v1/models/{self.name}": model}
        self.facts = {"chat": self._template is not None, **facts}
        self._writer, self._limits = writer, limits

    def error(self, status: int, message: str, error: Exception | None = None) -> dict[str, object]:
        kind: Any = "server_error" if status >= 500 else "invalid_request_error"
        facts = ErrorFacts(
            message=message, type=kind, param=getattr(error, "param", None), code=getattr(error, "code", None)
        )
        return ErrorMessage(error=facts).model_dump()

    async def answer(self, request: Request, body: bytes) -> Response:
        # 1. Read the request
        is_chat = request.url.path == "/v1/chat/completions"
        kind: type[CompletionRequest | ChatRequest] = ChatRequest if is_chat else CompletionRequest
        content = read_message(kind, body, 400, most_problems=1)
        if content.model not in (None, self.name):
            message = f"model: this server has no {content.model!r}; use {self.name!r}"
            raise RefusedError(404, message, param="model", code="model_not_found")
        stop = [content.stop] if isinstance(content.stop, str) else content.stop or []
        if len(stop) > 16 or "" in stop:
            raise RefusedError(400, "stop: give at most 16 texts, none of them empty", param="stop")
        temperature = 1.0 if content.temperature is None else content.temperature
        seed = secrets.randbits(32) if content.seed is None else content.seed  # a different text each time
        sampling = Sampling(temperature, content.top_k, content.top_p, seed)
        requested, default = content.max_tokens, None if is_chat else DEFAULT_COMPLETION_TOKENS
        # 2. Check the prompt, or the messages of the chat
        param = "messages" if is_chat else "prompt"
        if isinstance(content, CompletionRequest):
            texts = [content.prompt] if isinstance(content.prompt, str) else content.prompt
            if len(texts) != 1:
                raise RefusedError(400, f"prompt: has {len(texts)} texts; send one text per request", param=param)
        elif self._template is None:
            message = f"{self._no_chat}; use /v1/completions, or start the server with --chat-template FILE"
            raise RefusedError(400, message, code="no_chat_template")
        else:
            texts = [message.text for message in content.messages]
        characters, limit = sum(map(len, texts)), self._limits.characters
        if characters > limit:
            message = f"{param}: has {characters:,} characters, and the limit is {limit:,}; shorten it"
            raise RefusedError(400, message, param=param)
        for number, text in enumerate(texts if is_chat else ()):
            # In the model's text such a token begins or ends a message.
            token = next((token for token in self._special if token in text), None)
            if token is not None:
                name = f"messages.{number}.content"
                raise RefusedError(400, f"{name}: has the special token {token!r}; remove it", param=name)
        # 3. Encode it
        try:
            if isinstance(content, ChatRequest):
                assert self._template is not None
                ids = self._writer.encode(self._template.render(content.messages), is_chat=True)
                requested = requested or content.max_completion_tokens
            else:
                ids = self._writer.encode(texts[0])
            max_tokens, _ = self._writer.token_limit(ids, requested, default)
        except RefusedError:
            raise
        except InputError as error:
            message = str(error).replace("--max-tokens", "max_tokens")
            param = "max_tokens" if message.startswith("max_tokens") else param
            raise RefusedError(400, message, param=param, code="context_length_exceeded") from None
        # 4. Write, and send all of it or its pieces
        pieces = self.queue.write(ids, max_tokens, sampling, stop)
        frame = _Frame(self.name, len(ids), is_chat=is_chat)
        if not content.stream:
            return JSONResponse(frame.whole(await _unless_disconnected(request, _collect(pieces))))
        first = await _unless_disconnected(request, anext(pieces))
        with_usage = content.stream_options is not None and content.stream_options.include_usage is True
        return StreamingResponse(
            self._events(first, pieces, frame, with_usage=with_usage),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )

    async def _events(
        self, first: TextPiece, pieces: AsyncGenerator[TextPiece], frame: _Frame, *, with_usage: bool
    ) -> AsyncIterator[str]:
        """Yield server-sent events."""
        async with aclosing(pieces):
            try:
                if frame.is_chat:
                    delta = {"role": "assistant", "content": ""}
                    yield frame.event([{"index": 0, "delta": delta, "finish_reason": None}])
                count, piece = 1, first
                while True:
                    reason = _FINISH_REASONS[piece.stopped]
                    if piece.text or reason is not None:
                        delta = {"content": piece.text} if piece.text else {}
                        content: dict[str, Any] = {"delta": delta} if frame.is_chat else {"text": piece.text}
                        yield frame.event([{"index": 0, **content, "logprobs": None, "finish_reason": reason}])
                    if piece.stopped is not None:
                        break
                    count, piece = count + 1, await anext(pieces)
                if with_usage:
                    yield frame.event([], usage=frame.usage(count).model_dump())
            except EdgeformerError as error:
                yield f"data: {json.dumps(self.error(500, str(error)), ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"


class _Frame:
    """The documents around the pieces of one text."""

    def __init__(self, model: str, prompt_tokens: int, *, is_chat: bool) -> None:
        self.is_chat, self._prompt_tokens = is_chat, prompt_tokens
        id_ = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._facts = {"id": id_, "created": int(time.time()), "model": model}

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        """Return the answer to a request without ``stream``."""
        text, reason = "".join(piece.text for piece in pieces), _FINISH_REASONS[pieces[-1].stopped]
        usage = self.usage(len(pieces))
        if self.is_chat:
            choice = ChatChoice(message=ChatAnswer(content=text), finish_reason=reason)
            return ChatCompletion(**self._facts, choices=[choice], usage=usage).model_dump()
        choices = [CompletionChoice(text=text, finish_reason=reason)]
        return Completion(**self._facts, choices=choices, usage=usage).model_dump()

    def usage(self, count: int) -> Usage:
        """Return the token counts of a text with ``count`` new tokens."""
        prompt = self._prompt_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=count, total_tokens=prompt + count)

    def event(self, choices: list[dict[str, Any]], **others: object) -> str:
        """Return a server-sent event of a stream."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        document = {**self._facts, "object": kind, "choices": choices, **others}
        return f"data: {json.dumps(document, ensure_ascii=False)}\n\n"


async def _collect(pieces: AsyncGenerator[TextPiece]) -> list[TextPiece]:
    return [piece async for piece in pieces]


async def _unless_disconnected(request: Request, work: Any) -> Any:
    """Await ``work``. Raises ClientDisconnect, and cancels it, as soon as the client is gone."""

    async def wait_until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_until_gone())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
