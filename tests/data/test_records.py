"""Files of every format, layout, compression and encoding, and hub data sets; what is broken is reported."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.main import get_command

from edgeformer.artifacts.data_config import FileSource, HubSource
from edgeformer.artifacts.errors import DataError, InputError, MissingDependencyError
from edgeformer.cli.app import app
from edgeformer.data.column_detection import detect_columns
from edgeformer.data.records import WITH_OPTION, detect_dialect, likely_encodings
from edgeformer.data.rows import Row
from edgeformer.data.sources import Columns, read
from edgeformer.training.init import DraftOptions, draft
from tests.data.conftest import write
from tests.data.test_bombs import PACKERS

GERMAN = "Die Rechnung für März ist größer als üblich, bitte prüfen."


def source(path: Path, **settings: Any) -> FileSource:
    return FileSource.model_validate({"kind": "file", "path": str(path), **settings})


def rows(path: Path, **settings: Any) -> list[tuple[object, object, str]]:
    """Return text, label and place of every row."""
    return [(row.text, row.label, row.where.rpartition(", ")[2]) for row in read(source(path, **settings))]


def failure(path: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        rows(path, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_format_has_its_own_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", 'label\ttext\n1\t"so" good\u2028still\r\n\n0\tbad, bad\n')
    first, second = Row('"so" good\u2028still', "1", f"{path}, line 2"), Row("bad, bad", "0", f"{path}, line 4")
    assert [*read(source(path))] == [first, second], "no quotes, and only newlines end a row"
    lines = [{"text": "a", "label": 1}, {"text": "b", "label": "neg"}, {"text": "c", "label": 0.0}]
    path = write(tmp_path, "a.jsonl", b"\xef\xbb\xbf" + "\n".join(map(json.dumps, lines)).encode())
    assert [label for _, label, _ in rows(path)] == [1, "neg", 0]
    path = write(tmp_path, "a.txt", "one\n\n two\n")
    assert rows(path, label_value="pos") == [("one", "pos", "line 1"), (" two", "pos", "line 3")]
    assert "label_value" in failure(path)


def test_csv_has_quotes_and_rows_begin_at_their_first_line(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", '\ufefftext;label\r\n"two ""2"";\r\nlines";1\r\n\r\nlast;0\r\n')
    assert rows(path) == [('two "2";\r\nlines', "1", "line 2"), ("last", "0", "line 5")]
    broken = write(tmp_path, "b.csv", 'text;label\nfine;1\n"open;1\nand\nso on;1\n')
    assert "b.csv, line 3: not valid CSV" in failure(broken)
    assert rows(write(tmp_path, "c.csv", "sep=;\r\ntext;label\r\na, b;1\r\n")) == [("a, b", "1", "line 3")]
    samples = (
        (["text\n", "one, two; three\n"], ","),  # one column
        (["name, first;text;label\n", "a;b, c;d\n", "e, f, g;h;i\n"], ";"),
        (["text;label\n", "nice, really, yes;good\n"], ";"),
        (["a|b\n", "x|y\n"], "|"),
        ([], ","),
    )
    assert [detect_dialect(enumerate(lines))[0].delimiter for lines, _ in samples] == [mark for _, mark in samples]
    path = write(tmp_path, "d.csv", ";text;label;\n0;fine;1;\n")
    assert rows(path) == [("fine", "1", "line 2")]
    assert rows(path, text="column 1") == [("0", "1", "line 2")]


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".bz2"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_broken_compressed_files(tmp_path: Path, suffix: str, is_cut: bool) -> None:
    packed = PACKERS[suffix](b"text\tlabel\n" + b"fine\t1\n" * 5000)
    path = write(tmp_path, f"a.tsv{suffix}", packed[: len(packed) // 2] if is_cut else b"text\tlabel\nno\t1\n")
    message = failure(path)
    assert str(path) in message and "broken or incomplete" in message


def test_missing_file_and_column_get_the_nearest_name(tmp_path: Path) -> None:
    path = write(tmp_path, "train.tsv", "label\tsentence\n1\tfine\n")
    assert "did you mean 'train.tsv'" in failure(tmp_path / "tran.tsv")
    assert "no folder" in failure(tmp_path / "nowhere" / "a.tsv") and "is a folder" in failure(tmp_path)
    assert "no column 'sentense'; did you mean 'sentence'? columns: label, sentence" in failure(path, text="sentense")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"text": "a", "label": 1}\n{"txt": "b", "label": 1}\n', "line 2: no column 'text'"),
        ("a.tsv", "text\tlabel\nfine\t1\textra\n", "line 2: has 3 columns, but the header has 2"),
        ("a.csv", "text,label\nfine, really,1\n", "line 2: has 3 columns, but the header has 2"),
        ("a.csv", 'text,label\n"open,1\n', "line 2: not valid CSV"),
        ("a.csv", "text,text\na,b\n", "column 'text' occurs twice"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": \n', "line 2: not valid JSON"),
        ("a.jsonl", "[1, 2]\n", "line 1: must be a JSON object"),
        ("a.jsonl", "[" * 100_000, "line 1: not valid JSON"),
        ("a.jsonl", '{"text": 3, "label": 1}\n', "line 1: column 'text' has a value of type int"),
        ("a.jsonl", '{"text": "a\\ud800", "label": 1}\n', "surrogate"),
        ("a.jsonl", '{"text": "a", "label": [1]}\n', "column 'label' has a value of type list"),
        ("a.tsv", b"text\tlabel\nca\xe9\t1\n", "line 2: not UTF-8 text (byte 3 of the line is 0xe9)"),
        ("a.tsv", "", "no rows"),
        ("a.tsv", "text\tlabel\n", "no rows"),
        ("a.tsv", "text\tlabel\nfine\t\n", "skip_unlabelled: true"),
        ("a.jsonl", '{"text": "a", "label": NaN}\n', "skip_unlabelled: true"),
        ("a.dat", "text\tlabel\n", "format:"),
    ],
)  # fmt: skip
def test_errors_name_their_place(tmp_path: Path, name: str, content: str | bytes, expected: str) -> None:
    path = write(tmp_path, name, content)
    message = failure(path)
    assert message.startswith(str(path)) and expected in message


def test_unlabelled_rows_are_skipped_on_request(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"text": "a", "label": null}\n{"text": "b", "label": 1}\n')
    assert rows(path, skip_unlabelled=True) == [("b", 1, "line 2")]
    assert rows(path, skip_unlabelled=True, label_value="good") == [("b", "good", "line 2")]
    unlabelled = write(tmp_path, "b.jsonl", '{"text": "a", "label": null}\n')
    assert "no labelled rows" in failure(unlabelled, skip_unlabelled=True)


def test_where_keeps_rows_by_the_values_of_other_columns(tmp_path: Path) -> None:
    lines = [{"text": text, "label": 1, "shop": shop} for text, shop in (("a", "books"), ("b", 7), ("c", "dvd"))]
    path = write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines)))
    assert [text for text, _, _ in rows(path, where={"shop": ["books", 7]})] == ["a", "b"]
    assert [text for text, _, _ in rows(path, where={"shop": "dvd"}, label=None)] == ["c"]
    assert "has no rows with shop toys" in failure(path, where={"shop": "toys"})
    message = "line 1: no column 'shops'; did you mean 'shop'? columns: text, label, shop; correct where:"
    assert message in failure(path, where={"shops": "dvd"})
    with pytest.raises(ValidationError, match="must be a text or number, or a list of them"):
        source(path, where={"shop": []})


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ";"), ("a.tsv", "\t"), ("a.txt", "|"), ("a", ",")])
def test_columns_without_header_are_numbered(tmp_path: Path, name: str, delimiter: str) -> None:
    path = write(tmp_path, name, f"good{delimiter}fine film\nbad{delimiter}dull film\n")
    layout = {} if name in ("a.csv", "a.tsv") else {"delimiter": delimiter}
    expected = [("fine film", "good", "line 1"), ("dull film", "bad", "line 2")]
    assert rows(path, header=False, text=2, label=1, **layout) == expected
    assert rows(path, header=False, text=2, label_value="x", **layout)[0] == ("fine film", "x", "line 1")
    assert "no column '3'" in failure(path, header=False, text=1, label=3, **layout)
    message = "the format jsonl has no delimiter, quote and header"
    assert message in failure(write(tmp_path, "a.jsonl", "{}"), delimiter=";")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"header": False}, "use their numbers from 1 (text: 1, label: 2) instead of 'text'"),
        ({"header": False, "format": "jsonl"}, "header applies to tables of text, but format is jsonl"),
        ({"delimiter": ";", "format": "tsv"}, "set format: csv"),
        ({"quote": "'", "format": "tsv"}, "set format: csv"),
        ({"text": True}, "valid string"),
    ],
)
def test_contradictory_layouts_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        source(Path("a.csv"), **settings)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (GERMAN, "cp1252"),
        ("Le café était très agréable, à côté de la forêt ; où est le garçon ?", "cp1252"),
        ("It’s a “fine” film – really…", "cp1252"),
        ("You have won a £1000 prize! It costs £5.", "cp1252"),
        ("Zażółć gęślą jaźń, proszę o fakturę za miesiąc.", "cp1250"),
        ("Это хороший фильм, мне понравилось.", "cp1251"),
        ("これは良い映画です。とても面白かった。", "shift-jis"),
        (GERMAN, "utf-16-le"),
    ],
)
def test_likely_encoding_is_suggested(tmp_path: Path, text: str, encoding: str) -> None:
    path = write(tmp_path, "a.tsv", f"text\tlabel\n{text}\t1\n{text}\t0\n".encode(encoding))
    assert likely_encodings(path.read_bytes())[0] == encoding
    message = failure(path)
    assert f"likely {encoding}, which reads '" in message and ": save the file as UTF-8, or " in message
    assert f"--encoding {encoding} (" in message and f"encoding: {encoding} of the source in a recipe" in message
    assert [row[:2] for row in rows(path, encoding=encoding)] == [(text, "1"), (text, "0")]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_with_a_byte_order_mark_is_read(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path, "a.csv", f"\ufefftext;label\n{GERMAN};1\n".encode(encoding))
    assert [row[:2] for row in rows(path)] == [(GERMAN, "1")]
    assert detect_columns(write(tmp_path, "b.csv", path.read_bytes() + f"{GERMAN};0\n".encode(encoding) * 3), Columns())


# Quotes around every text, or only where they are needed.
QUOTED = "Sport;'Er sagte: \"Ja; nein\", und ''nie'' mehr'\r\nWeb;'Zwei\nZeilen; kurz'\r\nSport;'Drei, vier'\r\n" * 5


@pytest.mark.parametrize("unquoted", [0, 40])
def test_delimiter_and_quotes_are_detected_together(tmp_path: Path, unquoted: int) -> None:
    path = write(tmp_path, "a.csv", QUOTED + "Web;kurz, aber's reicht'\r\n" * unquoted)
    first = "Er sagte: \"Ja; nein\", und 'nie' mehr"
    expected = [(first, "Sport"), ("Zwei\nZeilen; kurz", "Web"), ("Drei, vier", "Sport")] * 5
    expected += [("kurz, aber's reicht'", "Web")] * unquoted
    result = detect_columns(path, Columns())
    assert (result.source.delimiter, result.source.quote, result.source.header) == (";", "'", False)
    assert [(row.text, row.label) for row in read(result.source)] == expected
    assert [row[:2] for row in rows(path, header=False, text=2, label=1)] == expected, "a recipe without the keys"
    assert detect_columns(path, Columns(delimiter="semicolon", quote="single")).source == result.source
    plain = write(tmp_path, "b.csv", "text,label\n'tis good, really,1\nfine,1\nit's bad,0\n" + "dull,0\n" * 9)
    assert "line 2: has 3 columns" in failure(plain), "an apostrophe at the beginning of a text is no quote"


def test_messages_show_little_data(tmp_path: Path) -> None:
    header = ";".join(f"{number} {'long text ' * 9}" for number in range(30))
    message = failure(write(tmp_path, "b.csv", f"{header}\n{'long text ' * 99};b\n"))
    assert "has 2 columns, but the header has 30 (0 long text" in message and "(30 in all)" in message
    assert message.count("long text") < 20 and "--delimiter and --quote (init, search)" in message
    for option, value in (("delimiter", "x"), ("quote", "`")):
        with pytest.raises(InputError, match=f"--{option} {value}: write "):
            Columns(**{option: value})
    line = f"{'so ' * 20}you won \u00a31000 {'call now ' * 20},spam\n".encode("cp1252")
    message = failure(write(tmp_path, "a.csv", b"text,label\n" + line))
    shown = [f"o {'so ' * 5}you won {sign}1000 call now call now c" for sign in "£Ł"]
    assert f"likely cp1252, which reads {shown[0]!r}, or cp1250, which reads {shown[1]!r}: save" in message
    message = failure(write(tmp_path, "a.csv", b"text,label\nx\x81\xff\xfe\x00\x9d\x01\x02\x8f,1\n"))
    assert "line 2: not UTF-8 text (byte 2 of the line is 0x81); " in message and "encoding" in message
    message = failure(write(tmp_path, "b.csv", b"text,label\n" + b"x\x81,1\n" * 30_000), encoding="cp1252")
    assert "b.csv, line 2: not CP1252 text (byte 2 of the line is 0x81)" in message


@pytest.mark.data
def test_public_files_as_people_have_them(data_folder: Path) -> None:
    own = data_folder / "own"
    if not own.is_dir():
        pytest.skip(f"{own} is not here")
    message = failure(own / "sms_spam_cp1252.csv", text="v2", label="v1")
    assert "it is likely cp1252, which reads '" in message and "£1.50" in message and "Ł1.50" in message
    german = detect_columns(own / "gnad_1028_single_quotes.csv", Columns())
    assert (german.source.quote, german.rows, len(german.labels), german.labels["Etat"]) == ("'", 1028, 9, 67)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.txt", "a.csv.gz"])
def test_text_formats_in_every_encoding(tmp_path: Path, name: str) -> None:
    line = json.dumps({"text": GERMAN, "label": "a"}, ensure_ascii=False)
    contents = {"csv": f'text,label\r\n"{GERMAN}",a\r\n', "tsv": f"text\tlabel\n{GERMAN}\ta\n", "jsonl": line}
    settings = {"label_value": "a", "label": None} if name == "a.txt" else {}
    for encoding in ("latin-1", "utf-16", "UTF8"):
        content = contents.get(name.split(".")[1], GERMAN).encode(encoding)
        path = write(tmp_path, name, gzip.compress(content) if name.endswith("gz") else content)
        assert [row[:2] for row in rows(path, encoding=encoding, **settings)] == [(GERMAN, "a")]


@pytest.mark.parametrize("name", ["cp9", "base64", "rot13", "", "a\0b"])
def test_unknown_encodings_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a text encoding"):
        source(Path("a.csv"), encoding=name)
    with pytest.raises(InputError, match=r"--encoding .*: is not a text encoding"):
        Columns(encoding=name)


def test_drafted_recipe_states_the_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = "".join(f"Größe Nummer {n} für alle;{('gut', 'übel')[n % 2]}\n" for n in range(40))
    Path("de.csv").write_bytes(f"Text;Kategorie\n{lines}".encode("cp1252"))
    with pytest.raises(DataError, match="--encoding cp1252 "):
        detect_columns(Path("de.csv"), Columns())
    result = draft(Path("de.csv"), DraftOptions(columns=Columns(encoding="cp1252")))
    assert "encoding: cp1252" in result.text
    assert [*result.guess.labels] == ["gut", "übel"] and sum(result.rows.values()) == 40


def test_suggested_commands_have_the_encoding_option() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    options = {name: {option for part in command.params for option in part.opts} for name, command in commands.items()}
    assert sorted(name for name in options if "--encoding" in options[name]) == [*WITH_OPTION]
    for name in ("init", "search"):  # of the message for rows of another length
        assert {"--delimiter", "--quote"} <= options[name]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, offline."""
    library = pytest.importorskip("datasets")
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return library


