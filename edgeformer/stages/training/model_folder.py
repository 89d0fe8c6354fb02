"""The ``model/`` folder of a classifier's run, with the inputs that export checks itself with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from edgeformer.data.batching import collate
from edgeformer.data.prepare import PreparedData
from edgeformer.families.saving import save_weights
from edgeformer.formats.files import write_json, write_text
from edgeformer.formats.recipe import ClassificationRecipe

GOLDEN_ROWS = 64


def save_classifier(folder: Path, model: nn.Module, recipe: ClassificationRecipe, data: PreparedData) -> None:
    """Fill ``folder``; the names are those that Hugging Face clients look for."""
    save_weights(model, folder / "model.safetensors")
    write_json(folder / "config.json", _config(recipe, data))
    write_text(folder / "tokenizer.json", data.tokenizer.to_str(pretty=True))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(recipe, data))
    _write_golden_inputs(folder / "golden_inputs.npz", recipe, data)


def _config(recipe: ClassificationRecipe, data: PreparedData) -> dict[str, object]:
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


def _tokenizer_config(recipe: ClassificationRecipe, data: PreparedData) -> dict[str, object]:
    name = data.tokenizer.id_to_token
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.data.max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "pad_token": name(data.special.pad),
        "unk_token": name(data.special.unk),
        "cls_token": name(data.special.cls),
    }


def _write_golden_inputs(path: Path, recipe: ClassificationRecipe, data: PreparedData) -> None:
    """Real validation inputs with their labels, so that export and the target device need no data set."""
    validation = data.validation
    count = min(GOLDEN_ROWS, len(validation))
    rows = np.random.default_rng(recipe.seed).choice(len(validation), count, replace=False)
    arrays = collate(validation, rows, data.special.pad)
    np.savez(path, **arrays, labels=validation.labels[rows])  # type: ignore[arg-type]
