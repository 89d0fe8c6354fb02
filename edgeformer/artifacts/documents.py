"""Recipes and device profiles: find, read, validate and write YAML files, with the line of each key.

Untrusted files are limited in size and depth. Values are read as in YAML 1.2, and written so that YAML 1.1 agrees.

Aliases (``*base``, ``<<: *base``) are refused: a few lines of them can stand for billions of values.

Lines come from PyYAML's nodes: ruamel.yaml takes twice the time, has no such limits, and reads dates and 1_000.
"""

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import InputError, RecipeError, did_you_mean
from edgeformer.artifacts.files import write_text

MOST_BYTES = 256 * 1024
"""Maximum size of a file in bytes: 60 times the largest shipped recipe or profile. PyYAML needs seconds for more."""
MOST_NODES = 20_000
"""Maximum number of keys and values: 100 times a large recipe. Reading and checking them takes less than a second."""
DEEPEST = 32
"""Maximum nesting of lists and mappings; recipes have 5 levels. Python's own limit would raise a RecursionError."""

KeyPath = tuple[str | int, ...]
_BOOL, _FLOAT, _INT, *_ONLY_1_1 = (
    f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "int", "timestamp", "merge", "value")
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core schema for booleans, numbers and dates, limits, and no aliases."""

    # PyYAML follows YAML 1.1, which reads 3e-4 as text, `no` as false and 2026-11-21 as a date.
    yaml_implicit_resolvers = {  # noqa: RUF012 (as PyYAML has it)
        first: [(tag, pattern) for tag, pattern in rules if tag not in (_BOOL, _FLOAT, _INT, *_ONLY_1_1)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _depth = _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node as PyYAML does, but limit depth and size, and refuse aliases."""
        self._nodes += 1
        problem = None
        if self.check_event(yaml.AliasEvent):
            problem = "an alias (*) is not supported; write the value in its place"
        elif self._depth > DEEPEST:
            problem = f"lists and mappings are nested more than {DEEPEST} levels deep"
        elif self._nodes > MOST_NODES:
            problem = f"has more than {MOST_NODES:,} keys and values"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value as PyYAML does, but raise ConstructorError if a tag does not fit its value."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, AttributeError, KeyError, TypeError, OverflowError):
            problem = f"a value does not fit its type {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_NUMBER = (
    r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(_FLOAT, re.compile(_NUMBER), list("-+.0123456789"))
_Loader.add_implicit_resolver(_INT, re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+.0123456789"))
_Loader.add_constructor(_INT, lambda loader, node: int(node.value, 0 if node.value.startswith(("0o", "0x")) else 10))


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes each string that YAML 1.1 or 1.2 would read as something else, and writes no aliases."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (as PyYAML has it)
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *_Loader.yaml_implicit_resolvers[first]]
        for first in _Loader.yaml_implicit_resolvers
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Represent a string; one with line breaks in double quotes, as PyYAML's other styles change some of them."""
        style = '"' if len(text.splitlines()) > 1 or text.strip() != text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(document: Mapping[str, Any], width: int = 120, *, inline: bool = False) -> str:
    """Write a document that :func:`parse_yaml` returns unchanged; ``inline``: lists of plain values on one line."""
    style = None if inline else False
    text: str = yaml.dump(
        document, Dumper=_Dumper, default_flow_style=style, allow_unicode=True, sort_keys=False, width=width
    )
    return text


