"""A trained classifier, ready to be exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeformer.families.build import load_encoder
from edgeformer.families.encoder.model import count_parameters
from edgeformer.families.exit_graphs import EncoderExits, logits_name
from edgeformer.formats.recipe import ClassificationRecipe
from edgeformer.formats.scores import ClassificationScore
from edgeformer.stages.exporting.exportable import Exportable, Logits, read_golden_inputs, run_exits, token_id
from edgeformer.tasks.classification import score


def open_classifier(run: Path, recipe: ClassificationRecipe) -> Exportable:
    """The run's weights with their golden inputs. Raises ArtifactError."""
    arrays = read_golden_inputs(run, ("input_ids", "attention_mask", "labels"))
    labels = arrays.pop("labels")
    model = load_encoder(recipe.model, recipe.classes, run / "model" / "model.safetensors")
    exits = EncoderExits(model)
    logits, states = run_exits(exits, arrays)
    references = {exit_: found.numpy() for exit_, found in logits.items()}
    parameters = count_parameters(model)

    def scored(exit_: int, logits: Logits, rows: NDArray[np.int64] | None = None) -> ClassificationScore:
        return score(logits, labels if rows is None else labels[rows])

    return Exportable(
        recipe=recipe,
        model=model,
        exits=exits,
        parameters=parameters,
        needed=dict.fromkeys(exits.exits, parameters),  # every iteration goes through all layers and the one head
        inputs=arrays,
        references=references,
        states=states,
        score=scored,
        golden={
            **arrays,
            "labels": labels,
            "logits": references[exits.exits[-1]],
            **{logits_name(exit_): found for exit_, found in references.items()},
        },
        facts={
            "labels": recipe.data.labels,
            "max_length": recipe.data.max_length,
            "pad_id": token_id(run, "pad_token_id"),
        },
    )
