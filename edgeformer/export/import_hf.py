"""``import hf``: make a run of a text encoder in a Hugging Face folder, or on the hub.

A sequence classifier becomes a classifier; a sentence-transformers folder, or an encoder without a head, becomes an
embedding model. Weights are read from safetensors only, and no code of the folder is run.
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
from edgeformer.data.rows import Text, label_sets
from edgeformer.data.sources import imported_data
from edgeformer.data.synthetic import SENTENCES
from edgeformer.data.tokenization import tokenizer_from_file
from edgeformer.export.imported_run import ImportedModel, write_run
from edgeformer.models import model_spec_of, recipe_type
from edgeformer.models.adapter import BuildTarget, ModelAdapter
from edgeformer.models.pretrained import MODEL
from edgeformer.models.pretrained.source import AS_ONNX, Source, open_source, read_object
from edgeformer.runtimes.torch.session import TorchSession
from edgeformer.tasks import Task, TextReader, get_task
from edgeformer.tasks.scoring import answer_rows

MAX_TOKENS = 512
"""Default maximum length of texts for models that take more."""

_BATCH, _PAIRS = 32, 16
_MULTI_LABEL_TASK, _MULTI_LABEL = "multi-label-classification", "multi_label_classification"
"""Name of the task here, and in a config.json."""
_THRESHOLDS = (
    "a text can have several of its labels, each from a probability of 0.5 on; state others as data.thresholds in the "
    "run's recipe.yaml before it is exported"
)
_TRAINING: Mapping[str, Any] = {
    "epochs": 3,
    "batch_size": 32,
    "optimizer": {"kind": "adamw", "lr": 3e-5},
    "schedule": {"kind": "cosine", "warmup": 0.1},
    "batching": "bucketed",
}
"""Usual fine-tuning of such encoders, for a recipe that is trained."""


@dataclass(frozen=True)
class HfOptions:
    """Where the run is written, and what the source does not say itself.

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
    last_part = Path(name).resolve().name if Path(name).is_dir() else name.rsplit("/", 1)[-1]
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", last_part).lstrip("._-")[:60] or "imported"
    free = partial(free_folder, options.artifacts, options.name, slug, or_else="")
    free()  # fails early if the name is taken
    if options.target is not None:
        load_profile(options.target, own_profiles(options.artifacts))
    if (head := source.other_head) is not None:
        raise InputError(
            f"{source.folder / CONFIG_FILE}: is a {head}, whose head is not computed here; only encoders and sequence "
            f"classifiers are imported; {AS_ONNX}"
        )
    is_embedding = source.pooling is not None or not source.classifies
    problem_type = source.config.get("problem_type")
    is_multi_label = problem_type == _MULTI_LABEL
    if is_embedding and options.labels is not None:
        raise InputError(f"--labels: {source.name} has no classifier; it is imported as an embedding model")
    if not is_embedding and options.pooling is not None:
        raise InputError(f"--pooling: {source.name} is a classifier, which reads its text in its own way; leave it out")
    is_supported = is_multi_label or problem_type in (None, "single_label_classification")
    if not is_embedding and (not is_supported or len(source.labels) == 1):
        raise InputError(
            f"{source.name}: is a model for {problem_type or 'regression'}; only classifiers of two or more labels are "
            f"imported; {AS_ONNX}"
        )
    task = get_task("embedding" if is_embedding else _MULTI_LABEL_TASK if is_multi_label else "classification")
    labels = None if is_embedding else _labels(source, options.labels)
    if options.max_length is not None and not 4 <= options.max_length <= source.max_positions:
        raise InputError(f"--max-length {options.max_length}: {source.name} takes 4 to {source.max_positions} tokens")
    max_length = options.max_length or min(source.max_length or MAX_TOKENS, source.max_positions)
    data, notes = imported_data(options.data, labels, max_length)
    if is_multi_label:
        data["label_separator"] = ","
        notes.append(_THRESHOLDS)
    recipe = _recipe(slug, source, options, task, data)
    adapter = model_spec_of(recipe).adapter
    model, attention = adapter.build(recipe, BuildTarget(for_export=True))
    missing = adapter.start(model, recipe)
    if missing:
        raise ArtifactError(
            f"{source.folder}: the weights lack {', '.join(missing[:5])}; it was never trained for {recipe.task}: "
            "fine-tune it first (model: {kind: pretrained, source: …} in a recipe)"
        )
    model.eval()
    reader = task.reader(source.tokenizer, recipe.data, recipe.model.vocab_size)
    prepared, golden_origin = _prepare(recipe, reader, adapter, model)
    for note in (*notes, *_notes(source, options, labels)):
        progress.message(note)
    checksum = source.weights_sha256()
    return write_run(free, ImportedModel(recipe, model, attention, prepared, Path(name).name, checksum, golden_origin))


