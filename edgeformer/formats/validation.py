"""From a raw document to a validated object; an error names file, line, key, what is allowed, the nearest key."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from edgeformer.formats.errors import RecipeError
from edgeformer.formats.yaml_file import KeyPath, YamlDocument, parse_value

M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], document: YamlDocument) -> M:
    """Validate ``document`` as ``model``. Raises RecipeError with one line per problem."""
    try:
        return model.model_validate(document.content)
    except ValidationError as error:
        # A list whose items are all wrong also counts as too short; the items say what is wrong.
        problems = [d for d in error.errors() if d["type"] != "too_short" or d["ctx"].get("actual_length") != 0]
        lines = [_explain(model, document, details) for details in problems or error.errors()]
        # A discriminated union reports the same slip once per member; say it once.
        raise RecipeError("\n".join(dict.fromkeys(lines))) from None


def apply_overrides(document: YamlDocument, overrides: list[str]) -> None:
    """Apply ``key.path=value`` overrides to ``document`` in place; a number in the path is a list position.

    Raises:
        RecipeError: an override has no ``=``, its value is not YAML, or its path leads through a plain value.
    """
    for override in overrides:
        path_text, equals, value_text = override.partition("=")
        if not equals or not path_text.strip():
            raise RecipeError(f"--set {override}: write key.path=value, e.g. --set training.epochs=3")
        try:
            value = parse_value(value_text)
        except yaml.YAMLError:
            raise RecipeError(f"--set {override}: the value is not valid YAML; quote it") from None
        _assign(document, path_text.strip().split("."), value, override)


def _assign(document: YamlDocument, keys: list[str], value: Any, override: str) -> None:
    target: Any = document.content
    path: KeyPath = ()
    for position, key in enumerate(keys):
        last = position == len(keys) - 1
        if isinstance(target, list):
            if not key.isdigit() or int(key) >= len(target):
                raise RecipeError(
                    f"--set {override}: {'.'.join(keys[:position])} is a list of {len(target)}; "
                    f"{key!r} is not one of its positions 0…{len(target) - 1}"
                )
            step: str | int = int(key)
        elif isinstance(target, dict):
            step = key
            if not last and target.get(key) is None:
                target[key] = {}
        else:
            raise RecipeError(
                f"--set {override}: {'.'.join(keys[:position])} is a single value and has no keys of its own"
            )
        path = (*path, step)
        if last:
            target[step] = value
            # Problems below this key are the override's, not the file's.
            for known in [known for known in document.lines if known[: len(path)] == path]:
                del document.lines[known]
            document.overridden[path] = f"--set {override}"
        else:
            target = target[step]


def _raw_path(content: Any, location: tuple[str | int, ...]) -> KeyPath:
    """pydantic's location without the union tags that it puts between keys."""
    path: list[str | int] = []
    here: Any = content
    for position, step in enumerate(location):
        if (isinstance(here, dict) and step in here) or (
            isinstance(here, list) and isinstance(step, int) and step < len(here)
        ):
            here = _child(here, step)
        elif position != len(location) - 1 or not isinstance(here, dict):
            continue
        path.append(step)
    return tuple(path)


def _child(here: Any, step: Any) -> Any:
    return here[step] if isinstance(here, (dict, list)) else None


def _explain(model: type[BaseModel], document: YamlDocument, details: ErrorDetails) -> str:
    path = _raw_path(document.content, details["loc"])
    dotted = ".".join(str(step) for step in path)
    where, kind, context = document.where(path), details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{where}: unknown key {dotted!r}; {_allowed_keys(model, document.content, path)}"
    if kind == "missing":
        return f"{where}: key {dotted!r} is missing; add it"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        discriminator = str(context.get("discriminator", "kind")).strip("'")
        tags = context.get("expected_tags") or ", ".join(map(repr, _tags(model, document.content, path)))
        tag = f", not {context['tag']!r}" if "tag" in context else ""
        return f"{where}: {dotted}.{discriminator} must be one of {tags}{tag}"
    message = details["msg"].removeprefix("Value error, ")
    value = details["input"]
    shown = f" (got {value!r})" if isinstance(value, (str, int, float, bool)) or value is None else ""
    return f"{where}: {dotted or 'the file'}: {message[:1].lower()}{message[1:]}{shown}"


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Every pydantic model that an annotation allows, through unions, lists and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        arguments = arguments[:1]
    elif not arguments and not isinstance(annotation, types.UnionType):
        return []
    return [found for argument in arguments for found in _models_in(argument)]


def _model_at(model: type[BaseModel], content: Any, path: KeyPath) -> list[type[BaseModel]]:
    """The models that may stand at ``path``; a union is narrowed by the ``kind`` that the document gives."""
    candidates = [model]
    here = content
    for step in path:
        here = _child(here, step)
        fields = [c.model_fields[step] for c in candidates if isinstance(step, str) and step in c.model_fields]
        if fields:
            candidates = [found for info in fields for found in _models_in(info.annotation)]
        if isinstance(here, dict) and "kind" in here:
            tagged = [c for c in candidates if here["kind"] in _kinds(c)]
            candidates = tagged or candidates
    return candidates


def _kinds(model: type[BaseModel]) -> tuple[Any, ...]:
    info = model.model_fields.get("kind")
    return typing.get_args(info.annotation) if info else ()


def _tags(model: type[BaseModel], content: Any, path: KeyPath) -> list[str]:
    return [str(kind) for candidate in _model_at(model, content, path) for kind in _kinds(candidate)]


def _allowed_keys(model: type[BaseModel], content: Any, path: KeyPath) -> str:
    keys = sorted(
        {
            info.alias or name
            for candidate in _model_at(model, content, path[:-1])
            for name, info in candidate.model_fields.items()
        }
    )
    near = difflib.get_close_matches(str(path[-1]), keys, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed here: {', '.join(keys)}"
