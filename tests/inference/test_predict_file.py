"""predict --file: any number of texts in bounded memory, answered in order, written whole or not at all."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from edgeformer.artifacts.data_config import FileSource
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.row_files import Row
from edgeformer.data.sources import Columns
from edgeformer.data.unlabelled import WINDOW_ROWS, InputRow, Reading, Unlabelled, unlabelled, windows
from edgeformer.inference import predict_file as module
from edgeformer.inference.predict import Model, opened, predict
from edgeformer.inference.predict_file import ahead, predict_file
from edgeformer.run import locate
from edgeformer.tasks.task import Answer, Unanswered
from tests.cli.run_cli import Outcome, edgeformer

OLD = Path(__file__).parents[1] / "old_format"
TEXTS = ["good film", "", "dull and long, and dull", '=cmd|"x"!A1', "<br>", "very " * 60 + "good"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run lies, and the texts in every format."""
    made = tmp_path_factory.mktemp("file")
    shutil.copytree(OLD / "classifier-v1", made / "artifacts" / "small")
    with (made / "in.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["id", "text"], *([f"{number}", text] for number, text in enumerate(TEXTS))])
    lines = [json.dumps({"text": text or None}) for text in TEXTS]
    (made / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (made / "in.txt").write_text("\ufeff" + "\r\n".join(TEXTS), encoding="utf-8", newline="")
    return made


def done(folder: Path, *arguments: str, code: int = 3, stdin: str = "") -> Outcome:
    outcome = edgeformer("predict", "small", *arguments, cwd=folder, stdin=stdin)
    assert outcome.code == code, outcome.err
    return outcome


def expected(texts: Sequence[str] = TEXTS) -> list[Row]:
    return [answer.as_dict() for answer in predict(locate(str(OLD / "classifier-v1"), OLD), texts)[1]]


def same(found: list[Row], texts: Sequence[str] = TEXTS) -> None:
    """Answers in order; probabilities depend a little on what else is in the batch."""
    wanted = expected(texts)
    assert [row["text"] for row in found] == [row["text"] for row in wanted]
    assert [row.get("error") for row in found] == [row.get("error") for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        assert row.get("label") == other.get("label") and row.get("truncated") == other.get("truncated")
        assert row.get("probability") == pytest.approx(other.get("probability"), abs=1e-5)


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl", "in.txt"])
def test_every_format_in(folder: Path, name: str) -> None:
    out = done(folder, "--file", name, "--format", "jsonl").out
    same([json.loads(line) for line in out.splitlines()])


def test_an_empty_text_has_an_error_and_no_label() -> None:
    found = expected()
    assert found[1] == {"text": "", "error": "the text is empty"}
    assert found[4] == {"text": "<br>", "error": "nothing is left of the text when it is cleaned"}


def test_plain_texts_have_it_too(folder: Path) -> None:
    table = done(folder, "", "good film").out
    assert "the text is empty" in table and "good film" in table
    document = json.loads(done(folder, "", "--json").out)
    assert document["predictions"] == [{"text": "", "error": "the text is empty"}]
    assert done(folder, "good film", code=0).out.count("error") == 0


def test_parquet_in_and_out(folder: Path) -> None:
    done(folder, "--file", "in.csv", "--output", "out.parquet")
    table = parquet.read_table(folder / "out.parquet")
    types = {field.name: str(field.type) for field in table.schema}
    assert types == {
        "id": "string", "text": "string", "label": "string", "probability": "double",
        "probabilities": "struct<negative: double, positive: double>", "truncated": "bool", "error": "string",
    }  # fmt: skip
    rows = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
    same(rows)
    done(folder, "--file", "out.parquet", "--output", "again.parquet")
    again = parquet.read_table(folder / "again.parquet").schema
    assert str(again.field("input_probabilities").type) == types["probabilities"] and "input_text" not in again.names
    assert again.names[:3] == ["id", "text", "input_label"] and str(again.field("input_probability").type) == "double"
    again = done(folder, "--file", "out.parquet", "--format", "jsonl").out
    same([json.loads(line) for line in again.splitlines()])


def test_csv_out_is_no_program(folder: Path) -> None:
    done(folder, "--file", "in.csv", "--output", "deep/out.csv")
    rows = list(csv.DictReader(io.StringIO((folder / "deep" / "out.csv").read_text(encoding="utf-8"))))
    assert list(rows[0]) == ["id", "text", "label", "probability", "probabilities", "truncated", "error"]
    assert rows[3]["text"] == f"'{TEXTS[3]}" and rows[1]["label"] == "" and rows[5]["truncated"] == "true"
    assert json.loads(rows[0]["probabilities"]).keys() == {"negative", "positive"}


def test_the_table_has_one_line_for_each_and_cuts_long_texts(folder: Path) -> None:
    out = done(folder, "--file", "in.csv").out
    lines = out.splitlines()
    assert lines[0] == "classifier-v1 · onnx-fp32" and lines[1].split() == ["label", "probability", "text"]
    assert len(lines) == 3 + len(TEXTS) and max(map(len, lines)) <= 140
    assert lines[3].split()[0] == "negative" and lines[3].endswith("  good film")
    assert lines[4].split(maxsplit=2) == ["–", "–", "the text is empty"]
    assert lines[8].endswith("very…") or lines[8].endswith("…")


def test_one_json_document(folder: Path) -> None:
    document = json.loads(done(folder, "--file", "in.csv", "--json").out)
    assert document["run"] == "classifier-v1" and document["artifact"] == "onnx-fp32"
    same(document["predictions"])
    summary = json.loads(done(folder, "--file", "in.csv", "--json", "--output", "x.jsonl").out)
    assert (summary["rows"], summary["errors"], summary["truncated"]) == (6, 2, 1)


def test_standard_input(folder: Path) -> None:
    lines = done(folder, "--file", "-", "--format", "jsonl", stdin="good film\n\ndull\n").out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["good film", "", "dull"]
    table = done(folder, "--file", "-", "--input-format", "csv", "--text", "b", "--format", "jsonl", code=0,
                 stdin="a,b\nx,good\n")  # fmt: skip
    assert json.loads(table.out)["text"] == "good"
    bad = edgeformer("predict", "--file", "-", "--input-format", "csv", cwd=folder, stdin="text,b\nx\n")
    assert bad.code == 2 and bad.err.startswith("error: standard input, line 2: has 1 columns")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--file", "in.csv", "--text", "txt"), "no column 'txt'"),
        (("--file", "in.txt", "--text", "text"), "is read as plain text"),
        (("--file", "in.csv", "--pair", "id"), "was trained on single texts"),
        (("--file", "in.csv", "--output", "in.csv"), "is the file of --file"),
        (("--file", "in.csv", "--output", "out.xml"), "its suffix does not tell the format"),
        (("--file", "in.csv", "--output", "artifacts"), "is a folder"),
        (("--file", "in.csv", "--format", "xml"), "is none of table, jsonl, csv, parquet"),
        (("--file", "in.csv", "--format", "parquet"), "give --output FILE"),
        (("--file", "in.csv", "--json", "--format", "csv"), "is one document"),
        (("--file", "in.csv", "--nearest", "in.txt"), "--nearest: is for single texts"),
        (("--file", "none.csv"), "did you mean 'in.csv'?"),
        (("--file", "in.csv", "a text"), "is one too many"),
        (("--output", "x.csv", "a text"), "--output: belongs to --file"),
        (("--text", "x", "a text"), "--text: names a column"),
    ],
)
def test_what_goes_wrong_is_said(folder: Path, options: tuple[str, ...], said: str) -> None:
    outcome = edgeformer("predict", "small", *options, cwd=folder)
    assert outcome.code == 2 and said in " ".join(outcome.err.split()), outcome.err
    assert outcome.out == "" or json.loads(outcome.out)["exit_code"] == 2


def test_a_file_that_breaks_later_leaves_no_output(folder: Path) -> None:
    (folder / "broken.csv").write_text("text\n" + "good film\n" * 5000 + "a,b\n", encoding="utf-8")
    outcome = edgeformer("predict", "small", "--file", "broken.csv", "--output", "b.jsonl", cwd=folder)
    assert outcome.code == 2 and "broken.csv, line 5002" in outcome.err
    document = edgeformer("predict", "small", "--file", "broken.csv", "--json", cwd=folder)
    assert json.loads(document.out)["exit_code"] == 2
    assert not [path for path in folder.iterdir() if "b.jsonl" in path.name]


def test_a_cell_that_is_no_text_has_its_own_error_and_a_long_one_an_answer(folder: Path) -> None:
    values = ["good film", 7, None, [1], "\ud800x", "dull"]
    (folder / "odd.jsonl").write_text("\n".join(json.dumps({"text": value}) for value in values), encoding="utf-8")
    with unlabelled(folder / "odd.jsonl", io.BytesIO(), Reading({})) as given:
        found = [answer.as_dict() for answer in predict_texts(given)]
    assert ["label" in row for row in found] == [True, False, False, False, False, True]
    assert found[1] == {"text": "7", "error": "column 'text' holds an int; it must hold text"}
    assert found[2]["error"] == "the text is empty" and "holds a list" in str(found[3]["error"])
    assert found[4]["text"] == '"\\ud800x"' and "surrogate" in str(found[4]["error"])
    (folder / "long.csv").write_text(f"id,text\n1,good film\n2,{'very ' * 30_000}\n3,dull\n", encoding="utf-8")
    with unlabelled(folder / "long.csv", io.BytesIO(), Reading({})) as given:
        answers = predict_texts(given)
    assert [answer.as_dict()["truncated"] for answer in answers] == [False, True, False]


def predict_texts(given: Unlabelled) -> list[Answer]:
    with opened(locate(str(OLD / "classifier-v1"), OLD)) as model:
        window = model.answering.read(list(given.texts()))
        return model.answering.answers(window, model.answering.run(model.run, window))


def test_killed_midway_it_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "edgeformer", "predict", str(OLD / "classifier-v1"), "--file", "-"]
    child = subprocess.Popen(
        [*command, "--output", "out.jsonl"], cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin is not None
    child.stdin.write(b"good film\n" * (4 * WINDOW_ROWS))  # and its end never comes
    child.stdin.flush()
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob(".out.jsonl.*.tmp*")):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.02)
    child.kill()
    child.communicate()
    assert not (tmp_path / "out.jsonl").exists() and list(tmp_path.glob(".out.jsonl.*.tmp*"))
    after = subprocess.run(
        [*command, "--output", "out.jsonl"], cwd=tmp_path, input=b"good film\n", capture_output=True, check=True
    )
    assert b"1 rows in" in after.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to one process")
