"""``predict``: answers, errors of single texts, early exit, imports; ``--file``: formats, order, bounded memory."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.row_files import TableRow
from edgeformer.data.rows import Row
from edgeformer.data.unlabelled import WINDOW_ROWS, Unlabelled, windows
from edgeformer.inference import predict_file as module
from edgeformer.inference.predict import Predictor, open_predictor, predict
from edgeformer.inference.predict_file import predict_file
from edgeformer.run import Location, locate
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks.task import Unanswered
from tests.cli.run_cli import Outcome, edgeformer
from tests.conftest import OLD_FORMAT

CLASSIFIER = OLD_FORMAT / "classifier-v1"
TEXTS = ["good film", "", "dull and long, and dull", '=cmd|"x"!A1', "<br>", "very " * 60 + "good"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and the texts in several formats."""
    folder = tmp_path_factory.mktemp("file")
    shutil.copytree(CLASSIFIER, folder / "artifacts" / "small")
    with (folder / "in.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *([f"{number}", text] for number, text in enumerate(TEXTS))])
    (folder / "clash.csv").write_text("text,label,input_label\ngood film,x,y\n", encoding="utf-8")
    lines = [json.dumps({"text": text or None}) for text in TEXTS]
    (folder / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "in.txt").write_text("\ufeff" + "\r\n".join(TEXTS), encoding="utf-8", newline="")
    return folder


@pytest.fixture(scope="module")
def model() -> Iterator[Predictor]:
    with open_predictor(locate(str(CLASSIFIER), CLASSIFIER.parent)) as model:
        yield model


def run_predict(folder: Path, *arguments: str, code: int = 3, stdin: str = "") -> Outcome:
    """Run ``predict small``; the default exit code is that of texts without an answer."""
    outcome = edgeformer("predict", "small", *arguments, cwd=folder, stdin=stdin)
    assert outcome.code == code, outcome.err
    return outcome


def refused(folder: Path, *arguments: str, stdin: str = "") -> str:
    """Run ``predict small`` with bad input; return the message."""
    return " ".join(run_predict(folder, *arguments, code=2, stdin=stdin).err.split())


def parse_lines(outcome: Outcome) -> list[TableRow]:
    return [json.loads(line) for line in outcome.out.splitlines()]


def check_rows(rows: Sequence[TableRow]) -> None:
    """Compare rows with ``predict``. Probabilities depend a little on the other texts of a batch."""
    answers = [answer.as_dict() for answer in predict(locate(str(CLASSIFIER), CLASSIFIER.parent), TEXTS)[1]]
    for row, answer in zip(rows, answers, strict=True):
        for name in ("text", "label", "truncated", "error"):
            assert row.get(name) == answer.get(name)
        assert row.get("probability") == pytest.approx(answer.get("probability"), abs=1e-5)


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl", "in.txt"])
def test_input_formats(folder: Path, name: str) -> None:
    rows = parse_lines(run_predict(folder, "--file", name, "--format", "jsonl"))
    check_rows(rows)
    check_rows(json.loads(run_predict(folder, "--file", name, "--json").out)["predictions"])
    summary = json.loads(run_predict(folder, "--file", name, "--json", "--output", "x.jsonl").out)
    assert (summary["rows"], summary["errors"], summary["truncated"]) == (6, 2, 1)
    assert rows[1]["error"] == "the text is empty" and "label" not in rows[1]
    assert rows[4]["error"] == "cleaning removes the whole text"


def test_parquet_in_and_out(folder: Path) -> None:
    run_predict(folder, "--file", "in.csv", "--output", "out.parquet")
    table = parquet.read_table(folder / "out.parquet")
    types = {field.name: str(field.type) for field in table.schema}
    assert types == {
        "id": "string", "text": "string", "label": "string", "probability": "double",
        "probabilities": "struct<negative: double, positive: double>", "truncated": "bool", "error": "string",
    }  # fmt: skip
    check_rows(table.to_pylist())
    run_predict(folder, "--file", "out.parquet", "--output", "second.parquet")
    schema = parquet.read_table(folder / "second.parquet").schema
    assert str(schema.field("input_probabilities").type) == types["probabilities"] and "input_text" not in schema.names
    assert schema.names[:3] == ["id", "text", "input_label"]
    assert str(schema.field("input_probability").type) == "double"
    check_rows(parse_lines(run_predict(folder, "--file", "out.parquet", "--format", "jsonl")))


def test_csv_output_contains_no_formulas(folder: Path) -> None:
    run_predict(folder, "--file", "in.csv", "--output", "deep/out.csv")
    rows = list(csv.DictReader(io.StringIO((folder / "deep" / "out.csv").read_text(encoding="utf-8"))))
    assert list(rows[0]) == ["id", "text", "label", "probability", "probabilities", "truncated", "error"]
    assert rows[3]["text"] == f"'{TEXTS[3]}" and rows[1]["label"] == "" and rows[5]["truncated"] == "true"
    assert json.loads(rows[0]["probabilities"]).keys() == {"negative", "positive"}


def test_standard_input(folder: Path) -> None:
    rows = parse_lines(run_predict(folder, "--file", "-", "--format", "jsonl", stdin="good film\n\ndull\n"))
    assert [row["text"] for row in rows] == ["good film", "", "dull"]
    options = ("--file", "-", "--input-format", "csv", "--text", "b", "--format", "jsonl")
    (row,) = parse_lines(run_predict(folder, *options, code=0, stdin="a,b\nx,good\n"))
    assert row["text"] == "good"
    message = refused(folder, "--file", "-", "--input-format", "csv", stdin="text,b\nx\n")
    assert message.startswith("error: standard input, line 2: has 1 columns")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--file", "in.csv", "--text", "txt"), "no column 'txt'"),
        (("--file", "in.txt", "--text", "text"), "is plain text"),
        (("--file", "in.csv", "--pair", "id"), "reads single texts"),
        (("--file", "in.csv", "--output", "in.csv"), "is also the input of --file"),
        (("--file", "in.csv", "--output", "out.xml"), "the suffix names no format"),
        (("--file", "in.csv", "--output", "artifacts"), "is a folder"),
        (("--file", "in.csv", "--format", "xml"), "Invalid value for '--format'"),
        (("--file", "in.csv", "--format", "parquet"), "give --output FILE"),
        (("--file", "in.csv", "--json", "--format", "csv"), "prints one JSON document"),
        (("--file", "in.csv", "--top", "3"), "--top: is the number of ranked texts; add --query TEXT"),
        (("--file", "none.csv"), "did you mean 'in.csv'?"),
        (("--file", "in.csv", "a text"), "excludes the text"),
        (("--file", "in.txt", "--format", "csv", "--columns", "a"), "in.txt is plain text without columns"),
        (("--columns", "a", "a text"), "--columns: is for a file of texts; add --file FILE"),
        (("--output", "x.csv", "a text"), "--output: is for a file of texts; add --file"),
        (("--text", "x", "a text"), "--text: describes a file"),
        (("--file", "in.csv", "--format", "csv", "--columns", "idd"), "has no column 'idd'; did you mean 'id'?"),
        (("--file", "clash.csv", "--format", "csv"), "which the answers have too, and 'input_label'"),
        (("--file", "in.csv", "--encoding", "cp9"), "--encoding cp9: is not a text encoding"),
    ],
)
def test_bad_options(folder: Path, options: tuple[str, ...], message: str) -> None:
    outcome = run_predict(folder, *options, code=2)
    assert message in " ".join(outcome.err.split()), outcome.err
    assert outcome.out == "" or json.loads(outcome.out)["exit_code"] == 2


