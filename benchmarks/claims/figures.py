"""How our figure for a claim is found: counted from a recipe, read from a committed JSON, or computed from such."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.claims.schema import Claims, Code, Counted, Each, Formula, Json, Number, Quoted, Setting, Source, Study
from benchmarks.claims.tables import NotThere, cell, seeds
from benchmarks.results_page.provenance import Affected, Change, origin_of, read_json, superseded, superseded_study
from benchmarks.studies.results import kept_documents
from edgeformer.artifacts.errors import InputError

MIB = 2**20


@dataclass
class Found:
    """A figure, and where it comes from."""

    value: Number
    origin: list[str] = field(default_factory=list)
    seeds: tuple[float, ...] = ()  # by seed, of which ``value`` is the mean or is computed; empty: there is one
    remarks: list[str] = field(default_factory=list)  # what has superseded the file it was read from


@cache
def count(recipe: str, overrides: tuple[str, ...]) -> int:
    """Exact parameters of a recipe's model."""
    from edgeformer.models import load_recipe
    from edgeformer.training.plan.plan import count_offline

    return count_offline(load_recipe(recipe, [*overrides]))


@cache
def setting(recipe: str, overrides: tuple[str, ...], key: str) -> Number:
    """A number that a recipe sets. Raises InputError where there is none at that key."""
    from edgeformer.models import load_recipe

    place: Any = load_recipe(recipe, [*overrides])
    for step in key.split("."):
        if isinstance(place, list | tuple) and step.isdigit():
            place = place[int(step)] if int(step) < len(place) else None
        else:
            place = place.get(step) if isinstance(place, dict) else getattr(place, step, None)
    if not isinstance(place, int | float):
        raise InputError(f"recipe {recipe}: no number at {key}")
    return place


def from_code(name: str) -> Number:
    """Return a constant, ``module:NAME``, or a default, ``module:function.parameter``. Raises InputError."""
    module, _, path = name.partition(":")
    attribute, _, parameter = path.partition(".")
    try:
        value = getattr(importlib.import_module(module), attribute)
        if parameter:
            value = inspect.signature(value).parameters[parameter].default
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise InputError(f"code {name!r}: there is no such constant or parameter ({error})") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"code {name!r}: {value!r} is no number")
    return value


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.USub: operator.neg,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"exp": math.exp, "log": math.log, "min": min, "max": max}


def calculate(formula: str, values: Mapping[str, Number]) -> Number:
    """Arithmetic on named values. Raises InputError for anything else."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(operand))
            case ast.Call(ast.Name(id=name), arguments, []) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(value, arguments))
        raise InputError(f"formula {formula!r}: {ast.unparse(node)} is neither arithmetic nor one of {[*values]}")

    try:
        return value(ast.parse(formula, mode="eval").body)
    except SyntaxError:
        raise InputError(f"formula {formula!r}: cannot be read") from None


def by_seed(formula: str, parts: Mapping[str, Found]) -> tuple[float, ...]:
    """Return a formula's value for each seed; parts with one seed are constants. Raises InputError: unequal seeds."""
    counts = {len(part.seeds) for part in parts.values() if part.seeds}
    if len(counts) > 1:
        raise InputError(f"formula {formula!r}: its parts have {' and '.join(map(str, sorted(counts)))} seeds")
    return tuple(
        calculate(formula, {name: part.seeds[seed] if part.seeds else part.value for name, part in parts.items()})
        for seed in range(max(counts, default=0))
    )


def remarks_of(changes: Sequence[tuple[Change, Affected]]) -> list[str]:
    """Return a sentence for each change that a figure does not have."""
    return [f"ours was measured before {change.commit} of {change.date[:10]}: {change.what}" for change, _ in changes]


def run_keys(study: str, results: Path) -> list[str]:
    """Return the keys of the runs of a study's table."""
    table = read_json(results / "studies" / f"{study}.json")
    return [key for row in table["rows"] for key in row.get("keys", ())]


