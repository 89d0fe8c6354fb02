"""Model families: each has one folder here, with its configuration, its torch module and what can be exported of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from pydantic import create_model

from edgeformer.discovery import Room
from edgeformer.families.family import Family
from edgeformer.formats.documents import YamlDocument, apply_overrides, find, read_yaml, validate
from edgeformer.formats.errors import RecipeError
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.workspace import RECIPE_FILE
from edgeformer.tasks import Task, all_tasks, task_named

__all__ = [
    "ROOM",
    "Family",
    "all_families",
    "family_of",
    "load_recipe",
    "read_recipe_of",
    "recipe_document",
    "recipe_type",
    "validate_recipe",
]


ROOM: Room[Family] = Room(__name__, "FAMILY", Family, lambda family: (family.kind,))


def all_families() -> tuple[Family, ...]:
    """Every family: the built-in ones, then those that other packages announce."""
    return ROOM.all()


def family_of(recipe: Recipe) -> Family:
    """The family of a recipe's model."""
    return _named(recipe.model.kind)


def _named(kind: str) -> Family:
    family = ROOM.find(kind)
    if family is not None:
        return family
    known = ", ".join(family.kind for family in all_families())
    raise RecipeError(f"model.kind {kind!r} is no family that is known here: {known}")


@cache
def _recipe_type(task: Task, family: Family) -> type[Recipe]:
    """A task's recipe with a family's ``model``."""
    own = task.recipe_type
    return create_model(own.__name__, __base__=own, __doc__=own.__doc__, model=(family.config_type, ...))


def validate_recipe(document: YamlDocument) -> Recipe:
    """Validate a raw recipe by its ``task`` and its model's ``kind``. Raises RecipeError."""
    content = document.content
    name = content.get("task")
    tasks = {task.name: task for task in all_tasks()}
    if name is not None and name not in tasks:
        raise RecipeError(f"{document.where(('task',))}: task must be one of {_listed(tasks)}, not {name!r}")
    task = tasks[name] if name is not None else next(iter(tasks.values()))  # validation then says what is missing
    families = {family.kind: family for family in all_families() if task.name in family.tasks}
    model = content.get("model")
    kind = model.get("kind") if isinstance(model, dict) else None
    if kind is None:
        return validate(_recipe_type(task, next(iter(families.values()))), document)
    if kind not in families:
        where = document.where(("model", "kind"))
        raise RecipeError(f"{where}: model.kind must be one of {_listed(families)} for {task.name}, not {kind!r}")
    return validate(_recipe_type(task, families[kind]), document)


def _listed(names: dict[str, Task] | dict[str, Family]) -> str:
    return ", ".join(map(repr, names))


def recipe_document(name: str, overrides: list[str]) -> YamlDocument:
    """The raw recipe that ``name`` (a path or a shipped name) stands for, with overrides applied, not validated yet."""
    document = read_yaml(find("recipes", name))
    apply_overrides(document, overrides)
    return document


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Find, read, override and validate a recipe. Raises RecipeError."""
    return validate_recipe(recipe_document(name, overrides or []))


def read_recipe_of(run: Path) -> Recipe:
    """The resolved recipe of a run's folder. Raises RecipeError."""
    return load_recipe(str(run / RECIPE_FILE))


def recipe_type(task: str, kind: str) -> Any:
    """The type of recipes of a task with a family's model.

    Args:
        task: a task's name.
        kind: the family's.
    """
    return _recipe_type(task_named(task), _named(kind))
