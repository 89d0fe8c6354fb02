"""Records (column → value) of data files and hub data sets, streamed: TSV, CSV, JSONL, plain text, Parquet; compressed.

Limits protect against small files that unpack to gigabytes and against lines that fill the memory. Real files stream
at any size: text packs 3 to 10 times smaller, repetitive logs 50 times.
"""

import bz2
import codecs
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from edgeformer.artifacts.data_config import FileSource, HubSource, Tag, column_names, parse_tag
from edgeformer.artifacts.errors import DataError, did_you_mean, needs_extra
from edgeformer.data.rows import Record, format_names, tag_runs

FORMATS = {
    ".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
    ".txt": "text", ".text": "text", ".conll": "conll",
}  # fmt: skip
COMPRESSIONS = (".xz", ".gz", ".bz2")
WITH_OPTION = ("evaluate", "exits", "init", "predict", "search")
"""Commands with the option ``--encoding``. Elsewhere files are UTF-8, or the recipe states their encoding."""
Line = tuple[int, str]  # line number from 1, and text with its line end

MAX_RATIO = 200  # maximum compression ratio: four times that of repetitive logs. Bombs reach 600 (gz) to 45,000 (bz2)
MAX_LINE = 16 << 20
"""Maximum line length in characters: three times the Bible. A parsed line takes up to 25 times its bytes in memory."""
MAX_COLUMNS = 10_000  # maximum number of columns of a table; every row becomes a dictionary of them
_RATIO_WINDOW = 8 << 20
"""Unpacked bytes per measurement of the ratio: fewer are harmless; an average would hide a bomb behind real text."""
_MAX_ROWS_PER_BYTE = 100
"""Maximum rows per byte of a Parquet file: repeated rows are packed to nearly nothing, but unpack to full texts."""
_SMALL_PARQUET_BYTES = 64 << 20  # size to which every Parquet file may unpack
_PARQUET_BATCH = 1_000  # rows per unpacked batch, because row groups can have any size
_NEAR_CHAOS = 0.02  # difference of charset-normalizer's measure of disorder by which an encoding is not less likely
_SHOWN_CHARACTERS = 50
"""Of a line, as each of at most three encodings reads it: messages show at most 200 characters of data."""
_LIKELY_ENCODINGS = (
    "cp1252", "cp1250", "cp1251", "koi8_r", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr", "utf_16", "utf_16_le",
    "utf_16_be",
)  # fmt: skip
"""Encodings that are suggested, in order of preference among equally good ones."""
_UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SAMPLE_LINES, _SAMPLE_CHARACTERS = 200, 1 << 16  # start of a file that is searched for its delimiter
_WRONG_BYTE = re.compile("[\udc80-\udcff]")  # an invalid byte, as surrogateescape represents it
_TAG = re.compile(r"O|[BIESLU]-.+")
_DELIMITER_LINE = re.compile(r"sep=([,;\t|])\r?\n?")  # line of some spreadsheets before the header


class _Unpacked(io.RawIOBase):
    """Unpacks a file. Raises DataError if it unpacks to more than MAX_RATIO times its size."""

    def __init__(self, path: Path, packed: BinaryIO) -> None:
        self._path, self._packed = path, packed
        openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
        self._file: BinaryIO = openers[path.suffix.lower()](packed)
        self._window_start, self._window_bytes = 0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(min(len(buffer), 1 << 20))
        buffer[: len(content)] = content
        self._window_bytes += len(content)
        if self._window_bytes >= _RATIO_WINDOW:
            position = self._packed.tell()
            if self._window_bytes > MAX_RATIO * (position - self._window_start):
                raise DataError(
                    f"{self._path}: unpacks to more than {MAX_RATIO} times its size, which is unusual for text, so "
                    "reading was stopped; if you trust the file, unpack it and use the unpacked file"
                )
            self._window_start, self._window_bytes = position, 0
        return len(content)


def as_text(file: Any, encoding: str | None) -> TextIO:
    """Return a buffered binary file as text; wrong bytes are surrogates.

    Without an ``encoding`` it is UTF-8, or UTF-16 after its byte order mark. Only ``\\n`` ends a line, or ``\\r`` if
    the file begins with such lines, as old spreadsheets write them.
    """
    start = file.peek(_SAMPLE_CHARACTERS)
    if encoding is None and start[:2] in _UTF_16_MARKS:
        encoding = "utf-16"
    newline = "\r" if b"\r" in start[:-2] and b"\n" not in start else "\n"
    return io.TextIOWrapper(file, encoding or "utf-8", errors="surrogateescape", newline=newline)


