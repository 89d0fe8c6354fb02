"""Writing a run's ``model/`` folder: the weights of any model, and everything of a language model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from edgeformer.formats.files import replacing, write_json, write_text
from edgeformer.formats.language_recipe import LanguageRecipe

GOLDEN_ROWS, GOLDEN_TOKENS = 8, 64


def save_weights(model: nn.Module, path: Path) -> None:
    """``model.safetensors``; every tensor on the CPU and contiguous."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    # Through `replacing`, because safetensors makes files that only their owner can read.
    with replacing(path) as temporary:
        save_file(state, temporary, metadata={"format": "pt"})


def save_language_model(
    folder: Path,
    model: nn.Module,
    recipe: LanguageRecipe,
    tokenizer: Tokenizer,
    boundary: int,
    stream: NDArray[np.int32],
) -> None:
    """Fill ``folder``; the names are those that Hugging Face clients look for.

    Args:
        boundary: the token between documents.
        stream: real token ids int32 [n], not trained on; windows of it become the golden inputs.
    """
    save_weights(model, folder / "model.safetensors")
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {
        "model_type": "edgeformer-crt",
        "architectures": ["CRT"],
        **recipe.model.model_dump(mode="json", exclude={"kind"}),
        "sequence_length": recipe.data.sequence_length,
        "boundary_token_id": boundary,
        "leaks": not recipe.model.causal,
    }
    write_json(folder / "config.json", config)
    name = tokenizer.id_to_token(boundary)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": recipe.data.sequence_length,
            "model_input_names": ["input_ids"],
            "bos_token": name,
            "eos_token": name,
        },
    )
    length = min(GOLDEN_TOKENS, recipe.data.sequence_length)
    np.savez(folder / "golden_inputs.npz", **golden_windows(stream, length))  # type: ignore[arg-type]


def golden_windows(stream: NDArray[np.int32], length: int) -> dict[str, NDArray[np.int64]]:
    """Eight evenly spaced windows: input_ids and targets (the tokens after them), int64 [8, length]."""
    if len(stream) <= length:  # a tiny text: repeated
        stream = np.resize(stream, length + 1)
    starts = np.linspace(0, len(stream) - length - 1, GOLDEN_ROWS).astype(np.int64)
    windows = stream[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return {"input_ids": windows[:, :-1], "targets": windows[:, 1:]}
