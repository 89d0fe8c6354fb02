"""What a measuring process is given: files that were checked, and real inputs at a stated shape.

The inputs are the bundle's golden rows, cut or repeated. Never zeros, never random tokens, which would falsify
confidence exits and lookups.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeformer.backends.opening import artifact_files, check_artifact, check_companion
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.stages.profiling.messages import CheckedArtifact

Tokens = npt.NDArray[np.int64]
GOLDEN_FILE = "golden.npz"
_REMEDY = "export the run again, or copy the whole bundle again"


@dataclass(frozen=True)
class GoldenRows:
    """The token ids of real inputs, each without its padding; at least one row, none empty.

    ``masked``: the model takes an attention mask beside them (classifiers).
    """

    rows: tuple[Tokens, ...]
    masked: bool = True


def check_files(bundle: Path, manifest: BundleManifest, artifact: ArtifactManifest) -> CheckedArtifact:
    """The artifact, after its files and its golden inputs were compared with the manifest and found to be of use.

    Args:
        bundle: the bundle's folder.
        manifest: of that bundle.
        artifact: a built one of it.

    Raises:
        ArtifactError: a file is missing, truncated or changed, or the golden inputs are not what they should be.
    """
    check_companion(bundle, manifest, (Path(artifact.companions) / GOLDEN_FILE).as_posix())
    read_golden(bundle / artifact.companions)
    file = check_artifact(bundle, manifest, artifact)
    return CheckedArtifact.of(artifact_files(file, artifact, manifest.max_positions), bundle)


def read_golden(bundle: Path) -> GoldenRows:
    """Read ``golden.npz``: ``input_ids`` and, for classifiers, ``attention_mask``, int64 [n, S]; else none is padded.

    Raises:
        ArtifactError: missing, damaged, or not shaped like that.
    """
    path = bundle / GOLDEN_FILE
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            ids: npt.NDArray[Any] = archive["input_ids"]
            masked = "attention_mask" in archive
            mask: npt.NDArray[Any] = archive["attention_mask"] if masked else np.ones_like(ids)
    except FileNotFoundError:
        raise ArtifactError(
            f"{path}: missing; without it there are no real inputs to measure with; {_REMEDY}"
        ) from None
    except (OSError, ValueError, KeyError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise ArtifactError(f"{path}: damaged ({type(error).__name__}: {str(error)[:120]}); {_REMEDY}") from None
    if ids.ndim != 2 or ids.shape != mask.shape or ids.dtype != np.int64 or 0 in ids.shape:
        raise ArtifactError(
            f"{path}: input_ids must be int64 [n, S] with a mask of the same shape, "
            f"but are {ids.dtype}{list(ids.shape)} and {list(mask.shape)}; {_REMEDY}"
        )
    rows = tuple(row[keep.astype(bool)] for row, keep in zip(ids, mask, strict=True))
    if any(row.size == 0 for row in rows):
        raise ArtifactError(f"{path}: a row holds padding only; {_REMEDY}")
    return GoldenRows(rows, masked)


def fit_row(row: Tokens, seq: int) -> Tokens:
    """One row cut or repeated: the first token (such as [CLS]) stays first, those after it repeat.

    Args:
        row: token ids, int64 [k].
        seq: tokens of the result.
    """
    if row.size >= seq:
        return row[:seq]
    body = row[1:] if row.size > 1 else row
    return np.concatenate([row[:1], np.resize(body, seq - 1)])


def make_buffers(golden: GoldenRows, batch: int, seq: int, count: int = 8) -> list[dict[str, Tokens]]:
    """Different inputs of shape [batch, seq], nothing padded, the golden rows used in turn.

    Several buffers in rotation keep a cache from answering instead of the artifact.

    Args:
        golden: real rows.
        batch: rows of an input.
        seq: tokens of each row.
        count: how many inputs.
    """
    buffers: list[dict[str, Tokens]] = []
    for number in range(count):
        picked = [golden.rows[(number * batch + offset) % len(golden.rows)] for offset in range(batch)]
        ids = np.ascontiguousarray(np.stack([fit_row(row, seq) for row in picked]), dtype=np.int64)
        mask = {"attention_mask": np.ones_like(ids)} if golden.masked else {}
        buffers.append({"input_ids": ids, **mask})
    return buffers
