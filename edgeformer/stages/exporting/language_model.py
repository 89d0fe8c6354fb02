"""A trained language model, ready to be exported; one that looks ahead only when that is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgeformer.models.build import load_crt
from edgeformer.models.causality import probe_causality
from edgeformer.models.crt import CRT, ExitGraph
from edgeformer.models.crt_loss import IGNORED
from edgeformer.models.encoder import count_parameters
from edgeformer.schema.errors import ArtifactError, InputError
from edgeformer.schema.language_recipe import LanguageRecipe
from edgeformer.schema.manifest import RunManifest
from edgeformer.schema.scores import LanguageScore
from edgeformer.stages.exporting.exportable import Array, Exportable, Logits, read_golden_inputs, token_id
from edgeformer.tasks.language_modeling import LanguageMeter, token_losses

TOP = 32
"""Logits per golden token that the bundle keeps; all of them would be gigabytes."""


def open_language_model(
    run: Path, recipe: LanguageRecipe, manifest: RunManifest, *, allow_leak: bool = False
) -> Exportable:
    """The run's weights with their golden inputs, after the causality probe.

    Raises:
        ArtifactError: a file of the run is missing or damaged.
        InputError: the model looks ahead, and ``allow_leak`` is not set.
    """
    arrays = read_golden_inputs(run, ("input_ids", "targets"))
    model = load_crt(recipe.model, run / "model" / "model.safetensors")
    leaks = _leaks(run, model, manifest, allow_leak)
    reference, golden = _references(model, torch.from_numpy(arrays["input_ids"]))
    targets = arrays["targets"].reshape(-1)
    return Exportable(
        recipe=recipe,
        graph=ExitGraph(model).eval(),
        model_parameters=count_parameters(model),
        graph_parameters=count_parameters(model) - count_parameters(model.exit_heads),
        inputs={"input_ids": arrays["input_ids"]},
        reference=reference,
        score=lambda logits: _score(model.loops, logits, targets),
        golden={**arrays, **golden},
        facts={
            "exits": model.exits,
            "leaks": leaks,
            "max_length": recipe.data.sequence_length,
            "pad_id": token_id(run, "boundary_token_id"),
        },
    )


def _leaks(run: Path, model: CRT, manifest: RunManifest, allow_leak: bool) -> bool:
    try:
        found = probe_causality(model)
    except ValueError as error:
        raise ArtifactError(f"{run}: the causality probe found nothing to judge: {error}; train it again") from None
    # A run whose architecture leaked stays marked, even if training shrank the leak below what the probe sees.
    leaks = found.leaks or manifest.leaks
    if leaks and not allow_leak:
        seen = f"outputs depend on tokens up to {found.reach} positions ahead" if found.leaks else "run.json says so"
        raise InputError(
            f"{run}: this model leaks future tokens ({seen}), so its scores are void; "
            "export it all the same, marked as leaking, with --allow-leak"
        )
    return leaks


@torch.inference_mode()
def _references(model: CRT, input_ids: Tensor) -> tuple[Logits, dict[str, Array]]:
    """The last exit's logits [tokens, V], and of every exit the ``TOP`` largest with the log-sum-exp of all."""
    states = model(input_ids)
    golden: dict[str, Array] = {}
    logits = torch.empty(0)
    for loop, state in states.items():
        logits = model.head_of(loop)(state).float()
        top = logits.topk(min(TOP, logits.shape[-1]))
        golden[f"top_values_exit{loop}"] = top.values.numpy()
        golden[f"top_indices_exit{loop}"] = top.indices.numpy()
        golden[f"log_sum_exp_exit{loop}"] = logits.logsumexp(-1).numpy()
    return logits.flatten(0, 1).numpy(), golden


def _score(loops: int, logits: Logits, targets: NDArray[np.int64]) -> LanguageScore:
    """Score of the last exit; logits [n, V], targets [n]."""
    counted = targets != IGNORED
    meter = LanguageMeter((loops,))
    meter.add({loops: token_losses(logits[counted], targets[counted])})
    return meter.score()
