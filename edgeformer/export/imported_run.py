"""Write the folder of a finished run for a model that was trained elsewhere, as training would write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgeformer.artifacts.files import write_json, write_text
from edgeformer.artifacts.manifest import AttentionUse, Causality, RunManifest
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import NEW_RUN, RECIPE_FILE, RUN_FILE
from edgeformer.data.tokenization import fingerprint
from edgeformer.models.adapter import count_parameters
from edgeformer.models.card import CARD_FILE, model_card
from edgeformer.models.weights import MODEL_FOLDER, save_model
from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.system.leftovers import new_folder
from edgeformer.tasks import Prepared


@dataclass(frozen=True)
class ImportedModel:
    """A model that was trained elsewhere.

    Attributes:
        recipe: what it would be trained with here.
        prepared: its tokenizer, and the rows that golden inputs are drawn from.
        origin: name of the file or model that it was imported from.
        sha256: of that file; None: there are several.
        golden_origin: where the golden inputs come from.
        leaks: it sees the tokens that it predicts.
        causality: result of the probe; None for a model that is meant to see the whole text.
    """

    recipe: Recipe
    model: nn.Module
    attention: AttentionUse
    prepared: Prepared[Any]
    origin: str
    sha256: str | None
    golden_origin: str
    leaks: bool = False
    causality: Causality | None = None


def write_run(free_folder: Callable[[], Path], imported: ImportedModel) -> Path:
    """Write the run's folder, which appears when it is complete, and return it.

    Args:
        free_folder: see :func:`~edgeformer.system.leftovers.new_folder`.

    Raises:
        InputError: another process took the name in the meantime.
    """
    recipe, moment = imported.recipe, now()
    checksum = f" (sha256 {imported.sha256})" if imported.sha256 is not None else ""

    def write(folder: Path) -> None:
        manifest = RunManifest(
            run=folder.name,
            status="finished",
            reason=f"imported from {imported.origin}{checksum}; golden inputs {imported.golden_origin}",
            task=recipe.task,
            recipe=recipe.name,
            recipe_sha256=recipe.fingerprint(),
            started=moment,
            finished=moment,
            parameters=count_parameters(imported.model),
            vocabulary=recipe.model.vocab_size,
            precision="unknown",
            attention=imported.attention,
            data=imported.prepared.summary,
            tokenizer_fingerprint=fingerprint(imported.prepared.tokenizer),
            leaks=imported.leaks,
            causality=imported.causality,
            versions=library_versions(),
            code_version=code_version(),
            host={**describe_host(), "threads": torch.get_num_threads()},
        )
        (folder / MODEL_FOLDER).mkdir()
        save_model(folder / MODEL_FOLDER, imported.model, recipe, imported.prepared)
        write_text(folder / MODEL_FOLDER / CARD_FILE, model_card(manifest, recipe))
        header = f"# Imported from {imported.origin}. Golden inputs: {imported.golden_origin}.\n"
        write_text(folder / RECIPE_FILE, header + recipe.to_yaml())
        write_json(folder / RUN_FILE, manifest)

    return new_folder(NEW_RUN, free_folder, write)
