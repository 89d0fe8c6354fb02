import bz2
import gzip
import json
import lzma
import subprocess
import sys

import pytest

from edgeformer.artifacts.data_config import DataConfig, FileSource, HubSource, SyntheticSource
from edgeformer.artifacts.errors import DataError
from edgeformer.data.rows import Row
from edgeformer.data.sources import local_parts, read


def source(path, **settings) -> FileSource:
    return FileSource(kind="file", path=str(path), **settings)


def rows(path, **settings) -> list[Row]:
    return list(read(source(path, **settings)))


def failure(path, **settings) -> str:
    with pytest.raises(DataError) as caught:
        rows(path, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_tsv_has_no_quoting_and_only_newlines_end_a_row(tmp_path):
    path = write(tmp_path, "a.tsv", 'label\ttext\n1\t"so" good\u2028still\r\n\n0\tbad, bad\n')
    assert rows(path) == [
        Row('"so" good\u2028still', "1", f"{path}, line 2"),
        Row("bad, bad", "0", f"{path}, line 4"),
    ]


def test_csv_has_quoting(tmp_path):
    path = write(tmp_path, "a.csv", 'text,label\n"a ""b"",\nc",1\nd,0\n')
    assert [(row.text, row.label) for row in read(source(path))] == [('a "b",\nc', "1"), ("d", "0")]


def test_jsonl_keeps_the_types_of_labels(tmp_path):
    lines = [{"text": "a", "label": 1}, {"text": "b", "label": "neg"}, {"text": "c", "label": 0.0}]
    path = write(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lines)))
    assert [row.label for row in read(source(path))] == [1, "neg", 0]