def test_a_file_that_breaks_later_leaves_no_output(folder: Path) -> None:
    (folder / "broken.csv").write_text("text\n" + "good film\n" * 5000 + "a,b\n", encoding="utf-8")
    assert "broken.csv, line 5002" in refused(folder, "--file", "broken.csv", "--output", "b.jsonl")
    document = run_predict(folder, "--file", "broken.csv", "--json", code=2)
    assert json.loads(document.out)["exit_code"] == 2
    assert not [path for path in folder.iterdir() if "b.jsonl" in path.name]


COMMAND = [sys.executable, "-m", "edgeformer", "predict", str(CLASSIFIER), "--file", "-", "--output", "out.jsonl"]


def start_and_wait(folder: Path, stdin: bytes) -> subprocess.Popen[bytes]:
    """Start ``predict --file -`` without ending its input; wait until it has written what it can."""
    child = subprocess.Popen(COMMAND, cwd=folder, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(stdin)
    child.stdin.flush()
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size or not stdin for path in folder.glob(".out.jsonl.*.tmp*")):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.02)
    return child


def test_a_killed_process_leaves_no_output(tmp_path: Path) -> None:
    child = start_and_wait(tmp_path, b"good film\n" * (4 * WINDOW_ROWS))
    child.kill()
    child.communicate()
    assert not (tmp_path / "out.jsonl").exists() and list(tmp_path.glob(".out.jsonl.*.tmp*"))
    second = subprocess.run(COMMAND, cwd=tmp_path, input=b"good film\n", capture_output=True, check=True)
    assert b"1 rows in" in second.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to one process")
