"""A training set on disk equals the set in memory, later runs find it again, and damage is repaired."""

import json
import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeformer.artifacts.data_config import DataConfig, TextConfig, TrainedTokenizer
from edgeformer.artifacts.errors import DataError
from edgeformer.data import records, splits, streaming
from edgeformer.data.language import prepare_text
from edgeformer.data.prepare import prepare, set_texts
from edgeformer.data.sources import local_parts
from edgeformer.data.storage import write_facts
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.data.trimming import trim_to_training
from edgeformer.system.lock import lock_path
from tests.data.conftest import file_sources, write_jsonl, write_parquet
from tests.measurement.measuring_child import Recorder

BPE = TrainedTokenizer(kind="trained", algorithm="bpe")
WORDPIECE = TrainedTokenizer(kind="trained")
TOKENIZING = "Tokenizing the training set"


@pytest.fixture
def parts(tmp_path):
    """600 training rows, and two small sets that share some texts with them."""
    train = list(synthetic_reviews(600, 1))
    rows = {"train": train, "validation": synthetic_reviews(40, 2), "test": [*train[:7], *synthetic_reviews(40, 3)]}
    return {part: file_sources(write_jsonl(tmp_path / f"{part}.jsonl", rows[part])) for part in rows}


def class_config(parts, *, stream=True, **settings) -> DataConfig:
    document = {"parts": parts, "split": "given", "labels": ["negative", "positive"], "max_length": 24}
    return DataConfig.model_validate({**document, "stream": stream, **settings})


def text_config(parts, mode="packed", *, stream=True, **settings) -> TextConfig:
    document = {"parts": parts, "mode": mode, "sequence_length": 16, "min_characters": 20}
    return TextConfig.model_validate({**document, "stream": stream, **settings})


