"""Rows of tokens in files: written piece by piece, published whole and checksummed, read some rows at a time.

What is asked for is copied out of the files and nothing of them stays mapped: the pages of a mapping count as this
process's memory, and an epoch would collect those of the whole file.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import read_at_most, replacing_folder, sha256_of, write_json, write_text
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.data.encoding import RowsT

Int64s = NDArray[np.int64]
Pieces = Mapping[str, NDArray[np.integer]]
"""Arrays of some rows by name: ``ids``, and ``offsets`` of the rows in it, with 0 in front; others beside them."""

FACTS_FILE, _FACTS_SUM = "facts.json", "facts.sha256"
_KINDS = {"ids": "<i4", "starts": "<i4", "offsets": "<i8", "labels": "<i8"}
_PER_TOKEN = ("ids", "starts")
_AT_ONCE = 256
"""Places that are looked up at once: the system maps 64 KiB around each of them."""


class StoredFacts(Frozen):
    """``facts.json`` beside the arrays: what they are of, and what is known of all of it.

    ``tokens`` (to be predicted), ``words`` and ``paragraphs`` are a language model's, ``label_rows`` a classifier's
    (rows of each class), as are ``empty`` (rows without a text, which were left out) and ``text_words`` (number
    of words → texts that have so many).
    """

    key: str
    sha256: dict[str, str]
    rows: int
    fingerprint: str
    truncated: int
    tokens: int = 0
    words: int = 0
    paragraphs: int = 0
    label_rows: tuple[int, ...] = ()
    empty: int = 0
    text_words: dict[str, int] = Field({})


class DiskArray:
    """A one-dimensional array in a file. The file stays open: a cache that is emptied meanwhile ends no run.

    Args:
        dtype: of its numbers; they fill the whole file.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self._file = path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)
        self._dtype = np.dtype(dtype)
        self._length = path.stat().st_size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: Int64s) -> NDArray[Any]:
        """A copy of the numbers at ``places``."""
        found = np.empty(len(places), dtype=self._dtype)
        for start in range(0, len(places), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            found[part] = self._mapped()[places[part]]
        return found

    def joined(self, begins: Int64s, sizes: Int64s) -> NDArray[Any]:
        """Copies of the ``sizes[i]`` numbers from ``begins[i]`` on, one behind the other."""
        found = [np.empty(0, dtype=self._dtype)]
        spans = list(zip(begins.tolist(), sizes.tolist(), strict=True))
        for start in range(0, len(spans), _AT_ONCE):
            mapped = self._mapped()
            found.append(np.concatenate([mapped[begin : begin + size] for begin, size in spans[start:][:_AT_ONCE]]))
        return np.concatenate(found)

    def _mapped(self) -> NDArray[Any]:
        return np.memmap(self._file, dtype=self._dtype, mode="r", shape=(self._length,))


@dataclass(frozen=True)
class StoredRows(Generic[RowsT]):
    """Rows on disk.

    Attributes:
        build: rows in memory from their arrays.
    """

    arrays: Mapping[str, DiskArray]
    facts: StoredFacts
    build: Callable[[Pieces], RowsT]

    def __len__(self) -> int:
        return self.facts.rows

    @property
    def truncated(self) -> int:
        """Rows that were cut."""
        return self.facts.truncated

    def sizes(self, numbers: Int64s) -> Int64s:
        """Tokens of the rows ``numbers``, int64 [n]."""
        offsets = self.arrays["offsets"]
        return np.asarray(offsets[numbers + 1] - offsets[numbers], dtype=np.int64)

    def loaded(self, numbers: Int64s) -> tuple[RowsT, Int64s]:
        """The rows ``numbers`` in memory, and their numbers there."""
        begins, sizes = self.arrays["offsets"][numbers], self.sizes(numbers)
        pieces: dict[str, NDArray[np.integer]] = {"offsets": np.concatenate(([0], np.cumsum(sizes)))}
        for name, array in self.arrays.items():
            if name in _PER_TOKEN:
                pieces[name] = array.joined(begins, sizes)
            elif name != "offsets":
                pieces[name] = array[numbers]
        return self.build(pieces), np.arange(len(numbers), dtype=np.int64)


class Writer:
    """Appends rows to the arrays of a folder; see :func:`writing`."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder, self._open = folder, files
        self._files: dict[str, BinaryIO] = {}
        self._digests: dict[str, Any] = {}
        self._rows = self._tokens = 0

    def append(self, pieces: Pieces) -> None:
        """Rows behind those that there are."""
        offsets = pieces["offsets"]
        begins = offsets + self._tokens
        for name, array in {**pieces, "offsets": begins[1:] if self._files else begins}.items():
            if name not in self._files:
                self._files[name] = self._open.enter_context((self._folder / f"{name}.bin").open("wb"))
                self._digests[name] = hashlib.sha256()
            content = np.ascontiguousarray(array, dtype=_KINDS[name]).tobytes()
            self._files[name].write(content)
            self._digests[name].update(content)
        self._rows += len(offsets) - 1
        self._tokens += int(offsets[-1])

    def finish(self, facts: Mapping[str, object]) -> None:
        """Close the arrays and write the facts: ``facts`` are those that the writer does not know."""
        self._open.close()
        checksums = {name: digest.hexdigest() for name, digest in self._digests.items()}
        counted = {"sha256": checksums, "rows": self._rows}
        write_json(self._folder / FACTS_FILE, StoredFacts.model_validate({**counted, **facts}, strict=False))
        write_text(self._folder / _FACTS_SUM, sha256_of(self._folder / FACTS_FILE) + "\n")


@contextmanager
def writing(folder: Path) -> Iterator[Writer]:
    """A writer whose arrays appear as ``folder`` once the block has called ``finish`` and ended without an error."""
    with replacing_folder(folder) as temporary, ExitStack() as files:
        yield Writer(temporary, files)


def read_stored(folder: Path, key: str, build: Callable[[Pieces], RowsT]) -> StoredRows[RowsT]:
    """Open what :func:`writing` has published, and check every byte of it.

    Raises:
        ArtifactError: damaged, or of something else than ``key``.
        OSError: a file of it is not there.
    """
    if read_at_most(folder / _FACTS_SUM, 100).decode("ascii", "replace").strip() != sha256_of(folder / FACTS_FILE):
        raise ArtifactError(f"{folder / FACTS_FILE}: is not what was written")
    facts = read_manifest(StoredFacts, folder / FACTS_FILE)
    if facts.key != key:
        raise ArtifactError(f"{folder}: is of other data")
    for name, known in facts.sha256.items():
        if name not in _KINDS or sha256_of(folder / f"{name}.bin") != known:
            raise ArtifactError(f"{folder / name}.bin: is not what was written")
    arrays = {name: DiskArray(folder / f"{name}.bin", _KINDS[name]) for name in facts.sha256}
    if not {"ids", "offsets"} <= arrays.keys() or len(arrays["offsets"]) != facts.rows + 1:
        raise ArtifactError(f"{folder}: does not hold the rows that it says")
    return StoredRows(arrays, facts, build)