@pytest.mark.parametrize("stdin", [b"", b"good film\n" * (3 * WINDOW_ROWS)])
def test_ctrl_c_ends_a_wait_for_standard_input(tmp_path: Path, stdin: bytes) -> None:
    child = start_and_wait(tmp_path, stdin)
    time.sleep(0.5)  # until all threads wait
    child.send_signal(signal.SIGINT)
    try:
        assert child.wait(10) == 130
    finally:
        child.kill()
        errors = child.communicate()[1].decode()
    assert "Fatal" not in errors and not list(tmp_path.iterdir()), errors


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE")
def test_a_closed_pipe_ends_the_command_quietly(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"good film\n" * (3 * WINDOW_ROWS))
    command = [*COMMAND[:5], "--file", "in.txt", "--format", "jsonl"]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline().startswith(b'{"text": "good film"')
    child.stdout.close()
    assert child.stderr is not None and child.stderr.read() == b"" and child.wait(60) == 141
    child.stderr.close()


class CountingFile:
    """Produces texts and takes answers, and records how many texts were read but not yet written."""

    def __init__(self, rows: int, error: Exception | None = None) -> None:
        self.rows, self.error = rows, error
        self.read = self.written = self.max_pending = 0
        self.texts_written: list[object] = []

    def texts(self) -> Iterator[Row]:
        for number in range(self.rows):
            self.read += 1
            self.max_pending = max(self.max_pending, self.read - self.written)
            yield Row(f"{'very ' * (number % 5)}good film {number}")

    def write(self, rows: Sequence[TableRow]) -> None:
        if self.error is not None:
            raise self.error
        self.written += len(rows)
        self.texts_written += [row["text"] for row in rows]

    def close(self) -> None:
        pass


def test_memory_is_bounded_and_order_is_kept(model: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "windows", lambda rows: windows(rows, most_rows=64))
    file = CountingFile(4000)
    assert predict_file(model, Unlabelled("test", False, None, file.texts), file).rows == 4000
    assert file.texts_written == [row.text for row in CountingFile(4000).texts()]
    # Windows that are being read, run and written, one that waits for the model, and one in each of two queues.
    assert file.max_pending <= 7 * 64


def test_an_error_in_any_thread_ends_all_threads(model: Predictor) -> None:
    def broken_texts() -> Iterator[Row]:
        yield from [Row("good")] * (WINDOW_ROWS + 1)
        raise DataError("line 9: broken")

    threads = threading.active_count()
    cases: list[tuple[Callable[[], Iterator[Row]], CountingFile, type[Exception], str]] = [
        (broken_texts, CountingFile(0), DataError, "line 9: broken"),
        (CountingFile(20_000).texts, CountingFile(0, OSError(28, "No space left on device")), OSError, "No space"),
    ]
    for texts, writer, error, message in cases:
        with pytest.raises(error, match=message):
            predict_file(model, Unlabelled("test", False, None, texts), writer)
    assert threading.active_count() == threads


def read_csv(path: Path) -> tuple[bytes, list[dict[str, str]]]:
    content = path.read_bytes()
    return content, list(csv.DictReader(io.StringIO(content.decode("utf-8-sig")), delimiter=";"))


