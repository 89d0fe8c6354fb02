"""What every import leaves: the folder of a finished run, as training would have left it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgeformer.backends import library_versions
from edgeformer.data.tokenization import fingerprint
from edgeformer.families.card import CARD_FILE, model_card
from edgeformer.families.network import count_parameters
from edgeformer.families.saving import MODEL_FOLDER, save_model
from edgeformer.formats.files import write_json, write_text
from edgeformer.formats.manifest import AttentionUse, Causality, RunManifest
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.workspace import NEW_RUN, RECIPE_FILE, RUN_FILE
from edgeformer.machine.host import code_version, describe_host, now
from edgeformer.machine.leftovers import new_folder
from edgeformer.tasks import Prepared


@dataclass(frozen=True)
class Imported:
    """A model that was trained elsewhere.

    Attributes:
        recipe: what it would be trained with here.
        prepared: its tokenizer, and the rows that golden inputs are drawn from.
        origin: what it was imported from, in words.
        sha256: of that file; None: it is several.
        golden: where the golden inputs are from, in words.
        leaks: it sees what it is asked to predict.
        causality: what the probe found; None for a model that is meant to see the whole text.
    """

    recipe: Recipe
    model: nn.Module
    attention: AttentionUse
    prepared: Prepared[Any]
    origin: str
    sha256: str | None
    golden: str
    leaks: bool = False
    causality: Causality | None = None


def write_run(free: Callable[[], Path], imported: Imported) -> Path:
    """Write the run's folder, which appears when it is complete, and return it.

    Args:
        free: see :func:`~edgeformer.machine.leftovers.new_folder`.

    Raises:
        InputError: the name was free, and is taken by now.
    """

    def write(folder: Path) -> None:
        recipe, manifest = imported.recipe, _manifest(folder.name, imported)
        (folder / MODEL_FOLDER).mkdir()
        save_model(folder / MODEL_FOLDER, imported.model, recipe, imported.prepared)
        write_text(folder / MODEL_FOLDER / CARD_FILE, model_card(manifest, recipe))
        header = f"# Imported from {imported.origin}. Golden inputs: {imported.golden}.\n"
        write_text(folder / RECIPE_FILE, header + recipe.to_yaml())
        write_json(folder / RUN_FILE, manifest)

    return new_folder(NEW_RUN, free, write)


def _manifest(name: str, imported: Imported) -> RunManifest:
    moment, recipe = now(), imported.recipe
    checksum = f" (sha256 {imported.sha256})" if imported.sha256 is not None else ""
    return RunManifest(
        run=name,
        status="finished",
        reason=f"imported from {imported.origin}{checksum}; golden inputs {imported.golden}",
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
