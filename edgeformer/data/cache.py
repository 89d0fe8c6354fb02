"""Token cache: an encoded set on disk, found again by what went into it."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from edgeformer.data.encoding import Encoded, encode
from edgeformer.data.texts import LabelledTexts
from edgeformer.data.tokenization import fingerprint
from edgeformer.formats.files import replacing
from edgeformer.formats.progress import Progress, Silent

FORMAT_VERSION = 1
_UNREADABLE = (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error)


def cache_key(texts: LabelledTexts, tokenizer_fingerprint: str, max_length: int) -> str:
    """sha256 over everything that decides the encoded set."""
    content = f"{FORMAT_VERSION} {texts.fingerprint()} {tokenizer_fingerprint} {max_length}"
    return hashlib.sha256(content.encode()).hexdigest()


def encode_cached(
    texts: LabelledTexts,
    tokenizer: Tokenizer,
    max_length: int,
    cache: Path | None,
    progress: Progress | None = None,
) -> Encoded:
    """Encode a set, or take it from ``cache`` (None: no cache).

    A damaged cache file is made again, with a message.
    """
    progress = progress or Silent()
    if cache is None:
        return encode(tokenizer, texts.texts, texts.labels, max_length, progress.advance)
    key = cache_key(texts, fingerprint(tokenizer), max_length)
    path = cache / f"tokens-{key[:24]}.npz"
    if path.exists():
        try:
            encoded = _read(path, key, texts)
        except _UNREADABLE as error:
            progress.message(f"{path}: damaged token cache ({error}); made again")
        else:
            progress.advance(len(texts))
            return encoded
    encoded = encode(tokenizer, texts.texts, texts.labels, max_length, progress.advance)
    try:
        _write(path, key, encoded)
    except OSError as error:
        # A cache that cannot be written (full or read-only disk) costs time, not the run.
        progress.message(f"{path}: token cache not written: {error.strerror}")
    return encoded


def _write(path: Path, key: str, encoded: Encoded) -> None:
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            key=np.array(key),
            ids=encoded.ids,
            offsets=encoded.offsets,
            labels=encoded.labels,
            truncated=np.array(encoded.truncated, dtype=np.int64),
        )


def _read(path: Path, key: str, texts: LabelledTexts) -> Encoded:
    """Read and check a file; the archive's own checksums find flipped bits. Raises one of ``_UNREADABLE``."""
    # Opened here: np.load leaves a file open that it cannot make sense of.
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        stored = {name: file[name] for name in ("key", "ids", "offsets", "labels", "truncated")}
    encoded = Encoded(stored["ids"], stored["offsets"], stored["labels"], int(stored["truncated"]))
    if str(stored["key"]) != key:
        raise ValueError("it is for other data")
    kinds = (encoded.ids.dtype, encoded.offsets.dtype, encoded.labels.dtype)
    if kinds != (np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.int64)):
        raise ValueError("wrong number types")
    if encoded.offsets.shape != (len(texts) + 1,) or not np.array_equal(encoded.labels, texts.labels):
        raise ValueError("wrong number of rows, or other labels")
    if encoded.offsets[0] != 0 or encoded.offsets[-1] != len(encoded.ids) or (encoded.lengths < 0).any():
        raise ValueError("broken row boundaries")
    return encoded
