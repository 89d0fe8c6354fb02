"""Import models that were trained elsewhere: write the folder of a finished run, as training would write it.

``import crt`` reads a checkpoint of the public CRT code, ``import hf`` a text encoder in a Hugging Face folder or on
the hub. Nothing in their files is executed, and weights of encoders are read from safetensors only.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from edgeformer.artifacts.data_config import FileTokenizer, HubTokenizer, TextConfig, parse_tag
from edgeformer.artifacts.documents import YamlDocument, load_profile, own_profiles, validate
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import sha256_of, write_json, write_text
from edgeformer.artifacts.manifest import Causality, DataSummary, ImportProof, RunManifest
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import (
    CONFIG_FILE,
    MODEL_FOLDER,
    NEW_RUN,
    RECIPE_FILE,
    RUN_FILE,
    TOKENIZER_FILE,
    free_folder,
)
from edgeformer.data.batching import TextRows
from edgeformer.data.encoding import Encoded, PlainText, Prepared, states_types
from edgeformer.data.rows import LabelledTexts, Text
from edgeformer.data.sources import SPANS, imported_data, local_parts
from edgeformer.data.synthetic import PARAGRAPHS, SENTENCES
from edgeformer.data.tokenization import BEGIN_IDS, TextBounds, fingerprint, load_language_tokenizer
from edgeformer.export.encoder_proof import prove_encoder
from edgeformer.models import load_recipe, model_spec_of, recipe_type
from edgeformer.models.adapter import ModelAdapter, count_parameters
from edgeformer.models.card import CARD_FILE, model_card
from edgeformer.models.causal import probe_causality
from edgeformer.models.crt.checkpoint import convert_weights, extract_state_dict, infer_config
from edgeformer.models.crt.model import CRT
from edgeformer.models.pretrained import MODEL
from edgeformer.models.pretrained.source import AS_ONNX, Source, open_source, weights_sha256
from edgeformer.models.weights import save_model
from edgeformer.runtimes import library_versions
from edgeformer.runtimes.torch.session import TorchSession
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.system.leftovers import new_folder
from edgeformer.tasks import Origin, Task, TextReader, get_task
from edgeformer.tasks.scoring import answer_rows


def write_run(
    free_folder: Callable[[], Path], recipe: Recipe, model: nn.Module, prepared: Prepared[Any], *,
    origin: str, sha256: str | None, golden_origin: str, leaks: bool = False,
    causality: Causality | None = None, proof: ImportProof | None = None,
) -> Path:  # fmt: skip
    """Write the run's folder, which appears when it is complete, and return it. Raises InputError.

    Args:
        prepared: its tokenizer, and the rows that golden inputs are drawn from.
        origin: name of the file or model that it was imported from.
        sha256: of that file; None: there are several.
        golden_origin: where the golden inputs come from.
        causality: result of the probe; None for a model that is meant to see the whole text.
        proof: comparison with the library that the model came from; None: of no known library.
    """
    moment, checksum = now(), f" (sha256 {sha256})" if sha256 is not None else ""

    def write(folder: Path) -> None:
        manifest = RunManifest(
            run=folder.name, status="finished", task=recipe.task, recipe=recipe.name,
            reason=f"imported from {origin}{checksum}; golden inputs {golden_origin}",
            recipe_sha256=recipe.fingerprint(), started=moment, finished=moment, parameters=count_parameters(model),
            vocabulary=recipe.model.vocab_size, precision="unknown", data=prepared.summary,
            tokenizer_fingerprint=fingerprint(prepared.tokenizer), leaks=leaks, causality=causality, proof=proof,
            versions=library_versions(), code_version=code_version(),
            host={**describe_host(), "threads": torch.get_num_threads()},
        )  # fmt: skip
        (folder / MODEL_FOLDER).mkdir()
        save_model(folder / MODEL_FOLDER, model, recipe, prepared)
        write_text(folder / MODEL_FOLDER / CARD_FILE, model_card(manifest, recipe))
        header = f"# Imported from {origin}. Golden inputs: {golden_origin}.\n"
        write_text(folder / RECIPE_FILE, header + recipe.to_yaml())
        write_json(folder / RUN_FILE, manifest)

    return new_folder(NEW_RUN, free_folder, write)


# Hugging Face: text encoders.

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
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", last_part).lstrip("._-")[:60] or "imported"
    free = partial(free_folder, options.artifacts, options.name, slug, or_else="")
    free()  # fails early if the name is taken
    if options.target is not None:
        load_profile(options.target, own_profiles(options.artifacts))
    if (head := source.other_head) is not None:
        raise InputError(
            f"{source.folder / CONFIG_FILE}: is a {head}, and only embedding models, classifiers of "
            f"texts or tokens and models with one output can be imported; {AS_ONNX}"
        )
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
    recipe = _encoder_recipe(slug, source, options, task, data)
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
    prepared, golden_origin = _prepare_encoder(recipe, reader, adapter, model)
    scorer: Any = adapter.scorer(model)
    with TorchSession(scorer, scorer.inputs, scorer.optional) as session:
        proof = prove_encoder(
            source, recipe, reader, session.run, progress, max_length=options.max_length,
            allow_difference=options.unproven,
        )  # fmt: skip
    for note in (*notes, *_encoder_notes(source, options, labels)):
        progress.message(note)
    if proof.reason is not None:
        progress.message(f"unproven: {proof.reason}")
    return write_run(
        free, recipe, model, prepared, origin=Path(name).name, sha256=weights_sha256(source.folder),
        golden_origin=golden_origin, proof=proof,
    )  # fmt: skip


def _encoder_notes(source: Source, options: HfOptions, labels: Sequence[str] | None) -> list[str]:
    """Describe the defaults that were chosen. ``labels``: of a classifier; empty: regression; None: embedding."""
    notes = []
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
    return notes


def _encoder_recipe(slug: str, source: Source, options: HfOptions, task: Task, data: dict[str, Any]) -> Recipe:
    """Return the recipe that would fine-tune the model here. Raises InputError."""
    is_embedding = task.name == "embedding"
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
    return recipe


def _prepare_encoder(
    recipe: Recipe, reader: TextReader, adapter: ModelAdapter, model: nn.Module
) -> tuple[Prepared[Encoded], str]:
    """Return tokenizer, rows for golden inputs and a summary of the data; and where the rows come from."""
    task = get_task(recipe.task)
    sets = task.rows.available_sets(recipe.data)
    if "validation" in sets:
        rows, origin = task.rows.encode_rows(recipe.data, reader, sets["validation"]), "from the validation set"
    else:
        texts: list[Text] = [*SENTENCES]
        if getattr(recipe.model, "pairs", False):
            texts = [*texts[_PAIRS:], *itertools.pairwise(SENTENCES[: _PAIRS + 1])]
        rows = task.rows.encode_rows(recipe.data, reader, LabelledTexts.unlabelled(texts))
        scorer: Any = adapter.scorer(model)
        with TorchSession(scorer, scorer.inputs, scorer.optional) as session:
            logits = answer_rows(session.run, rows, reader.pad, _BATCH)["logits"]
        rows = task.answerer.with_answers(rows, logits, recipe.data)
        origin = "from a built-in English text"
        if task.golden_names[1]:
            origin += ", labelled by the FP32 model, so scores on them are agreement with it"
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


# The public CRT code: checkpoints, which are untrusted. torch's restricted reader executes no code, but a few bytes of
# a pickle can make it allocate arrays or tensors of any size, so the file is checked before it is read.

_NAME, _PUBLISHED_RECIPE = "crt_imported", "crt_deep_published"
_UNKNOWN_DATA = DataSummary(split="unknown", synthetic=False, rows={}, fingerprint="unknown")

MAX_PICKLE_BYTES = 4 << 20
"""Of a checkpoint without its numbers: names and shapes of 40,000 tensors. Each byte can become an object of 60."""
_REFUSED = re.compile(r"(?:Unsupported global: GLOBAL|Trying to call|Unsupported class) ([\w.]+)")


@dataclass(frozen=True)
class ImportOptions:
    """Where the run is written, and what the checkpoint does not hold itself.

    Attributes:
        tokenizer: a tokenizer.json; None: GPT-2's from the hub, which the public code uses.
        data: a folder with train and validation text; None: WikiText-103 from the hub, which is not read now.
        unproven: as in :class:`HfOptions`.
    """

    artifacts: Path
    name: str | None = None
    tokenizer: Path | None = None
    data: Path | None = None
    unproven: bool = False


def import_crt(path: Path, options: ImportOptions, progress: Progress = SILENT) -> Path:
    """Make a finished run of a checkpoint, and return its folder. Raises InputError; nothing was written then."""
    free = partial(free_folder, options.artifacts, options.name, _NAME, or_else="")
    free()  # fails early if the name is taken
    weights = read_weights(path)
    config = infer_config(weights, str(path))
    model = CRT(config)
    model.load_state_dict(convert_weights(weights, config, str(path)))
    model.eval()
    return write_language_run(
        free, _PUBLISHED_RECIPE, _NAME, model, options, progress,
        description=f"CRT-Deep, imported from {path.name}; leaks future tokens, so its perplexity is void",
        origin=path.name, sha256=sha256_of(path),
    )  # fmt: skip


def write_language_run(
    free: Callable[[], Path], base: str, name: str, model: Any, options: ImportOptions, progress: Progress, *,
    description: str, origin: str, sha256: str, tokenizer: Tokenizer | None = None,
    tokenizer_config: Mapping[str, Any] = MappingProxyType({}), proof: ImportProof | None = None,
) -> Path:  # fmt: skip
    """Write the run of a language model, with the data and the training of a shipped recipe.

    Args:
        free: returns the run's folder.
        base: the recipe.
        name, description: of the run's own recipe.
        origin, sha256: of the file that it was imported from.
        tokenizer: None: the one of ``options``.
        tokenizer_config: further keys of tokenizer_config.json.
        proof: as of :func:`write_run`.

    Raises:
        InputError: data or tokenizer do not fit.
        ArtifactError: the weights are degenerate.
    """
    config, published = model.config, load_recipe(base).model_dump()
    length = min(published["data"]["sequence_length"], config.max_positions)
    data, notes = TextConfig.model_validate({**published["data"], "sequence_length": length}), list[str]()
    if options.data is not None:
        section, notes = local_parts(data, options.data)
        data = cast("TextConfig", section)
    if BEGIN_IDS in tokenizer_config:  # packed rows put no token but the boundary in front of a document
        data = data.model_copy(update={"mode": "paragraphs"})
    source: FileTokenizer | HubTokenizer = HubTokenizer(kind="hub", name="gpt2")
    if options.tokenizer is not None or tokenizer is not None:
        file = options.tokenizer.resolve() if options.tokenizer is not None else free() / MODEL_FOLDER / TOKENIZER_FILE
        source = FileTokenizer(kind="file", path=str(file))
    if len(model.exits) == 1:
        published["training"]["exit_weight"] = 0.0
    document = {
        **published,
        "name": name,
        "description": description,
        "allow_leak": False,
        "data": data.model_dump(),
        "tokenizer": source.model_dump(),
        "model": config.model_dump(),
    }
    recipe = recipe_type(published["task"], config.kind).model_validate(document)
    for note in notes:
        progress.message(note)
    if tokenizer is None:
        tokenizer = load_language_tokenizer(recipe.tokenizer, vocab_size=config.vocab_size, training_texts=None)
    bounds = TextBounds.of(tokenizer, tokenizer_config)
    plain = PlainText(tokenizer, bounds)
    if options.data is not None:
        task, reader = get_task(recipe.task), TextReader(tokenizer, plain.boundary, config.vocab_size, bounds)
        rows = task.rows.read_set(recipe.data, reader, "validation", Origin(as_trained=True))
        golden_origin = "from the validation text"
    else:
        between = bounds.begin or (plain.boundary,)
        encoded = [[*between, *plain.encode(paragraph).ids] for paragraph in PARAGRAPHS]
        ids = np.array([*itertools.chain.from_iterable(encoded), plain.boundary], dtype=np.int32)
        words = sum(len(paragraph.split()) + 1 for paragraph in PARAGRAPHS)
        ends = np.array([0, len(ids)], dtype=np.int64)
        rows = TextRows(ids, ends, None, len(ids) - 1, words, 0)
        golden_origin = "from a built-in English text"
    try:
        causality = probe_causality(model)
    except ValueError as error:
        raise ArtifactError(f"{origin}: the causality probe cannot judge this model: {error}") from None
    return write_run(
        free,
        recipe,
        model,
        Prepared(tokenizer, plain.boundary, rows, rows, {}, _UNKNOWN_DATA, tokenizer_config=tokenizer_config),
        origin=origin,
        sha256=sha256,
        golden_origin=golden_origin,
        # The architecture decides, whatever the probe measured.
        leaks=causality.leaks or model_spec_of(recipe).leaks(config),
        causality=causality,
        proof=proof,
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read name → tensor of a torch checkpoint or a ``.safetensors`` file, on the CPU. Raises ArtifactError."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ArtifactError(f"{path}: {problem}; give a checkpoint file (.pt, .pth, .bin or .safetensors)")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _unpickle(path)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ArtifactError(f"{path}: cannot be read as safetensors: {error}; copy it again") from None
    weights = extract_state_dict(content, str(path))
    unusable = [name for name, t in weights.items() if t.layout != torch.strided or t.is_quantized or t.is_meta]
    if unusable:
        names = ", ".join(sorted(unusable)[:8])
        raise ArtifactError(f"{path}: holds sparse, quantized or meta tensors ({names}); save the dense FP32 weights")
    # A tensor can be a view that repeats one number, or memory that no byte of the file fills.
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if claimed > 2 * path.stat().st_size:  # embeddings and head may share their numbers
        raise ArtifactError(
            f"{path}: names tensors of {claimed:,} bytes, far more than the file holds, so it is not read; save the "
            "weights again: torch.save(model.state_dict(), PATH)"
        )
    infinite = [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]
    if infinite:
        raise ArtifactError(
            f"{path}: holds infinite values or NaN in {', '.join(sorted(infinite)[:8])}; give an earlier checkpoint"
        )
    return weights


def _unpickle(path: Path) -> Any:
    """Read a checkpoint with torch's restricted reader, which may not allocate without limit. Raises ArtifactError."""
    size, problem = path.stat().st_size, ""
    pickle_bytes = size  # of torch before 1.6: numbers and objects are one stream
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
            is_packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
            if is_packed or sum(member.file_size for member in members) > size:
                problem = "is a compressed archive, which torch never writes"
            pickle_bytes = max((m.file_size for m in members if m.filename.endswith(".pkl")), default=0)
        if not problem and pickle_bytes > MAX_PICKLE_BYTES:
            problem = f"holds {pickle_bytes >> 20} MiB of Python objects, or was saved by torch before 1.6 (2020)"
        elif not problem and size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(b"bytearray") >= 0:  # torch allows bytearray(10**11), a dozen bytes in a pickle
                    problem = "holds Python objects (bytearray), not only tensors"
        if problem:
            remedy = "if you trust it, load it with torch and save the weights: torch.save(model.state_dict(), PATH)"
            raise ArtifactError(f"{path}: {problem}; {remedy}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the unpickler's; the error below says the same
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ArtifactError):
        raise
    except Exception as error:  # a damaged file can raise nearly anything in the unpickler
        message = str(error) or type(error).__name__
        if "weights_only" in message or "Weights only" in message:
            refused = _REFUSED.search(message)
            raise ArtifactError(
                f"{path}: holds Python objects{f' ({refused[1]})' if refused else ''}, which could run code, or is no "
                "checkpoint; save only the weights: torch.save(model.state_dict(), PATH)"
            ) from None
        first_line = message.splitlines()[0]
        raise ArtifactError(f"{path}: is damaged or no torch checkpoint: {first_line}; copy it again") from None