@dataclass
class Finder:
    """Finds figures in the folder of committed results; ``claims`` has named sources, and what is published."""

    claims: Claims
    results: Path

    def find(self, source: Source | str, figure: str) -> Found:
        """The figure of that name.

        Raises:
            NotThere: no result holds it yet.
            InputError: a pointer leads nowhere in a file that is there, or a study cannot have the row.
        """
        match source:
            case str():
                return self._first(source, figure)
            case Counted():
                parameters = count(source.recipe, source.set)
                counted = f"counted from {source.recipe}"
                return Found(parameters * source.bytes_each / MIB if source.bytes_each else parameters, [counted])
            case Json():
                value = self._pointed(source, figure)
                dates = origin_of([self._read(source.file)], [source.file]).dates
                old = superseded(source.file, dates[-1] if dates else "", self.results, source.path)
                return Found(value, [source.file], remarks=remarks_of(old))
            case Study():
                name = source.figure.replace("$figure", figure)
                value = cell(source, name, self.results)
                old = superseded_study(source.study, [name], run_keys(source.study, self.results), self.results)
                origin = [f"studies/{source.study}.json"]
                return Found(value, origin, seeds(source, name, self.results), remarks_of(old))
            case Code():
                return Found(from_code(source.name.replace("$figure", figure)), [source.name])
            case Setting():
                value = setting(source.recipe, source.set, source.key.replace("$figure", figure))
                return Found(value, [f"recipe {source.recipe}"])
            case Each():
                return self.find(source.of[figure], figure)
            case Quoted():
                return Found(self._published(source, figure), ["the paper's own figures"])
            case Formula():
                parts = {name: self.find(part, figure) for name, part in source.of.items()}
                value = calculate(source.formula, {name: part.value for name, part in parts.items()})
                origins = sorted({origin for part in parts.values() for origin in part.origin})
                remarks = [*dict.fromkeys(remark for part in parts.values() for remark in part.remarks)]
                return Found(value, origins, by_seed(source.formula, parts), remarks)
        raise TypeError(source)

    def _first(self, name: str, figure: str) -> Found:
        missing = []
        for source in self.claims.sources[name]:
            try:
                return self.find(source, figure)
            except NotThere as reason:
                missing.append(str(reason))
        raise NotThere("; ".join(missing))

    def _published(self, source: Quoted, figure: str) -> Number:
        claim, name = self.claims.claims.get(source.claim), source.figure.replace("$figure", figure)
        value = claim.published.get(name) if claim is not None else None
        if not isinstance(value, int | float):
            raise InputError(f"claim {source.claim!r} publishes no single figure {name!r}")
        return value

    def _read(self, file: str) -> Any:
        path = self.results / file
        if path.parent.name == "studies" and path.stem in (runs := kept_documents(path.parent)):
            return runs[path.stem]
        if not path.is_file():
            raise NotThere(f"{file} is not committed yet")
        return read_json(path)

    def _pointed(self, source: Json, figure: str) -> Number:
        place = self._read(source.file)
        for step in source.path:
            place = follow(place, figure if step == "$figure" else step)
            if place is None:
                raise InputError(f"{source.file}: nothing at {step!r} of {source.path} (figure {figure!r})")
        if isinstance(place, bool) or not isinstance(place, int | float):
            raise InputError(f"{source.file}: no number at {source.path} (figure {figure!r})")
        return place


def follow(place: Any, step: str | int | dict[str, Any]) -> Any:
    """One step of a path; None where it leads nowhere."""
    if isinstance(step, dict):
        objects = [item for item in place if isinstance(item, dict)] if isinstance(place, list) else []
        fitting = [item for item in objects if all(item.get(key) == value for key, value in step.items())]
        return fitting[0] if len(fitting) == 1 else None
    if isinstance(place, list) and isinstance(step, int) and -len(place) <= step < len(place):
        return place[step]
    return place.get(step) if isinstance(place, dict) else None
