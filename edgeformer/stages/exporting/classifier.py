"""A trained classifier, ready to be exported."""

from __future__ import annotations

from pathlib import Path

import torch

from edgeformer.models.build import load_encoder
from edgeformer.models.encoder import count_parameters
from edgeformer.schema.recipe import ClassificationRecipe
from edgeformer.stages.exporting.exportable import Exportable, read_golden_inputs, token_id
from edgeformer.tasks.classification import score


def open_classifier(run: Path, recipe: ClassificationRecipe) -> Exportable:
    """The run's weights with their golden inputs. Raises ArtifactError."""
    arrays = read_golden_inputs(run, ("input_ids", "attention_mask", "labels"))
    labels = arrays.pop("labels")
    model = load_encoder(recipe.model, recipe.classes, run / "model" / "model.safetensors")
    parameters = count_parameters(model)
    with torch.inference_mode():
        reference = model(*map(torch.from_numpy, arrays.values())).numpy()
    return Exportable(
        recipe=recipe,
        graph=model,
        model_parameters=parameters,
        graph_parameters=parameters,
        inputs=arrays,
        reference=reference,
        score=lambda logits: score(logits, labels),
        golden={**arrays, "labels": labels, "logits": reference},
        facts={
            "labels": recipe.data.labels,
            "max_length": recipe.data.max_length,
            "pad_id": token_id(run, "pad_token_id"),
        },
    )
