"""What is said over HTTP: requests, answers and refusals, and the OpenAPI document of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from edgeformer import __version__
from edgeformer.artifacts.errors import InputError
from edgeformer.data.encoding import require_unicode
from edgeformer.data.rows import Text
from edgeformer.inference.serving_engine import Limits
from edgeformer.tasks.text_answers import Answering


class PredictRequest(BaseModel):
    """One text, or many; of a classifier of pairs the second texts, too."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = Field(None, description="one text; or else texts")
    texts: list[str] | None = Field(None, min_length=1, description="many texts")
    pair: str | None = Field(None, description="with text: the second text of a pair")
    pairs: list[str] | None = Field(None, description="with texts: the second texts, one for each")

    @model_validator(mode="after")
    def _one_or_many(self) -> Self:
        if (self.text is None) == (self.texts is None):
            raise ValueError("give either text or texts")
        if (self.pair is not None and self.text is None) or (self.pairs is not None and self.texts is None):
            raise ValueError("pair belongs to text, and pairs to texts")
        if self.pairs is not None and len(self.pairs) != len(self.texts or ()):
            raise ValueError(f"{len(self.pairs)} pairs for {len(self.texts or ())} texts; give one for each")
        return self

    def rows(self) -> list[Text]:
        """The texts, or pairs of texts."""
        if self.text is not None:
            return [self.text if self.pair is None else (self.text, self.pair)]
        texts = self.texts or []
        return [*texts] if self.pairs is None else [*zip(texts, self.pairs, strict=True)]


class PredictionMessage(BaseModel):
    """What one text gets: a label, a vector, or an error."""

    model_config = ConfigDict(extra="allow")

    text: str
    pair: str | None = None
    label: str | None = Field(None, description="classifiers: the likeliest label")
    probability: float | None = Field(None, description="classifiers: of that label")
    probabilities: dict[str, float] | None = Field(None, description="classifiers: of every label")
    vector: list[float] | None = Field(None, description="embedding models")
    truncated: bool | None = Field(None, description="only the beginning of the text was read")
    error: str | None = Field(None, description="why there is no answer: the text is empty")


class PredictResponse(BaseModel):
    """Answers in the order of the texts."""

    run: str
    artifact: str
    predictions: list[PredictionMessage]


class Refusal(BaseModel):
    """Why there is no answer."""

    error: str


class RefusedError(InputError):
    """A request that is answered with its ``status`` and no prediction."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def read_request(body: bytes, limits: Limits, answering: Answering) -> list[Text]:
    """The texts of a request.

    Args:
        body: JSON.
        limits: of the server.
        answering: the model, which may read single texts only, or pairs only.

    Raises:
        RefusedError: it is not what is expected, too much, or not what the model reads.
    """
    try:
        rows = PredictRequest.model_validate_json(body).rows()
    except ValidationError as error:
        raise RefusedError(422, "; ".join(map(_problem, error.errors()[:5]))) from None
    if len(rows) > limits.texts:
        raise RefusedError(422, f"texts: {len(rows):,}, but at most {limits.texts:,} in one request; send several")
    problem = answering.pairs_problem(pairs=not isinstance(rows[0], str))
    if problem is not None:
        raise RefusedError(422, f"pairs: {problem}")
    for number, row in enumerate(rows):
        for part in (row,) if isinstance(row, str) else row:
            if len(part) > limits.characters:
                many = f"{len(part):,} characters, but at most {limits.characters:,}"
                raise RefusedError(422, f"texts[{number}]: has {many}; give its beginning")
            try:
                require_unicode(f"texts[{number}]", part)
            except InputError as error:
                raise RefusedError(422, str(error)) from None
    return rows


def _problem(found: Any) -> str:
    where, said = ".".join(map(str, found["loc"])), str(found["msg"]).removeprefix("Value error, ")
    return f"{where}: {said}" if where else said


def openapi(name: str, limits: Limits) -> dict[str, object]:
    """The OpenAPI 3.1 document of a server.

    Args:
        name: of the run that it answers with.
        limits: which it states.
    """
    schemas: dict[str, Any] = {}

    def schema(model: type[BaseModel]) -> dict[str, str]:
        document = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(document.pop("$defs", {}))
        schemas[model.__name__] = document
        return {"$ref": f"#/components/schemas/{model.__name__}"}

    refusal = {"content": {"application/json": {"schema": schema(Refusal)}}}
    responses: dict[str, Any] = {
        "200": {
            "description": "answers in the order of the texts",
            "content": {"application/json": {"schema": schema(PredictResponse)}},
        },
        "408": {"description": "the body did not come in time", **refusal},
        "413": {"description": f"the body is larger than {limits.body_bytes:,} bytes", **refusal},
        "415": {"description": "the body is not called application/json", **refusal},
        "422": {"description": "not what is expected, or more than the limits allow", **refusal},
        "500": {"description": "the model failed: not enough memory for instance", **refusal},
        "503": {"description": "overloaded, or stopping; Retry-After says when to come again", **refusal},
        "504": {"description": f"no answer within {limits.timeout_s:g} s", **refusal},
    }
    plain = _get("text/plain", {"type": "string"})
    predict = {
        "summary": "Answer one text or many",
        "description": f"At most {limits.texts:,} texts of {limits.characters:,} characters.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema(PredictRequest)}}},
        "responses": responses,
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"edgeformer serve: {name}", "version": __version__},
        "paths": {
            "/predict": {"post": predict},
            "/healthz": _get("application/json", {"type": "object"})("It answers; 503 while it stops"),
            "/metrics": plain("Counts for Prometheus"),
        },
        "components": {"schemas": schemas},
    }


def _get(kind: str, schema: dict[str, str]) -> Callable[[str], dict[str, object]]:
    def path(summary: str) -> dict[str, object]:
        content = {"content": {kind: {"schema": schema}}, "description": summary}
        return {"get": {"summary": summary, "responses": {"200": content}}}

    return path
