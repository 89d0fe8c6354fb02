"""Encoded rows on disk: appended in pieces, checksummed, reused by later runs, read without loading all of them.

Reads copy from the files and keep no mapping: mapped pages count as memory of the process, and an epoch would
map the whole file.
"""

import hashlib
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import read_at_most, sha256_of, write_json, write_text
from edgeformer.artifacts.manifest import OverlapCount
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.data.encoding import Rows, RowsT
from edgeformer.data.rows import Int64s

_FACTS_FILE, _FACTS_CHECKSUM = "facts.json", "facts.sha256"
_DTYPES = {"ids": "<i4", "starts": "<i4", "targets": "<i4", "types": "|i1", "offsets": "<i8", "labels": "<i8"}
"""Fields of rows that are stored, if the rows have them."""
_TOKEN_ARRAYS = ("ids", "starts", "targets", "types")
_COUNTS = ("truncated", "inexact", "tokens", "words")  # counts in the fields of rows, which are added up in the facts
_MAPPED_READS = 256  # positions read per mapping: the system maps 64 KiB around each


class StoredFacts(Frozen):
    """``facts.json`` of stored rows: checksums and counts."""

    key: str
    sha256: dict[str, str]
    rows: int
    fingerprint: str
    truncated: int
    texts: int = 0
    overlap: tuple[OverlapCount, ...] = ()
    tokens: int = 0
    words: int = 0
    label_rows: tuple[int, ...] = ()  # of each class
    inexact: int = 0
    empty: int = 0  # rows without a text
    text_words: dict[int, int] = Field({})  # number of words → texts


class DiskArray:
    """A one-dimensional array in a file, which stays open, so that deleting the cache breaks no running process."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        self._dtype = np.dtype(dtype)
        self._length = path.stat().st_size // self._dtype.itemsize

    def __getitem__(self, places: Int64s) -> NDArray[Any]:
        """Return a copy of the numbers at ``places``."""
        copies = np.empty(len(places), dtype=self._dtype)
        for start in range(0, len(places), _MAPPED_READS):
            part = slice(start, start + _MAPPED_READS)
            copies[part] = self.mapped()[places[part]]
        return copies

    def read_spans(self, begins: Int64s, sizes: Int64s) -> NDArray[Any]:
        """Return copies of the ``sizes[i]`` numbers from ``begins[i]`` on, concatenated."""
        copies = [np.empty(0, dtype=self._dtype)]
        for start in range(0, len(begins), _MAPPED_READS):
            part = slice(start, start + _MAPPED_READS)
            mapped = self.mapped()
            spans = zip(begins[part].tolist(), sizes[part].tolist(), strict=True)
            copies.append(np.concatenate([mapped[begin : begin + size] for begin, size in spans]))
        return np.concatenate(copies)

    def mapped(self) -> NDArray[Any]:
        """Return the whole array, mapped until it is deleted."""
        if not self._length:  # nothing can be mapped
            return np.empty(0, dtype=self._dtype)
        return np.memmap(self._file, dtype=self._dtype, mode="r", shape=(self._length,))


@dataclass(frozen=True)
class StoredRows(Generic[RowsT]):
    """Rows of a ``kind`` on disk; rows in memory have the counts of all rows."""

    arrays: Mapping[str, DiskArray]
    facts: StoredFacts
    kind: type[RowsT]

    def __len__(self) -> int:
        return self.facts.rows

    def sizes(self, numbers: Int64s) -> Int64s:
        """Return the tokens of the rows ``numbers``, int64 [n]."""
        offsets = self.arrays["offsets"]
        return np.asarray(offsets[numbers + 1] - offsets[numbers], dtype=np.int64)

    def loaded(self, numbers: Int64s) -> tuple[RowsT, Int64s]:
        """Return the rows ``numbers`` in memory, and their numbers there."""
        begins, sizes = self.arrays["offsets"][numbers], self.sizes(numbers)
        arrays: dict[str, NDArray[Any]] = {"offsets": np.concatenate(([0], np.cumsum(sizes)))}
        for name, array in self.arrays.items():
            if name in _TOKEN_ARRAYS:
                arrays[name] = array.read_spans(begins, sizes)
            elif name != "offsets":
                arrays[name] = array[numbers]
        return self._rows(arrays), np.arange(len(numbers), dtype=np.int64)

    def in_memory(self) -> RowsT:
        """Return all rows in memory."""
        return self._rows({name: np.array(array.mapped()) for name, array in self.arrays.items()})

    def _rows(self, arrays: Mapping[str, NDArray[Any]]) -> RowsT:
        names = {field.name for field in fields(self.kind)}
        return self.kind(**arrays, **{name: getattr(self.facts, name) for name in _COUNTS if name in names})


def write_rows(folder: Path, pieces: Iterable[Rows]) -> dict[str, object]:
    """Write the arrays of rows, given in pieces. Return facts: the number of rows, file → sha256, and the counts."""
    digests: dict[str, Any] = {}
    rows, tokens, counts = 0, 0, dict.fromkeys(_COUNTS, 0)
    for piece in pieces:
        begins = piece.offsets + tokens
        arrays = {name: array for name in _DTYPES if (array := getattr(piece, name, None)) is not None}
        for name, array in {**arrays, "offsets": begins[1:] if digests else begins}.items():
            content = np.ascontiguousarray(array, dtype=_DTYPES[name]).tobytes()
            with (folder / f"{name}.bin").open("ab") as file:
                file.write(content)
            digests.setdefault(f"{name}.bin", hashlib.sha256()).update(content)
        rows, tokens = rows + len(piece), int(begins[-1])
        for name in _COUNTS:
            counts[name] += getattr(piece, name, 0)
    return {"rows": rows, "sha256": {name: digest.hexdigest() for name, digest in digests.items()}, **counts}


def write_facts(folder: Path, facts: Mapping[str, object]) -> None:
    """Write the facts about stored rows, with a checksum of their own."""
    write_json(folder / _FACTS_FILE, StoredFacts.model_validate(facts, strict=False))
    write_text(folder / _FACTS_CHECKSUM, sha256_of(folder / _FACTS_FILE))


def read_stored(folder: Path, key: str, kind: type[RowsT], progress: Progress) -> StoredRows[RowsT] | None:
    """Open the stored rows of ``key`` and check every byte of them. None: not stored, or damaged, with a message."""
    if not folder.exists():
        return None
    try:
        facts = read_manifest(StoredFacts, folder / _FACTS_FILE)
        facts_checksum = read_at_most(folder / _FACTS_CHECKSUM, 100).decode("ascii", "replace")
        for name, checksum in {_FACTS_FILE: facts_checksum, **facts.sha256}.items():
            if sha256_of(folder / name) != checksum or facts.key != key:
                raise ArtifactError(f"{folder / name}: differs from its checksum")
        names = [name.removesuffix(".bin") for name in facts.sha256 if name.endswith(".bin")]
        return StoredRows({name: DiskArray(folder / f"{name}.bin", _DTYPES[name]) for name in names}, facts, kind)
    except (ArtifactError, OSError) as error:
        progress.message(f"damaged token cache ({error}); it is made again")
        return None