def append(path, label=1, text="one more"):
    """Add a row to a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps({"text": text, "label": label}) + "\n")


def assert_same(one, other):
    """Compare the rows, the tokenizers and the summaries of two prepared data sets."""
    assert one.summary == other.summary and one.tokenizer.to_str() == other.tokenizer.to_str()
    assert len(one.train) == len(other.train)
    permutation = np.random.default_rng(0).permutation(len(one.train))
    for numbers in (permutation, permutation[:5]):
        assert np.array_equal(one.train.sizes(numbers), other.train.sizes(numbers))
        contents = []
        for rows, places in (one.train.loaded(numbers), other.train.loaded(numbers)):
            spans = [slice(*rows.offsets[place : place + 2]) for place in places.tolist()]
            arrays = [array for name in ("ids", "starts") if (array := getattr(rows, name, None)) is not None]
            labels = rows.labels[places].tolist() if hasattr(rows, "labels") else None
            contents.append(([[array[span].tolist() for span in spans] for array in arrays], labels))
        assert contents[0] == contents[1]


@pytest.mark.parametrize("piece", [7, 2048])
@pytest.mark.parametrize("mode", ["packed", "paragraphs"])
def test_language_model_text_equals_the_set_in_memory(parts, tmp_path, monkeypatch, mode, piece):
    monkeypatch.setattr(streaming, "_PIECE_ROWS", piece)
    in_memory = prepare_text(text_config(parts, mode, stream=False, first_n=500), BPE, 400, tmp_path / "one")
    streamed = prepare_text(text_config(parts, mode, first_n=500), BPE, 400, tmp_path / "two")
    assert_same(in_memory, streamed)
    assert streamed.summary.truncated_rows["train"] > 0 or mode == "packed"
    assert [count.duplicates for count in streamed.summary.overlap] == [0, 7]


@pytest.mark.parametrize(("kind", "tokenizer"), [("jsonl", BPE), ("parquet", BPE), ("several", WORDPIECE)])
def test_classifier_rows_equal_the_set_in_memory(parts, tmp_path, monkeypatch, kind, tokenizer):
    monkeypatch.setattr(streaming, "_PIECE_CHARACTERS", 5000)
    if kind == "parquet":
        monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "hub")
        (tmp_path / "reviews").mkdir()
        write_parquet(tmp_path / "reviews" / "train.parquet", list(synthetic_reviews(600, 1)))
        parts["train"] = [{"kind": "hub", "name": str(tmp_path / "reviews")}]
    elif kind == "several":
        (tmp_path / "more.tsv").write_text("label\ttext\n1\tand more of it\n\twithout a label\n0\tthe last one\n")
        table = file_sources(tmp_path / "more.tsv", skip_unlabelled=True)
        parts["train"] = [*parts["train"], *table, {"kind": "synthetic-reviews", "rows": 30, "seed": 9}]
    streamed = prepare(class_config(parts), tokenizer, 400, tmp_path / "streamed")
    assert_same(prepare(class_config(parts, stream=False), tokenizer, 400, tmp_path / "in-memory"), streamed)
    assert streamed.summary.truncated_rows["train"] > 0
    assert sum(streamed.summary.label_rows["train"].values()) == (632 if kind == "several" else 600)


@pytest.mark.parametrize("settings", [{}, {"split_seed": 5, "rows": {"validation": 0.5, "test": 20}}])
def test_stratified_sets_of_one_file_equal_the_sets_in_memory(parts, tmp_path, monkeypatch, settings):
    monkeypatch.setattr(streaming, "_PIECE_ROWS", 50)
    rows = list(synthetic_reviews(300, 1))
    text = [f"{n % 2}\t{row.text if n % 9 else rows[n // 9].text.upper()}\n" for n, row in enumerate(rows)]
    (tmp_path / "all.tsv").write_text("label\ttext\n" + "".join([*text, "1\t \n"]), encoding="utf-8")
    parts = {"train": file_sources(tmp_path / "all.tsv"), "validation": parts["validation"], "hotels": parts["test"]}
    in_memory = class_config(parts, split="stratified", stream=False, **settings)
    streamed = class_config(parts, split="stratified", **settings)
    results = []
    for config in (in_memory, streamed):
        data = prepare(config, WORDPIECE, 400, tmp_path / "cache")
        assert [finding.rows for finding in data.summary.findings if finding.kind == "empty texts"] == [1]
        results.append(replace(data, summary=data.summary.model_copy(update={"findings": ()})))
        assert list(data.tests) == ["test", "hotels"]
    assert_same(*results)
    assert np.array_equal(results[0].validation.ids, results[1].validation.ids)
    for name in ("train", "validation", "test", "hotels"):
        assert set_texts(streamed, name).fingerprint() == results[0].summary.fingerprints[name]
    trained_on = results[1].tokenizer, results[1].summary.fingerprints
    trimmed, expected = (trim_to_training(config, *trained_on) for config in (streamed, in_memory))
    assert np.array_equal(trimmed[0].kept, expected[0].kept) and trimmed[1] == expected[1]


def test_pool_that_grows_between_two_passes_is_refused(parts, tmp_path, monkeypatch):
    cut_stream = splits.cut_stream

    def grow_after(config, texts):
        sets = cut_stream(config, texts)
        append(tmp_path / "train.jsonl")
        return sets

    monkeypatch.setattr(splits, "cut_stream", grow_after)
    with pytest.raises(DataError, match=r"data\.parts: a file changed while it was read"):
        prepare(class_config({"train": parts["train"]}, split="stratified"), BPE, 400, tmp_path / "cache")


@pytest.mark.parametrize(
    ("rows", "message"), [(9, "9 rows; split 'stratified' needs"), (12, "21 rows requested, but there are 2")]
)
def test_pool_that_is_too_small_for_its_sets_is_refused(tmp_path, rows, message):
    source = file_sources(write_jsonl(tmp_path / "few.jsonl", synthetic_reviews(rows, 1)))
    with pytest.raises(DataError, match=message):
        prepare(class_config({"train": source}, split="stratified", rows={"test": 21}), BPE, 400, tmp_path / "cache")


def test_folder_without_the_sets_that_streaming_needs_is_refused(parts, tmp_path):
    (tmp_path / "validation.jsonl").unlink()
    with pytest.raises(DataError, match=r"stream: true is not possible with split: given.*use split: stratified, or"):
        local_parts(class_config({"train": parts["train"]}, split="stratified"), tmp_path)


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """The stems of the files whose rows are read, once for each pass."""
    stems: list[str] = []
    file_records = records.file_records

    def recorded(source, *arguments):
        for number, record in enumerate(file_records(source, *arguments)):
            if number == 1:  # the first record alone is read to check the names of the columns
                stems.append(Path(source.path).stem)
            yield record

    monkeypatch.setattr(records, "file_records", recorded)
    return stems


@pytest.mark.parametrize("tokenizer", [BPE, WORDPIECE])
def test_later_run_reads_no_training_row(parts, tmp_path, passes, tokenizer):
    append(tmp_path / "train.jsonl", text=" ")
    first = prepare(class_config(parts), tokenizer, 400, tmp_path / "cache")
    assert passes.count("train") == 2 and "empty texts" in {finding.kind for finding in first.summary.findings}
    passes.clear()
    second = prepare(class_config(parts), tokenizer, 400, tmp_path / "cache")
    assert sorted(passes) == ["test", "validation"]
    if sys.platform == "linux":
        shutil.rmtree(tmp_path / "cache")  # breaks no run
    assert_same(first, second)
    if sys.platform == "linux":
        assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "nothing stays mapped"


def test_changed_file_of_equal_size_and_time_is_noticed(parts, tmp_path):
    path = tmp_path / "train.jsonl"
    first, state = prepare(class_config(parts), BPE, 400, tmp_path / "cache"), path.stat()
    content = path.read_bytes()
    place = content.index(b'"text": "') + 9
    letter = b"q" if content[place : place + 1] != b"q" else b"z"
    path.write_bytes(content[:place] + letter + content[place + 1 :])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    second = prepare(class_config(parts), BPE, 400, tmp_path / "cache")
    assert second.summary.fingerprint != first.summary.fingerprint
    assert second.summary == prepare(class_config(parts, stream=False), BPE, 400, tmp_path / "other").summary


def test_file_that_changes_during_reading_is_refused(parts, tmp_path, monkeypatch):
    write_rows = streaming.write_rows

    def grow_and_write(folder, pieces):
        append(tmp_path / "train.jsonl")
        return write_rows(folder, pieces)

    monkeypatch.setattr(streaming, "write_rows", grow_and_write)
    with pytest.raises(DataError, match=r"train\.jsonl: changed while it was read; start again"):
        prepare(class_config(parts), BPE, 400, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*stream*"))


def test_bad_rows_and_sets_are_refused_before_tokenizing(parts, tmp_path) -> None:
    progress = Recorder()
    append(tmp_path / "train.jsonl", "great")
    with pytest.raises(DataError, match=r"train\.jsonl, line 601: label 'great' is not in data.labels"):
        prepare(class_config(parts), BPE, 400, tmp_path / "cache", progress)
    write_jsonl(tmp_path / "train.jsonl", [row for row in synthetic_reviews(50, 1) if row.label == 1])
    with pytest.raises(DataError, match=r"one class only: all \d+ rows are labelled 'positive'"):
        prepare(class_config(parts), BPE, 400, tmp_path / "cache", progress)
    assert TOKENIZING not in progress.started
    (tmp_path / "train.jsonl").write_text('{"text": "short"}\n' * 3)
    with pytest.raises(DataError, match=r"data\.parts\.train: none of its 3 paragraphs has more than 20 characters"):
        prepare_text(text_config(parts), BPE, 400, tmp_path / "cache")


DAMAGED = ["ids.bin", "offsets.bin", "labels.bin", "facts.json", "tokenizer.json", "facts.sha256", "foreign"]


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_cache_is_repaired_and_leftovers_are_removed(parts, tmp_path, name):
    config, cache = class_config(parts), tmp_path / "cache"
    first, progress = prepare(config, BPE, 400, cache), Recorder()
    (folder,) = cache.glob("stream-*")
    if name == "foreign":
        write_facts(folder, {**json.loads((folder / "facts.json").read_text()), "key": "another"})
    else:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).unlink()  # the first run goes on reading its open file
        if name != "facts.sha256":  # which stays missing
            (folder / name).write_bytes(content)
    leftover = cache / f".{folder.name}.x.tmp"  # of a killed process
    leftover.mkdir()
    (leftover / "ids.bin").write_bytes(b"half")
    assert_same(first, prepare(config, BPE, 400, cache, progress))
    assert any("damaged token cache" in message for message in progress.messages) and not leftover.exists()
    progress = Recorder()
    assert_same(first, prepare(config, BPE, 400, cache, progress))
    assert TOKENIZING not in progress.started


def test_other_processes_wait_for_the_one_that_writes(parts, tmp_path):
    config, cache = class_config(parts), tmp_path / "cache"
    prepare(config, BPE, 400, cache)
    (folder,) = cache.glob("stream-*")
    shutil.rmtree(folder)
    progress, results = Recorder(), []
    thread = threading.Thread(target=lambda: results.append(prepare(config, BPE, 400, cache, progress)))
    with lock_path(folder):
        thread.start()
        thread.join(timeout=0.5)
        assert thread.is_alive() and not folder.exists()
    thread.join(timeout=60)
    assert len(results) == 1
    assert len([message for message in progress.messages if "is being replaced by process" in message]) == 1