@contextmanager
def open_data_file(path: Path, encoding: str | None = None) -> Iterator[TextIO]:
    """Open a file as text (:func:`as_text`), unpacked by its suffix.

    Raises DataError for a file that cannot be read, a broken archive or a bomb.
    """
    try:
        with path.open("rb", buffering=_SAMPLE_CHARACTERS) as file:
            is_packed = path.suffix.lower() in COMPRESSIONS
            yield as_text(io.BufferedReader(_Unpacked(path, file), 1 << 18) if is_packed else file, encoding)
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        # bz2 and gzip report damage as an OSError without a system error.
        raise DataError(
            f"{path}: broken or incomplete {path.suffix} file ({error}); copy or download it again"
        ) from None


def lines_of(path: Path, file: TextIO) -> Iterator[Line]:
    """Yield the lines of an opened data file with their ends. Raises DataError: wrong encoding, or a line too long."""
    encoding, number = file.encoding, 0
    while True:
        number += 1
        try:
            line = file.readline(MAX_LINE + 1)
        except UnicodeError as error:
            reason = getattr(error, "reason", error)
            raise DataError(
                f"{path}: not {encoding} text ({reason}, in or after line {number}); use another encoding"
            ) from None
        if not line:
            return
        if len(line) > MAX_LINE:
            raise DataError(f"{path}, line {number}: longer than {MAX_LINE >> 20} MiB; split it into one line per text")
        wrong = None if line.isascii() else _WRONG_BYTE.search(line)
        if wrong is not None or (number == 1 and line.count("\0") * 3 > len(line)):
            raw, place, problem = line.encode(encoding, "surrogateescape"), 0, "every second byte is 0"
            if wrong is not None:
                place = len(line[: wrong.start()].encode(encoding))
                problem = f"byte {place + 1} of the line is 0x{ord(wrong[0]) - 0xDC00:02x}"
            following = file.read(_SAMPLE_CHARACTERS) if file.seekable() else ""  # reading a pipe could block
            names = likely_encodings(raw + following.encode(encoding, "surrogateescape"))
            readings: dict[str, str] = {}  # text around the wrong byte → the first encoding that reads it so
            for name in names:
                start = max(0, len(raw[:place].decode(name, "replace")) - _SHOWN_CHARACTERS // 2)
                text = raw.decode(name, "replace").rstrip()[start : start + _SHOWN_CHARACTERS]
                readings.setdefault(text, name)
            guesses = ", or ".join([f"{name}, which reads {text!r}" for text, name in readings.items()][:3])
            remark, name = (f"it is likely {guesses}: ", names[0]) if names else ("", "NAME")
            raise DataError(
                f"{path}, line {number}: not {encoding.upper()} text ({problem}); {remark}save the file as UTF-8, or "
                f"state its encoding: --encoding {name} ({', '.join(WITH_OPTION)}), or encoding: {name} of the source "
                "in a recipe"
            )
        yield number, line.removeprefix("\ufeff") if number == 1 else line


def likely_encodings(sample: bytes) -> list[str]:
    """Return the likely encodings of a text that is not UTF-8, the most likely one first; empty: none fits."""
    # In UTF-16, every second byte of Latin letters is 0.
    if sample[:400].count(0) * 3 > len(sample[:400]):
        return ["utf-16-le" if sample[1:400:2].count(0) > sample[0:400:2].count(0) else "utf-16-be"]
    from charset_normalizer import from_bytes

    matches = [*from_bytes(sample, cp_isolation=[*_LIKELY_ENCODINGS])]
    least = min((match.chaos for match in matches), default=0.0)
    near = [match for match in matches if match.chaos <= least + _NEAR_CHAOS]
    coherence = {name: match.coherence for match in near for name in match.could_be_from_charset}
    best = max(coherence.values(), default=0.0)
    names = [name for name in _LIKELY_ENCODINGS if coherence.get(name, -1.0) >= best / 2]
    # Sums of money decide the coherence between Western and Central European: cp1252 is far more frequent.
    names.sort(key=lambda name: (name != "cp1252", -coherence[name]))
    if not names:
        with suppress(UnicodeDecodeError):
            sample.decode("cp1252")
            names = ["cp1252"]
    return [name.replace("_", "-") for name in names]


def check_file(path: Path) -> None:
    """Raise DataError, with the nearest name in the folder, if ``path`` is not a file."""
    if path.is_file():
        return
    if path.is_dir():
        raise DataError(f"{path}: is a folder; give a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"{path}: no such file, and no folder {folder} (working directory: {Path.cwd()})")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    hint = did_you_mean(path.name, names)
    raise DataError(f"{path}: no such file; {hint}files in {folder}: {', '.join(names[:12]) or 'none'}")


def suffix_format(path: Path) -> str | None:
    """Return the format by the suffix of a file, compressed or not; None: unknown suffix."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def format_of_source(source: FileSource) -> str:
    """Return the format of a source's file. Raises DataError for an unknown suffix."""
    path = Path(source.path)
    name: str | None = source.format
    if name is None:
        name = suffix_format(path)
        if source.delimiter is not None or source.quote is not None or not source.header:  # then it is a table
            if name in (None, "text"):
                name = "csv"
            if name in ("jsonl", "parquet"):
                raise DataError(f"{path}: the format {name} has no delimiter, quote and header; leave these keys out")
    if name is None:
        raise DataError(
            f"{path}: the suffix names no format; set format: of the source to tsv, csv, jsonl, parquet or text"
        )
    # TSV has tabs and no quotes; a .tsv file with others is a CSV file.
    return "csv" if name == "tsv" and (source.delimiter not in (None, "\t") or source.quote is not None) else name


def file_records(source: FileSource, labels: Sequence[str] = ()) -> Iterator[Record]:
    """Stream the records of a file. ``labels``: as in :func:`class_records`. Raises DataError."""
    # 1. A table that a library reads
    path = Path(source.path)
    check_file(path)
    kind = format_of_source(source)
    if kind == "parquet":
        if source.encoding is not None:
            raise DataError(f"{path}: Parquet texts are always UTF-8; leave out the encoding {source.encoding}")
        with needs_extra("train", f"{path}: reading it"):
            import datasets
        from pyarrow import parquet

        try:
            metadata, size = parquet.read_metadata(path), path.stat().st_size
            unpacked = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
            if unpacked > max(_SMALL_PARQUET_BYTES, MAX_RATIO * size) or metadata.num_rows > _MAX_ROWS_PER_BYTE * size:
                raise DataError(
                    f"{path}: {metadata.num_rows:,} rows of {unpacked:,} bytes unpacked are unusual for text in "
                    f"{size:,} bytes, so the file is not read; if you trust it, write it again as JSONL"
                )
            options: dict[str, Any] = {"split": "train", "streaming": True, "batch_size": _PARQUET_BATCH}
            rows = datasets.load_dataset("parquet", data_files=str(path), **options)
            yield from class_records(rows, str(path), labels)
        except DataError:
            raise
        except Exception as error:  # pyarrow's errors have no common base class
            raise DataError(f"{path}: cannot be read as Parquet: {first_line(error)}; write it again") from None
        return
    # 2. Lines of text
    if kind == "text" and source.label is not None and source.label_value is None:
        raise DataError(
            f"{path}: plain text has no label column; set label_value: of the source to the label of all its lines"
        )
    if kind == "text" and (source.text_pair is not None or len(column_names(source.text)) > 1):
        raise DataError(f"{path}: plain text has one column; give pairs and further columns as TSV, CSV or JSONL")
    with open_data_file(path, source.encoding) as file:
        lines = lines_of(path, file)
        if kind == "csv":
            dialect, lines = detect_dialect(lines, source.delimiter, source.quote)
            name = {",": "a comma", ";": "a semicolon", "\t": "a tab"}.get(dialect.delimiter, repr(dialect.delimiter))
            mark = dialect.quotechar
            remedy = (
                f"put a text that contains {name} in quotes ({mark}...{mark}), or state the characters of the file: "
                "--delimiter and --quote (init, search), or delimiter: and quote: of the source in a recipe"
            )
            yield from _table_records(path, _csv_rows(path, lines, dialect), remedy, header=source.header)
        elif kind == "tsv":
            rows = ((number, line.rstrip("\r\n").split("\t")) for number, line in lines if line.rstrip("\r\n"))
            remedy = "a text that contains a tab needs CSV or JSONL, because TSV has no quotes"
            yield from _table_records(path, rows, remedy, header=source.header)
        elif kind == "conll":
            yield from _conll_records(path, lines, source)
        else:
            for number, line in lines:
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                if kind == "text":  # its one column has the name that the source states
                    yield where, {column_names(source.text)[0]: line.rstrip("\r\n")}
                    continue
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{where}: not valid JSON: {error}; JSONL has one JSON object per line") from None
                if not isinstance(values, dict):
                    raise DataError(f'{where}: must be a JSON object ({{"text": …}}), not {type(values).__name__}')
                yield where, values


def _conll_records(path: Path, lines: Iterator[Line], source: FileSource) -> Iterator[Record]:
    """Yield each sentence as its text, the tokens joined by spaces, and its labelled spans. Raises DataError.

    Columns are separated by tabs, or else by white space. Comments (``#`` and no tag) are left out.
    """
    column = {"text": 0, "label": -1}
    column |= {key: int(name) - 1 for key in column if (name := str(getattr(source, key))).isdecimal()}
    tokens: list[str] = []
    tags: list[Tag] = []
    first = 0
    for number, line in itertools.chain(lines, [(0, "")]):
        content = line.rstrip("\r\n")
        cells = content.split("\t") if "\t" in content else content.split()
        if not any(cells) or cells[0] == "-DOCSTART-":
            if tokens:
                ends = [*itertools.accumulate(len(token) + 1 for token in tokens)]
                spans = [
                    {"start": ends[begin] - len(tokens[begin]) - 1, "end": ends[end - 1] - 1, "label": label}
                    for label, begin, end in tag_runs(tags)
                ]
                yield (
                    f"{path}, line {first}",
                    {column_names(source.text)[0]: " ".join(tokens), source.label or "spans": spans},
                )
            tokens, tags = [], []
            continue
        tag = cells[column["label"]] if column["label"] < len(cells) else ""
        if len(cells) < 2 or not "".join(cells[column["text"] : column["text"] + 1]) or not _TAG.fullmatch(tag):
            if cells[0].startswith("#"):
                continue
            raise DataError(
                f"{path}, line {number}: has no token and tag (O, B-LABEL, I-LABEL; also E-, S-, L-, U-) in "
                f"its columns: {format_names(map(repr, cells), 5)}; repair the line, or set the source's text: and "
                "label: to the numbers of the two columns"
            )
        first = first if tokens else number
        tokens.append(cells[column["text"]])
        tags.append(parse_tag(tag))


def first_lines(lines: Iterator[Line]) -> Iterator[Line]:
    """Yield the lines by which a dialect is detected."""
    characters = 0
    for number, line in itertools.islice(lines, _SAMPLE_LINES):
        characters += len(line)
        yield number, line
        if characters > _SAMPLE_CHARACTERS:
            return


class Dialect(NamedTuple):
    """Characters between and around the cells of a CSV file, as the arguments of csv.reader."""

    delimiter: str
    quotechar: str


def detect_dialect(
    lines: Iterator[Line], delimiter: str | None = None, quote: str | None = None
) -> tuple[Dialect, Iterator[Line]]:
    """Return the dialect of a CSV file, and the lines of its table. What is stated is not detected.

    By its characters most rows have as many columns as the first row, which has at least two. Single quotes win a tie
    if half of the rows have a cell in them. If no delimiter is better, also for a table with one column, it is a comma.
    """
    sample = list(first_lines(lines))
    delimiter_line = _DELIMITER_LINE.fullmatch(sample[0][1]) if sample else None
    if delimiter_line:
        del sample[0]
        delimiter = delimiter or delimiter_line[1]
    texts = [text for _, text in sample]
    quality: dict[Dialect, tuple[float, int]] = {}
    for character, mark in itertools.product(delimiter or ",;\t|", quote or "\"'"):
        rows: list[list[str]] = []
        try:  # strict: an apostrophe at the beginning of a text is no quote
            for cells in csv.reader(texts, delimiter=character, quotechar=mark, strict=mark == "'"):
                rows += [cells] if cells else []
        except csv.Error as error:
            if "end of data" not in str(error):  # the sample ends within a text
                continue
        if rows and (len(rows[0]) > 1 or delimiter is not None):
            share = sum(len(cells) == len(rows[0]) for cells in rows) / len(rows)
            border = re.escape(character)
            ends = (f"(^|{border}){mark}", f"{mark}({border}|\r?\n?$)")
            quoted = min(sum(bool(re.search(end, text)) for text in texts) for end in ends)
            if quoted or mark == quote or mark == '"':
                quality[Dialect(character, mark)] = share, (2 * (2 * quoted >= len(rows)) if mark == "'" else 1)
    default = Dialect(delimiter or ",", quote or '"')
    return max(quality, key=quality.__getitem__, default=default), itertools.chain(sample, lines)


def _csv_rows(path: Path, lines: Iterator[Line], dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line, and the cells, of each row that is not empty. Raises DataError."""
    csv.field_size_limit(MAX_LINE)  # Python's default of 128 KiB is less than some texts have
    first_number, first_text = next(lines, (1, ""))
    texts = itertools.chain([first_text], (line for _, line in lines))
    reader = csv.reader(texts, **dialect._asdict(), strict=True)
    number = first_number
    try:
        for cells in reader:
            if cells:
                yield number, cells
            number = first_number + reader.line_num
    except csv.Error as error:
        kind, mark = {"'": "single"}.get(dialect.quotechar, "double"), dialect.quotechar
        raise DataError(
            f"{path}, line {number}: not valid CSV: {error}; look for a {kind} quote that is not closed or not doubled "
            f"({mark}{mark})"
        ) from None


def _table_records(path: Path, rows: Iterable[tuple[int, list[str]]], remedy: str, *, header: bool) -> Iterator[Record]:
    """Yield the records of a table; without a ``header`` its columns are named 1, 2, 3 …"""
    names: list[str] = []
    for number, cells in rows:
        if not names:
            if len(cells) > MAX_COLUMNS:
                raise DataError(f"{path}, line 1: has {len(cells):,} columns; at most {MAX_COLUMNS:,} are possible")
            names = [str(place) for place in range(1, len(cells) + 1)]
            if header:
                repeated = next((name for name, count in Counter(cells).items() if count > 1 and name), None)
                if repeated is not None:
                    raise DataError(
                        f"{path}, line 1: column {format_names([repeated])!r} occurs twice; rename one of them"
                    )
                names = [name or f"column {place}" for place, name in enumerate(cells, start=1)]
                continue
        if len(cells) != len(names):
            first = "the header" if header else "the first row"
            columns = f"{len(cells)} columns, but {first} has {len(names)} ({format_names(names)})"
            raise DataError(f"{path}, line {number}: has {columns}; {remedy}")
        yield f"{path}, line {number}", dict(zip(names, cells, strict=True))


def hub_rows(source: HubSource) -> Any:
    """Load the library's data set, with its fingerprint, of a hub source or a local folder. Raises DataError."""
    with needs_extra("train", f"{source.title}: reading it"):
        import datasets
    try:
        return datasets.load_dataset(source.name, source.config, split=source.split, revision=source.revision)
    except Exception as error:  # the library raises many unrelated types
        raise DataError(
            f"{source.title}: cannot be loaded: {type(error).__name__}: {first_line(error)}; check "
            "name, config and split, or give local files instead: --data DIR, or a source of kind: file"
        ) from None


def first_line(error: Exception) -> str:
    """Return the first line of a library's error message."""
    return (str(error).splitlines() or [""])[0].strip()


def chosen_records(records: Iterator[Record], where: Mapping[str, Sequence[str]]) -> Iterator[Record]:
    """Yield the records that have one of the stated values in each column of ``where``. Raises DataError: no column."""
    for place, values in records:
        for column in where:
            if column not in values:
                hint = f"{did_you_mean(column, list(values))}columns: {format_names(values)}"
                raise DataError(f"{place}: no column {column!r}; {hint}; correct where: of the source")
        if all(str(values[column]) in chosen for column, chosen in where.items()):
            yield place, values


def class_records(rows: Any, where: str, labels: Sequence[str]) -> Iterator[Record]:
    """Yield the records of a library's data set. In class columns -1 means "unlabelled".

    ``labels``: of the recipe. A class column with the same names in another order is read by name.
    """
    class_names: dict[str, list[str]] = {
        column: list(feature.names)
        for column, feature in (rows.features or {}).items()
        if type(feature).__name__ == "ClassLabel"
    }
    for number, values in enumerate(rows, start=1):
        read_as: dict[str, object] = {}
        for column, names in class_names.items():
            value = values.get(column)
            if isinstance(value, int) and value < 0:
                read_as[column] = None
            elif isinstance(value, int) and value < len(names) and set(names) == set(labels):
                read_as[column] = names[value]
        yield f"{where}, row {number}", {**values, **read_as}
