"""Files that are not UTF-8: read as stated, refused with the likely encoding, the same data as in UTF-8."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.main import get_command

from edgeformer.artifacts.data_config import FileSource, stated
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.cli.app import app
from edgeformer.data.column_detection import guess
from edgeformer.data.records import WITH_OPTION, likely_encoding
from edgeformer.data.sources import Columns, read
from edgeformer.training.init import DraftOptions, draft
from tests.cli.run_cli import edgeformer

OLD = Path(__file__).parents[1] / "old_format"
GERMAN = "Die Rechnung für März ist größer als üblich, bitte prüfen."


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (GERMAN, "cp1252"),
        ("Le café était très agréable, à côté de la forêt ; où est le garçon ?", "cp1252"),
        ("El niño comió una piña en la mañana. ¿Cómo está usted?", "cp1252"),
        ("It’s a “fine” film – really…", "cp1252"),
        ("Zażółć gęślą jaźń, proszę o fakturę za miesiąc.", "cp1250"),
        ("Это хороший фильм, мне понравилось.", "cp1251"),
        ("これは良い映画です。とても面白かった。", "shift-jis"),
        (GERMAN, "utf-16"),
        (GERMAN, "utf-16-le"),
        (GERMAN, "utf-16-be"),
    ],
)
def test_the_likely_encoding_is_named(tmp_path: Path, text: str, encoding: str) -> None:
    content = f"text\tlabel\n{text}\t1\n{text}\t0\n".encode(encoding)
    assert likely_encoding(content) == encoding
    (tmp_path / "a.tsv").write_bytes(content)
    remedy = (
        rf"likely {encoding}: save the file as UTF-8, or .*--encoding {encoding} \(.*encoding: {encoding} in a recipe"
    )
    with pytest.raises(DataError, match=remedy):
        list(read(FileSource(kind="file", path=str(tmp_path / "a.tsv"))))
    source = FileSource(kind="file", path=str(tmp_path / "a.tsv"), encoding=encoding)
    assert [(row.text, row.label) for row in read(source)] == [(text, "1"), (text, "0")]


def test_bytes_that_no_encoding_fits_get_the_remedy_only(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\nx\x81\xff\xfe\x00\x9d\x01\x02\x8f,1\n")
    with pytest.raises(DataError, match=r"line 2: not UTF-8 text \(byte 2 of the line is 0x81\); .*encoding"):
        list(read(FileSource(kind="file", path=str(tmp_path / "a.csv"))))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.txt", "a.csv.gz"])
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "UTF8"])
def test_every_format_of_text_in_every_encoding(tmp_path: Path, name: str, encoding: str) -> None:
    line = json.dumps({"text": GERMAN, "label": "a"}, ensure_ascii=False)
    texts = {
        "csv": f'text,label\r\n"{GERMAN}",a\r\n',
        "tsv": f"text\tlabel\n{GERMAN}\ta\n",
        "jsonl": line,
        "txt": GERMAN,
    }
    content = texts[name.split(".")[1]].encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    label = {"label_value": "a", "label": None} if name == "a.txt" else {}
    source = FileSource(kind="file", path=str(tmp_path / name), encoding=encoding, **label)
    assert [(row.text, row.label) for row in read(source)] == [(GERMAN, "a")]


def test_what_is_not_in_the_stated_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\n" + b"x\x81,1\n" * 30_000)
    with pytest.raises(DataError, match=r"a\.csv: not cp1252 text \(.*byte"):
        list(read(FileSource(kind="file", path=str(tmp_path / "a.csv"), encoding="cp1252")))


@pytest.mark.parametrize("name", ["cp9", "base64", "rot13", "", "a\0b"])
def test_unknown_encodings(name: str) -> None:
    with pytest.raises(ValueError, match="is no known text encoding"):
        FileSource(kind="file", path="a.csv", encoding=name)
    with pytest.raises(InputError, match=r"--encoding .*: is no known text encoding"):
        Columns(encoding=name)


def test_the_names_of_caches_stay_where_no_encoding_is_stated() -> None:
    plain = FileSource(kind="file", path="a.csv")
    assert "encoding" not in stated(plain.model_dump(mode="json"))
    assert "encoding" in stated(plain.model_copy(update={"encoding": "cp1252"}).model_dump(mode="json"))


def test_a_recipe_of_such_a_file_states_its_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"Größe Nummer {n} für alle;{('gut', 'übel')[n % 2]}\n" for n in range(40))
    Path("de.csv").write_bytes(f"Text;Kategorie\n{rows}".encode("cp1252"))
    with pytest.raises(DataError, match="--encoding cp1252 "):
        guess(Path("de.csv"), Columns())
    found = draft(Path("de.csv"), DraftOptions(columns=Columns(encoding="cp1252")))
    assert (
        "encoding: cp1252" in found.text and [*found.guess.labels] == ["gut", "übel"] and sum(found.rows.values()) == 40
    )


def test_evaluate_reads_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "de.csv").write_bytes("text;label\nschön und größer;positive\nübel;negative\n".encode("utf-16"))
    run = ("evaluate", str(OLD / "classifier-v1"), "--data", "de.csv", "--json")
    outcome = edgeformer(*run, "--encoding", "utf-16", cwd=tmp_path)
    assert outcome.code == 0 and json.loads(outcome.out)["rows"][0]["n"] == 2, outcome.err
    refused = edgeformer(*run, cwd=tmp_path)
    assert refused.code == 2 and "it is likely utf-16: save the file" in refused.err
    lone = edgeformer("evaluate", str(OLD / "classifier-v1"), "--encoding", "utf-16", cwd=tmp_path)
    assert lone.code == 2 and "--encoding: are of a file" in lone.err


def test_the_remedy_names_the_commands_that_have_the_option() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    have = [name for name, command in commands.items() if any("--encoding" in option.opts for option in command.params)]
    assert sorted(have) == [*WITH_OPTION]
