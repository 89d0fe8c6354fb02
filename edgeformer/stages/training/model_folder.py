"""The ``model/`` folder of a run: weights, configuration, tokenizer, and the inputs that export checks itself with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.torch import save_file
from torch import nn

from edgeformer.data.batching import collate
from edgeformer.data.prepare import PreparedData
from edgeformer.schema.files import write_json, write_text
from edgeformer.schema.recipe import Recipe

GOLDEN_ROWS = 64


def write_model(folder: Path, model: nn.Module, recipe: Recipe, data: PreparedData) -> None:
    """Fill ``folder``; the names are those that Hugging Face clients look for."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", _config(recipe, data))
    write_text(folder / "tokenizer.json", data.tokenizer.to_str(pretty=True))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(recipe, data))
    _write_golden_inputs(folder / "golden_inputs.npz", recipe, data)


def _config(recipe: Recipe, data: PreparedData) -> dict[str, object]:
    labels = recipe.data.labels
    return {
        "model_type": "edgeformer-encoder",
        "architectures": ["EncoderClassifier"],
        **recipe.model.model_dump(mode="json", exclude={"kind"}),
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "max_length": recipe.data.max_length,
        "pad_token_id": data.special.pad,
    }


def _tokenizer_config(recipe: Recipe, data: PreparedData) -> dict[str, object]:
    name = data.tokenizer.id_to_token
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.data.max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "pad_token": name(data.special.pad),
        "unk_token": name(data.special.unk),
        "cls_token": name(data.special.cls),
    }


def _write_golden_inputs(path: Path, recipe: Recipe, data: PreparedData) -> None:
    """Real validation inputs with their labels, so that export and the target device need no data set."""
    validation = data.validation
    count = min(GOLDEN_ROWS, len(validation))
    rows = np.random.default_rng(recipe.seed).choice(len(validation), count, replace=False)
    arrays = collate(validation, rows, data.special.pad)
    np.savez(path, **arrays, labels=validation.labels[rows])  # type: ignore[arg-type]
