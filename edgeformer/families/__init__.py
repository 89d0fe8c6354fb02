"""Model families: each has one folder here, with its configuration, its torch module and what can be exported of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import create_model

from edgeformer.discovery import Room
from edgeformer.families.family import Family as Family
from edgeformer.formats.documents import apply_overrides, find, validate
from edgeformer.formats.errors import RecipeError
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.recipe_paths import resolve_paths
from edgeformer.formats.workspace import RECIPE_FILE
from edgeformer.formats.yaml_text import read_yaml
from edgeformer.tasks import all_tasks, task_named

ROOM: Room[Family] = Room(__name__, "FAMILY", Family, lambda family: (family.kind,))
"""Every family: the built-in ones, then those that other packages announce."""


def family_of(recipe: Recipe) -> Family:
    """The family of a recipe's model."""
    return _named(recipe.model.kind)


def _named(kind: str) -> Family:
    family = ROOM.find(kind)
    if family is not None:
        return family
    known = ", ".join(family.kind for family in ROOM.all())
    raise RecipeError(f"model.kind {kind!r} is no family that is known here: {known}")


@cache
def recipe_type(task: str, kind: str) -> Any:
    """The type of recipes of a task with a family's model.

    Args:
        task: a task's name.
        kind: the family's.
    """
    own = task_named(task).recipe_type
    return create_model(own.__name__, __base__=own, __doc__=own.__doc__, model=(_named(kind).config_type, ...))


def load_recipe(name: str, overrides: list[str] | None = None, note: Callable[[str], None] | None = None) -> Recipe:
    """Find, read, override and validate a recipe, by its ``task`` and its model's ``kind``. Raises RecipeError.

    Its paths come out absolute: see :func:`~edgeformer.formats.recipe_paths.resolve_paths`.

    Args:
        name: a path, or a shipped recipe's name.
        overrides: ``key=value`` each.
        note: receives a message for each path that was found elsewhere than beside the recipe, and where a recipe's
            path does not exist and the shipped recipe of that name is used; None: such a path is an error.
    """
    path = find("recipes", name, note=note)
    document = read_yaml(path)
    apply_overrides(document, overrides or [])
    _drop_stale_count(document.content, overrides or [])
    asked, model = document.content.get("task"), document.content.get("model")
    tasks = {task.name: task for task in all_tasks() if task.trained}
    if asked is not None and asked not in [*tasks]:
        raise RecipeError(f"{document.where(('task',))}: task must be one of {_listed(tasks)}, not {asked!r}")
    task = tasks[asked or next(iter(tasks))]  # where there is none, validation says what is missing
    families = {family.kind: family for family in ROOM.all() if task.name in family.tasks}
    kind = model.get("kind") if isinstance(model, dict) else None
    if kind is not None and kind not in [*families]:
        where = document.where(("model", "kind"))
        raise RecipeError(f"{where}: model.kind must be one of {_listed(families)} for {task.name}, not {kind!r}")
    family = families[kind or next(iter(families))]
    made = recipe_type(task.name, family.kind)
    sections = {section: made.model_fields[section].annotation.folders for section in ("model", "training")}
    for message in resolve_paths(document, path.parent.resolve(), sections):
        if note is not None:
            note(message)
    if isinstance(document.content, dict):
        family.complete(document.content)
    recipe: Recipe = validate(made, document)
    return recipe


def _drop_stale_count(content: Any, overrides: list[str]) -> None:
    """Remove ``data.expected_rows`` where an override changes what is read: the count is of the recipe as it is."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    changes_data = any(key.split(".")[0] in ("data", "tokenizer") or key == "model.vocab_size" for key in keys)
    data = content.get("data") if isinstance(content, dict) else None
    if changes_data and "data.expected_rows" not in keys and isinstance(data, dict):
        data.pop("expected_rows", None)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def read_recipe_of(run: Path) -> Recipe:
    """The resolved recipe of a run's folder. Raises RecipeError."""
    return load_recipe(str(run / RECIPE_FILE))
