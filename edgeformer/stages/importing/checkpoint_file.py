"""Reading a checkpoint file without running anything that is in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from edgeformer.families.crt.checkpoint import weights_in
from edgeformer.formats.errors import ArtifactError

_REFUSED = re.compile(r"(?:Unsupported global: GLOBAL|Trying to call|Unsupported class) ([\w.]+)")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Name → tensor of a torch checkpoint or a ``.safetensors`` file, on the CPU.

    Raises:
        ArtifactError: missing, truncated, no checkpoint, with Python objects in it, or weights that are no numbers.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: {'is a folder, not a' if path.is_dir() else 'no such'} checkpoint file")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    weights = weights_in(content, str(path))
    odd = [name for name, t in weights.items() if t.layout != torch.strided or t.is_quantized or t.is_meta]
    if odd:
        raise ArtifactError(
            f"{path}: holds sparse, quantised or empty tensors, not weights: {', '.join(sorted(odd)[:8])}"
        )
    broken = [name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise ArtifactError(f"{path}: holds infinite values or NaN in {', '.join(sorted(broken)[:8])}")
    return weights


def _read_safetensors(path: Path) -> Mapping[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path}: cannot be read as safetensors: {error}; copy it again") from None


def _read_torch(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
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
