"""Texts that are to be answered: a file of any format, or standard input, one after the other and never all at once."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from edgeformer.data.records import check_file, format_of
from edgeformer.data.rows import Text
from edgeformer.data.sources import Columns, file_source, read
from edgeformer.data.unpacking import COMPRESSIONS, opened, raw_lines
from edgeformer.formats.data_config import FileSource, Source
from edgeformer.formats.errors import DataError, InputError

WINDOW_ROWS, WINDOW_CHARACTERS = 2048, 4 << 20
"""What is in memory at once. Rows of similar length are found among so many."""
STANDARD_INPUT = "standard input"
PLAIN = "text"
_HEADED = ("csv", "tsv")


@dataclass(frozen=True)
class Unlabelled:
    """Texts that wait to be read.

    Attributes:
        name: of the file, for messages.
        pairs: they are pairs.
        expected: about how many there are; None: nobody knows.
        texts: reads them from the start. Raises DataError.
        leave: ends the reading; true: a thread waits for what may never come, and cannot be waited for.
    """

    name: str
    pairs: bool
    expected: int | None
    texts: Callable[[], Iterator[Text]]
    leave: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Reading:
    """How a file is to be read.

    Attributes:
        parts: what the model's own data is, whose columns are looked for; empty: not known.
        columns: named ones, which win.
        format: as data sections call it; None: by the file's suffix, and of standard input one text per line.
        single: single texts only, also where the file has the columns of a pair.
    """

    parts: Mapping[str, Sequence[Source]]
    columns: Columns = field(default_factory=Columns)
    format: str | None = None
    single: bool = False


@contextlib.contextmanager
def unlabelled(path: Path | None, stdin: BinaryIO, how: Reading) -> Iterator[Unlabelled]:
    """The texts of a file, or of standard input; a line of plain text is one, also an empty line.

    Args:
        path: None: standard input. Lines are read as they come; a table is first written to a temporary file.
        stdin: its bytes.
        how: it is read.

    Raises:
        DataError: no such file, or none of its columns can be the text.
        InputError: options that do not go together.
    """
    if how.columns.text_pair is not None and how.columns.text is None:
        raise InputError("--pair COL: name the column of the first texts, too: --text COL --pair COL")
    if path is None and how.format in (None, PLAIN):
        _refuse_columns(how, STANDARD_INPUT)
        raw = _Left(stdin)
        texts = lambda: _lines(Path(STANDARD_INPUT), io.BufferedReader(raw))  # noqa: E731
        yield Unlabelled(STANDARD_INPUT, False, None, texts, raw.leave)
        return
    if path is not None:
        yield _of_file(path, how)
        return
    with tempfile.TemporaryDirectory() as folder:
        spooled = Path(folder) / f"standard-input.{how.format}"
        with spooled.open("wb") as file:
            shutil.copyfileobj(stdin, file)
        try:
            yield _of_file(spooled, how)
        except DataError as error:
            raise DataError(str(error).replace(str(spooled), STANDARD_INPUT)) from None


def windows(
    texts: Iterable[Text], rows: int = WINDOW_ROWS, characters: int = WINDOW_CHARACTERS
) -> Iterator[list[Text]]:
    """Texts in groups of up to ``rows``, and of about ``characters`` at most: one text may have more."""
    window: list[Text] = []
    size = 0
    for text in texts:
        window.append(text)
        size += len(text) if isinstance(text, str) else len(text[0]) + len(text[1])
        if len(window) >= rows or size >= characters:
            yield window
            window, size = [], 0
    if window:
        yield window


class _Left(io.RawIOBase):
    """Standard input for a thread that can be left while it waits.

    The stream itself is locked by who waits in it, and an interpreter that ends aborts where it cannot have that lock.
    """

    def __init__(self, stdin: BinaryIO) -> None:
        self._raw: Any = getattr(stdin, "raw", stdin)
        self._waits = self._left = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._waits = True
        try:
            found: int | None = None if self._left else self._raw.readinto(buffer)
        finally:
            self._waits = False
        if self._left:
            raise InterruptedError("nobody reads it any more")
        return found

    def leave(self) -> bool:
        """From now on nothing can be read; true: somebody waits right now."""
        self._left = True
        return self._waits


def _of_file(path: Path, how: Reading) -> Unlabelled:
    check_file(path)
    kind = _format(path, how.format)
    if kind == PLAIN:
        _refuse_columns(how, str(path))
        return Unlabelled(str(path), False, _count(path, kind), lambda: _plain(path))
    source = _source(path, how)
    texts = lambda: (row.text for row in read(source, blanks=True))  # noqa: E731
    return Unlabelled(str(path), source.text_pair is not None, _count(path, kind), texts)


def _format(path: Path, stated: str | None) -> str:
    try:
        known = format_of(path, None)
    except DataError:
        known = None
    if known is None and stated != PLAIN:
        raise InputError(
            f"{path}: its suffix does not tell the format; rename it, or say it with --input-format and pipe the file: "
            "--file -"
        )
    if stated not in (None, PLAIN, known):
        raise InputError(f"--input-format {stated}: {path} is called {known}; rename it, or leave out --input-format")
    return stated or str(known)


def _refuse_columns(how: Reading, name: str) -> None:
    for option, column in (("--text", how.columns.text), ("--pair", how.columns.text_pair)):
        if column is not None:
            raise InputError(f"{option} {column}: {name} is read as plain text, one text per line, without columns")


def _source(path: Path, how: Reading) -> FileSource:
    """The file with the columns that the model's own data has; else with well-known ones."""
    single = FileSource(kind="file", path=str(path), text_pair=None)
    own = [source for sources in how.parts.values() for source in sources]
    known = {(source.text, source.text_pair): source for source in own if source.kind != "synthetic-reviews"}
    if how.columns.text is not None:
        return file_source(path, next(iter(known.values()), None), labelled=False, columns=how.columns)
    if how.single:
        known = {key: source for key, source in known.items() if key[1] is None}
    elif not own:
        return _unknown(path, single)
    refusals: list[DataError] = []
    found: list[FileSource] = []
    for columns, like in (known or {("", None): single}).items():
        try:
            source = file_source(path, like, labelled=False, columns=how.columns)
        except DataError as error:
            refusals.append(error)
            continue
        if (source.text, source.text_pair) == columns:
            return source
        found.append(source)
    if not found:
        raise _with_option(refusals[0])
    return found[0]


