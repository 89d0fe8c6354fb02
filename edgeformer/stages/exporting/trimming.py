"""The same model with a trimmed vocabulary: fewer rows in its table, and companions of its own in the bundle."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from edgeformer.data.tokenization import special_ids
from edgeformer.data.trimming import Trimmed, trim_to_training
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.files import write_json, write_text
from edgeformer.formats.golden import write_golden
from edgeformer.formats.manifest import ArtifactManifest, Precision, RunManifest, Vocabulary
from edgeformer.formats.workspace import CONFIG_FILE, MODEL_FOLDER, TOKENIZER_FILE
from edgeformer.stages.exporting.exportable import Exportable, read_json, with_references
from edgeformer.tasks import TextReader


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


def trim_subject(subject: Exportable, manifest: RunManifest, tokenizer: Tokenizer) -> TrimmedSubject:
    """The model with a table of the tokens that its training text uses.

    Its golden inputs are those of the whole model with the new numbers; a token that is gone becomes the unknown one.
    Its references are those of the trimmed model in torch: parity is about the graphs. What trimming itself costs is
    in the score on the validation split, which is tokenized anew.

    Args:
        subject: the whole model.
        manifest: of its run.
        tokenizer: the run's own.

    Raises:
        InputError: a model whose vocabulary cannot be trimmed.
        DataError: the training text is not there any more, or a tokenizer that cannot be trimmed.
    """
    if not subject.task.can_trim:
        raise InputError(
            "--vocab-trim: only a classifier's vocabulary can be trimmed; a language model's vocabulary is what it "
            "predicts, so without some tokens it is another model, whose perplexity compares with nothing"
        )
    data: Any = subject.recipe.data  # labelled texts: no other task can trim
    trimmed, vocabulary = trim_to_training(data, tokenizer, manifest.data.fingerprints)
    new = np.full(vocabulary.original, special_ids(trimmed.tokenizer).unk, dtype=np.int64)
    new[trimmed.kept] = np.arange(len(trimmed.kept))
    inputs = {**subject.inputs, "input_ids": new[subject.inputs["input_ids"]]}
    model = subject.network.trim(subject.model, torch.from_numpy(trimmed.kept))
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
    order: tuple[Precision, ...] = ("int8", "fp16", "fp32")
    trimmed_companions(run / MODEL_FOLDER, made.trimmed, folder)
    config = read_json(folder / CONFIG_FILE, dict)
    write_json(folder / CONFIG_FILE, made.subject.family.client_config(config, min(built, key=order.index)))
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
    name, key = "tokenizer_config.json", "added_tokens_decoder"
    described = read_json(model_folder / name, dict)
    if key in described:
        described[key] = {str(renumbered(old, name, key)): token for old, token in described[key].items()}
    write_json(target / name, described)
    write_text(target / TOKENIZER_FILE, trimmed.tokenizer.to_str(pretty=True))
