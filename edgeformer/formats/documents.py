"""Recipes and device profiles: found by path or by name, read as YAML, overridden, validated.

An error names file, line, key, what is allowed and the nearest key. Numbers are read as YAML 1.2 does (3e-4 is a
number, ``on`` is text).
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.errors import InputError, RecipeError, did_you_mean
from edgeformer.formats.files import write_text
from edgeformer.formats.yaml_text import DEEPEST, KeyPath, YamlDocument, parse_value, read_yaml

M = TypeVar("M", bound=BaseModel)
Kind = Literal["recipes", "profiles"]
_CALLED = {"recipes": "recipe", "profiles": "device profile"}
_MOST_PROBLEMS = 20
"""As many as a person reads at once; the file of a stranger could have thousands."""
_LONGEST_OVERRIDE = 120
"""Characters of an override that a message repeats."""


def validate(model: type[M], document: YamlDocument) -> M:
    """Validate ``document`` as ``model``. Raises RecipeError with one line per problem."""
    try:
        return model.model_validate(document.content)
    except ValidationError as error:
        # A list whose items are all wrong also counts as too short; the items say what is wrong.
        problems = [d for d in error.errors() if d["type"] != "too_short" or d["ctx"].get("actual_length") != 0]
        problems = problems or error.errors()
        lines = [_explain(model, document, details) for details in problems[:_MOST_PROBLEMS]]
        more = [f"… and {len(problems) - _MOST_PROBLEMS:,} more problems"] if len(problems) > _MOST_PROBLEMS else []
        # A discriminated union reports the same slip once per member; say it once.
        raise RecipeError("\n".join([*dict.fromkeys(lines), *more])) from None


def apply_overrides(document: YamlDocument, overrides: list[str]) -> None:
    """Apply ``key.path=value`` overrides to ``document`` in place; a number in the path is a list position.

    Raises:
        RecipeError: an override has no ``=``, its value is not YAML, or its path leads through a plain value.
    """
    for given in overrides:
        path_text, equals, value_text = given.partition("=")
        override = given if len(given) <= _LONGEST_OVERRIDE else f"{given[:_LONGEST_OVERRIDE]}…"
        if not equals or not path_text.strip():
            raise RecipeError(f"--set {override}: write key.path=value, e.g. --set training.epochs=3")
        try:
            value = parse_value(value_text)
        except yaml.YAMLError as error:
            reason = getattr(error, "problem", None) or "it cannot be read"
            raise RecipeError(f"--set {override}: the value is not valid YAML ({reason}); quote it") from None
        keys = path_text.strip().split(".")
        if len(keys) > DEEPEST:
            raise RecipeError(f"--set {override}: its path has {len(keys):,} steps, more than {DEEPEST}")
        _assign(document, keys, value, override)


def _assign(document: YamlDocument, keys: list[str], value: Any, override: str) -> None:
    target: Any = document.content
    path: KeyPath = ()
    for position, key in enumerate(keys):
        parent = ".".join(keys[:position])
        if path:
            target = target[path[-1]]
        if isinstance(target, list):
            if not key.isdigit() or int(key) >= len(target):
                raise RecipeError(
                    f"--set {override}: {parent} is a list of {len(target)}; "
                    f"{key!r} is not one of its positions 0…{len(target) - 1}"
                )
            path = (*path, int(key))
        elif isinstance(target, dict):
            path = (*path, key)
            if target.get(key) is None:
                target[key] = {}
        else:
            raise RecipeError(f"--set {override}: {parent} is a single value and has no keys of its own")
    target[path[-1]] = value
    # Problems below this key are the override's, not the file's.
    document.lines = {known: line for known, line in document.lines.items() if known[: len(path)] != path}
    document.overridden[path] = f"--set {override}"


def _raw_path(content: Any, location: tuple[str | int, ...]) -> KeyPath:
    """pydantic's location without the union tags that it puts between keys."""
    path: KeyPath = ()
    for position, step in enumerate(location):
        missing = position == len(location) - 1 and isinstance(content, dict)
        if _has(content, step) or missing:
            path = (*path, step)
            content = content[step] if _has(content, step) else None
    return path


def _has(here: Any, step: Any) -> bool:
    if isinstance(here, list):
        return isinstance(step, int) and step < len(here)
    return isinstance(here, dict) and step in here


