"""From a recipe's model section to a torch module, and back from a saved one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from edgeformer.models.encoder import EncoderClassifier
from edgeformer.models.flash import choose_attention
from edgeformer.models.layers import sdpa
from edgeformer.schema.errors import ArtifactError
from edgeformer.schema.recipe import EncoderConfig


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


def load_encoder(config: EncoderConfig, classes: int, weights: Path) -> EncoderClassifier:
    """The model with the weights of a run's ``model.safetensors``, in evaluation mode on the CPU, through SDPA.

    Raises:
        ArtifactError: the file is missing, damaged, or holds other tensors than the configuration asks for.
    """
    try:
        state = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{weights}: cannot be read as safetensors: {error}; copy or train it again") from None
    model, _ = build_encoder(config, classes, for_export=True)
    expected = model.state_dict()
    problems = [f"missing {name}" for name in expected.keys() - state.keys()]
    problems += [f"unexpected {name}" for name in state.keys() - expected.keys()]
    problems += [
        f"{name} is {list(state[name].shape)}, not {list(expected[name].shape)}"
        for name in expected.keys() & state.keys()
        if state[name].shape != expected[name].shape
    ]
    if problems:
        raise ArtifactError(f"{weights}: does not fit the recipe beside it: {'; '.join(sorted(problems)[:5])}")
    model.load_state_dict(state)
    return model.eval()


def count_offline(config: EncoderConfig, classes: int) -> int:
    """Exact parameter count without allocating a weight (meta device)."""
    with torch.device("meta"):
        model, _ = build_encoder(config, classes, for_export=True)
    return sum(parameter.numel() for parameter in model.parameters())
