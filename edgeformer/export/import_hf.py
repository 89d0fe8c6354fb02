"""import hf: a text encoder in a Hugging Face folder, or on the hub, becomes a run.

A sequence classifier becomes a classifier; a sentence-transformers folder, or an encoder without a head, an embedding
model. Weights are read from safetensors only, and no code of the folder is run.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from edgeformer.artifacts.documents import YamlDocument, load_profile, own_profiles, validate
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import CONFIG_FILE, free_folder
from edgeformer.data.encoding import Encoded, Prepared, encode, encode_texts
from edgeformer.data.rows import LabelledTexts, Text, label_sets
from edgeformer.data.sources import imported_data
from edgeformer.data.synthetic import SENTENCES
from edgeformer.data.tokenization import tokenizer_from_file
from edgeformer.export.imported_run import Imported, write_run
from edgeformer.models import model_spec_of, recipe_type
from edgeformer.models.adapter import ModelAdapter, Place
from edgeformer.models.pretrained import MODEL
from edgeformer.models.pretrained.source import AS_ONNX, Source, open_source, read_object
from edgeformer.runtimes.torch.session import TorchSession
from edgeformer.tasks import Task, TextReader, task_named
from edgeformer.tasks.scoring import answer_rows

MOST_TOKENS = 512
"""Tokens that a text is cut to, where neither the user nor the source says it, of models that take more."""

_BATCH, _PAIRS = 32, 16
_SEVERAL, _MULTI_LABEL = "multi-label-classification", "multi_label_classification"
"""As the task is called here, and in a config.json."""
_THRESHOLDS = (
    "a text can have several of its labels, each from a probability of 0.5 on; state others as data.thresholds in the "
    "run's recipe.yaml before it is exported"
)
_BUILT_IN = "from a short built-in English text, not from the model's own data"
_TRAINING: Mapping[str, Any] = {
    "epochs": 3,
    "batch_size": 32,
    "optimizer": {"kind": "adamw", "lr": 3e-5},
    "schedule": {"kind": "cosine", "warmup": 0.1},
    "batching": "bucketed",
}
"""As such encoders are usually fine-tuned, should the recipe be trained."""


@dataclass(frozen=True)
class HfOptions:
    """Where the run goes, and what the source does not say itself.

    Attributes:
        data: a labelled file, or a folder of train, validation and test files; for an embedding model of scored pairs.
        labels: names of the classes, in order; None: the source's.
        pooling: of an embedding model: cls, mean or max; None: the source's, else mean.
        max_length: tokens that a text is cut to; None: the source's, else what the model takes, at most 512.
        target: the device profile that plan and profile use by default.
    """

    artifacts: Path
    name: str | None = None
    data: Path | None = None
    labels: tuple[str, ...] | None = None
    pooling: str | None = None
    max_length: int | None = None
    target: str | None = None


def import_hf(name: str, options: HfOptions, progress: Progress = SILENT) -> Path:
    """Make a finished run of the model in a folder, or of that name on the hub, and return its folder.

    Raises:
        InputError: model, tokenizer, data, labels or name cannot be used; nothing was written.
        ArtifactError: a file of the model is missing or damaged.
    """
    source = open_source(name)
    called = _slug(name)
    free = partial(free_folder, options.artifacts, options.name, called, or_else="")
    free()  # before the work: the name may be taken
    if options.target is not None:
        load_profile(options.target, own_profiles(options.artifacts))
    embeds = source.pooling is not None or not source.classifies
    _check(source, options, embeds=embeds)
    task = task_named("embedding" if embeds else _SEVERAL if _gives_several(source) else "classification")
    labels = None if embeds else _labels(source, options.labels)
    data, notes = imported_data(options.data, labels, _length(source, options))
    if task.name == _SEVERAL:
        data["label_separator"] = ","
        notes.append(_THRESHOLDS)
    recipe = _recipe(called, source, options, task, data)
    model, attention = _model(source, recipe)
    reader = task.reader(source.tokenizer, recipe.data, recipe.model.vocab_size)
    prepared, golden = _prepared(recipe, reader, model_spec_of(recipe).adapter, model)
    for note in (*notes, *_notes(source, options, labels)):
        progress.message(note)
    found = Imported(recipe, model, attention, prepared, Path(name).name, source.weights_sha256(), golden)
    return write_run(free, found)


def _slug(name: str) -> str:
    """A name for recipe and run: the last part of a path or of a hub name, in characters that a name can have."""
    last = Path(name).resolve().name if Path(name).is_dir() else name.rsplit("/", 1)[-1]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last).lstrip("._-")[:60] or "imported"


def _check(source: Source, options: HfOptions, *, embeds: bool) -> None:
    """Raises InputError for options that do not go with the model, and for classifiers of another kind."""
    if (head := source.other_head) is not None:
        raise InputError(
            f"{source.folder / CONFIG_FILE}: is a {head}, whose head is not computed here; only encoders and sequence "
            f"classifiers are imported; {AS_ONNX}"
        )
    if embeds and options.labels is not None:
        raise InputError(f"--labels: {source.name} has no classifier; it is imported as an embedding model")
    if not embeds and options.pooling is not None:
        raise InputError(f"--pooling: {source.name} is a classifier, which reads its text in its own way; leave it out")
    kind = source.config.get("problem_type")
    known = (None, "single_label_classification", _MULTI_LABEL)
    if not embeds and (kind not in known or len(source.labels) == 1):
        kind = kind or "regression"
        raise InputError(
            f"{source.name}: is a model for {kind}; only classifiers of two or more labels are imported; {AS_ONNX}"
        )


def _gives_several(source: Source) -> bool:
    return source.config.get("problem_type") == _MULTI_LABEL


def _labels(source: Source, asked: tuple[str, ...] | None) -> tuple[str, ...]:
    """Names of the classes. Raises InputError."""
    own = source.labels or ("LABEL_0", "LABEL_1")  # what transformers takes for granted
    if blank := [label for label in asked or own if not label.strip()]:
        where = "--labels" if asked is not None else f"{source.folder / CONFIG_FILE}: id2label"
        raise InputError(f"{where}: has a class without a name ({blank[0]!r}); name all {len(own)}")
    if asked is None and len(set(own)) != len(own):
        told = f"id2label gives a name twice: {', '.join(own)[:200]}"
        raise InputError(f"{source.folder / CONFIG_FILE}: {told}; give others with --labels")
    if asked is not None and (len(asked) != len(own) or len(set(asked)) != len(asked)):
        raise InputError(f"--labels {','.join(asked)}: needs {len(own)} different names, for {', '.join(own)}")
    return asked or own


def _length(source: Source, options: HfOptions) -> int:
    """Tokens that a text is cut to. Raises InputError."""
    asked = options.max_length
    if asked is not None and not 4 <= asked <= source.max_positions:
        raise InputError(f"--max-length {asked}: {source.name} takes 4 to {source.max_positions} tokens")
    return asked or min(source.max_length or MOST_TOKENS, source.max_positions)


def _notes(source: Source, options: HfOptions, labels: Sequence[str] | None) -> list[str]:
    """What the user should know of what was chosen for them. ``labels``: of a classifier."""
    notes = []
    if source.has_code:
        notes.append("config.json names code of its own (auto_map), which is not run")
    if options.max_length is None and source.max_length is None and source.max_positions > MOST_TOKENS:
        notes.append(f"texts are cut to {MOST_TOKENS} tokens; it takes {source.max_positions} (--max-length)")
    if labels is None and options.pooling is None and source.pooling is None:
        notes.append("it does not say how a text becomes one vector: the mean of its tokens' (--pooling)")
    if labels is None and (prompt := _default_prompt(source.folder)):
        notes.append(f"sentence-transformers puts {prompt!r} in front of every text; here texts are taken as they are")
    if labels is not None and all(re.fullmatch(r"LABEL_\d+", label) for label in labels):
        notes.append(f"its labels have no names: {', '.join(labels)} (--labels)")
    return notes


def _default_prompt(folder: Path) -> str | None:
    """What a sentence-transformers folder puts in front of every text, unless it is told otherwise."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return None
    try:
        told = read_object(path)
        return str(told["prompts"][told["default_prompt_name"]]) if told.get("default_prompt_name") else None
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: damaged: {error}; copy it again") from None


