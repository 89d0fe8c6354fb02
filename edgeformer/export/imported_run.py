"""Tensors of a stranger's checkpoint: read without running anything in it, and without making room that it only claims.

torch's own restricted reader runs no code, but it makes what it is told to make: a byte array or a tensor of any size
from a few bytes. So nothing is asked of it that the file's own bytes do not back.
"""

from __future__ import annotations

import mmap
import re
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import write_json, write_text
from edgeformer.artifacts.manifest import AttentionUse, Causality, RunManifest
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import NEW_RUN, RECIPE_FILE, RUN_FILE
from edgeformer.data.tokenization import fingerprint
from edgeformer.models.adapter import count_parameters
from edgeformer.models.card import CARD_FILE, model_card
from edgeformer.models.crt.checkpoint import weights_in
from edgeformer.models.weights import MODEL_FOLDER, save_model
from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.system.leftovers import new_folder
from edgeformer.tasks import Prepared

_MOST_PICKLE_BYTES = 4 << 20
"""Of the part that is not numbers: 40,000 tensors' names and shapes. Each byte can become an object of 60."""
_REFUSED = re.compile(r"(?:Unsupported global: GLOBAL|Trying to call|Unsupported class) ([\w.]+)")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Name → tensor of a torch checkpoint or a ``.safetensors`` file, on the CPU. Raises ArtifactError."""
    if not path.is_file():
        raise ArtifactError(f"{path}: {'is a folder, not a' if path.is_dir() else 'no such'} checkpoint file")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _unpickled(path)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ArtifactError(f"{path}: cannot be read as safetensors: {error}; copy it again") from None
    weights = weights_in(content, str(path))
    odd = [name for name, t in weights.items() if t.layout != torch.strided or t.is_quantized or t.is_meta]
    if odd:
        raise ArtifactError(
            f"{path}: holds sparse, quantised or empty tensors, not weights: {', '.join(sorted(odd)[:8])}"
        )
    # A tensor can be a view that repeats one number, or lie in memory that no byte of the file fills.
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if claimed > 2 * path.stat().st_size:  # embeddings and head may share their numbers
        raise ArtifactError(f"{path}: claims tensors of {claimed:,} bytes, far more than the file; it is not used")
    broken = [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise ArtifactError(f"{path}: holds infinite values or NaN in {', '.join(sorted(broken)[:8])}")
    return weights


def _unpickled(path: Path) -> Any:
    """What torch reads of a file that was looked at first. Raises ArtifactError."""
    try:
        _check(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the unpickler: what it refuses is said below
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ArtifactError):
        raise
    except Exception as error:  # a damaged file can raise nearly anything in the unpickler
        message = str(error)
        if "weights_only" in message or "Weights only" in message:
            named = _REFUSED.search(message)
            raise ArtifactError(
                f"{path}: holds Python objects{f' ({named[1]})' if named else ''} or is no checkpoint; only tensors "
                "are read, because the rest could run code. Save only the weights: torch.save(model.state_dict(), PATH)"
            ) from None
        first = message.splitlines()[0] if message else type(error).__name__
        raise ArtifactError(f"{path}: is no torch checkpoint, or a damaged one: {first}; copy it again") from None


def _check(path: Path) -> None:
    """Raise ArtifactError for what torch would unpack, or make, without end."""
    remedy = "load it where you trust it, and save it again: torch.save(model.state_dict(), PATH)"
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        packed = [member for member in members if member.compress_type != zipfile.ZIP_STORED]
        if packed or sum(member.file_size for member in members) > size:
            raise ArtifactError(f"{path}: is a packed archive; torch stores checkpoints unpacked; {remedy}")
        pickled = max((m.file_size for m in members if m.filename.endswith(".pkl")), default=0)
    else:
        pickled = size  # of torch before 1.6: numbers and the rest are one stream
    if pickled > _MOST_PICKLE_BYTES:
        raise ArtifactError(
            f"{path}: holds {pickled >> 20} MiB of Python objects, or was saved by torch before 1.6 (2020); {remedy}"
        )
    if size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"bytearray") >= 0:  # allowed by torch: bytearray(10**11) is a dozen bytes in a pickle
                raise ArtifactError(f"{path}: holds Python objects (bytearray), not only tensors; {remedy}")


# What every import leaves: the folder of a finished run, as training would have left it.


@dataclass(frozen=True)
class Imported:
    """A model that was trained elsewhere.

    Attributes:
        recipe: what it would be trained with here.
        prepared: its tokenizer, and the rows that golden inputs are drawn from.
        origin: what it was imported from, in words.
        sha256: of that file; None: it is several.
        golden: where the golden inputs are from, in words.
        leaks: it sees what it is asked to predict.
        causality: what the probe found; None for a model that is meant to see the whole text.
    """

    recipe: Recipe
    model: nn.Module
    attention: AttentionUse
    prepared: Prepared[Any]
    origin: str
    sha256: str | None
    golden: str
    leaks: bool = False
    causality: Causality | None = None


def write_run(free: Callable[[], Path], imported: Imported) -> Path:
    """Write the run's folder, which appears when it is complete, and return it.

    Args:
        free: see :func:`~edgeformer.system.leftovers.new_folder`.

    Raises:
        InputError: the name was free, and is taken by now.
    """

    def write(folder: Path) -> None:
        recipe, manifest = imported.recipe, _manifest(folder.name, imported)
        (folder / MODEL_FOLDER).mkdir()
        save_model(folder / MODEL_FOLDER, imported.model, recipe, imported.prepared)
        write_text(folder / MODEL_FOLDER / CARD_FILE, model_card(manifest, recipe))
        header = f"# Imported from {imported.origin}. Golden inputs: {imported.golden}.\n"
        write_text(folder / RECIPE_FILE, header + recipe.to_yaml())
        write_json(folder / RUN_FILE, manifest)

    return new_folder(NEW_RUN, free, write)


def _manifest(name: str, imported: Imported) -> RunManifest:
    moment, recipe = now(), imported.recipe
    checksum = f" (sha256 {imported.sha256})" if imported.sha256 is not None else ""
    return RunManifest(
        run=name,
        status="finished",
        reason=f"imported from {imported.origin}{checksum}; golden inputs {imported.golden}",
        task=recipe.task,
        recipe=recipe.name,
        recipe_sha256=recipe.fingerprint(),
        started=moment,
        finished=moment,
        parameters=count_parameters(imported.model),
        vocabulary=recipe.model.vocab_size,
        precision="unknown",
        attention=imported.attention,
        data=imported.prepared.summary,
        tokenizer_fingerprint=fingerprint(imported.prepared.tokenizer),
        leaks=imported.leaks,
        causality=imported.causality,
        versions=library_versions(),
        code_version=code_version(),
        host={**describe_host(), "threads": torch.get_num_threads()},
    )
