"""A recipe as the command line gives it: a name, overrides, and the shorthands for local files."""

from __future__ import annotations

from pathlib import Path

from edgeformer.formats.language_recipe import LanguageRecipe
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipes import AnyRecipe
from edgeformer.formats.shipped import load_recipe
from edgeformer.formats.sources import FileTokenizer


def read_recipe(
    name: str, overrides: list[str] | None, data: Path | None, tokenizer: Path | None, progress: Progress
) -> AnyRecipe:
    """Find, override and validate a recipe. Raises RecipeError or DataError."""
    recipe = load_recipe(name, overrides)
    if data is not None:
        recipe, notes = _with_local_data(recipe, data)
        for note in notes:
            progress.message(note)
    if tokenizer is not None:
        recipe = recipe.model_copy(update={"tokenizer": FileTokenizer(kind="file", path=str(tokenizer))})
    return recipe


def _with_local_data(recipe: AnyRecipe, folder: Path) -> tuple[AnyRecipe, list[str]]:
    from edgeformer.data.sources import local_parts, local_text_parts

    if isinstance(recipe, LanguageRecipe):
        texts, notes = local_text_parts(recipe.data, folder)
        return recipe.model_copy(update={"data": texts}), notes
    labelled, notes = local_parts(recipe.data, folder)
    return recipe.model_copy(update={"data": labelled}), notes
