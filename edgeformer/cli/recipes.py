"""A recipe as the command line gives it: a name, overrides, and the shorthands for local files."""

from __future__ import annotations

from pathlib import Path

from edgeformer.schema.progress import Progress
from edgeformer.schema.recipe import FileTokenizer, Recipe
from edgeformer.schema.shipped import load_recipe


def read_recipe(
    name: str, overrides: list[str] | None, data: Path | None, tokenizer: Path | None, progress: Progress
) -> Recipe:
    """Find, override and validate a recipe. Raises RecipeError or DataError."""
    recipe = load_recipe(name, overrides)
    if data is not None:
        from edgeformer.data.sources import local_parts

        config, notes = local_parts(recipe.data, data)
        recipe = recipe.model_copy(update={"data": config})
        for note in notes:
            progress.message(note)
    if tokenizer is not None:
        recipe = recipe.model_copy(update={"tokenizer": FileTokenizer(kind="file", path=str(tokenizer))})
    return recipe
