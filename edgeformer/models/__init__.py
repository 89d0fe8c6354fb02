"""Model families: each has one folder here, with its configuration, its torch module and what can be exported of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import create_model

from edgeformer.artifacts.documents import apply_overrides, find, read_yaml, validate
from edgeformer.artifacts.errors import RecipeError
from edgeformer.artifacts.recipe import Recipe, resolve_paths
from edgeformer.artifacts.workspace import RECIPE_FILE
from edgeformer.models.spec import ModelSpec as ModelSpec
from edgeformer.registry import Registry
from edgeformer.tasks import all_tasks, task_named

REGISTRY: Registry[ModelSpec] = Registry(__name__, "MODEL", ModelSpec, lambda model_spec: (model_spec.kind,))
"""Every family: the built-in ones, then those that other packages announce."""


def model_spec_of(recipe: Recipe) -> ModelSpec:
    """The family of a recipe's model."""
    return _named(recipe.model.kind)


def _named(kind: str) -> ModelSpec:
    model_spec = REGISTRY.find(kind)
    if model_spec is not None:
        return model_spec
    known = ", ".join(model_spec.kind for model_spec in REGISTRY.all())
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

    Its paths come out absolute: see :func:`~edgeformer.artifacts.recipe.resolve_paths`.

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
    model_specs = {model_spec.kind: model_spec for model_spec in REGISTRY.all() if task.name in model_spec.tasks}
    kind = model.get("kind") if isinstance(model, dict) else None
    if kind is not None and kind not in [*model_specs]:
        where = document.where(("model", "kind"))
        raise RecipeError(f"{where}: model.kind must be one of {_listed(model_specs)} for {task.name}, not {kind!r}")
    model_spec = model_specs[kind or next(iter(model_specs))]
    made = recipe_type(task.name, model_spec.kind)
    sections = {section: made.model_fields[section].annotation.folders for section in ("model", "training")}
    for message in resolve_paths(document, path.parent.resolve(), sections):
        if note is not None:
            note(message)
    if isinstance(document.content, dict):
        model_spec.complete(document.content)
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
