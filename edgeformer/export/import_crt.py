"""``import crt``: make a run of a checkpoint of the public CRT code.

The checkpoint is untrusted. torch's restricted reader executes no code, but a few bytes of a pickle can make it
allocate arrays or tensors of any size, so the file is checked before it is read.
"""

from __future__ import annotations

import itertools
import mmap
import re
import warnings
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from edgeformer.artifacts.data_config import FileTokenizer, HubTokenizer, TextConfig
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import AttentionUse, DataSummary
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.workspace import free_folder
from edgeformer.data.batching import TextRows
from edgeformer.data.encoding import PlainText, Prepared
from edgeformer.data.language import prepare_text_set
from edgeformer.data.sources import local_text_parts
from edgeformer.data.synthetic import PARAGRAPHS
from edgeformer.data.tokenization import load_language_tokenizer
from edgeformer.export.imported_run import ImportedModel, write_run
from edgeformer.models import load_recipe, recipe_type
from edgeformer.models.crt import CRTConfig
from edgeformer.models.crt.adapter import build_crt, probe_causality
from edgeformer.models.crt.checkpoint import convert_weights, extract_state_dict, infer_config
from edgeformer.tasks.language_modeling import LanguageRecipe

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
    """

    artifacts: Path
    name: str | None = None
    tokenizer: Path | None = None
    data: Path | None = None


def import_crt(path: Path, options: ImportOptions, progress: Progress = SILENT) -> Path:
    """Make a finished run of a checkpoint, and return its folder.

    Raises:
        InputError: checkpoint, tokenizer, data or name cannot be used; nothing was written.
    """
    free = partial(free_folder, options.artifacts, options.name, _NAME, or_else="")
    free()  # fails early if the name is taken
    weights = read_weights(path)
    config = infer_config(weights, str(path))
    model = build_crt(config)
    model.load_state_dict(convert_weights(weights, config, str(path)))
    model.eval()
    recipe, notes = _recipe(path, config, options)
    for note in notes:
        progress.message(note)
    tokenizer = load_language_tokenizer(recipe.tokenizer, vocab_size=config.vocab_size, training_texts=None)
    plain = PlainText(tokenizer)
    if options.data is not None:
        rows, golden_origin = prepare_text_set(recipe.data, tokenizer, None, "validation"), "from the validation text"
    else:
        encoded = [[*plain.encode(paragraph).ids, plain.boundary] for paragraph in PARAGRAPHS]
        ids = np.array([plain.boundary, *itertools.chain.from_iterable(encoded)], dtype=np.int32)
        words = sum(len(paragraph.split()) + 1 for paragraph in PARAGRAPHS)
        ends = np.array([0, len(ids)], dtype=np.int64)
        rows = TextRows(ids, ends, None, len(ids) - 1, words, len(PARAGRAPHS), 0)
        golden_origin = "from a short built-in English text, not from the model's own data"
    try:
        causality = probe_causality(model)
    except ValueError as error:
        raise ArtifactError(f"{path}: cannot be probed for leaks: {error}") from None
    imported = ImportedModel(
        recipe=recipe,
        model=model,
        attention=AttentionUse(requested="sdpa", used="sdpa"),
        prepared=Prepared(tokenizer, plain.boundary, rows, rows, {}, _UNKNOWN_DATA),
        origin=path.name,
        sha256=sha256_of(path),
        golden_origin=golden_origin,
        # The architecture decides, whatever the probe measured.
        leaks=causality.leaks or not model.causal,
        causality=causality,
    )
    return write_run(free, imported)


def _recipe(path: Path, config: CRTConfig, options: ImportOptions) -> tuple[LanguageRecipe, list[str]]:
    """Return the published recipe with this model, and notes. Raises DataError."""
    published = load_recipe(_PUBLISHED_RECIPE).model_dump()
    length = min(published["data"]["sequence_length"], config.max_positions)
    data, notes = TextConfig.model_validate({**published["data"], "sequence_length": length}), list[str]()
    if options.data is not None:
        data, notes = local_text_parts(data, options.data)
    tokenizer: FileTokenizer | HubTokenizer = HubTokenizer(kind="hub", name="gpt2")
    if options.tokenizer is not None:
        tokenizer = FileTokenizer(kind="file", path=str(options.tokenizer.resolve()))
    if not config.exits:
        published["training"]["exit_weight"] = 0.0
    document = {
        **published,
        "name": _NAME,
        "description": f"CRT-Deep, imported from {path.name}; looks ahead, so its perplexity means nothing",
        "allow_leak": False,
        "data": data.model_dump(),
        "tokenizer": tokenizer.model_dump(),
        "model": config.model_dump(),
    }
    recipe: LanguageRecipe = recipe_type(published["task"], config.kind).model_validate(document)
    return recipe, notes


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read name → tensor of a torch checkpoint or a ``.safetensors`` file, on the CPU. Raises ArtifactError."""
    if not path.is_file():
        raise ArtifactError(f"{path}: {'is a folder, not a' if path.is_dir() else 'no such'} checkpoint file")
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
        raise ArtifactError(f"{path}: holds sparse, quantised or empty tensors, not weights: {names}")
    # A tensor can be a view that repeats one number, or memory that no byte of the file fills.
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if claimed > 2 * path.stat().st_size:  # embeddings and head may share their numbers
        raise ArtifactError(f"{path}: claims tensors of {claimed:,} bytes, far more than the file; it is not used")
    infinite = [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]
    if infinite:
        raise ArtifactError(f"{path}: holds infinite values or NaN in {', '.join(sorted(infinite)[:8])}")
    return weights


def _unpickle(path: Path) -> Any:
    """Read a checkpoint with torch's restricted reader, after :func:`_check_checkpoint`. Raises ArtifactError."""
    try:
        _check_checkpoint(path)
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
                f"{path}: holds Python objects{f' ({refused[1]})' if refused else ''} or is no checkpoint; only "
                "tensors are read, because the rest could run code. Save only the weights: "
                "torch.save(model.state_dict(), PATH)"
            ) from None
        first_line = message.splitlines()[0]
        raise ArtifactError(f"{path}: is no torch checkpoint, or a damaged one: {first_line}; copy it again") from None


def _check_checkpoint(path: Path) -> None:
    """Raise ArtifactError for a file that torch would unpack, or allocate memory for, without limit."""
    remedy = "load it where you trust it, and save it again: torch.save(model.state_dict(), PATH)"
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        is_packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
        if is_packed or sum(member.file_size for member in members) > size:
            raise ArtifactError(f"{path}: is a packed archive; torch stores checkpoints unpacked; {remedy}")
        pickle_bytes = max((m.file_size for m in members if m.filename.endswith(".pkl")), default=0)
    else:
        pickle_bytes = size  # of torch before 1.6: numbers and objects are one stream
    if pickle_bytes > MAX_PICKLE_BYTES:
        raise ArtifactError(
            f"{path}: holds {pickle_bytes >> 20} MiB of Python objects, or was saved by torch before 1.6 (2020); "
            f"{remedy}"
        )
    if size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"bytearray") >= 0:  # torch allows bytearray(10**11), a dozen bytes in a pickle
                raise ArtifactError(f"{path}: holds Python objects (bytearray), not only tensors; {remedy}")
