"""A recipe as the command line gives it: a name, overrides, and the shorthands for local files."""

from __future__ import annotations

from pathlib import Path

from edgeformer.families import load_recipe
from edgeformer.formats.data_config import FileTokenizer
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipe import Recipe
from edgeformer.tasks import task_named


def read_recipe(
    name: str, overrides: list[str] | None, data: Path | None, tokenizer: Path | None, progress: Progress
) -> Recipe:
    """Find, override and validate a recipe. Raises RecipeError or DataError."""
    recipe = load_recipe(name, overrides)
    if data is not None:
        recipe, notes = _with_local_data(recipe, data)
        for note in notes:
            progress.message(note)
    if tokenizer is not None:
        recipe = recipe.model_copy(update={"tokenizer": FileTokenizer(kind="file", path=str(tokenizer))})
    return recipe


def _with_local_data(recipe: Recipe, folder: Path) -> tuple[Recipe, list[str]]:
    data, notes = task_named(recipe.task).local_data(recipe.data, folder)
    return recipe.model_copy(update={"data": data}), notes
