"""YAML from a stranger: read as YAML 1.2 does, each key with its line, and refused before it can cost time or memory.

Aliases (``&base`` … ``*base``, ``<<: *base``) work; each counts with all that it stands for, so that a few lines cannot
stand for billions, and one that leads back into itself is refused.

Lines come from PyYAML's nodes: ruamel.yaml takes twice the time, has no such limits, and reads dates and 1_000.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from edgeformer.formats.errors import RecipeError

MOST_BYTES = 256 * 1024
"""Of a file: 60 times the largest recipe or profile that is shipped. PyYAML needs seconds for more."""
MOST_VALUES = 10_000
"""Keys and values, aliases written out: 100 times a large recipe, and read and checked in well under a second."""
DEEPEST = 32
"""Levels of lists and mappings in each other; recipes have 5. Python's own limit would end in a RecursionError."""

KeyPath = tuple[str | int, ...]
_BOOL, _FLOAT, _INT, _TIMESTAMP = (f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "int", "timestamp"))


class _Loader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core schema for booleans, numbers and dates, and a limit to nesting."""

    # PyYAML follows YAML 1.1: it reads 3e-4 as text, `no` as false and 2026-11-21 as a date.
    yaml_implicit_resolvers = {  # noqa: RUF012 (as PyYAML has it)
        first: [(tag, pattern) for tag, pattern in rules if tag not in (_BOOL, _FLOAT, _INT, _TIMESTAMP)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _depth = _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """As PyYAML does, which would go as deep as the text says."""
        if self._depth > DEEPEST:
            raise yaml.composer.ComposerError(None, None, _TOO_DEEP, self.get_mark())
        self._nodes += 1
        if self._nodes > 2 * MOST_VALUES + 1:  # a key and its value are two
            raise yaml.composer.ComposerError(None, None, _TOO_MANY, self.get_mark())
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As PyYAML does, which lets Python's own errors through where a tag does not fit its value."""
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
_TOO_DEEP = f"lists and mappings are nested more than {DEEPEST} deep"
_TOO_MANY = f"holds more than {MOST_VALUES:,} values, with its aliases (*) written out"


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


def _lines_of(root: yaml.Node) -> dict[KeyPath, int]:
    """The line of every key and list item, aliases written out. Raises yaml.MarkedYAMLError beyond a limit."""
    lines: dict[KeyPath, int] = {}
    around: list[yaml.Node] = []
    values, top = 0, root

    def refuse(problem: str, node: yaml.Node) -> None:
        raise yaml.composer.ComposerError(None, None, problem, node.start_mark)

    def walk(node: yaml.Node, path: KeyPath, place: yaml.Node) -> None:
        nonlocal values, top
        if any(node is outer for outer in around):
            refuse("an alias (*) stands inside the value that it stands for, which has no end; write the value", place)
        if len(around) > DEEPEST:
            refuse(_TOO_DEEP, top)
        around.append(node)
        for step, marked, value in _items(node):
            values += 1
            if node is root:
                top = marked  # its line is the alias's, where an aliased value has the line of its anchor
            if values > MOST_VALUES:
                refuse(_TOO_MANY, top)
            if (*path, step) in lines:
                refuse(f"key {step!r} is given twice; keep one of them", marked)
            here = (*path, step)
            lines[here] = marked.start_mark.line + 1
            walk(value, here, marked)
        around.pop()

    walk(root, (), root)
    return lines


def _items(node: yaml.Node) -> list[tuple[str | int, yaml.Node, yaml.Node]]:
    """Key or position, what marks its line, and value."""
    if isinstance(node, yaml.SequenceNode):
        return [(position, item, item) for position, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return []
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.composer.ComposerError(None, None, "a key must be a plain word", key.start_mark)
    return [(str(key.value), key, value) for key, value in node.value]


def _tree(content: Any) -> Any:
    """The same values, none of them shared: an override of one place must not change its aliases."""
    if isinstance(content, dict):
        return {key: _tree(value) for key, value in content.items()}
    return [_tree(value) for value in content] if isinstance(content, list) else content


def _parse(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """The value, and the lines of its keys. Raises yaml.YAMLError."""
    node = yaml.compose(text, Loader=_Loader)
    if node is None:
        return None, {}
    lines = _lines_of(node)
    return _tree(_Loader("").construct_document(node)), lines


def parse_value(text: str) -> Any:
    """One value as it would be read from a recipe (``--set key=VALUE``). Raises yaml.YAMLError."""
    return _parse(text)[0]


def read_yaml(path: Path) -> YamlDocument:
    """Read a YAML mapping.

    Raises:
        RecipeError: the file is missing, too large, not UTF-8, not YAML, not a mapping, repeats a key, or is built to
            take for ever: too deep, too many values, an alias inside itself.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise RecipeError(f"{path}: cannot be read: {reason}") from None
    if len(content) > MOST_BYTES:
        line = content.count(b"\n") + 1
        raise RecipeError(f"{path}:{line}: goes on after {MOST_BYTES // 1024} KiB; a recipe or profile has a few")
    try:
        found, lines = _parse(text.removeprefix("\ufeff"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(f"{path}:{line}: not valid YAML: {error.reason} (#x{error.character:04x})") from None
    if not isinstance(found, dict):
        raise RecipeError(f"{path}: must hold keys and values (key: value), one per line")
    return YamlDocument(str(path), found, lines)
