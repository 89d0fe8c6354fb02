"""Real inputs at a stated shape: the bundle's golden rows, cut or repeated. Never zeros, never random tokens,
which would falsify confidence exits and lookups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeformer.formats.golden import GOLDEN_FILE
from edgeformer.formats.golden import read_golden as read_golden_file
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.stages.profiling.messages import ChildSpec, Item, Phase

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GoldenRows:
    """The token ids of real inputs, each without its padding; at least one row, none empty.

    ``masked``: the model takes an attention mask beside them (classifiers).
    """

    rows: tuple[Tokens, ...]
    masked: bool = True


def phases_of(artifact: ArtifactManifest, bundle: Path) -> tuple[Phase, ...]:
    """What can be measured of an artifact.

    A decode graph writes token by token; a language model's step bundle does that too, and takes whole texts. Raises
    ArtifactError as :func:`read_golden`, which tells a language model from a classifier.
    """
    if artifact.role == "decode":
        return ("decode",)
    writes = artifact.role == "step" and not read_golden(bundle / artifact.companions).masked
    return ("steady", "decode") if writes else ("steady",)


def items_of(spec: ChildSpec) -> tuple[Item, ...]:
    """Everything that is to be measured, in this order: shape by shape, and at each of them phase by phase."""
    phases = phases_of(spec.artifact, Path(spec.bundle))
    return tuple((phase, *shape) for shape in spec.shapes for phase in phases)


def read_golden(bundle: Path) -> GoldenRows:
    """The golden inputs in a bundle's folder, or in its trimmed companions'. Raises ArtifactError."""
    golden = read_golden_file(bundle / GOLDEN_FILE)
    return GoldenRows(golden.texts(), golden.padded)


def fit_row(row: Tokens, seq: int) -> Tokens:
    """One row [k] cut or repeated to [seq]: the first token (such as [CLS]) stays first, those after it repeat."""
    if row.size >= seq:
        return row[:seq]
    body = row[1:] if row.size > 1 else row
    return np.concatenate([row[:1], np.resize(body, seq - 1)])


def make_buffers(golden: GoldenRows, batch: int, seq: int, count: int = 8) -> list[dict[str, Tokens]]:
    """``count`` different inputs of shape [batch, seq], nothing padded, the golden rows used in turn.

    Several buffers in rotation keep a cache from answering instead of the artifact.
    """
    buffers: list[dict[str, Tokens]] = []
    for number in range(count):
        picked = [golden.rows[(number * batch + offset) % len(golden.rows)] for offset in range(batch)]
        ids = np.ascontiguousarray(np.stack([fit_row(row, seq) for row in picked]), dtype=np.int64)
        mask = {"attention_mask": np.ones_like(ids)} if golden.masked else {}
        buffers.append({"input_ids": ids, **mask})
    return buffers
