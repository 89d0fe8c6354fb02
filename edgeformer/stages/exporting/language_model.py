"""A trained language model, ready to be exported; one that looks ahead only when that is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from edgeformer.families.build import load_crt
from edgeformer.families.crt.causality import probe_causality
from edgeformer.families.crt.loss import IGNORED
from edgeformer.families.crt.model import CRT
from edgeformer.families.encoder.model import count_parameters
from edgeformer.families.exit_graphs import CRTExits
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.language_recipe import LanguageRecipe
from edgeformer.formats.manifest import RunManifest
from edgeformer.formats.scores import LanguageScore
from edgeformer.stages.exporting.exportable import Array, Exportable, Logits, read_golden_inputs, run_exits, token_id
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
    inputs = {"input_ids": arrays["input_ids"]}
    exits = CRTExits(model)
    logits, states = run_exits(exits, inputs)
    targets = arrays["targets"].reshape(-1)

    def scored(exit_: int, logits: Logits, rows: NDArray[np.int64] | None = None) -> LanguageScore:
        return _score(exit_, logits, targets if rows is None else targets[rows])

    return Exportable(
        recipe=recipe,
        model=model,
        exits=exits,
        parameters=count_parameters(model),
        needed={loop: _needed(model, loop) for loop in model.exits},
        inputs=inputs,
        references={loop: found.flatten(0, 1).numpy() for loop, found in logits.items()},
        states=states,
        score=scored,
        golden={**arrays, **_golden(logits)},
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


def _needed(model: CRT, loop: int) -> int:
    """Parameters of the graph up to an exit: no head but its own, no encoding of a loop behind it."""
    heads = count_parameters(model.exit_heads) + count_parameters(model.head)
    unused = (model.loops - loop) * model.loop_encodings.shape[1]
    return count_parameters(model) - heads + count_parameters(model.head_of(loop)) - unused


def _golden(logits: dict[int, Tensor]) -> dict[str, Array]:
    """Of every exit the ``TOP`` largest logits of every token, the log-sum-exp of all, and how widely they spread."""
    golden: dict[str, Array] = {}
    for loop, found in logits.items():
        top = found.topk(min(TOP, found.shape[-1]))
        golden[f"top_values_exit{loop}"] = top.values.numpy()
        golden[f"top_indices_exit{loop}"] = top.indices.numpy()
        golden[f"log_sum_exp_exit{loop}"] = found.logsumexp(-1).numpy()
        golden[f"logits_std_exit{loop}"] = found.numpy().std()
    return golden


def _score(loop: int, logits: Logits, targets: NDArray[np.int64]) -> LanguageScore:
    """Score of one exit; logits [n, V], targets [n]."""
    counted = targets != IGNORED
    meter = LanguageMeter((loop,))
    meter.add({loop: token_losses(logits[counted], targets[counted])})
    return meter.score()