def _explain(model: type[BaseModel], document: YamlDocument, details: ErrorDetails) -> str:
    path = _raw_path(document.content, details["loc"])
    dotted = ".".join(str(step) for step in path)
    where, kind, context = document.where(path), details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        parents = _models_at(model, document.content, path[:-1])
        return f"{where}: unknown key {dotted!r}; {_allowed_keys(parents, str(path[-1]))}"
    if kind == "missing":
        return f"{where}: key {dotted!r} is missing; add it"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        discriminator = str(context.get("discriminator", "kind")).strip("'")
        kinds = [repr(str(kind)) for found in _models_at(model, document.content, path) for kind in _kinds(found)]
        tags = context.get("expected_tags") or ", ".join(kinds)
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


def _models_at(model: type[BaseModel], content: Any, path: KeyPath) -> list[type[BaseModel]]:
    """The models that may stand at ``path``; a union is narrowed by the ``kind`` that the document gives."""
    candidates = [model]
    for step in path:
        content = content[step] if _has(content, step) else None
        fields = [c.model_fields[step] for c in candidates if isinstance(step, str) and step in c.model_fields]
        if fields:
            candidates = [found for info in fields for found in _models_in(info.annotation)]
        if isinstance(content, dict) and "kind" in content:
            candidates = [c for c in candidates if content["kind"] in _kinds(c)] or candidates
    return candidates


def _kinds(model: type[BaseModel]) -> tuple[Any, ...]:
    info = model.model_fields.get("kind")
    return typing.get_args(info.annotation) if info else ()


def _allowed_keys(models: list[type[BaseModel]], key: str) -> str:
    keys = sorted({info.alias or name for model in models for name, info in model.model_fields.items()})
    return f"{did_you_mean(key, keys)}allowed here: {', '.join(keys)}"


def shipped_folder(kind: Kind) -> Path:
    """Where the shipped files lie: inside an installed wheel, or at the top of a source checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "shipped" / kind
    return installed if installed.is_dir() else package.parent / kind


def shipped_names(kind: Kind) -> list[str]:
    """Names of the shipped recipes or profiles, sorted."""
    return sorted(path.stem for path in shipped_folder(kind).glob("*.yaml"))


def own_profiles(artifacts: Path) -> Path:
    """The folder of the user's own device profiles: where `calibrate` writes and every command looks."""
    return artifacts / "profiles"


def profile_names(local: Path) -> list[str]:
    """Names of the shipped device profiles and of those in the folder ``local``, sorted."""
    return sorted({*shipped_names("profiles"), *(path.stem for path in local.glob("[!.]*.yaml"))})


def find(kind: Kind, name: str, local: Path | None = None, note: Callable[[str], None] | None = None) -> Path:
    """The file that ``name`` (a path or a shipped name) stands for.

    Args:
        local: a folder of the user's own files; one of the same name is used instead of the shipped one.
        note: receives a message where a path of the clone, such as ``recipes/crt_mini.yaml``, does not exist and the
            shipped file is used instead; None: such a path is an error. Other paths always are: a wrong path must not
            train another recipe that has the same file name.

    Raises:
        RecipeError: neither exists; the message lists the shipped names.
    """
    bare = Path(name).name
    places = [Path()]
    if bare == name:
        places += [folder for folder in (local, shipped_folder(kind)) if folder is not None]
    for candidate in [place / f"{name}{suffix}" for place in places for suffix in ("", ".yaml", ".yml")]:
        if candidate.is_file():
            return candidate
    names = shipped_names(kind)
    shipped = bare.removesuffix(".yml").removesuffix(".yaml")
    if note is not None and Path(name).parent == Path(kind) and shipped in names:
        path = shipped_folder(kind) / f"{shipped}.yaml"
        note(f"{name}: no such file; the shipped {_CALLED[kind]} {shipped!r} is used: {path}")
        return path
    hint = did_you_mean(Path(name).stem, names)
    raise RecipeError(f"no {_CALLED[kind]} {name!r}: no such file, and {hint}the shipped ones are {', '.join(names)}")


def save_profile(device: DeviceProfile, path: Path, comment: str) -> None:
    """Write a profile as :func:`load_profile` reads it, without what is not known or as everywhere.

    Args:
        device: the profile.
        path: of the file.
        comment: its first lines, each with ``#``.
    """
    document = device.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    write_text(path, comment + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120))


def load_profile(
    name: str | None, local: Path | None = None, note: Callable[[str], None] | None = None
) -> DeviceProfile:
    """Find, read and validate a device profile: a path, one in the folder ``local``, or a shipped one.

    ``note`` is that of :func:`find`.

    ``local`` is ``<artifacts>/profiles``, where `calibrate` writes. Raises RecipeError; InputError where
    neither a command nor a recipe's target gave a ``name``.
    """
    if name is None:
        raise InputError("--device: name a hardware profile; the recipe has no target (see: edgeformer list devices)")
    return validate(DeviceProfile, read_yaml(find("profiles", name, local, note)))