def test_columns_delimiter_and_byte_order_mark_are_kept(folder: Path) -> None:
    (folder / "de.csv").write_text(
        "\ufeffNr;comment;label;Datum\n7;good film;gut;=1+1\n8;dull;schlecht;2.1.\n", encoding="utf-8"
    )
    options = ("--file", "de.csv", "--text", "comment")
    run_predict(folder, *options, "--output", "de_out.csv", code=0)
    content, rows = read_csv(folder / "de_out.csv")
    assert content.startswith(b"\xef\xbb\xbfNr;comment;input_label;Datum;text;label;probability;")
    assert [(row["Nr"], row["comment"], row["text"], row["input_label"]) for row in rows] == [
        ("7", "good film", "good film", "gut"), ("8", "dull", "dull", "schlecht"),
    ]  # fmt: skip
    assert rows[0]["Datum"] == "'=1+1" and rows[0]["label"] in ("positive", "negative")
    selected = parse_lines(run_predict(folder, *options, "--format", "jsonl", "--columns", "Datum,Nr", code=0))
    assert list(selected[1])[:3] == ["Datum", "Nr", "text"]
    without = run_predict(folder, *options, "--format", "csv", "--columns", "none", code=0).out
    assert without.lstrip("\ufeff").startswith("text;label;probability;")