def _unknown(path: Path, single: FileSource) -> FileSource:
    """Nothing is known of the model's data: pairs where the file has those, and nothing that could be a single text."""
    try:
        source = file_source(path, labelled=False)
    except DataError as error:
        raise _with_option(error) from None
    if source.text_pair is not None:
        with contextlib.suppress(DataError):
            other = file_source(path, single, labelled=False)
            raise InputError(
                f"{path}: nothing is known of this model's data, so rows could be single texts ({other.text}) or pairs "
                f"({source.text} and {source.text_pair}); say it: --text {other.text}, or --text {source.text} "
                f"--pair {source.text_pair}"
            )
    return source


def _with_option(error: DataError) -> DataError:
    named = "; columns: " not in str(error) or "--text" in str(error)
    return error if named else DataError(f"{error}; or name it: --text COLUMN")


def _plain(path: Path) -> Iterator[Text]:
    with opened(path) as file:
        yield from _lines(path, file)


def _lines(path: Path, file: BinaryIO) -> Iterator[Text]:
    """Every line, also the empty ones: answers stand on the same lines."""
    for number, raw in raw_lines(path, file):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, line {number}: not UTF-8 text (byte {error.start + 1} of the line is "
                f"0x{raw[error.start]:02x}); save it as UTF-8"
            ) from None
        yield (line.removeprefix("\ufeff") if number == 1 else line).rstrip("\r\n")


def _count(path: Path, kind: str) -> int | None:
    """About how many rows a file has: its lines. A line break inside a quoted text counts, too."""
    if kind == "parquet" or path.suffix.lower() in COMPRESSIONS:
        return None
    with path.open("rb") as file:
        lines, last = 0, b""
        while chunk := file.read(1 << 20):
            lines += chunk.count(b"\n")
            last = chunk[-1:]
    return lines + (last not in (b"", b"\n")) - (kind in _HEADED)
