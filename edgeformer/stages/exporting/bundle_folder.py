"""The folder of a new bundle: what stands beside the graphs, what must not stay there, and bundle.json."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeformer.backends.backend import ENGINES_FOLDER
from edgeformer.families.card import CARD_FILE, write_model_card
from edgeformer.families.saving import MODEL_FOLDER
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import sha256_of, write_json
from edgeformer.formats.golden import write_golden
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest, RunManifest
from edgeformer.machine.host import code_version, now
from edgeformer.stages.exporting.exportable import Exportable, read_json

COMPANIONS = ("tokenizer.json", "tokenizer_config.json")


def write_companions(folder: Path, run: Path, manifest: RunManifest, subject: Exportable) -> None:
    """Everything beside the graphs: tokenizer, configuration, model card, golden inputs.

    Args:
        folder: of the bundle.
        run: that becomes it; its card, where it has one, may have been edited by hand and is taken as it is.
        manifest: of the run.
        subject: what is exported of it.

    Raises:
        ArtifactError: a file of the run is missing or damaged.
    """
    for name in COMPANIONS:
        source = run / MODEL_FOLDER / name
        if not source.is_file():
            raise ArtifactError(f"{source}: missing; train the run again")
        shutil.copyfile(source, folder / name)
    write_json(folder / "config.json", read_json(run / MODEL_FOLDER / "config.json", subject.family.client_config))
    card = run / MODEL_FOLDER / CARD_FILE
    if card.is_file():
        shutil.copyfile(card, folder / CARD_FILE)
    else:
        write_model_card(folder, manifest, subject.recipe)
    write_golden(folder, subject.golden)


def remove_rejected(folder: Path, artifacts: Sequence[ArtifactManifest]) -> list[ArtifactManifest]:
    """The entries, after the files of what was rejected or never judged were deleted, weights beside them too.

    Clients look for graphs by name, not in bundle.json: what failed its bar must not lie where they would take it.

    Args:
        folder: of the bundle.
        artifacts: everything that was tried.
    """
    gone: dict[str, object] = {"file": None, "parts": {}, "sha256": None, "weights_file": None}
    kept = [entry if entry.status == "built" else entry.model_copy(update=gone) for entry in artifacts]
    listed = {file for artifact in kept for file in (artifact.file, artifact.weights_file, *artifact.parts.values())}
    graphs = [*folder.rglob("*.onnx"), *folder.rglob("*.onnx_data")]
    for path in [*graphs, *(folder / ENGINES_FOLDER).glob("*")]:
        if path.relative_to(folder).as_posix() not in listed:
            path.unlink()
    return kept


def bundle_manifest(
    folder: Path,
    manifest: RunManifest,
    subject: Exportable,
    artifacts: Sequence[ArtifactManifest],
    facts: dict[str, Any],
) -> BundleManifest:
    """bundle.json of a folder in which everything else lies.

    Args:
        folder: of the bundle.
        manifest: of its run.
        subject: the whole model.
        artifacts: what was built, and what was not.
        facts: the task's, and ``notes``.
    """
    recipe, graphs = subject.recipe, {artifact.file for artifact in artifacts}
    others = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return BundleManifest(
        run=manifest.run,
        task=manifest.task,
        created=now(),
        **facts,
        exits=subject.family.trained_exits(recipe.model),
        leaks=subject.leaks,
        max_positions=recipe.model.max_positions,
        parameters=manifest.parameters,
        synthetic=manifest.data.synthetic,
        target=recipe.target,
        data=recipe.data,
        data_fingerprints=manifest.data.fingerprints,
        files={name: sha256_of(folder / name) for name in others if name not in graphs},
        artifacts=tuple(artifacts),
        code_version=code_version(),
    )
