"""Import text encoders of Hugging Face, in a folder or on the hub: ``import hf``.

Nothing in their files is executed, and weights are read from safetensors only.
"""

import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeformer.artifacts.data_config import parse_tag
from edgeformer.artifacts.documents import YamlDocument, load_profile, own_profiles, validate
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import CONFIG_FILE
from edgeformer.data.encoding import Prepared, states_types
from edgeformer.data.rows import LabelledTexts, Text
from edgeformer.data.sources import SPANS, imported_data
from edgeformer.data.synthetic import SENTENCES
from edgeformer.imports.proof import prove_encoder
from edgeformer.imports.run import reserve_name, write_run
from edgeformer.models import model_spec_of, recipe_type
from edgeformer.models.pretrained import MODEL
from edgeformer.models.pretrained.source import AS_ONNX, open_source, weights_sha256
from edgeformer.runtimes.torch.session import TorchSession
from edgeformer.tasks import get_task
from edgeformer.tasks.scoring import answer_rows

MAX_TOKENS = 512
"""Default maximum length of texts for models that take more."""

_BATCH, _PAIRS = 32, 16
_MULTI_LABEL = "multi_label_classification"
_TASKS = {"single_label_classification": "classification", _MULTI_LABEL: "multi-label-classification"}
"""``problem_type`` of a config.json of a sequence classifier → task."""
_THRESHOLDS = (
    "a text has every label with a probability of at least 0.5; for other thresholds, set data.thresholds in the "
    "recipe.yaml of the run before you export it"
)
_TRAINING: Mapping[str, Any] = {
    "epochs": 3, "batch_size": 32, "optimizer": {"kind": "adamw", "lr": 3e-5},
    "schedule": {"kind": "cosine", "warmup": 0.1}, "batching": "bucketed",
}  # fmt: skip
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
        prompts: of an embedding model: text in front of a ``query`` or ``document``; empty: the source's.
        unproven: import the model also if its answers differ from its library's, marked as unproven.
    """

    artifacts: Path
    name: str | None = None
    data: Path | None = None
    labels: tuple[str, ...] | None = None
    pooling: str | None = None
    max_length: int | None = None
    target: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    unproven: bool = False


def import_hf(name: str, options: HfOptions, progress: Progress = SILENT) -> Path:
    """Make a finished run of the model in a folder, or of that name on the hub, and return its folder.

    Raises InputError for unusable arguments, ArtifactError for a missing or damaged file; nothing was written then.
    """
    source = open_source(name)
    last_part = Path(name).resolve().name if Path(name).is_dir() else name.rsplit("/", 1)[-1]
    slug, free = reserve_name(options.artifacts, options.name, last_part)
    if options.target is not None:
        load_profile(options.target, own_profiles(options.artifacts))
    if (head := source.other_head) is not None:
        raise InputError(
            f"{source.folder / CONFIG_FILE}: is a {head}, and only embedding models, classifiers of "
            f"texts or tokens and models with one output can be imported; {AS_ONNX}"
        )

    # 1. Choose the task.
    is_embedding = source.pooling is not None or not (source.classifies or source.tags_tokens)
    outputs = len(source.labels) or source.sizes.num_labels or 2
    problem_type = str(source.config.get("problem_type") or "single_label_classification")
    task_name = _TASKS.get(problem_type) if outputs > 1 else "regression"
    task_name = "embedding" if is_embedding else "token-classification" if source.tags_tokens else task_name
    if task_name is None:
        raise InputError(
            f"{source.name}: is a model for {problem_type} of {outputs} outputs, and only classifiers of texts or "
            f"tokens, models with one output and embedding models can be imported; {AS_ONNX}"
        )
    task = get_task(task_name)
    is_regression = task.name == "regression"

    # 2. Check the options, and complete them by what the source says.
    if options.labels is not None and (is_embedding or is_regression):
        article = "an" if is_embedding else "a"
        raise InputError(f"--labels: {source.name} is {article} {task.noun} and has no labels; leave it out")
    if options.prompts and not is_embedding:
        raise InputError(
            f"--query-prompt, --document-prompt: {source.name} is a {task.noun}, and prompts are for embedding models; "
            "leave them out"
        )
    if not is_embedding and options.pooling is not None:
        raise InputError(f"--pooling: {source.name} is a {task.noun}, which pools in its own way; leave it out")
    labels: tuple[str, ...] | None = () if is_regression else None
    if not is_embedding and not is_regression:
        default = source.labels or ("LABEL_0", "LABEL_1")  # the default of transformers
        labels, place = options.labels or default, f"{source.folder / CONFIG_FILE}: id2label"
        if len(labels) != len(default) or len({label for label in labels if label.strip()}) != len(labels):
            place = place if options.labels is None else f"--labels {','.join(labels)}"
            raise InputError(
                f"{place}: the model has {len(default)} classes ({', '.join(default)[:200]}); give {len(default)} "
                "different names with --labels"
            )
    if options.max_length is not None and not 4 <= options.max_length <= source.max_positions:
        raise InputError(f"--max-length {options.max_length}: {source.name} reads 4 to {source.max_positions} tokens")
    max_length = options.max_length or min(source.max_length or MAX_TOKENS, source.max_positions)
    if not is_embedding and source.settings.used_prompts.get("default"):
        raise InputError(
            f"{source.name}: default_prompt_name of config_sentence_transformers.json is not supported for a "
            f"{task.noun}; remove the key, and put the prompt in front of your texts"
        )

    # 3. Describe data and model in a recipe.
    data, notes = imported_data(options.data, labels, max_length, SPANS if source.tags_tokens else None)
    if source.tags_tokens and labels is not None:
        if "O" not in labels:
            raise InputError(
                f"{source.name}: has the classes {', '.join(labels)[:200]}, and none is O, that of a token in no span; "
                "name them in order: --labels O,B-PER,I-PER"
            )
        spans = dict.fromkeys(label for _, label in map(parse_tag, labels) if label)
        data |= {"labels": [*spans], "tags": [*labels]}
    if task.name == _TASKS[_MULTI_LABEL]:
        data["label_separator"] = ","
        notes.append(_THRESHOLDS)
    elif is_regression:
        data["activation"] = source.activation()
    elif is_embedding:
        saved = source.settings.used_prompts
        typed = {**{kind: prompt for kind, prompt in saved.items() if kind == "default"}, **options.prompts}
        data["prompts"] = typed if options.prompts else saved
        data["pools_prompt"] = source.pools_prompt or not data["prompts"]
        data["similarity"] = source.settings.similarity_fn_name or "cosine"
    takes_pairs = not (is_embedding or source.tags_tokens) and source.sizes.token_types > 1
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
            "dimensions": source.settings.truncate_dim if is_embedding else None,
            "pairs": takes_pairs and states_types(source.tokenizer, pairs=True),
        },
        "training": dict(_TRAINING),
    }
    MODEL.complete(document)
    recipe: Recipe = validate(recipe_type(task.name, MODEL.kind), YamlDocument(source.name, document))

    # 4. Load the model, and prove its answers.
    adapter = model_spec_of(recipe).adapter
    model = adapter.build(recipe)
    missing = adapter.start(model, recipe)
    if missing:
        raise ArtifactError(
            f"{source.folder}: the weights lack {', '.join(missing[:5])} of the model that config.json describes: it "
            f"was never trained for {recipe.task} (fine-tune it first, with model.kind: pretrained in a recipe), or "
            "id2label has another number of classes than the weights"
        )
    model.eval()
    reader = task.rows.reader(recipe.tokenizer, recipe.data, recipe.model.vocab_size)
    scorer: Any = adapter.scorer(model)
    sets = task.rows.available_sets(recipe.data)
    if "validation" in sets:
        rows = task.rows.encode_rows(recipe.data, reader, sets["validation"])
        golden_origin = "from the validation set"
    else:
        texts: list[Text] = [*SENTENCES]
        if getattr(recipe.model, "pairs", False):
            texts = [*texts[_PAIRS:], *itertools.pairwise(SENTENCES[: _PAIRS + 1])]
        rows = task.rows.encode_rows(recipe.data, reader, LabelledTexts.unlabelled(texts))
        with TorchSession(scorer, scorer.inputs, scorer.optional) as session:
            logits = answer_rows(session.run, rows, reader.pad, _BATCH)["logits"]
        rows = task.answerer.with_answers(rows, logits, recipe.data)
        golden_origin = "from a built-in English text"
        if task.golden_names[1]:
            golden_origin += ", labelled by the FP32 model, so scores on them are agreement with it"
    fingerprints = {name: labelled.fingerprint() for name, labelled in sets.items()}
    lines = "".join(f"{name} {len(sets[name])} {digest}\n" for name, digest in fingerprints.items())
    summary = DataSummary(
        split="imported", synthetic=False, rows={name: len(labelled) for name, labelled in sets.items()},
        fingerprint=hashlib.sha256(lines.encode()).hexdigest() if sets else "unknown", fingerprints=fingerprints,
    )  # fmt: skip
    prepared = Prepared(reader.tokenizer, reader.pad, rows, rows, {}, summary)
    with TorchSession(scorer, scorer.inputs, scorer.optional) as session:
        proof = prove_encoder(
            source, recipe, reader, session.run, progress, max_length=options.max_length,
            allow=options.unproven,
        )  # fmt: skip

    # 5. Write the run.
    if source.has_code:
        notes.append("config.json names Python code (auto_map), which edgeformer does not run")
    if options.max_length is None and source.max_length is None and source.max_positions > MAX_TOKENS:
        notes.append(f"texts are cut to {MAX_TOKENS} tokens; for up to {source.max_positions}, use --max-length")
    if labels is None and options.pooling is None and source.pooling is None:
        notes.append(
            "the model does not state its pooling; the mean of the token states is used (change it with --pooling)"
        )
    if prompt := source.settings.used_prompts.get("default"):
        notes.append(f"{prompt!r} is put in front of every text, as sentence-transformers does")
    unused = [name for name in ("passage", "corpus") if (source.settings.prompts or {}).get(name)]
    if unused and labels is None:
        notes.append(
            f"the prompt {unused[0]!r} is not used, because sentence-transformers uses only that of the name "
            "'document' for documents; set it with --document-prompt"
        )
    if labels and all(re.fullmatch(r"LABEL_\d+", label) for label in labels):
        notes.append(f"the labels have only default names ({', '.join(labels)}); name them with --labels")
    for note in notes:
        progress.message(note)
    if proof.reason is not None:
        progress.message(f"unproven: {proof.reason}")
    return write_run(
        free, recipe, model, prepared, origin=Path(name).name, sha256=weights_sha256(source.folder),
        golden_origin=golden_origin, proof=proof,
    )  # fmt: skip