@dataclass
class YamlDocument:
    """A mapping read from YAML, its source, and the line of each key path."""

    source: str
    content: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overridden: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """Return the origin of ``path``: ``file:line`` of the nearest enclosing key, or the override of its value."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.overridden:
                return self.overridden[path[:length]]
            if path[:length] in self.lines:
                return f"{self.source}:{self.lines[path[:length]]}"
        return self.source


def parse_yaml(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """Return a YAML document's value, and the line of every key and list item. Raises yaml.YAMLError."""
    lines: dict[KeyPath, int] = {}

    def walk(node: yaml.Node, path: KeyPath) -> None:
        items: list[tuple[Any, yaml.Node, yaml.Node]] = []
        if isinstance(node, yaml.SequenceNode):
            items = [(position, item, item) for position, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            items = [(key.value, key, value) for key, value in node.value]
        for step, key, value in items:
            item_path = (*path, step)
            problem = None
            if isinstance(node, yaml.MappingNode) and not isinstance(key, yaml.ScalarNode):
                problem = "a key must be a plain word"
            elif item_path in lines:
                problem = f"key {step!r} is given twice; keep one of them"
            if problem is not None:
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            lines[item_path] = key.start_mark.line + 1
            walk(value, item_path)

    root = yaml.compose(text, Loader=_Loader)
    if root is None:
        return None, lines
    walk(root, ())
    return _Loader("").construct_document(root), lines


def read_yaml(path: Path) -> YamlDocument:
    """Read a YAML mapping. Raises RecipeError: missing, not YAML, with aliases or repeated keys, or too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise RecipeError(f"{path}: cannot be read: {reason}") from None
    if len(content) > MOST_BYTES:
        line = content.count(b"\n") + 1
        raise RecipeError(f"{path}:{line}: larger than {MOST_BYTES // 1024} KiB; a recipe or profile has a few KiB")
    try:
        document, lines = parse_yaml(text.removeprefix("\ufeff"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(f"{path}:{line}: not valid YAML: {error.reason} (#x{error.character:04x})") from None
    if not isinstance(document, dict):
        raise RecipeError(f"{path}: must hold keys and values, one per line, as in name: reviews")
    return YamlDocument(str(path), document, lines)


M = TypeVar("M", bound=BaseModel)
Kind = Literal["recipes", "profiles"]
_CALLED = {"recipes": "recipe", "profiles": "device profile"}
_MOST_PROBLEMS = 20  # maximum number of problems in a message; an untrusted file could have thousands
_LONGEST_OVERRIDE = 120  # maximum number of characters of an override in a message


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
        # A discriminated union reports the same problem once per member; list it once.
        raise RecipeError("\n".join([*dict.fromkeys(lines), *more])) from None


def apply_overrides(document: YamlDocument, overrides: list[str]) -> None:
    """Apply ``key.path=value`` overrides to ``document`` in place; a number in the path is a list position.

    Raises RecipeError: an override has no ``=``, its value is not YAML, or its path leads through a plain value.
    """
    for assignment in overrides:
        path_text, equals, value_text = assignment.partition("=")
        override = assignment if len(assignment) <= _LONGEST_OVERRIDE else f"{assignment[:_LONGEST_OVERRIDE]}…"
        if not equals or not path_text.strip():
            raise RecipeError(f"--set {override}: write key.path=value, e.g. --set training.epochs=3")
        try:
            value, _ = parse_yaml(value_text)
        except yaml.YAMLError as error:
            reason = getattr(error, "problem", None) or "it cannot be read"
            raise RecipeError(f"--set {override}: the value is not valid YAML ({reason}); quote it") from None
        keys = path_text.strip().split(".")
        if len(keys) > DEEPEST:
            raise RecipeError(f"--set {override}: the path has {len(keys):,} steps; at most {DEEPEST} are possible")
        target: Any = document.content
        path: KeyPath = ()
        for position, key in enumerate(keys):
            parent = ".".join(keys[:position])
            if path:
                target = target[path[-1]]
            if isinstance(target, list):
                if not key.isdigit() or int(key) >= len(target):
                    raise RecipeError(
                        f"--set {override}: {parent} is a list with {len(target)} entries; {key!r} is not one of its "
                        f"positions 0…{len(target) - 1}"
                    )
                path = (*path, int(key))
            elif isinstance(target, dict):
                path = (*path, key)
                if target.get(key) is None:
                    target[key] = {}
            else:
                raise RecipeError(f"--set {override}: {parent} is a single value without keys; set {parent} itself")
        target[path[-1]] = value
        # Problems below this key are the override's, not the file's.
        document.lines = {key: line for key, line in document.lines.items() if key[: len(path)] != path}
        document.overridden[path] = f"--set {override}"


def _explain(model: type[BaseModel], document: YamlDocument, details: ErrorDetails) -> str:
    """Return one problem as file, line, key, and what is allowed."""
    path: KeyPath = ()
    content: Any = document.content
    holders: list[type[BaseModel]] = []  # models that may have the path's last key
    models = [model]  # models that may be at the path
    for position, step in enumerate(details["loc"], 1):
        if isinstance(content, list):
            is_present = isinstance(step, int) and step < len(content)
        else:
            is_present = isinstance(content, dict) and step in content
        if not is_present and (position < len(details["loc"]) or not isinstance(content, dict)):
            continue  # the tag of a union, which pydantic puts between keys
        path, holders, content = (*path, step), models, content[step] if is_present else None
        fields = [info for holder in holders for name, info in holder.model_fields.items() if name == step]
        if fields:
            models = [nested for info in fields for nested in _models_in(info.annotation)]
        if isinstance(content, dict) and "kind" in content:
            models = [candidate for candidate in models if content["kind"] in _kinds(candidate)] or models

    dotted = ".".join(map(str, path))
    where, kind, context = document.where(path), details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        keys = sorted({info.alias or name for holder in holders for name, info in holder.model_fields.items()})
        hint = did_you_mean(str(path[-1]), keys)
        return f"{where}: unknown key {dotted!r}; {hint}allowed here: {', '.join(keys)}"
    if kind == "missing":
        return f"{where}: key {dotted!r} is missing; add it"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        discriminator = str(context.get("discriminator", "kind")).strip("'")
        kinds = [repr(str(kind)) for candidate in models for kind in _kinds(candidate)]
        allowed = context.get("expected_tags") or ", ".join(kinds)
        tag = f", not {context['tag']!r}" if "tag" in context else ""
        return f"{where}: {dotted}.{discriminator} must be one of {allowed}{tag}"
    message = details["msg"].removeprefix("Value error, ")
    value = details["input"]
    value_text = f" (got {value!r})" if isinstance(value, (str, int, float, bool)) or value is None else ""
    return f"{where}: {dotted or 'the file'}: {message[:1].lower()}{message[1:]}{value_text}"


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return every pydantic model that an annotation allows, through unions, lists and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        arguments = arguments[:1]
    elif not arguments and not isinstance(annotation, types.UnionType):
        return []
    return [nested for argument in arguments for nested in _models_in(argument)]


def _kinds(model: type[BaseModel]) -> tuple[Any, ...]:
    info = model.model_fields.get("kind")
    return typing.get_args(info.annotation) if info else ()


def shipped_folder(kind: Kind) -> Path:
    """Return the folder of the shipped files: inside an installed wheel, or at the top of a source checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "shipped" / kind
    return installed if installed.is_dir() else package.parent / kind


def shipped_names(kind: Kind, local: Path | None = None) -> list[str]:
    """Return the sorted names of the shipped recipes or profiles, and of those in the folder ``local``."""
    folders = [shipped_folder(kind), *([local] if local is not None else [])]
    return sorted({path.stem for folder in folders for path in folder.glob("[!.]*.yaml")})


def own_profiles(artifacts: Path) -> Path:
    """Return the folder of the user's device profiles: `calibrate` writes there, and every command searches it."""
    return artifacts / "profiles"


def find(kind: Kind, name: str, local: Path | None = None) -> Path:
    """Return the file of ``name``: a path, or a name in ``local``, the folder of the user's files, or a shipped one.

    Raises RecipeError, which lists the shipped names.
    """
    places = [Path()]
    if Path(name).name == name:
        places += [folder for folder in (local, shipped_folder(kind)) if folder is not None]
    for candidate in [place / f"{name}{suffix}" for place in places for suffix in ("", ".yaml", ".yml")]:
        if candidate.is_file():
            return candidate
    names = shipped_names(kind)
    hint = did_you_mean(Path(name).stem, names)
    raise RecipeError(f"no {_CALLED[kind]} {name!r}: no such file; {hint}shipped: {', '.join(names)}")


def save_profile(device: DeviceProfile, path: Path, comment: str) -> None:
    """Write the lines of ``comment``, then the profile without defaults, as :func:`load_profile` reads it."""
    document = device.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    write_text(path, comment + to_yaml(document))


def load_profile(
    name: str | None, local: Path | None = None, note: Callable[[str], None] | None = None
) -> DeviceProfile:
    """Find, read and validate a device profile: a path, one in the folder ``local``, or a shipped one.

    ``note`` receives a message if a calibration of an earlier estimator is ignored. Raises RecipeError, and InputError
    if ``name`` is None: neither the command nor a recipe's target names a profile.
    """
    if name is None:
        raise InputError(
            "--device is missing, and the recipe has no target; add --device NAME (edgeformer list devices shows the "
            "names)"
        )
    document = read_yaml(find("profiles", name, local))
    profile = validate(DeviceProfile, document)
    if note is not None and profile.calibration is None and document.content.get("calibration") is not None:
        where = document.where(("calibration",))
        note(f"{where}: calibration: made by an earlier estimator and ignored; run edgeformer calibrate again")
    return profile


def resolve_paths(document: YamlDocument, folder: Path, folders: Mapping[str, Sequence[str]]) -> list[str]:
    """Make the paths in a recipe absolute, in place; return notes on those that are not beside the recipe.

    A relative path is resolved against the recipe's folder, then against the working directory; a path of ``--set``
    against the latter only. A value that could be the name of a hub model or of a run is not changed.

    Args:
        document: the parsed file, not validated.
        folder: folder of the recipe.
        folders: section → its keys that can name a folder.
    """
    content, notes = document.content, []
    places: list[tuple[KeyPath, Any, bool]] = [(("tokenizer", "path"), content.get("tokenizer"), True)]
    places += [((section, key), content.get(section), False) for section, keys in folders.items() for key in keys]
    data = content.get("data")
    parts, further = (data.get("parts"), data.get("unlabelled")) if isinstance(data, dict) else (None, None)
    lists: list[tuple[KeyPath, Any]] = [(("data", "unlabelled"), further)]
    lists += [(("data", "parts", part), rows) for part, rows in (parts if isinstance(parts, dict) else {}).items()]
    for where, sources in lists:
        for number, source in enumerate(sources) if isinstance(sources, list) else ():
            places.append(((*where, number, "path"), source, True))
            if isinstance(source, dict) and source.get("kind") == "hub":
                places.append(((*where, number, "name"), source, False))
    for path, holder, is_path in places:
        value = holder.get(path[-1]) if isinstance(holder, dict) else None
        if not isinstance(value, str) or not value:
            continue
        typed = any(path[:length] in document.overridden for length in range(len(path) + 1))
        with suppress(OSError, ValueError):  # too long, or not a path: opening it reports the error
            candidates = [start / value for start in ([Path.cwd()] if typed else [folder, Path.cwd()])]
            matches = [candidate for candidate in candidates if (candidate.exists() if is_path else candidate.is_dir())]
            if Path(value).is_absolute() or not (matches or is_path):
                continue
            resolved = (matches or candidates)[0].resolve()
            holder[path[-1]] = str(resolved)
            if not typed and resolved.exists() and resolved != (folder / value).resolve():
                notes.append(
                    f"{'.'.join(map(str, path))}: {value} is not in the folder of the recipe; using {resolved}"
                )
    return notes