def write_classes(datasets: Any, path: Path, labels: list[int]) -> None:
    names = datasets.ClassLabel(names=["negative", "positive"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    texts = [f"text {number}" for number in range(len(labels))]
    datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features).to_parquet(path)


def labels_of(source: FileSource | HubSource, labels: tuple[str, ...] = ("negative", "positive")) -> list[object]:
    return [row.label for row in read(source, labels)]


def test_parquet_is_read_with_its_class_names(datasets: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write_classes(datasets, path, [1, 0, 1])
    assert [row[0] for row in rows(path)] == ["text 0", "text 1", "text 2"]
    assert [*read(source(path))][1].where == f"{path}, row 2"
    # If the recipe has the same names in another order, names decide; other names leave the numbers.
    assert labels_of(source(path), ("positive", "negative")) == ["positive", "negative", "positive"]
    assert labels_of(source(path), ("bad", "good")) == [1, 0, 1]
    assert "train.parquet: cannot be read as Parquet" in failure(write(tmp_path, "train.parquet", b"PAR1 no"))


def test_local_data_set_folder_is_a_hub_source(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "reviews").mkdir()
    write_classes(datasets, tmp_path / "reviews" / "train.parquet", [1, 0, -1])
    write_classes(datasets, tmp_path / "reviews" / "test.parquet", [0])
    hub = HubSource(kind="hub", name=str(tmp_path / "reviews"), split="train", skip_unlabelled=True)
    assert labels_of(hub) == ["positive", "negative"]
    assert labels_of(hub.model_copy(update={"split": "test"})) == ["negative"]
    with pytest.raises(DataError, match=r"row 3: has no label.*skip_unlabelled"):  # -1 means "unlabelled"
        labels_of(hub.model_copy(update={"skip_unlabelled": False}))
    with pytest.raises(DataError, match="split nonsense: cannot be loaded"):
        labels_of(hub.model_copy(update={"split": "nonsense"}))
    with pytest.raises(DataError, match=r"no column 'texts'; did you mean 'text'"):
        labels_of(hub.model_copy(update={"text": "texts"}))
    (tmp_path / "tables").mkdir()
    write(tmp_path / "tables", "train.csv", "text,label\nfine,1\nbad,0\n")
    assert labels_of(HubSource(kind="hub", name=str(tmp_path / "tables"))) == [1, 0]


def test_hub_source_without_the_library_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "\.\[train\]" in the clone'):
        labels_of(HubSource(kind="hub", name="nyu-mll/glue"))
