"""Columns of files, parts of recipes, and the files of a folder."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from edgeformer.artifacts.data_config import DataConfig, FileSource, HubSource, SpanSource, stated
from edgeformer.artifacts.errors import DataError
from edgeformer.data.column_detection import detect_columns
from edgeformer.data.rows import Unreadable
from edgeformer.data.sources import Columns, file_source, load_part, local_parts, read, replacement_source
from edgeformer.tasks import get_task
from tests.data.conftest import write

LABELLED = "text,label\nfine,1\n"


def like(**settings: Any) -> FileSource:
    return FileSource.model_validate({"kind": "file", "path": "own.csv", **settings})


def names(source: FileSource) -> tuple[str | tuple[str, ...], str | None, str | None, bool]:
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
    with pytest.raises(DataError, match=r"--text COLUMN, or NUMBER if the first line has no column names"):
        file_source(path, columns=Columns())
    with pytest.raises(DataError, match=r"rename a column to one of text, sentence") as caught:
        file_source(path)
    assert "--text" not in str(caught.value)


def test_file_is_read_with_the_layout_of_the_recipe(tmp_path: Path) -> None:
    parts = {"train": [like(header=False, text=2, label=1)]}
    bare = write(tmp_path, "bare.csv", "1;fine film\n0;dull film\n")
    assert names(replacement_source(bare, parts)) == ("2", None, "1", False)
    table = write(tmp_path, "table.csv", "body,stars\nfine,1\n")
    assert names(replacement_source(table, parts, Columns("body", None, "stars"))) == ("body", None, "stars", True)
    parts = {"train": [like(path="x.dat", delimiter="|", text="body", label="stars")]}
    assert replacement_source(write(tmp_path, "table.dat", "body|stars\nfine|1\n"), parts).delimiter == "|"


CELLS = [("A head", "its body"), ("", "only a body"), ("only a head", "  "), ("", "")]
JOINED = ["A head its body", "only a body", "only a head", ""]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet", "hub"])
def test_several_columns_are_one_text(tmp_path: Path, name: str) -> None:
    rows = [{"body": body, "title": title, "label": "x"} for title, body in CELLS]
    with_nulls = [{key: value or None for key, value in row.items()} for row in rows]
    if name in ("a.parquet", "hub"):
        pytest.importorskip("datasets").Dataset.from_list(with_nulls).to_parquet(tmp_path / "a.parquet")
    elif name == "a.jsonl":
        write(tmp_path, name, "\n".join(map(json.dumps, with_nulls)))
    else:
        delimiter = "\t" if name == "a.tsv" else ","
        write(tmp_path, name, "".join(delimiter.join(row) + "\n" for row in [rows[0], *(row.values() for row in rows)]))
    if name == "hub":
        folder = tmp_path / "hub"
        (folder / "data").mkdir(parents=True)
        (tmp_path / "a.parquet").rename(folder / "data" / "train.parquet")
        hub = HubSource.model_validate({"kind": "hub", "name": str(folder), "text": ["title", "body"]})
        assert [row.text for row in read(hub)] == JOINED
        return
    source = file_source(tmp_path / name, columns=Columns("title, body"))
    assert source.text == ("title", "body") and [row.text for row in read(source)] == JOINED
    assert FileSource.model_validate_json(source.model_dump_json()) == source
    assert [row.text for row in read(source, skipped=[])] == JOINED[:3]
    parts = {"train": [like(text=["body", "title"])]}
    assert next(read(replacement_source(tmp_path / name, parts, Columns()))).text == "its body A head"
    assert replacement_source(tmp_path / name, parts, Columns("body")).text == "body"
    with pytest.raises(DataError, match=rf"{name}: no column 'tittle' \(--text\); did you mean 'title'\?"):
        file_source(tmp_path / name, columns=Columns("body,tittle"))
    with pytest.raises(DataError, match="column 'body' cannot be both texts"):
        file_source(tmp_path / name, columns=Columns("title,body", "body"))
    with pytest.raises(DataError, match=r"no text column; columns: body, title, label; .* column to one of head"):
        replacement_source(tmp_path / name, {"train": [like(text=["head", "body"])]}, Columns())


def test_commas_in_names_numbers_and_pairs_of_several_columns(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", '"a,b",a,b,label\n1,2,3,x\n')
    assert file_source(path, columns=Columns("a,b")).text == "a,b"
    assert file_source(path, columns=Columns("b,a")).text == ("b", "a")
    pairs = {"train": [like(text=["a", "b"], text_pair="a,b")]}
    assert next(read(replacement_source(path, pairs))).text == ("2 3", "1")
    with pytest.raises(DataError, match="rename two columns to a and c and b, sentence1"):
        replacement_source(path, {"train": [like(text=["a", "c"], text_pair="b")]})
    bare = write(tmp_path, "bare.csv", "1;fine;film\n0;dull;film\n")
    assert names(file_source(bare, columns=Columns("2,3", None, "1"))) == (("2", "3"), None, "1", False)
    numbered = replacement_source(bare, {"train": [like(header=False, text=[3, 2], label=1)]})
    assert [(row.text, row.label) for row in read(numbered)] == [("film fine", "1"), ("film dull", "0")]


def test_values_that_are_no_text_and_sources_without_columns(tmp_path: Path) -> None:
    source = like(path=str(write(tmp_path, "a.jsonl", '{"a": "x", "b": ["y"]}\n')), text=["a", "b"], label=None)
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: column 'b' has a value of type list instead of text"):
        list(read(source))
    (row,) = read(source, blanks=True)
    assert isinstance(row.text, Unreadable) and "'b'" in row.text.problem
    with pytest.raises(DataError, match=r"line 1: no column 'c'; columns: a, b; set text: of the source"):
        list(read(source.model_copy(update={"text": ("a", "c")})))
    with pytest.raises(DataError, match="plain text has one column"):
        list(read(like(path=str(write(tmp_path, "a.txt", "x\n")), text=["a", "b"], label=None)))
    for settings in ({"text": []}, {"text": ["a", None]}, {"header": False, "text": [1, "b"], "label": 3}):
        with pytest.raises(ValidationError):
            like(**settings)
    with pytest.raises(ValidationError):
        SpanSource.model_validate({"kind": "file", "path": "a.jsonl", "text": ["a", "b"]})


def test_label_values_are_read_as_names_and_do_not_change_older_hashes(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text,label\na,1\nb,2.0\nc,4\nd,News\n")
    section = {"parts": {"test": [like(path=str(path))]}, "split": "imported", "labels": ["World", "Sci/Tech", "News"]}
    older = DataConfig.model_validate(section, strict=False)
    hashed = stated(older.model_copy(update={"unlabelled": older.parts["test"]}).model_dump(mode="json"))
    assert "label_values" not in hashed and "where" in hashed["unlabelled"][0]
    assert not [source for source in (*hashed["parts"]["test"], *hashed["unlabelled"]) if "quote" in source]
    config = DataConfig.model_validate({**section, "label_values": [1, 2, 4]}, strict=False)
    assert DataConfig.model_validate_json(config.model_dump_json()) == config
    assert stated(config.model_dump(mode="json"))["label_values"] == ["1", "2", "4"]
    assert load_part(config, "test").labels.tolist() == [0, 1, 2, 2]
    task = get_task("classification").rows
    assert task.file_texts(config, path).labels.tolist() == [0, 1, 2, 2]
    other = write(tmp_path, "b.csv", "text,label\na,0\n")  # no position: a class has the value 1
    with pytest.raises(DataError, match=r"b\.csv, line 2: label '0' .* allowed: World, Sci/Tech, News, 1, 2, 4; cor"):
        task.file_texts(config, other)
    for values in ([1, 2], [1, 2, 2], [1, 2, 2, 3]):
        with pytest.raises(ValidationError, match="label_values: must be different, one for each of labels"):
            DataConfig.model_validate({**section, "label_values": values}, strict=False)


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
    columns = [("sentence", "label"), ("content", "sentiment"), ("review", "label")]
    assert [(source.text, source.label) for source in sources.values()] == columns
    files = {"train": "train.tsv", "validation": "dev.csv", "sst-test": "test.jsonl.gz"}
    assert {part: source.path for part, source in sources.items()} == {p: str(tmp_path / f) for p, f in files.items()}
    assert local.split == "sst-test" and len(notes) == 1 and "extra" in notes[0]


@pytest.mark.parametrize(("other", "split"), [(None, "stratified"), ("test", "given"), ("validation", "glue-dev")])
def test_stratified_recipe_uses_the_test_sets_of_a_folder(tmp_path: Path, other: str | None, split: str) -> None:
    parts = ["train", *([other] if other else [])]
    for name in parts:
        write(tmp_path, f"{name}.csv", LABELLED)
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
        write(tmp_path, f"{name}.csv", LABELLED)
    local, notes = local_parts(config("imported"), tmp_path)
    paths = {part: Path(sources[0].path).name for part, sources in local.parts.items()}
    assert paths == {"train": "train.csv", "validation": "dev.csv"}
    assert len(notes) == 2 and "part test: no file" in notes[0]
    assert local.split == "glue-dev" and notes[1] == "split glue-dev: a tenth of train is held out as validation set"
    write(tmp_path, "test.csv", LABELLED)
    assert local_parts(config("imported"), tmp_path)[0].split == "imported"
    (tmp_path / "dev.csv").unlink()
    assert local_parts(config("imported"), tmp_path)[0].split == "given"
