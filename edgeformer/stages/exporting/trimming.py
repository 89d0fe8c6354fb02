"""The same model with a trimmed vocabulary: fewer rows in its table, and companions of its own in the bundle."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from edgeformer.formats.manifest import Precision, RunManifest, Vocabulary
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
    return TrimmedSubject(with_references(replace(subject, model=model, inputs=inputs)), trimmed, vocabulary)


def write_trimmed_companions(folder: Path, run: Path, made: TrimmedSubject, precision: Precision) -> None:
    """Configuration, tokenizer and golden inputs of the trimmed artifacts.

    Args:
        folder: of the trimmed repository in the new bundle.
        run: whose ``model`` says everything else.
        precision: of the graph for clients that do not ask for one.

    Raises:
        ArtifactError: a file of the run is missing or damaged, or names a token that was not kept.
    """
    folder.mkdir(exist_ok=True)
    trimmed_companions(run / "model", made.trimmed, folder)
    config = read_json(folder / "config.json", dict)
    write_json(folder / "config.json", made.subject.family.client_config(config, precision))
    write_golden(folder, made.subject.golden)


def trimmed_companions(model_folder: Path, trimmed: Trimmed, target: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json for the trimmed vocabulary.

    Args:
        model_folder: the run's ``model``, whose files say everything else.

    Raises:
        ArtifactError: a file is missing or damaged, or names a token that was not kept.
    """
    config = read_json(model_folder / "config.json", dict)
    for key in [key for key, value in config.items() if key.endswith("_token_id") and value is not None]:
        config[key] = _new_number(trimmed, config[key], model_folder / "config.json", key)
    write_json(target / "config.json", {**config, "vocab_size": len(trimmed.kept)})
    described = read_json(model_folder / "tokenizer_config.json", dict)
    if "added_tokens_decoder" in described:
        source = model_folder / "tokenizer_config.json"
        described["added_tokens_decoder"] = {
            str(_new_number(trimmed, number, source, "added_tokens_decoder")): token
            for number, token in described["added_tokens_decoder"].items()
        }
    write_json(target / "tokenizer_config.json", described)
    write_text(target / "tokenizer.json", trimmed.tokenizer.to_str(pretty=True))


def _new_number(trimmed: Trimmed, old: object, path: Path, key: str) -> int:
    found = [new for new, number in enumerate(trimmed.kept.tolist()) if str(number) == str(old)]
    if not found:
        raise ArtifactError(f"{path}: {key} {old!r} is no token of the trimmed vocabulary; train the run again")
    return found[0]
