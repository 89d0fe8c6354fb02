"""From a recipe's model section to a torch module, and back from a saved one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from edgeformer.families.crt.model import CRT
from edgeformer.families.encoder.flash import choose_attention
from edgeformer.families.encoder.layers import sdpa
from edgeformer.families.encoder.model import EncoderClassifier
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.language_recipe import CRTConfig, LanguageRecipe
from edgeformer.formats.recipe import EncoderConfig
from edgeformer.formats.recipes import AnyRecipe
from edgeformer.formats.shipped import load_recipe
from edgeformer.formats.workspace import RECIPE_FILE


def build_encoder(
    config: EncoderConfig,
    classes: int,
    *,
    device_type: str = "cpu",
    precision: str = "fp32",
    for_export: bool = False,
) -> tuple[EncoderClassifier, str | None]:
    """The model with fresh weights, and why its attention is not the requested one (None if it is).

    Args:
        device_type, precision: where and in what the model will compute; flash attention depends on both.
        for_export: use torch's SDPA whatever the configuration says.
    """
    attention, reason = (sdpa, None) if for_export else choose_attention(config.attention, device_type, precision)
    options = config.model_dump(exclude={"kind", "attention"})
    return EncoderClassifier(classes=classes, attention=attention, **options), reason


def build_crt(config: CRTConfig) -> CRT:
    """CRT-Deep with fresh weights."""
    return CRT(**config.model_dump(exclude={"kind"}))


def load_encoder(config: EncoderConfig, classes: int, weights: Path) -> EncoderClassifier:
    """The model with the weights of a run's ``model.safetensors``, in evaluation mode on the CPU, through SDPA.

    Raises:
        ArtifactError: the file is missing, damaged, or holds other tensors than the configuration asks for.
    """
    model, _ = build_encoder(config, classes, for_export=True)
    _load_into(model, weights)
    return model


def load_crt(config: CRTConfig, weights: Path) -> CRT:
    """The same for CRT-Deep. Raises ArtifactError."""
    model = build_crt(config)
    _load_into(model, weights)
    return model


def load_model(run: Path) -> EncoderClassifier | CRT:
    """The trained model of a run's folder (``recipe.yaml`` and ``model/``), in evaluation mode on the CPU.

    Raises:
        RecipeError, ArtifactError: the recipe or the weights are missing or damaged, or do not fit each other.
    """
    recipe, weights = load_recipe(str(run / RECIPE_FILE)), run / "model" / "model.safetensors"
    if isinstance(recipe, LanguageRecipe):
        return load_crt(recipe.model, weights)
    return load_encoder(recipe.model, recipe.classes, weights)


def _load_into(model: nn.Module, weights: Path) -> None:
    try:
        state = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{weights}: cannot be read as safetensors: {error}; copy or train it again") from None
    problems = misfits(model.state_dict(), state)
    if problems:
        raise ArtifactError(f"{weights}: does not fit the recipe beside it: {'; '.join(problems[:5])}")
    model.load_state_dict(state)
    model.eval()


def misfits(expected: dict[str, Tensor], state: dict[str, Tensor]) -> list[str]:
    """What keeps ``state`` from being loaded: missing, unexpected and misshapen tensors, by name."""
    problems = [f"missing {name}" for name in expected.keys() - state.keys()]
    problems += [f"unexpected {name}" for name in state.keys() - expected.keys()]
    problems += [
        f"{name} is {list(state[name].shape)}, not {list(expected[name].shape)}"
        for name in expected.keys() & state.keys()
        if state[name].shape != expected[name].shape
    ]
    return sorted(problems)


def count_offline(recipe: AnyRecipe) -> int:
    """Exact parameter count of a recipe's model without allocating a weight (meta device)."""
    with torch.device("meta"):
        if isinstance(recipe, LanguageRecipe):
            model: nn.Module = build_crt(recipe.model)
        else:
            model, _ = build_encoder(recipe.model, recipe.classes, for_export=True)
    return sum(parameter.numel() for parameter in model.parameters())