@pytest.mark.parametrize("given", [b"", b"good film\n" * (3 * WINDOW_ROWS)])
def test_interrupted_while_it_waits_for_standard_input_it_ends_at_once(tmp_path: Path, given: bytes) -> None:
    command = [sys.executable, "-m", "edgeformer", "predict", str(OLD / "classifier-v1"), "--file", "-"]
    child = subprocess.Popen(
        [*command, "--output", "out.jsonl"], cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin is not None and child.stderr is not None
    child.stdin.write(given)
    child.stdin.flush()
    deadline = time.monotonic() + 60
    while not (found := [path.stat().st_size for path in tmp_path.glob(".out.jsonl.*.tmp*")]) or (
        given and not any(found)
    ):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.02)
    time.sleep(0.5)  # its threads wait by now
    child.send_signal(signal.SIGINT)
    try:
        assert child.wait(10) == 130
    finally:
        child.kill()
        said = child.communicate()[1].decode()
    assert "Fatal" not in said and not list(tmp_path.iterdir()), said


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE")
def test_a_reader_that_has_enough_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"good film\n" * (3 * WINDOW_ROWS))
    command = [sys.executable, "-m", "edgeformer", "predict", str(OLD / "classifier-v1"), "--file", "in.txt"]
    child = subprocess.Popen(
        [*command, "--format", "jsonl"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline().startswith(b'{"text": "good film"')
    child.stdout.close()
    assert child.stderr is not None and child.stderr.read() == b"" and child.wait(60) == 141
    child.stderr.close()


class Watched:
    """Texts and answers that know how far apart they are."""

    def __init__(self, rows: int) -> None:
        self.rows, self.read, self.written, self.most = rows, 0, 0, 0
        self.texts_out: list[object] = []

    def texts(self) -> Iterator[InputRow]:
        for number in range(self.rows):
            self.read += 1
            self.most = max(self.most, self.read - self.written)
            yield InputRow(f"{'very ' * (number % 5)}good film {number}")

    def write(self, rows: Sequence[Row]) -> None:
        self.written += len(rows)
        self.texts_out += [row["text"] for row in rows]

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with opened(locate(str(OLD / "classifier-v1"), OLD)) as found:
        yield found


def test_it_never_holds_more_than_a_few_windows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "windows", lambda rows: windows(rows, most_rows=64))
    watched = Watched(4000)
    found = predict_file(model, Unlabelled("made", False, None, watched.texts), watched)
    assert watched.texts_out == [row.text for row in Watched(4000).texts()] and found.rows == 4000
    # Being written, answered, waiting to be answered, read; and one that waits in each of two queues.
    assert watched.most <= 7 * 64


def test_windows_are_bounded_by_characters_too() -> None:
    def sizes(row: InputRow, rows: int, most_rows: int, characters: int) -> list[int]:
        return [len(window) for window in windows([row] * rows, most_rows, characters)]

    assert sizes(InputRow("a" * 10), 7, 3, 1000) == [3, 3, 1]
    assert sizes(InputRow("a" * 10), 4, 100, 20) == [2, 2]
    assert sizes(InputRow(("a", "b" * 30)), 3, 100, 20) == [1, 1, 1]
    assert sizes(InputRow("a", values={"text": "a", "kept": "b" * 30}), 3, 100, 20) == [1, 1, 1]


def test_an_error_of_any_thread_ends_it(model: Model) -> None:
    def texts() -> Iterator[InputRow]:
        yield from [InputRow("good")] * (WINDOW_ROWS + 1)
        raise DataError("line 9: broken")

    before = threading.active_count()
    with pytest.raises(DataError, match="line 9: broken"):
        predict_file(model, Unlabelled("made", False, None, texts), Watched(0))

    class Full(Watched):
        def write(self, rows: Sequence[Row]) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        predict_file(model, Unlabelled("made", False, None, Watched(20_000).texts), Full(0))
    assert threading.active_count() == before


def test_what_runs_ahead_stops_when_nobody_takes_it() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(10**9):
            made.append(number)
            yield number

    items = ahead(numbers())
    assert [next(items), next(items)] == [0, 1]
    items.close()
    count = len(made)
    time.sleep(0.05)
    assert len(made) == count <= 5


def test_columns_are_those_of_the_models_own_data(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("sentence1,sentence2,body,text\na,b,c,d\n", encoding="utf-8")
    pairs = FileSource(kind="file", path="x", text="sentence1", text_pair="sentence2")
    body = FileSource(kind="file", path="x", text="body")

    def texts(how: Reading) -> list[object]:
        with unlabelled(path, io.BytesIO(), how) as given:
            return list(given.texts())

    assert texts(Reading({"train": (pairs,)})) == [("a", "b")]
    assert texts(Reading({"train": (body,)})) == ["c"]
    assert texts(Reading({"train": (pairs,)}, single=True)) == ["d"]
    assert texts(Reading({"train": (pairs,)}, Columns(text="text"))) == ["d"]
    assert texts(Reading({"train": (body,)}, Columns(text="text", text_pair="body"))) == [("d", "c")]
    with pytest.raises(InputError, match=r"--text text, or --text sentence1 --pair sentence2"):
        texts(Reading({}))


def test_an_unanswered_text_is_said_in_python_too() -> None:
    found = predict(locate(str(OLD / "classifier-v1"), OLD), [" ", "a"])[1]
    assert [isinstance(answer, Unanswered) for answer in found] == [True, False]
    assert np.isfinite(found[1].probability)  # type: ignore[attr-defined]


@pytest.mark.skipif(
    not hasattr(os, "mkfifo"), reason="this system has no named pipes, and makes links with a right only"
)
def test_links_and_pipes_are_not_replaced(folder: Path) -> None:
    (folder / "real.jsonl").write_text("kept", encoding="utf-8")
    (folder / "link.jsonl").symlink_to("real.jsonl")
    os.mkfifo(folder / "pipe.jsonl")
    for name in ("link.jsonl", "pipe.jsonl"):
        refused = edgeformer("predict", "small", "--file", "in.csv", "--output", name, cwd=folder)
        assert refused.code == 2 and "is a link or a device" in refused.err
    assert (folder / "link.jsonl").is_symlink() and (folder / "real.jsonl").read_text(encoding="utf-8") == "kept"


def csv_of(path: Path) -> tuple[bytes, list[dict[str, str]]]:
    content = path.read_bytes()
    text = content.decode("utf-8-sig")
    return content, list(csv.DictReader(io.StringIO(text), delimiter=";"))


def test_columns_delimiter_and_byte_order_mark_are_kept(folder: Path) -> None:
    (folder / "de.csv").write_text(
        "\ufeffNr;comment;label;Datum\n7;good film;gut;=1+1\n8;dull;schlecht;2.1.\n", encoding="utf-8"
    )
    done(folder, "--file", "de.csv", "--text", "comment", "--output", "de_out.csv", code=0)
    content, rows = csv_of(folder / "de_out.csv")
    assert content.startswith(b"\xef\xbb\xbfNr;comment;input_label;Datum;text;label;probability;")
    assert [(row["Nr"], row["comment"], row["text"], row["input_label"]) for row in rows] == [
        ("7", "good film", "good film", "gut"), ("8", "dull", "dull", "schlecht"),
    ]  # fmt: skip
    assert rows[0]["Datum"] == "'=1+1" and rows[0]["label"] in ("positive", "negative")
    some = done(folder, "--file", "de.csv", "--text", "comment", "--format", "jsonl", "--columns", "Datum,Nr", code=0)
    assert list(json.loads(some.out.splitlines()[1]))[:3] == ["Datum", "Nr", "text"]
    none = done(folder, "--file", "de.csv", "--text", "comment", "--format", "csv", "--columns", "none", code=0)
    assert none.out.lstrip("\ufeff").startswith("text;label;probability;")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--columns", "Dtum"), "has no column 'Dtum'; did you mean 'Datum'? columns: text, Datum, label, input_label"),
        (
            ("--columns", "all"),
            "'label' is the name of a column of the answers, and 'input_label' is in the input, too",
        ),
        (("--format", "table", "--columns", "Datum"), "--columns: a table for the terminal has the texts only"),
    ],
)
def test_columns_that_cannot_be_kept(folder: Path, options: tuple[str, ...], said: str) -> None:
    (folder / "clash.csv").write_text("text,Datum,label,input_label\ngood film,1,x,y\n", encoding="utf-8")
    outcome = edgeformer("predict", "small", "--file", "clash.csv", "--format", "jsonl", *options, cwd=folder)
    assert outcome.code == 2 and said in " ".join(outcome.err.split()), outcome.err
    plain = edgeformer("predict", "small", "--file", "in.txt", "--format", "csv", "--columns", "a", cwd=folder)
    assert plain.code == 2 and "in.txt is plain text, which has no columns" in plain.err
    single = edgeformer("predict", "small", "good film", "--columns", "a", cwd=folder)
    assert single.code == 2 and "--columns: belongs to --file FILE" in single.err


