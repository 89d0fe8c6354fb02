"""Every kind of recipe, and which of them a document is."""

from __future__ import annotations

from edgeformer.formats.errors import RecipeError
from edgeformer.formats.language_recipe import LanguageRecipe
from edgeformer.formats.recipe import ClassificationRecipe
from edgeformer.formats.validation import validate
from edgeformer.formats.yaml_file import YamlDocument

AnyRecipe = ClassificationRecipe | LanguageRecipe

KINDS: dict[str, type[ClassificationRecipe] | type[LanguageRecipe]] = {
    "classification": ClassificationRecipe,
    "language-modeling": LanguageRecipe,
}
"""A recipe's ``task`` → its type."""


def validate_recipe(document: YamlDocument) -> AnyRecipe:
    """Validate a raw recipe by its ``task``. Raises RecipeError."""
    task = document.content.get("task") if isinstance(document.content, dict) else None
    if task is None:
        return validate(ClassificationRecipe, document)  # which says what is missing
    if not isinstance(task, str) or task not in KINDS:
        raise RecipeError(
            f"{document.where(('task',))}: task must be one of {', '.join(map(repr, KINDS))}, not {task!r}"
        )
    return validate(KINDS[task], document)
