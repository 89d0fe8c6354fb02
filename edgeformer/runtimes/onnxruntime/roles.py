"""Open ONNX artifacts of every role with any runtime that can open a single graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.runtimes.decoder import Decoder
from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions
from edgeformer.runtimes.session import Graph, Session


def open_role(files: ArtifactFiles, options: OpenOptions, open_part: Callable[[Path], Graph]) -> Session:
    """Open an artifact as one session; see :meth:`Runtime.open`.

    Args:
        files: as in :meth:`Runtime.open`.
        options: as in :meth:`Runtime.open`.
        open_part: opens one graph file.
    """
    from edgeformer.runtimes.onnxruntime.decode import DecodeSession, StepSession

    role = files.artifact.role
    if options.early is not None and role != "step":
        raise InputError(
            f"artifact {files.artifact.id!r} always runs all of its loops; rows can leave a step artifact early"
        )
    if options.exits and role != "step":
        raise InputError(f"artifact {files.artifact.id!r} answers after its last loop only; a step artifact at all")
    if role == "step":
        return StepSession(files.parts, _loops(files), open_part, exits=options.exits, early=options.early)
    return DecodeSession(open_part(files.file)) if role == "decode" else open_part(files.file)


def open_role_decoder(
    files: ArtifactFiles, exits: Collection[int] | None, open_part: Callable[[Path], Graph]
) -> Decoder[Any]:
    """Open a step or decode artifact for generation; see :meth:`Runtime.open_decoder`.

    Args:
        files: as in :meth:`Runtime.open_decoder`.
        exits: as in :meth:`Runtime.open_decoder`.
        open_part: opens one graph file.
    """
    from edgeformer.runtimes.onnxruntime.decode import FullDepthEngine, StepEngine, StepParts

    role = files.artifact.role
    if role not in ("step", "decode"):
        raise InputError(f"artifact {files.artifact.id!r} keeps nothing of earlier tokens, so it cannot write")
    if role == "decode":
        return Decoder(FullDepthEngine(open_part(files.file)))
    loops = _loops(files)
    return Decoder(StepEngine(StepParts(files.parts, loops, exits or (loops,), open_part)))


def _loops(files: ArtifactFiles) -> int:
    if files.loops is None:
        raise ArtifactError(f"{files.file}: a step artifact whose number of loops is not known; export the run again")
    return files.loops
