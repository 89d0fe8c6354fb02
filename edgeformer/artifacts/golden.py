"""golden.npz: real validation inputs with torch FP32's outputs, for the self-check of a device.

Schema and reader. ``input_ids``, and ``attention_mask`` and ``token_type_ids`` if the model takes them, are int64
[n, S]. The other arrays are the task's targets and torch's logits: numbers only, [n, …], or one for all rows.

For a graph with other inputs, ``in.NAME`` and ``out.NAME`` are its inputs and FP32 outputs in n calls, [n, …].
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.workspace import REMEDY

GOLDEN_FILE = "golden.npz"
_MOST_BYTES, _MOST_MEMBERS = 256 << 20, 1_000
"""Maximum unpacked size in bytes (20 times that of a language model with 8 exits), and number of arrays."""
_IDS, _MASK, TOKEN_TYPES = "input_ids", "attention_mask", "token_type_ids"
INPUT, OUTPUT = "in.", "out."  # name prefixes of the arrays that are whole inputs and outputs of a graph

Array = NDArray[Any]
Tokens = NDArray[np.int64]


class GoldenError(ArtifactError):
    """golden.npz is unusable; no artifact is at fault."""


@dataclass(frozen=True)
class Golden:
    """Validated arrays of a golden.npz. Raises GoldenError if they do not follow the schema."""

    path: Path  # of the file, for messages
    arrays: Mapping[str, Array]

    def __post_init__(self) -> None:
        problem = next(self._problems(), None)
        if problem is not None:
            raise GoldenError(f"{self.path}: damaged: {problem}; {REMEDY}")

    def _problems(self) -> Iterator[str]:
        """Yield what does not follow the schema; a check relies on those before it."""
        if self.cases(INPUT):
            calls = {len(array) if array.ndim else 0 for array in self.arrays.values()}
            if len(calls) > 1 or 0 in calls:
                yield f"the arrays have different numbers of calls: {sorted(calls)}"
            for name, array in self.arrays.items():
                if not name.startswith((INPUT, OUTPUT)):
                    yield f"{name} is neither an input ({INPUT}…) nor an output ({OUTPUT}…)"
                if array.dtype.kind not in "iufb":
                    yield f"{name} holds {array.dtype}, not numbers"
                if name.startswith(INPUT) and 0 in array.shape:
                    yield f"{name} is empty: {list(array.shape)}"
            return
        if _IDS not in self.arrays:
            yield f"it has no {_IDS}"
        ids = self.arrays[_IDS]
        texts = [self.arrays[name] for name in (_IDS, _MASK, TOKEN_TYPES) if name in self.arrays]
        is_alike = {(array.dtype, array.shape) for array in texts} == {(np.dtype(np.int64), ids.shape)}
        if ids.ndim != 2 or 0 in ids.shape or not is_alike:
            shapes = " and ".join(f"{array.dtype}{list(array.shape)}" for array in texts)
            yield f"input_ids must be int64 [n, S], with a mask and types of the same shape, but are {shapes}"
        if not self.arrays.get(_MASK, np.ones_like(ids)).any(axis=1).all():
            yield "a row holds padding only"
        for name, array in self.arrays.items():
            if array.dtype.kind not in "iuf":
                yield f"{name} holds {array.dtype}, not numbers"
            if array.ndim and (0 in array.shape or len(array) != len(ids)):
                yield f"{name} has the shape {list(array.shape)}, which does not fit {len(ids)} rows"

    def __len__(self) -> int:
        """Return the number of rows or calls."""
        return len(next(iter(self.cases(INPUT).values()), self.arrays.get(_IDS, np.empty(0))))

    def cases(self, kind: str) -> dict[str, Array]:
        """Return the inputs (``INPUT``) or outputs (``OUTPUT``) of a graph: name → [calls, …]."""
        return {name.removeprefix(kind): array for name, array in self.arrays.items() if name.startswith(kind)}

    def first(self, rows: int) -> Golden:
        """Return a copy with the first ``rows`` rows or calls."""
        return Golden(self.path, {name: array[:rows] if array.ndim else array for name, array in self.arrays.items()})

    def inputs(self, names: Sequence[str]) -> dict[str, Tokens]:
        """Return the graph inputs ``names``, int64 [n, S] each. Raises GoldenError if one is missing."""
        missing = [name for name in names if name not in self.arrays]
        if missing:
            raise GoldenError(
                f"{self.path}: has no {missing[0]!r}, because an older version wrote it; export the run again"
            )
        return {name: self.arrays[name] for name in names}

    def texts(self) -> tuple[Tokens, ...]:
        """Return the tokens of every row without padding; no row is empty."""
        ids = self.arrays[_IDS]
        mask = self.arrays.get(_MASK, np.ones_like(ids))
        return tuple(row[keep.astype(bool)] for row, keep in zip(ids, mask, strict=True))


def read_golden(path: Path) -> Golden:
    """Read and check a golden.npz, without unpickling. Raises GoldenError."""
    try:
        return Golden(path, read_arrays(path))
    except FileNotFoundError:
        raise GoldenError(f"{path}: the golden inputs are missing; {REMEDY}") from None
    except ValueError as error:
        raise GoldenError(f"{path}: damaged ({error}); {REMEDY}") from None


def read_arrays(path: Path) -> dict[str, Array]:
    """Return all arrays of an .npz file, name → array, without unpickling.

    Raises FileNotFoundError: there is no such file; ValueError: the file is damaged, or exceeds the limits of a
    golden.npz.
    """
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        # numpy would unpack and allocate without bounds, so sizes are checked first.
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if len(members) > _MOST_MEMBERS or sum(member.file_size for member in members) > _MOST_BYTES:
                raise ValueError(f"it unpacks to more than {_MOST_BYTES >> 20} MiB or {_MOST_MEMBERS} arrays")
            for member in members:
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"{member.filename} has a compression that numpy does not write")
                with archive.open(member) as array:
                    shape, _, dtype = readers[np.lib.format.read_magic(array)](array)
                if math.prod(shape) * dtype.itemsize > member.file_size:
                    raise ValueError(f"{member.filename} states the shape {list(shape)}, but holds fewer numbers")
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile and numpy raise nearly anything for damage: passwords, negative sizes
        raise ValueError(f"{type(error).__name__}: {str(error)[:120]}") from None


def write_golden(folder: Path, arrays: Mapping[str, Array]) -> Golden:
    """Write ``folder/golden.npz``. Raises GoldenError if the arrays do not follow the schema."""
    golden = Golden(folder / GOLDEN_FILE, arrays)
    with replacing(golden.path) as temporary:
        np.savez(temporary, **arrays)  # type: ignore[arg-type]
    return golden
