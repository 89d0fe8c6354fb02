"""Columns of files, parts of recipes, and the files of a folder."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.data_config import DataConfig, FileSource
from edgeformer.artifacts.errors import DataError
from edgeformer.data.column_detection import detect_columns
from edgeformer.data.sources import Columns, file_source, local_parts, replacement_source

LABELLED = "text,label\nfine,1\n"


def write(folder: Path, name: str, content: str | bytes = LABELLED) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def like(**settings: Any) -> FileSource:
    return FileSource.model_validate({"kind": "file", "path": "own.csv", **settings})


def names(source: FileSource) -> tuple[str, str | None, str | None, bool]:
    return source.text, source.text_pair, source.label, source.header


def test_columns_can_be_named_separately(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "sentence1,sentence2,Review,stars,label\na,b,c,5,1\n")
    assert names(file_source(path, columns=Columns(label="stars"))) == ("sentence1", "sentence2", "stars", True)
    assert names(file_source(path, columns=Columns("Review"))) == ("Review", None, "label", True)
    assert names(file_source(path, columns=Columns(text_pair="sentence2"))) == ("sentence1", "sentence2", "label", True)
    assert names(file_source(path, columns=Columns(text_pair="sentence1"))) == ("Review", "sentence1", "label", True)
    with pytest.raises(DataError, match=r"no column 'star' \(--label\); did you mean 'stars'\? columns: sentence1"):
        file_source(path, columns=Columns(label="star"))
    with pytest.raises(DataError, match="cannot be both texts"):
        file_source(path, columns=Columns("Review", "Review"))


def test_numbers_are_the_columns_of_a_file_without_header(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "1;fine film\n0;dull film\n")
    assert names(file_source(path, columns=Columns("2", None, "1"))) == ("2", None, "1", False)
    with pytest.raises(DataError, match=r"--text COLUMN, or --text NUMBER if the first line has no column names"):
        file_source(path, columns=Columns())
    with pytest.raises(DataError, match=r"rename a column to one of text, sentence") as caught:
        file_source(path)
    assert "--text" not in str(caught.value)


def test_file_is_read_with_the_layout_of_the_recipe(tmp_path: Path) -> None:
    parts = {"train": [like(header=False, text=2, label=1)]}
    bare = write(tmp_path, "bare.csv", "1;fine film\n0;dull film\n")
    assert names(replacement_source(bare, parts)) == ("2", None, "1", False)
    table = write(tmp_path, "table.csv", "body,stars\nfine,1\n")
    columns = Columns("body", None, "stars")
    assert names(replacement_source(table, parts, columns)) == ("body", None, "stars", True)
    parts = {"train": [like(path="x.dat", delimiter="|", text="body", label="stars")]}
    assert replacement_source(write(tmp_path, "table.dat", "body|stars\nfine|1\n"), parts).delimiter == "|"


def test_second_text_is_for_models_of_pairs(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "question,answer,right\na,b,1\n")
    with pytest.raises(DataError, match="--pair answer: this model reads single texts"):
        replacement_source(path, {"train": [like()]}, Columns("question", "answer", "right"))
    pairs = {"train": [like(text="question", text_pair="answer")]}
    for columns in (Columns(label="right"), Columns("question", None, "right")):
        assert names(replacement_source(path, pairs, columns)) == ("question", "answer", "right", True)


@pytest.mark.parametrize("name", ["Kategorie", "CATEGORY", "Catégorie", "étiquette", "Rating ", "sentiment", "topic"])
def test_label_names_are_the_same_for_all_commands(tmp_path: Path, name: str) -> None:
    table = "".join(f"A text about number {n};{'ab'[n % 2]}\n" for n in range(8))
    path = write(tmp_path, "a.csv", f"Text;{name}\n{table}")
    sources = (detect_columns(path, Columns()).source, replacement_source(path, {}), file_source(path))
    assert [source.label for source in sources] == [name] * 3


def test_ambiguous_label_columns_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text;rating;topic\nfine;1;2\ndull;2;1\n")
    with pytest.raises(DataError, match=r"2 columns could hold the labels: rating, topic; choose one: --label COLUMN"):
        file_source(path, columns=Columns())
    with pytest.raises(DataError, match=r"rating, topic; rename the right one to label"):
        file_source(path)
    assert file_source(path, like(label="Topic")).label == "topic"
    assert file_source(path, columns=Columns("topic")).label == "rating"
    assert file_source(write(tmp_path, "b.csv", "text;topic;sentiment\na;1;2\n")).label == "sentiment"


def config(split: str = "sst-test", **parts: Any) -> DataConfig:
    hub = {"kind": "hub", "name": "nyu-mll/glue", "text": "sentence"}
    sources = {part: [settings or hub] for part, settings in parts.items()}
    return DataConfig.model_validate({"parts": sources, "split": split, "labels": ["negative", "positive"]})


def test_files_and_columns_of_a_folder_are_found_by_name(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", "label\tsentence\n1\tfine\n")
    write(tmp_path, "dev.csv", "content,sentiment\nfine,1\n")
    write(tmp_path, "test.jsonl.gz", gzip.compress(b'{"review": "x", "label": 1}\n'))
    local, notes = local_parts(config(train=None, validation=None, **{"sst-test": None}, extra=None), tmp_path)
    sources = {part: sources[0] for part, sources in local.parts.items()}
    assert {part: (source.path, source.text, source.label) for part, source in sources.items()} == {
        "train": (str(tmp_path / "train.tsv"), "sentence", "label"),
        "validation": (str(tmp_path / "dev.csv"), "content", "sentiment"),
        "sst-test": (str(tmp_path / "test.jsonl.gz"), "review", "label"),
    }
    assert local.split == "sst-test"
    assert len(notes) == 1 and "extra" in notes[0]


@pytest.mark.parametrize(
    ("files", "split", "parts"),
    [
        (("train",), "stratified", ["train"]),
        (("train", "test"), "given", ["train", "test"]),
        (("train", "validation"), "glue-dev", ["train", "validation"]),
    ],
)
def test_stratified_recipe_uses_the_test_sets_of_a_folder(
    tmp_path: Path, files: tuple[str, ...], split: str, parts: list[str]
) -> None:
    for name in files:
        write(tmp_path, f"{name}.csv")
    local, notes = local_parts(config("stratified", train=None), tmp_path)
    assert (local.split, [*local.parts]) == (split, parts)
    assert len(notes) == (split != "stratified") and all(split in note for note in notes)


def test_missing_files_and_columns_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", "label\tsentence\n1\tfine\n")
    chosen = config("glue-dev", train=None, validation=None)
    with pytest.raises(DataError, match=r"no file for the part 'validation'.*validation\.tsv.*dev\.tsv.*train\.tsv"):
        local_parts(chosen, tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        local_parts(chosen, tmp_path / "gone")
    write(tmp_path, "dev.tsv", "label\tphrase\n1\tfine\n")
    with pytest.raises(DataError, match=r"dev\.tsv: no text column; columns: label, phrase"):
        local_parts(chosen, tmp_path)


def test_imported_model_uses_the_parts_of_a_folder(tmp_path: Path) -> None:
    for name in ("train", "dev"):
        write(tmp_path, f"{name}.csv")
    local, notes = local_parts(config("imported"), tmp_path)
    paths = {part: Path(sources[0].path).name for part, sources in local.parts.items()}
    assert paths == {"train": "train.csv", "validation": "dev.csv"}
    assert len(notes) == 2 and "part test: no file" in notes[0]
    assert local.split == "glue-dev" and notes[1] == "split glue-dev: a tenth of train is held out as validation set"
    write(tmp_path, "test.csv")
    assert local_parts(config("imported"), tmp_path)[0].split == "imported"
    (tmp_path / "dev.csv").unlink()
    assert local_parts(config("imported"), tmp_path)[0].split == "given"
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="none of the parts train, validation, test has a file"):
        local_parts(config("imported"), tmp_path / "empty")


def test_reading_files_imports_neither_torch_nor_datasets() -> None:
    program = (
        "import sys, edgeformer.data.prepare, edgeformer.data.batching\n"
        "print([name for name in ('torch', 'datasets', 'onnxruntime', 'pyarrow') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
