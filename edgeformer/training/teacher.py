"""The run that a training is taught by: found as every RUN argument is, and pinned by its weights' checksum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import ArtifactError, RecipeError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.recipe import Recipe
from edgeformer.models.weights import MODEL_FOLDER, WEIGHTS
from edgeformer.run import Run, locate


def with_teacher(recipe: Recipe, artifacts: Path) -> Recipe:
    """The recipe with its teacher's folder and checksum; one that names no teacher as it is.

    So that a run says what taught it, and does not go on with another one.

    Args:
        artifacts: where a teacher is looked for by its name.

    Raises:
        RecipeError: there is no such run, it is unfinished, or not the one that the recipe was made for.
    """
    training: Any = recipe.training
    named = getattr(training, "teacher", None)
    if named is None:
        return recipe
    where = f"training.teacher: {named}"
    try:
        folder = locate(named, artifacts).require_run()
        run = Run.open(folder)
    except ArtifactError as error:
        raise RecipeError(f"{where}: is no run ({error}); name a finished run, or its folder") from None
    try:
        run.require_finished()
    except ArtifactError as error:
        raise RecipeError(f"{where}: {error}") from None
    weights = folder / MODEL_FOLDER / WEIGHTS
    if not weights.is_file():
        raise RecipeError(f"{where}: has no weights ({weights}); copy the whole run again")
    found = sha256_of(weights)
    if training.teacher_sha256 not in (None, found):
        raise RecipeError(
            f"{where}: its weights are not those that the recipe was made for (training.teacher_sha256); take that key "
            "out to be taught by them all the same"
        )
    changed = training.model_copy(update={"teacher": str(folder.resolve()), "teacher_sha256": found})
    return recipe.model_copy(update={"training": changed})


def without_teacher(recipe: Recipe) -> Recipe:
    """The recipe with the student alone, for planning where the teacher is not at hand.

    A student that begins with its teacher's layers begins with those of the source, which are as large.
    """
    model: Any = recipe.model
    fold = getattr(model, "fold", None)
    if fold is not None and fold.weights == "teacher":
        model = model.model_copy(update={"fold": fold.model_copy(update={"weights": "source"})})
    training = recipe.training.model_copy(update={"teacher": None})
    return recipe.model_copy(update={"model": model, "training": training})
