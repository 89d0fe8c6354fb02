"""A run's ``model/`` folder: weights, configuration, tokenizer, golden inputs, named as Hugging Face clients expect."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import replacing, write_json, write_text
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import MODEL_FOLDER
from edgeformer.models import model_spec_of, read_run_recipe
from edgeformer.tasks import Prepared, get_task

WEIGHTS, GOLDEN_INPUTS = "model.safetensors", "golden_inputs.npz"


def save_model(folder: Path, model: nn.Module, recipe: Recipe, prepared: Prepared) -> None:
    """Write weights, configuration, tokenizer and golden inputs to ``folder``."""
    model_spec, task = model_spec_of(recipe), get_task(recipe.task)
    save_weights(model.state_dict(), folder / WEIGHTS)
    config = {
        "model_type": model_spec.model_type,
        "architectures": [model_spec.architecture],
        **recipe.model.model_dump(mode="json", exclude={"kind"}),
        **task.rows.client_config(prepared, recipe),
        **({"leaks": model_spec.leaks(recipe.model)} if task.can_write else {}),
    }
    write_json(folder / "config.json", config)
    write_text(folder / "tokenizer.json", prepared.tokenizer.to_str(pretty=True))
    write_json(
        folder / "tokenizer_config.json", {**task.rows.tokenizer_config(prepared, recipe), **prepared.tokenizer_config}
    )
    np.savez(folder / GOLDEN_INPUTS, **task.rows.golden_inputs(prepared, recipe))  # type: ignore[arg-type]


def load_model(run: Path) -> nn.Module:
    """Load a run's trained model, in evaluation mode on the CPU. Raises RecipeError or ArtifactError."""
    recipe = read_run_recipe(run)
    model = model_spec_of(recipe).adapter.build(recipe)
    load_weights(model, run / MODEL_FOLDER / WEIGHTS)
    return model


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    # `replacing` also sets the usual permissions: safetensors creates files that only their owner can read.
    with replacing(path) as temporary:
        save_file(state, temporary, metadata={"format": "pt"})


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file into ``model`` and set evaluation mode.

    Raises:
        ArtifactError: the file is damaged, or its tensors are not the model's.
    """
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path}: cannot be read as safetensors: {error}; copy or train it again") from None
    expected = model.state_dict()
    problems = [f"missing {name}" for name in expected.keys() - state.keys()]
    problems += [f"unexpected {name}" for name in state.keys() - expected.keys()]
    problems += [
        f"{name} is {list(state[name].shape)}, not {list(expected[name].shape)}"
        for name in expected.keys() & state.keys()
        if state[name].shape != expected[name].shape
    ]
    if problems:
        raise ArtifactError(f"{path}: does not match the recipe of the run: {'; '.join(sorted(problems)[:5])}")
    model.load_state_dict(state)
    model.eval()
