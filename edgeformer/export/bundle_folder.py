"""The folder of a new bundle: what stands beside the graphs, what must not stay there, and bundle.json; and the model
with a trimmed vocabulary, which has fewer rows in its table, and companions of its own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import sha256_of, write_json, write_text
from edgeformer.artifacts.golden import write_golden
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, Precision, RunManifest, Vocabulary
from edgeformer.artifacts.workspace import CONFIG_FILE, MODEL_FOLDER, TOKENIZER_FILE
from edgeformer.data.tokenization import special_ids
from edgeformer.data.trimming import ALL_USED, Keeping, Trimmed
from edgeformer.export.exportable import Exportable, read_json, with_references
from edgeformer.models.card import CARD_FILE, model_card
from edgeformer.runtimes.runtime import ENGINES_FOLDER
from edgeformer.system.host import code_version, now
from edgeformer.tasks import TextReader

TOKENIZER_CONFIG = "tokenizer_config.json"


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
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG):
        source = run / MODEL_FOLDER / name
        if not source.is_file():
            raise ArtifactError(f"{source}: missing; train the run again")
        shutil.copyfile(source, folder / name)
    told = subject.task.answer_config(subject.recipe.data)  # as bundle.json: the recipe may say more than training did
    config = read_json(
        run / MODEL_FOLDER / CONFIG_FILE, lambda found: subject.model_spec.client_config({**found, **told})
    )
    write_json(folder / CONFIG_FILE, config)
    card = run / MODEL_FOLDER / CARD_FILE
    if card.is_file():
        shutil.copyfile(card, folder / CARD_FILE)
    else:
        write_text(folder / CARD_FILE, model_card(manifest, subject.recipe))
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
    # What a builder made can be an ONNX file, too: each path once.
    for path in {*folder.rglob("*.onnx"), *folder.rglob("*.onnx_data"), *(folder / ENGINES_FOLDER).glob("*")}:
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
        facts: the task's, ``notes`` and ``made_from``.
    """
    recipe, graphs = subject.recipe, {artifact.file for artifact in artifacts}
    others = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return BundleManifest(
        run=manifest.run,
        task=manifest.task,
        created=now(),
        **facts,
        exits=subject.model_spec.trained_exits(recipe.model),
        loops=subject.model_spec.loops(recipe.model),
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


@dataclass(frozen=True)
class TrimmedSubject:
    """What is exported, the tokenizer that goes with it, and what trimming did to the validation text."""

    subject: Exportable
    trimmed: Trimmed
    vocabulary: Vocabulary

    @property
    def reader(self) -> TextReader:
        """How the trimmed model reads text."""
        tokenizer = self.trimmed.tokenizer
        return TextReader(tokenizer, special_ids(tokenizer).pad, self.vocabulary.kept)


def trim_subject(
    subject: Exportable, manifest: RunManifest, tokenizer: Tokenizer, keeping: Keeping = ALL_USED
) -> TrimmedSubject:
    """The model with a table of the tokens that its training text uses.

    Its golden inputs are those of the whole model with the new numbers; a token that is gone becomes the unknown one.
    Its references are those of the trimmed model in torch: parity is about the graphs. What trimming itself costs is
    in the score on the validation split, which is tokenized anew.

    Args:
        subject: the whole model.
        manifest: of its run.
        tokenizer: the run's own.
        keeping: which tokens stay.

    Raises:
        InputError: a model whose vocabulary cannot be trimmed.
        DataError: the training text is not there any more, or a tokenizer that cannot be trimmed.
    """
    trimmed, vocabulary = subject.task.trim(subject.recipe.data, tokenizer, manifest.data.fingerprints, keeping)
    new = np.full(vocabulary.original, special_ids(trimmed.tokenizer).unk, dtype=np.int64)
    new[trimmed.kept] = np.arange(len(trimmed.kept))
    inputs = {**subject.inputs, "input_ids": new[subject.inputs["input_ids"]]}
    model = subject.adapter.trim(subject.model, torch.from_numpy(trimmed.kept))
    small = with_references(subject.recipe, model, inputs, subject.answers, leaks=subject.leaks)
    return TrimmedSubject(small, trimmed, vocabulary)


def complete_trimmed(folder: Path, run: Path, made: TrimmedSubject, artifacts: Sequence[ArtifactManifest]) -> None:
    """What stands beside the trimmed graphs; where none was built there is no such repository.

    Args:
        folder: of the trimmed repository in the new bundle.
        run: whose ``model`` says everything else.
        made: the trimmed model.
        artifacts: of the whole bundle; config.json names one of the trimmed ones for clients that ask for none.

    Raises:
        ArtifactError: a file of the run is missing or damaged, or names a token that was not kept.
    """
    built = {artifact.precision for artifact in artifacts if artifact.trimmed and artifact.status == "built"}
    if not built:
        shutil.rmtree(folder)
        return
    order: tuple[Precision, ...] = ("int8", "int4", "fp16", "fp32")
    trimmed_companions(run / MODEL_FOLDER, made.trimmed, folder)
    config = read_json(folder / CONFIG_FILE, dict) | made.subject.task.answer_config(made.subject.recipe.data)
    write_json(folder / CONFIG_FILE, made.subject.model_spec.client_config(config, min(built, key=order.index)))
    write_golden(folder, made.subject.golden)


def trimmed_companions(model_folder: Path, trimmed: Trimmed, target: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json for the trimmed vocabulary.

    Args:
        model_folder: the run's ``model``, whose files say everything else.

    Raises:
        ArtifactError: a file is missing or damaged, or names a token that was not kept.
    """
    numbers = {str(old): new for new, old in enumerate(trimmed.kept.tolist())}

    def renumbered(old: object, name: str, key: str) -> int:
        if str(old) not in numbers:
            raise ArtifactError(
                f"{model_folder / name}: {key} {old!r} is no token of the trimmed vocabulary; train the run again"
            )
        return numbers[str(old)]

    config = read_json(model_folder / CONFIG_FILE, dict)
    for key, old in config.items():
        if key.endswith("_token_id") and old is not None:
            config[key] = renumbered(old, CONFIG_FILE, key)
    write_json(target / CONFIG_FILE, {**config, "vocab_size": len(trimmed.kept)})
    described, key = read_json(model_folder / TOKENIZER_CONFIG, dict), "added_tokens_decoder"
    if key in described:
        described[key] = {str(renumbered(old, TOKENIZER_CONFIG, key)): token for old, token in described[key].items()}
    write_json(target / TOKENIZER_CONFIG, described)
    write_text(target / TOKENIZER_FILE, trimmed.tokenizer.to_str(pretty=True))
