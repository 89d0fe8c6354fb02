"""Reading an ONNX file with the onnx package: sizes and types, without the weights beside it."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from edgeformer.formats.errors import ArtifactError


def open_graph(path: Path) -> onnx.ModelProto:
    """Read an ONNX file. Raises ArtifactError when it is missing, truncated or something else."""
    try:
        return onnx.load(str(path), load_external_data=False)  # sizes and types are enough
    except (OSError, DecodeError) as error:
        raise ArtifactError(f"{path}: cannot be read as ONNX: {error}; export it again") from None