def test_keys_of_json_lines_are_kept_as_they_are(folder: Path) -> None:
    rows = [{"text": "good film", "n": [1, {"a": float("nan")}]}, {"text": "dull", "error": "\ud800", "more": 1.5}]
    (folder / "keys.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    out = done(folder, "--file", "keys.jsonl", "--format", "jsonl", code=0).out
    first, second = map(json.loads, out.splitlines())
    assert first["n"] == [1, {"a": None}] and list(first)[:2] == ["text", "n"]
    assert second["input_error"] == "\ud800" and second["more"] == 1.5 and "error" not in second
    outcome = edgeformer("predict", "small", "--file", "keys.jsonl", "--output", "keys.csv", cwd=folder)
    assert outcome.code == 2 and "keys.jsonl, line 2: has the key 'error', which the first record lacks" in outcome.err
    assert not (folder / "keys.csv").exists()
    done(folder, "--file", "keys.jsonl", "--output", "keys.csv", "--columns", "n", code=0)
    assert (folder / "keys.csv").read_text(encoding="utf-8").startswith("n,text,label")
    done(folder, "--file", "keys.jsonl", "--output", "keys.parquet", "--columns", "n", code=0)
    assert parquet.read_table(folder / "keys.parquet")["n"].to_pylist() == ['[1, {"a": null}]', None]


@pytest.mark.parametrize(
    ("name", "content", "records"),
    [
        ("n.csv", 'id,text\n1,"one\ntext\n\nin lines"\n\n2,two\n', 2),
        ("n.csv", 'sep=;\nid;text\n1;"one;\ntext"\n2;two', 2),
        ("n.tsv", "id\ttext\n1\tone\n\n2\ttwo\n", 2),
        ("n.jsonl", '{"text": "one"}\n\n  \n{"text": "two"}\n{"text": "three"}', 3),
        ("n.txt", "one\n\ntwo", 3),
        ("n.csv", 'id,text\n1,"not closed\n', 1),
    ],
)
@pytest.mark.parametrize("encoding", [None, "utf-16"])
def test_progress_counts_records(tmp_path: Path, name: str, content: str, records: int, encoding: str | None) -> None:
    (tmp_path / name).write_bytes(content.encode(encoding or "utf-8"))
    how = Reading({}, Columns(encoding=encoding))
    with contextlib.suppress(DataError), unlabelled(tmp_path / name, io.BytesIO(), how) as given:
        assert given.expected == records
        assert given.expected == len(list(given.rows()))


def test_an_encoding_can_be_stated(folder: Path) -> None:
    text = "Nr;text\n1;schön und größer\n2;café\n"
    for encoding in ("cp1252", "utf-16"):
        (folder / "enc.csv").write_bytes(text.encode(encoding))
        done(folder, "--file", "enc.csv", "--encoding", encoding, "--output", "enc_out.csv", code=0)
        content, rows = csv_of(folder / "enc_out.csv")
        assert [row["text"] for row in rows] == ["schön und größer", "café"]
        assert content.startswith(b"\xef\xbb\xbf") == (encoding == "utf-16")  # which has a byte order mark
        (folder / "enc.txt").write_bytes("größer\ncafé\n".encode(encoding))
        lines = done(folder, "--file", "enc.txt", "--encoding", encoding, "--format", "jsonl", code=0).out
        assert [json.loads(line)["text"] for line in lines.splitlines()] == ["größer", "café"]
        refused = edgeformer("predict", "small", "--file", "enc.csv", "--output", "enc_out.csv", cwd=folder)
        assert (
            refused.code == 2
            and f"it is likely {encoding}: save the file as UTF-8, or state its encoding: --encoding {encoding} ("
            in refused.err
        )
    unknown = edgeformer("predict", "small", "--file", "enc.csv", "--encoding", "cp9", "--json", cwd=folder)
    assert unknown.code == 2 and "--encoding cp9: is no known text encoding; examples: utf-8, cp1252" in unknown.err
    other = edgeformer("predict", "small", "--file", "enc.csv", "--encoding", "shift_jis", cwd=folder)
    assert other.code == 2 and "enc.csv: not shift_jis text (" in other.err