def _recipe(called: str, source: Source, options: HfOptions, task: Task, data: dict[str, Any]) -> Recipe:
    """What the model would be fine-tuned with here. Raises InputError."""
    embeds = task.predicts == "vectors"
    place = Path(source.name)
    document: dict[str, Any] = {
        "name": called,
        "description": f"{source.config['model_type']}, imported from {source.name}",
        "task": task.name,
        "target": options.target,
        "data": data,
        "model": {
            "kind": MODEL.kind,
            "source": str(place.resolve()) if place.is_dir() else source.name,
            "pooling": (options.pooling or source.pooling or "mean") if embeds else None,
            "normalize": source.normalize,
            "pairs": not embeds and _tells_pairs(source),
        },
        "training": dict(_TRAINING),
    }
    MODEL.complete(document)
    recipe: Recipe = validate(recipe_type(task.name, MODEL.kind), YamlDocument(source.name, document))
    return recipe


def _tells_pairs(source: Source) -> bool:
    """Whether it tells the two texts of a pair by token types: the model has some, and its tokenizer uses them."""
    has_types = int(source.config.get("type_vocab_size") or 0) > 1
    return has_types and 1 in tokenizer_from_file(source.tokenizer).encode("a", "b").type_ids


def _model(source: Source, recipe: Recipe) -> tuple[nn.Module, Any]:
    adapter = model_spec_of(recipe).adapter
    model, attention = adapter.build(recipe, Place(for_export=True))
    lacking = adapter.start(model, recipe)
    if lacking:
        raise ArtifactError(
            f"{source.folder}: the weights lack {', '.join(lacking[:5])}; it was never trained for {recipe.task}: "
            "fine-tune it first (model: {kind: pretrained, source: …} in a recipe)"
        )
    return model.eval(), attention


