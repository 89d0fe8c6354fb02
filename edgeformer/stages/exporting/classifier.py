"""A trained classifier, ready to be exported."""

from __future__ import annotations

from pathlib import Path

from edgeformer.models.build import load_encoder
from edgeformer.models.encoder import count_parameters
from edgeformer.models.exit_graphs import EncoderExits, logits_name
from edgeformer.schema.recipe import ClassificationRecipe
from edgeformer.stages.exporting.exportable import Exportable, read_golden_inputs, run_exits, token_id
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
    return Exportable(
        recipe=recipe,
        model=model,
        exits=exits,
        parameters=parameters,
        needed=dict.fromkeys(exits.exits, parameters),  # every iteration goes through all layers and the one head
        inputs=arrays,
        references=references,
        states=states,
        score=lambda exit_, logits: score(logits, labels),
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