def test_plain_text_needs_a_label_for_all(tmp_path):
    path = write(tmp_path, "a.txt", "one\n\n two\n")
    assert [(row.text, row.label) for row in read(source(path, label_value="pos"))] == [
        ("one", "pos"),
        (" two", "pos"),
    ]
    assert "label_value" in failure(path)


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".bz2"])
@pytest.mark.parametrize("stem", ["tsv", "jsonl"])
def test_compressed_files_are_read(tmp_path, stem, suffix):
    content = b"text\tlabel\nfine\t1\n" if stem == "tsv" else b'{"text": "fine", "label": "1"}\n'
    pack = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress}[suffix]
    path = write(tmp_path, f"a.{stem}{suffix}", pack(content))
    assert [(row.text, row.label) for row in read(source(path))] == [("fine", "1")]


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".bz2"])
@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_broken_compressed_files(tmp_path, suffix, damage):
    pack = {".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress}[suffix]
    whole = pack(b"text\tlabel\n" + b"fine\t1\n" * 5000)
    path = write(tmp_path, f"a.tsv{suffix}", whole[: len(whole) // 2] if damage == "cut" else b"text\tlabel\nno\t1\n")
    message = failure(path)
    assert str(path) in message
    assert "broken or incomplete" in message


def test_reading_is_streaming(tmp_path):
    path = write(tmp_path, "a.tsv", b"text\tlabel\nfine\t1\n\xff\xfe\t1\n")
    found = read(source(path))
    assert next(found).text == "fine"
    with pytest.raises(DataError, match="line 3"):
        next(found)


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    for name, content in (
        ("a.tsv", "text\tlabel\nx\t1\n"),
        ("a.csv", "text,label\nx,1\n"),
        ("a.jsonl", '{"text":"x","label":1}'),
    ):
        assert [row.text for row in read(source(write(tmp_path, name, b"\xef\xbb\xbf" + content.encode())))] == ["x"]


def test_missing_file_suggests_the_nearest_name(tmp_path):
    write(tmp_path, "train.tsv", "x")
    message = failure(tmp_path / "tran.tsv")
    assert "tran.tsv" in message
    assert "did you mean 'train.tsv'" in message
    assert "no folder" in failure(tmp_path / "nowhere" / "a.tsv")
    assert "is a folder" in failure(tmp_path)


def test_missing_columns_are_named_with_what_there_is(tmp_path):
    path = write(tmp_path, "a.tsv", "label\tsentence\n1\tfine\n")
    message = failure(path, text="sentense")
    assert "no column 'sentense'" in message
    assert "did you mean 'sentence'" in message
    assert "label, sentence" in message
    assert "label:" in failure(path, text="sentence", label="stars")
    jsonl = write(tmp_path, "a.jsonl", '{"text": "a", "label": 1}\n{"txt": "b", "label": 1}\n')
    assert "line 2" in failure(jsonl)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.tsv", "text\tlabel\nfine\t1\textra\n", "line 2: has 3 columns, the header 2"),
        ("a.csv", "text,label\nfine, really,1\n", "line 2: has 3 columns, the header 2"),
        ("a.csv", 'text,label\n"open,1\n', "line 2: not valid CSV"),
        ("a.csv", "text,text\na,b\n", "column 'text' is there twice"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": \n', "line 2: not valid JSON"),
        ("a.jsonl", "[1, 2]\n", "line 1: must be a JSON object"),
        ("a.jsonl", "[" * 100_000, "line 1: not valid JSON"),
        ("a.jsonl", '{"text": 3, "label": 1}\n', "line 1: column 'text' holds an int"),
        ("a.jsonl", '{"text": null, "label": 1}\n', "line 1: column 'text' holds nothing"),
        ("a.jsonl", '{"text": "a\\ud800", "label": 1}\n', "surrogate"),
        ("a.jsonl", '{"text": "a", "label": [1]}\n', "column 'label' holds a list"),
        ("a.tsv", b"text\tlabel\nca\xe9\t1\n", "line 2: not UTF-8 text (byte 3 of the line is 0xe9)"),
        ("a.tsv", "text\tlabel\nx\t1\n".encode("utf-16"), "it is likely utf-16"),
        ("a.tsv", "", "no rows"),
        ("a.tsv", "text\tlabel\n", "no rows"),
        ("a.jsonl", "\n\n", "no rows"),
        ("a.tsv", "text\tlabel\nfine\t\n", "skip_unlabelled: true"),
        ("a.jsonl", '{"text": "a", "label": null}\n', "skip_unlabelled: true"),
        ("a.jsonl", '{"text": "a", "label": NaN}\n', "skip_unlabelled: true"),
        ("a.dat", "text\tlabel\n", "format:"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(tmp_path, name, content, expected):
    path = write(tmp_path, name, content)
    message = failure(path)
    assert message.startswith(str(path))
    assert expected in message


def test_unlabelled_rows_are_skipped_on_request(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"text": "a", "label": null}\n{"text": "b", "label": 1}\n')
    assert [row.text for row in read(source(path, skip_unlabelled=True))] == ["b"]
    only = write(tmp_path, "b.jsonl", '{"text": "a", "label": null}\n')
    assert "no labelled rows" in failure(only, skip_unlabelled=True)
    alike = source(path, skip_unlabelled=True, label_value="good")
    assert [row.text for row in read(alike)] == ["b"], "rows that nobody labelled are left out, also of one label"


def test_label_value_stands_for_the_column(tmp_path):
    path = write(tmp_path, "a.csv", "text\nfine\n")
    assert [row.label for row in read(source(path, label_value="movie"))] == ["movie"]


def test_synthetic_rows_say_so():
    found = list(read(SyntheticSource(kind="synthetic-reviews", rows=5, seed=1)))
    assert len(found) == 5
    assert {row.where for row in found} == {"synthetic-reviews (generated)"}


def config(split="sst-test", **parts) -> DataConfig:
    hub = {"kind": "hub", "name": "nyu-mll/glue", "text": "sentence"}
    given = {part: [settings or hub] for part, settings in parts.items()}
    return DataConfig.model_validate({"parts": given, "split": split, "labels": ["negative", "positive"]})


def test_local_parts_finds_files_and_columns_by_name(tmp_path):
    write(tmp_path, "train.tsv", "label\tsentence\n1\tfine\n")
    write(tmp_path, "dev.csv", "content,sentiment\nfine,1\n")
    write(tmp_path, "test.jsonl.gz", gzip.compress(b'{"review": "x", "label": 1}\n'))
    local, notes = local_parts(config(train=None, validation=None, **{"sst-test": None}, extra=None), tmp_path)
    found = {part: sources[0] for part, sources in local.parts.items()}
    assert {part: (s.path, s.text, s.label) for part, s in found.items()} == {
        "train": (str(tmp_path / "train.tsv"), "sentence", "label"),
        "validation": (str(tmp_path / "dev.csv"), "content", "sentiment"),
        "sst-test": (str(tmp_path / "test.jsonl.gz"), "review", "label"),
    }
    assert local.split == "sst-test"
    assert len(notes) == 1
    assert "extra" in notes[0]


def test_local_parts_prefers_the_recipes_columns_and_keeps_its_choices(tmp_path):
    write(tmp_path, "train.csv", "text,opinion,label,stars\nno,yes,1,5\n")
    settings = {
        "kind": "file",
        "path": "gone.csv",
        "text": "opinion",
        "label": "stars",
        "skip_unlabelled": True,
    }
    local, _ = local_parts(config("random-split", train=settings), tmp_path)
    (part,) = local.parts["train"]
    assert (part.text, part.label, part.skip_unlabelled) == ("opinion", "stars", True)


@pytest.mark.parametrize(
    ("files", "split", "parts"),
    [
        (("train",), "stratified", ["train"]),
        (("train", "test"), "given", ["train", "test"]),
        (("train", "dev", "test"), "given", ["train", "validation", "test"]),
        (("train", "validation"), "glue-dev", ["train", "validation"]),
    ],
)
def test_a_recipe_that_cuts_its_own_sets_is_tested_on_those_of_the_folder(tmp_path, files, split, parts):
    for name in files:
        write(tmp_path, f"{name}.csv", "text,label\nfine,1\n")
    local, notes = local_parts(config("stratified", train=None), tmp_path)
    assert (local.split, [*local.parts]) == (split, parts)
    assert len(notes) == (split != "stratified") and all(split in note for note in notes)


def test_files_that_a_protocol_does_not_read_are_named(tmp_path):
    for name in ("train", "test"):
        write(tmp_path, f"{name}.csv", "text,label\nfine,1\n")
    local, notes = local_parts(config("random-split", train=None), tmp_path)
    assert [*local.parts] == ["train"] and notes == [
        "test.csv is left alone: split random-split of this recipe has no such part"
    ]


def test_local_parts_names_what_is_missing(tmp_path):
    write(tmp_path, "train.tsv", "label\tsentence\n1\tfine\n")
    with pytest.raises(DataError, match=r"no file for part 'validation'.*validation\.tsv.*dev\.tsv.*train\.tsv"):
        local_parts(config("glue-dev", train=None, validation=None), tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        local_parts(config("glue-dev", train=None, validation=None), tmp_path / "gone")
    write(tmp_path, "dev.tsv", "label\tphrase\n1\tfine\n")
    with pytest.raises(DataError, match=r"dev\.tsv: no text column; columns: label, phrase"):
        local_parts(config("glue-dev", train=None, validation=None), tmp_path)


def test_given_does_without_a_validation_file(tmp_path):
    for name in ("train", "test"):
        write(tmp_path, f"{name}.csv", "text,label\nfine,1\n")
    local, notes = local_parts(config("given", train=None, validation=None, test=None), tmp_path)
    assert set(local.parts) == {"train", "test"}
    assert "validation" in notes[0]


def test_a_model_imported_without_data_gets_the_parts_of_a_folder(tmp_path):
    for name in ("train", "dev"):
        write(tmp_path, f"{name}.csv", "text,label\nfine,1\n")
    local, notes = local_parts(config("imported"), tmp_path)
    assert {part: sources[0].path for part, sources in local.parts.items()} == {
        "train": str(tmp_path / "train.csv"),
        "validation": str(tmp_path / "dev.csv"),
    }
    assert len(notes) == 2 and "part test: no file" in notes[0]
    assert local.split == "glue-dev" and notes[1] == "split glue-dev: a tenth of train is held out as validation set"
    write(tmp_path, "test.csv", "text,label\nfine,1\n")
    assert local_parts(config("imported"), tmp_path)[0].split == "imported"
    (tmp_path / "dev.csv").unlink()
    assert local_parts(config("imported"), tmp_path)[0].split == "given"
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has none of the files train, validation, test"):
        local_parts(config("imported"), tmp_path / "empty")


def test_reading_files_needs_neither_torch_nor_datasets():
    program = (
        "import sys, edgeformer.data.prepare, edgeformer.data.batching\n"
        "print([name for name in ('torch', 'datasets', 'onnxruntime', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_hub_source_without_the_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    from edgeformer.artifacts.errors import MissingDependencyError

    with pytest.raises(MissingDependencyError, match=r'pip install "\.\[train\]" in the clone'):
        list(read(HubSource(kind="hub", name="nyu-mll/glue")))
