"""A run's ``model/`` folder: everything that export and other programs need of a trained model. The names are those
that Hugging Face clients look for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from edgeformer.families import family_of, read_recipe_of
from edgeformer.families.network import Place
from edgeformer.families.weights import load_weights, save_weights
from edgeformer.formats.files import write_json, write_text
from edgeformer.formats.recipe import Recipe
from edgeformer.tasks import Prepared, task_named

MODEL_FOLDER, WEIGHTS, GOLDEN_INPUTS = "model", "model.safetensors", "golden_inputs.npz"


def save_model(folder: Path, model: nn.Module, recipe: Recipe, prepared: Prepared) -> None:
    """Fill ``folder`` with weights, configuration, tokenizer and golden inputs."""
    family, task = family_of(recipe), task_named(recipe.task)
    save_weights(model, folder / WEIGHTS)
    config = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **recipe.model.model_dump(mode="json", exclude={"kind"}),
        **task.client_config(prepared, recipe),
        **({"leaks": family.leaks(recipe.model)} if task.writes_text else {}),
    }
    write_json(folder / "config.json", config)
    write_text(folder / "tokenizer.json", prepared.tokenizer.to_str(pretty=True))
    write_json(folder / "tokenizer_config.json", task.tokenizer_config(prepared, recipe))
    np.savez(folder / GOLDEN_INPUTS, **task.golden_inputs(prepared, recipe))  # type: ignore[arg-type]


def load_model(run: Path) -> nn.Module:
    """The trained model of a run's folder (``recipe.yaml`` and ``model/``), in evaluation mode on the CPU.

    Raises:
        RecipeError, ArtifactError: the recipe or the weights are missing or damaged, or do not fit each other.
    """
    recipe = read_recipe_of(run)
    model, _ = family_of(recipe).network.build(recipe, Place(for_export=True))
    load_weights(model, run / MODEL_FOLDER / WEIGHTS)
    return model