def test_keys_of_json_lines_are_kept(folder: Path) -> None:
    rows = [{"text": "good film", "n": [1, {"a": float("nan")}]}, {"text": "dull", "error": "\ud800", "more": 1.5}]
    (folder / "keys.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ("--file", "keys.jsonl")
    first, second = parse_lines(run_predict(folder, *options, "--format", "jsonl", code=0))
    assert first["n"] == [1, {"a": None}] and list(first)[:2] == ["text", "n"]
    assert second["input_error"] == "\ud800" and second["more"] == 1.5 and "error" not in second
    message = refused(folder, *options, "--output", "keys.csv")
    assert "keys.jsonl, line 2: has the key 'error', which the first record lacks" in message
    assert not (folder / "keys.csv").exists()
    run_predict(folder, *options, "--output", "keys.csv", "--columns", "n", code=0)
    assert (folder / "keys.csv").read_text(encoding="utf-8").startswith("n,text,label")
    run_predict(folder, *options, "--output", "keys.parquet", "--columns", "n", code=0)
    assert parquet.read_table(folder / "keys.parquet")["n"].to_pylist() == ['[1, {"a": null}]', None]


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_encodings(folder: Path, encoding: str) -> None:
    (folder / "enc.csv").write_bytes("Nr;text\n1;schön und größer\n2;café\n".encode(encoding))
    run_predict(folder, "--file", "enc.csv", "--encoding", encoding, "--output", "enc_out.csv", code=0)
    content, rows = read_csv(folder / "enc_out.csv")
    assert [row["text"] for row in rows] == ["schön und größer", "café"]
    assert content.startswith(b"\xef\xbb\xbf") == (encoding == "utf-16")  # UTF-16 has a byte order mark
    (folder / "enc.txt").write_bytes("größer\ncafé\n".encode(encoding))
    lines = run_predict(folder, "--file", "enc.txt", "--encoding", encoding, "--format", "jsonl", code=0)
    assert [row["text"] for row in parse_lines(lines)] == ["größer", "café"]
    unstated = ("--file", "enc.csv", "--output", "enc_out.csv")
    if encoding == "utf-16":  # its byte order mark states it
        run_predict(folder, *unstated, code=0)
        assert read_csv(folder / "enc_out.csv") == (content, rows)
    else:
        assert "it is likely cp1252, which reads '1;schön und größer'" in refused(folder, *unstated)


OVERFLOW = "the model's answer is not a number (overflow)"


@pytest.fixture
def location() -> Location:
    return locate(str(CLASSIFIER), OLD_FORMAT)


def answers_of(location: Location, texts: list[Any], **options: Any) -> list[Any]:
    return list(predict(location, texts, **options)[1])


def test_a_prediction_is_the_likeliest_label(finished_run: Path) -> None:
    location = locate(str(finished_run), finished_run.parent)
    predictions = answers_of(location, ["Wonderful!!! <br /> I loved it", "terrible, awful, boring " * 40])
    assert [prediction.truncated for prediction in predictions] == [False, True]
    for prediction in predictions:
        probabilities: dict[str, float] = prediction.probabilities
        assert prediction.label == max(probabilities, key=probabilities.__getitem__)
        assert prediction.probability == max(probabilities.values())
        assert sum(probabilities.values()) == pytest.approx(1.0)


def test_texts_without_an_answer_have_an_error_and_no_text_is_refused(location, edgeformer):
    empty, answer = answers_of(location, [" ", "a"])
    assert isinstance(empty, Unanswered) and np.isfinite(answer.probability)
    document = json.loads(edgeformer("predict", str(CLASSIFIER), "", "--json", code=3))
    assert document["predictions"] == [{"text": "", "error": "the text is empty"}]
    table = edgeformer("predict", str(CLASSIFIER), "", "good film", code=3)
    assert "the text is empty" in table and "good film" in table
    assert "error" not in edgeformer("predict", str(CLASSIFIER), "good film")
    with pytest.raises(InputError, match="there is no text"):
        predict(location, [])
    with pytest.raises(InputError, match=r"is a language model.*edgeformer generate"):
        predict(locate(str(OLD_FORMAT / "language-v1"), OLD_FORMAT), ["a text"])


def test_an_overflow_is_an_error_and_no_label(tmp_path, monkeypatch, edgeformer):
    """Graphs return NaN and infinity for the longer text."""
    run_session = OnnxSession.run

    def run(session: OnnxSession, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = run_session(session, inputs)
        outputs["logits"][inputs["attention_mask"].sum(axis=1) > 12] = np.nan, np.inf
        return outputs

    monkeypatch.setattr(OnnxSession, "run", run)
    texts = ["a fine film", "long " * 12, "", "dull"]
    predictions = json.loads(edgeformer("predict", str(CLASSIFIER), *texts, "--json", code=3))["predictions"]
    errors = [prediction.get("error") for prediction in predictions]
    assert errors == [None, OVERFLOW, "the text is empty", None]
    assert {prediction.get("label", "none") for prediction in predictions} <= {"positive", "negative", "none"}
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    options = ("--file", str(file), "--output", str(tmp_path / "out.csv"), "--json")
    assert json.loads(edgeformer("predict", str(CLASSIFIER), *options, code=3))["errors"] == 2
    assert OVERFLOW in (tmp_path / "out.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize("confidence", [0.0, 0.5001, 1.0])
def test_texts_leave_a_step_artifact_at_the_confidence(location: Location, confidence: float) -> None:
    texts = ["a fine film", "dull and long", "neither good nor bad, and much too long for its own good"]
    artifact, answers = predict(location, texts, confidence=confidence)
    assert artifact == "onnx-fp32-step"
    first, last = (answers_of(location, texts, artifact=name) for name in ("onnx-fp32-exit1", "onnx-fp32"))
    for answer, early, late in zip(answers, first, last, strict=True):
        leaves = early.probability >= confidence
        assert answer.as_dict()["loops"] == (1 if leaves else 2)
        assert answer.as_dict()["probability"] == pytest.approx((early if leaves else late).probability, abs=1e-5)


NOT_NEEDED = (
    "torch", "datasets", "matplotlib", "jinja2", "rich", "safetensors", "accelerate", "pynvml", "yaml", "tabulate",
    "edgeformer.report", "edgeformer.models", "edgeformer.training", "edgeformer.benchmark", "edgeformer.measurement",
    "edgeformer.runtimes.tensorrt",
)  # fmt: skip

PROGRAM = f"""
import sys
from edgeformer.cli import main
try:
    main()
finally:
    print([name for name in {NOT_NEEDED!r} if name in sys.modules], file=sys.stderr)
"""


def test_an_answer_imports_only_what_it_needs() -> None:
    """Imports take most of the time until the first answer."""
    arguments = ["predict", str(CLASSIFIER / "bundle"), "a fine film", "--json"]
    result = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["predictions"][0]["text"] == "a fine film"
    assert result.stderr.strip() == "[]"