def _labels(source: Source, requested: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of the classes. Raises InputError."""
    default = source.labels or ("LABEL_0", "LABEL_1")  # the default of transformers
    labels, place = requested or default, f"{source.folder / CONFIG_FILE}: id2label"
    if blank := [label for label in labels if not label.strip()]:
        flag = "--labels" if requested is not None else place
        raise InputError(f"{flag}: has a class without a name ({blank[0]!r}); name all {len(default)}")
    is_unique = len(set(labels)) == len(labels)
    if requested is None and not is_unique:
        raise InputError(f"{place} gives a name twice: {', '.join(default)[:200]}; give others with --labels")
    if requested is not None and (len(requested) != len(default) or not is_unique):
        needed = f"needs {len(default)} different names, for {', '.join(default)}"
        raise InputError(f"--labels {','.join(requested)}: {needed}")
    return labels


def _notes(source: Source, options: HfOptions, labels: Sequence[str] | None) -> list[str]:
    """Describe the defaults that were chosen. ``labels``: of a classifier."""
    notes = []
    if source.has_code:
        notes.append("config.json names code of its own (auto_map), which is not run")
    if options.max_length is None and source.max_length is None and source.max_positions > MAX_TOKENS:
        notes.append(f"texts are cut to {MAX_TOKENS} tokens; it takes {source.max_positions} (--max-length)")
    if labels is None and options.pooling is None and source.pooling is None:
        notes.append("it does not say how a text becomes one vector: the mean of its tokens' (--pooling)")
    path = source.folder / "config_sentence_transformers.json"
    if labels is None and path.is_file():
        content = read_object(path)
        try:
            default = content.get("default_prompt_name")
            prompt = str(content["prompts"][default]) if default else ""
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"{path}: damaged: {error}; copy it again") from None
        if prompt:
            notes.append(
                f"sentence-transformers puts {prompt!r} in front of every text; here texts are taken as they are"
            )
    if labels is not None and all(re.fullmatch(r"LABEL_\d+", label) for label in labels):
        notes.append(f"its labels have no names: {', '.join(labels)} (--labels)")
    return notes


def _recipe(slug: str, source: Source, options: HfOptions, task: Task, data: dict[str, Any]) -> Recipe:
    """Return the recipe that would fine-tune the model here. Raises InputError."""
    is_embedding = task.predicts == "vectors"
    # Token types tell the texts of a pair apart if the model has some, and its tokenizer uses them.
    takes_pairs = not is_embedding and int(source.config.get("type_vocab_size") or 0) > 1
    takes_pairs = takes_pairs and 1 in tokenizer_from_file(source.tokenizer).encode("a", "b").type_ids
    folder = Path(source.name)
    document: dict[str, Any] = {
        "name": slug,
        "description": f"{source.config['model_type']}, imported from {source.name}",
        "task": task.name,
        "target": options.target,
        "data": data,
        "model": {
            "kind": MODEL.kind,
            "source": str(folder.resolve()) if folder.is_dir() else source.name,
            "pooling": (options.pooling or source.pooling or "mean") if is_embedding else None,
            "normalize": source.normalize,
            "pairs": takes_pairs,
        },
        "training": dict(_TRAINING),
    }
    MODEL.complete(document)
    recipe: Recipe = validate(recipe_type(task.name, MODEL.kind), YamlDocument(source.name, document))
    return recipe


def _prepare(
    recipe: Recipe, reader: TextReader, adapter: ModelAdapter, model: nn.Module
) -> tuple[Prepared[Encoded], str]:
    """Return tokenizer, rows for golden inputs and a summary of the data; and where the rows come from."""
    task, length = get_task(recipe.task), recipe.data.tokens_at_once
    sets = task.available_sets(recipe.data)
    if "validation" in sets:
        rows, origin = encode(sets["validation"], reader.tokenizer, length), "from the validation set"
        if recipe.task == _MULTI_LABEL_TASK:
            data: Any = recipe.data
            rows = replace(rows, labels=label_sets(rows.labels, len(data.labels)))
    else:
        texts: list[Text] = [*SENTENCES]
        if getattr(recipe.model, "pairs", False):
            texts = [*texts[_PAIRS:], *itertools.pairwise(SENTENCES[: _PAIRS + 1])]
        rows, _ = encode_texts(reader.tokenizer, texts, length)
        scorer: Any = adapter.scorer(model)
        with TorchSession(scorer, scorer.inputs, scorer.optional) as session:
            logits = answer_rows(session.run, rows, reader.pad, _BATCH)["logits"]
        # The model's own answers are the labels; a logit above 0 is a probability above 0.5.
        labels = logits > 0 if recipe.task == _MULTI_LABEL_TASK else logits.argmax(-1)
        rows = replace(rows, labels=labels.astype(np.int64))
        origin = "from a short built-in English text, not from the model's own data"
        if task.golden_names[1]:
            origin += "; its labels are the model's own answers, so that scores there say how often artifacts agree"
    fingerprints = {name: labelled.fingerprint() for name, labelled in sets.items()}
    lines = "".join(f"{name} {len(sets[name])} {digest}\n" for name, digest in fingerprints.items())
    summary = DataSummary(
        split="imported",
        synthetic=False,
        rows={name: len(labelled) for name, labelled in sets.items()},
        fingerprint=hashlib.sha256(lines.encode()).hexdigest() if sets else "unknown",
        fingerprints=fingerprints,
    )
    return Prepared(reader.tokenizer, reader.pad, rows, rows, {}, summary), origin
