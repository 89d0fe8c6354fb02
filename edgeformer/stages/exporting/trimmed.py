"""The same classifier with a trimmed vocabulary: a subject of its own, with companions of its own in the bundle."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from edgeformer.data.tokenization import special_ids
from edgeformer.data.trimming import Trimmed, require_classifier, trim_to_training
from edgeformer.families.encoder.model import EncoderClassifier, count_parameters
from edgeformer.families.exit_graphs import EncoderExits, logits_name
from edgeformer.formats.files import replacing, write_json
from edgeformer.formats.manifest import Precision, RunManifest, Vocabulary
from edgeformer.formats.recipe import ClassificationRecipe
from edgeformer.stages.exporting.exportable import Exportable, run_exits
from edgeformer.stages.exporting.hub_config import hub_config
from edgeformer.stages.exporting.trim import trim_model, trimmed_companions


@dataclass(frozen=True)
class TrimmedSubject:
    """What is exported, the tokenizer that goes with it, and what trimming did to the validation text."""

    subject: Exportable
    trimmed: Trimmed
    vocabulary: Vocabulary

    @property
    def tokenizer(self) -> tuple[Tokenizer, int]:
        """With the token that fills up rows."""
        return self.trimmed.tokenizer, special_ids(self.trimmed.tokenizer).pad


def trim_subject(subject: Exportable, manifest: RunManifest, tokenizer: Tokenizer) -> TrimmedSubject:
    """The model with a table of the tokens that its training text uses.

    Its golden inputs are those of the whole model with the new numbers; a token that is gone becomes the unknown one.
    Its references are those of the trimmed model in torch: parity is about the graphs. What trimming itself costs is
    in the score on the validation split, which is tokenized anew.

    Raises:
        InputError: a language model.
        DataError: the training text is not there any more, or a tokenizer that cannot be trimmed.
    """
    require_classifier(manifest.task)
    recipe = subject.recipe
    assert isinstance(subject.model, EncoderClassifier) and isinstance(recipe, ClassificationRecipe)
    trimmed, vocabulary = trim_to_training(recipe.data, tokenizer, manifest.data.fingerprints)
    new = np.full(vocabulary.original, special_ids(trimmed.tokenizer).unk, dtype=np.int64)
    new[trimmed.kept] = np.arange(len(trimmed.kept))
    inputs = {**subject.inputs, "input_ids": new[subject.inputs["input_ids"]]}
    model = trim_model(subject.model, trimmed.kept)
    exits = EncoderExits(model)
    logits, states = run_exits(exits, inputs)
    references = {exit_: found.numpy() for exit_, found in logits.items()}
    parameters = count_parameters(model)
    golden = {
        **inputs,
        "labels": subject.golden["labels"],
        "logits": references[exits.exits[-1]],
        **{logits_name(exit_): found for exit_, found in references.items()},
    }
    return TrimmedSubject(
        replace(
            subject,
            model=model,
            exits=exits,
            parameters=parameters,
            needed=dict.fromkeys(exits.exits, parameters),
            inputs=inputs,
            references=references,
            states=states,
            golden=golden,
        ),
        trimmed,
        vocabulary,
    )


def write_trimmed_companions(folder: Path, run: Path, made: TrimmedSubject, precision: Precision) -> None:
    """Configuration, tokenizer and golden inputs of the trimmed artifacts.

    Args:
        precision: of the graph for clients that do not ask for one.
    """
    folder.mkdir(exist_ok=True)
    trimmed_companions(run / "model", made.trimmed, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", hub_config(config, precision))
    with replacing(folder / "golden.npz") as temporary:
        np.savez(temporary, **made.subject.golden)  # type: ignore[arg-type]
