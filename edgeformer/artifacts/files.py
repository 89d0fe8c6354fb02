"""Atomic file writes, so that a killed process leaves no partial file under a final name; and file hashes."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel

ASIDE, TEMPORARY = ".old", ".tmp"
"""Suffixes of the folders that :func:`replacing_folder` makes: for the previous folder, and for the new one."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it over ``path`` on success, remove it on any error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}{TEMPORARY}{path.suffix}")
    try:
        with _naming(path):
            temporary.touch(exist_ok=False)
            yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def whole(path: Path) -> Path:
    """Return an absolute path without ``.`` and ``..``, which have no name of their own and no siblings."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() follows links, and a link itself may be replaced


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Like :func:`replacing` for a folder; an existing folder at ``path`` is replaced as a whole.

    If a process is killed between the two renames, the next one restores the old folder. A working directory inside
    the old folder becomes the same directory of the new one.
    """
    path = whole(path)
    try:
        working: Path | None = Path.cwd()
    except OSError:  # it was deleted
        working = None
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}{TEMPORARY}")
    aside = temporary.with_suffix(ASIDE)
    try:
        with _naming(path):
            temporary.mkdir()
            yield temporary
        if path.exists():
            aside.mkdir()
            path.replace(aside / path.name)
        temporary.replace(path)
        if working is not None and working.is_relative_to(path) and working.is_dir():
            os.chdir(working)
    finally:
        if aside.exists() and not path.exists() and (aside / path.name).exists():
            (aside / path.name).replace(path)  # an error or a signal came between the two renames
        if temporary.exists():
            shutil.rmtree(temporary)
        if aside.exists():
            # Rename before deleting: a folder with the suffix .old is always complete.
            shutil.rmtree(aside.rename(temporary))


_UNCHANGED = "; the previous content is unchanged"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError for a full disk, in which the system names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = str(error.strerror).removesuffix(_UNCHANGED)  # of a file in a folder, which was named already
        raise OSError(error.errno, f"{reason}{_UNCHANGED}", str(path)) from error


def read_at_most(path: Path, most_bytes: int) -> bytes:
    """Return a whole file. Raises OSError, also above ``most_bytes``, so that an untrusted file cannot fill memory."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB, which no such file is", str(path))
    return content


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text with ``\\n`` line ends atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_json(path: Path, value: BaseModel | dict[str, object]) -> None:
    """Write a manifest (or a plain document) as indented JSON atomically."""
    write_text(path, as_json(value))


def as_json(value: BaseModel | dict[str, object]) -> str:
    """Return a manifest (or a plain document) as the text of an indented JSON file."""
    document = value.model_dump(mode="json", by_alias=True) if isinstance(value, BaseModel) else value
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes as hex."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
