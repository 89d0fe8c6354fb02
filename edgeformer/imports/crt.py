"""Import checkpoints of the public CRT code, which are untrusted: ``import crt``.

torch's restricted reader executes no code, but a few bytes of a pickle can make it allocate arrays or tensors of any
size, so the file is checked before it is read.
"""

import mmap
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.imports.run import ImportOptions, reserve_name, write_language_run
from edgeformer.models.crt.checkpoint import convert_weights, extract_state_dict, infer_config
from edgeformer.models.crt.model import CRT

_NAME, _PUBLISHED_RECIPE = "crt_imported", "crt_deep_published"

MAX_PICKLE_BYTES = 4 << 20
"""Of a checkpoint without its numbers: names and shapes of 40,000 tensors. Each byte can become an object of 60."""
_REFUSED = re.compile(r"(?:Unsupported global: GLOBAL|Trying to call|Unsupported class) ([\w.]+)")


def import_crt(path: Path, options: ImportOptions, progress: Progress = SILENT) -> Path:
    """Make a finished run of a checkpoint, and return its folder. Raises InputError; nothing was written then."""
    _, free = reserve_name(options.artifacts, options.name, _NAME)
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
    config = infer_config(weights, str(path))
    model = CRT(config)
    model.load_state_dict(convert_weights(weights, config, str(path)))
    model.eval()
    return write_language_run(
        free, _PUBLISHED_RECIPE, _NAME, model, options, progress,
        description=f"CRT-Deep, imported from {path.name}; leaks future tokens, so its perplexity is void",
        origin=path.name, sha256=sha256_of(path),
    )  # fmt: skip


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