def _prepared(
    recipe: Recipe, reader: TextReader, adapter: ModelAdapter, model: nn.Module
) -> tuple[Prepared[Encoded], str]:
    """Tokenizer, the rows that golden inputs are drawn from, and what is known of the data; and where rows are from."""
    task = task_named(recipe.task)
    sets = task.known_sets(recipe.data)
    length = recipe.data.tokens_at_once
    if "validation" in sets:
        rows, golden = encode(sets["validation"], reader.tokenizer, length), "from the validation set"
        if recipe.task == _SEVERAL:
            data: Any = recipe.data
            rows = replace(rows, labels=label_sets(rows.labels, len(data.labels)))
    else:
        rows, golden = _built_in(recipe, reader, adapter, model), _BUILT_IN
        if task.golden_names[1]:
            golden += "; its labels are the model's own answers, so that scores there say how often artifacts agree"
    return Prepared(reader.tokenizer, reader.pad, rows, rows, {}, _summary(sets)), golden


def _built_in(recipe: Recipe, reader: TextReader, adapter: ModelAdapter, model: nn.Module) -> Encoded:
    """Sentences, and of a model that tells pairs also pairs of them, with the model's own answers as labels."""
    texts: list[Text] = [*SENTENCES]
    if getattr(recipe.model, "pairs", False):
        texts = [*texts[_PAIRS:], *itertools.pairwise(SENTENCES[: _PAIRS + 1])]
    encoded, _ = encode_texts(reader.tokenizer, texts, recipe.data.tokens_at_once)
    scorer: Any = adapter.scorer(model)
    with TorchSession(scorer, scorer.inputs, scorer.optional) as session:
        answers = answer_rows(session.run, encoded, reader.pad, _BATCH)["logits"]
    right = answers > 0 if recipe.task == _SEVERAL else answers.argmax(-1)  # above 0: a probability above 0.5
    return Encoded(encoded.ids, encoded.offsets, right.astype(np.int64), encoded.truncated)


def _summary(sets: Mapping[str, LabelledTexts]) -> DataSummary:
    prints = {name: texts.fingerprint() for name, texts in sets.items()}
    whole = "".join(f"{name} {len(sets[name])} {found}\n" for name, found in prints.items())
    return DataSummary(
        split="imported",
        synthetic=False,
        rows={name: len(texts) for name, texts in sets.items()},
        fingerprint=hashlib.sha256(whole.encode()).hexdigest() if sets else "unknown",
        fingerprints=prints,
    )
