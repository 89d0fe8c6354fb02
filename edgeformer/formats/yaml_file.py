"""YAML in, with the line of every key; numbers as YAML 1.2 reads them (3e-4 is a number, ``on`` is text)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from edgeformer.formats.errors import RecipeError

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core schema for booleans, numbers and dates."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    # PyYAML follows YAML 1.1: it reads 3e-4 as text, `no` as false and 2026-11-21 as a date.
    replaced = (
        "tag:yaml.org,2002:bool",
        "tag:yaml.org,2002:float",
        "tag:yaml.org,2002:timestamp",
        "tag:yaml.org,2002:int",
    )
    table = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in replaced]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    boolean = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
    number = re.compile(
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    )
    for first in "tTfF":
        table.setdefault(first, []).append((replaced[0], boolean))
    whole = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
    for first in "-+.0123456789":
        table.setdefault(first, []).extend([(replaced[1], number), (replaced[3], whole)])
    return table


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text, 10)


_Loader.yaml_implicit_resolvers = _resolvers()
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


@dataclass
class YamlDocument:
    """A mapping read from YAML, where it came from, and the line of each key path."""

    source: str
    content: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overridden: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """Who set ``path``: ``file:line`` of the nearest enclosing key, or the override that replaced it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.overridden:
                return self.overridden[path[:length]]
            if path[:length] in self.lines:
                return f"{self.source}:{self.lines[path[:length]]}"
        return self.source


def _index(node: yaml.Node, path: KeyPath, document: YamlDocument) -> None:
    place: KeyPath
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise RecipeError(f"{document.source}:{line}: key {key!r} is given twice; keep one of them")
            seen.add(key)
            place = (*path, key)
            document.lines[place] = line
            _index(value_node, place, document)
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            place = (*path, position)
            document.lines[place] = item.start_mark.line + 1
            _index(item, place, document)


def parse_value(text: str) -> Any:
    """One value as it would be read from a recipe (``--set key=VALUE``). Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: Path) -> YamlDocument:
    """Read a YAML mapping.

    Raises:
        RecipeError: the file is missing, not UTF-8, not YAML, not a mapping, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise RecipeError(f"{path}: cannot be read: {reason}") from None
    document = YamlDocument(str(path), {})
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if not isinstance(node, yaml.MappingNode):
                raise RecipeError(f"{path}: must hold keys and values (key: value), one per line")
            _index(node, (), document)
            document.content = loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {error}") from None
    return document
