"""A training set on disk is the same set: its rows, counts and fingerprint; and it is found again, or made anew."""

import gzip
import json
import lzma
import threading
from pathlib import Path

import numpy as np
import pytest

from edgeformer.artifacts.data_config import DataConfig, TextConfig, TrainedTokenizer
from edgeformer.artifacts.errors import DataError
from edgeformer.artifacts.progress import SILENT, Silent
from edgeformer.data import prepare as preparing
from edgeformer.data import sources, streaming
from edgeformer.data.language import prepare_text
from edgeformer.data.prepare import prepare
from edgeformer.data.streaming import Streaming
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.data.trimming import trim_to_training
from edgeformer.system.lock import claiming

BPE = TrainedTokenizer(kind="trained", algorithm="bpe")
WORDPIECE = TrainedTokenizer(kind="trained")
LABELS = ["negative", "positive"]


class Recorder(Silent):
    def __init__(self):
        self.messages: list[str] = []
        self.bars: list[str] = []

    def message(self, text):
        self.messages.append(text)

    def start(self, description, total, unit=""):
        self.bars.append(description)


def write_jsonl(path, rows, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": row.text, "label": row.label}) + "\n" for row in rows)


def write_parquet(path, rows):
    datasets = pytest.importorskip("datasets")
    columns = {"text": [row.text for row in rows], "label": [row.label for row in rows]}
    datasets.Dataset.from_dict(columns).to_parquet(path)


WRITERS = {
    "jsonl": write_jsonl,
    "jsonl.xz": lambda path, rows: write_jsonl(path, rows, lzma.open),
    "jsonl.gz": lambda path, rows: write_jsonl(path, rows, gzip.open),
    "parquet": write_parquet,
}


@pytest.fixture
def parts(tmp_path):
    """600 training rows, and two small sets that share some texts with them."""
    train = list(synthetic_reviews(600, 1))
    write_jsonl(tmp_path / "train.jsonl", train)
    write_jsonl(tmp_path / "validation.jsonl", synthetic_reviews(40, 2))
    write_jsonl(tmp_path / "test.jsonl", [*train[:7], *synthetic_reviews(40, 3)])
    return {part: source(tmp_path / f"{part}.jsonl") for part in ("train", "validation", "test")}


def source(path, **more):
    return [{"kind": "file", "path": str(path), **more}]


def classes(parts, **more) -> DataConfig:
    document = {"parts": parts, "split": "given", "labels": LABELS, "max_length": 24, **more}
    return DataConfig.model_validate(document)


def text(parts, mode="packed", **more) -> TextConfig:
    document = {"parts": parts, "mode": mode, "sequence_length": 16, "min_characters": 20, **more}
    return TextConfig.model_validate(document)


def streamed(config):
    return config.model_copy(update={"stream": True})


def assert_same(one, other):
    """Set, tokenizer and all that a run writes down of its data."""
    assert one.summary == other.summary
    assert one.tokenizer.to_str() == other.tokenizer.to_str()
    assert len(one.train) == len(other.train)
    numbers = np.random.default_rng(0).permutation(len(one.train))
    for part in (numbers, numbers[:5]):
        (rows, places), (others, other_places) = one.train.loaded(part), other.train.loaded(part)
        assert np.array_equal(one.train.sizes(part), other.train.sizes(part))
        for place, other_place in zip(places.tolist(), other_places.tolist(), strict=True):
            spans = [slice(*found.offsets[at : at + 2]) for found, at in ((rows, place), (others, other_place))]
            for name in ("ids", "starts"):
                arrays = [getattr(found, name, None) for found in (rows, others)]
                assert (arrays[0] is None) == (arrays[1] is None)
                if arrays[0] is not None:
                    assert np.array_equal(arrays[0][spans[0]], arrays[1][spans[1]])
            if hasattr(rows, "labels"):
                assert rows.labels[place] == others.labels[other_place]


@pytest.mark.parametrize("piece", [1, 7, 2048])
@pytest.mark.parametrize("mode", ["packed", "paragraphs"])
def test_a_language_models_text_is_the_same(parts, tmp_path, monkeypatch, mode, piece):
    monkeypatch.setattr(streaming, "_PIECE_ROWS", piece)
    config = text(parts, mode, first_n=500)
    kept = prepare_text(config, BPE, 400, tmp_path / "one")
    found = prepare_text(streamed(config), BPE, 400, tmp_path / "two")
    assert_same(kept, found)
    assert found.summary.truncated_rows["train"] > 0 or mode == "packed"
    assert [counted.duplicates for counted in found.summary.overlap] == [0, 7]


@pytest.mark.parametrize("tokenizer", [BPE, WORDPIECE])
@pytest.mark.parametrize("kind", list(WRITERS))
def test_a_classifiers_rows_are_the_same(parts, tmp_path, monkeypatch, kind, tokenizer):
    monkeypatch.setattr(streaming, "_PIECE_CHARACTERS", 5000)
    WRITERS[kind](tmp_path / f"train.{kind}", list(synthetic_reviews(600, 1)))
    config = classes({**parts, "train": source(tmp_path / f"train.{kind}")})
    kept = prepare(config, tokenizer, 400, tmp_path / "one")
    found = prepare(streamed(config), tokenizer, 400, tmp_path / "two")
    assert_same(kept, found)
    assert found.summary.truncated_rows["train"] > 0
    assert sum(found.summary.label_rows["train"].values()) == 600


def test_several_sources_and_skipped_rows(parts, tmp_path):
    (tmp_path / "more.tsv").write_text("label\ttext\n1\tand more of it\n\twithout a label\n0\tthe last one\n")
    more = source(tmp_path / "more.tsv", skip_unlabelled=True)
    made_up = [{"kind": "synthetic-reviews", "rows": 30, "seed": 9}]
    config = classes({**parts, "train": [*parts["train"], *more, *made_up]})
    assert_same(prepare(config, BPE, 400, tmp_path / "one"), prepare(streamed(config), BPE, 400, tmp_path / "two"))


def test_a_local_data_set_folder_streams(parts, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    (tmp_path / "reviews").mkdir()
    write_parquet(tmp_path / "reviews" / "train.parquet", list(synthetic_reviews(200, 1)))
    hub = [{"kind": "hub", "name": str(tmp_path / "reviews")}]
    config = classes({**parts, "train": hub})
    assert_same(prepare(config, BPE, 400, tmp_path / "one"), prepare(streamed(config), BPE, 400, tmp_path / "two"))


def passes(monkeypatch):
    """The part names whose rows are read from now on."""
    read: list[str] = []
    honest = sources.file_records

    def counting(source, *arguments):
        for number, record in enumerate(honest(source, *arguments)):
            if number == 1:  # the first record alone is read to check the names of the columns
                read.append(Path(source.path).stem)
            yield record

    monkeypatch.setattr(sources, "file_records", counting)
    return read


@pytest.mark.parametrize("tokenizer", [BPE, WORDPIECE])
def test_what_was_made_is_found_without_reading_a_training_row(parts, tmp_path, monkeypatch, tokenizer):
    config = streamed(classes(parts))
    read = passes(monkeypatch)
    first = prepare(config, tokenizer, 400, tmp_path / "cache")
    assert read.count("train") == 2
    read.clear()
    assert_same(first, prepare(config, tokenizer, 400, tmp_path / "cache"))
    assert sorted(read) == ["test", "validation"]


def test_another_test_set_is_compared_without_tokenizing_again(parts, tmp_path, monkeypatch):
    config = streamed(classes(parts))
    prepare(config, BPE, 400, tmp_path / "cache")
    write_jsonl(tmp_path / "test.jsonl", list(synthetic_reviews(600, 1))[:9])
    read, progress = passes(monkeypatch), Recorder()
    found = prepare(config, BPE, 400, tmp_path / "cache", progress)
    assert [counted.duplicates for counted in found.summary.overlap] == [9]
    assert read.count("train") == 1
    assert "Tokenizing the training set" not in progress.bars


def test_a_changed_file_is_noticed_although_size_and_time_are_the_same(parts, tmp_path):
    import os

    config, path = streamed(classes(parts)), tmp_path / "train.jsonl"
    before, state = prepare(config, BPE, 400, tmp_path / "cache"), path.stat()
    content = path.read_bytes()
    place = content.index(b'"text": "') + 9
    changed = content[:place] + (b"q" if content[place : place + 1] != b"q" else b"z") + content[place + 1 :]
    path.write_bytes(changed)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    after = prepare(config, BPE, 400, tmp_path / "cache")
    assert after.summary.fingerprint != before.summary.fingerprint
    assert after.summary == prepare(classes(parts), BPE, 400, tmp_path / "other").summary


def test_a_file_that_changes_while_it_is_read_is_refused(parts, tmp_path, monkeypatch):
    path = tmp_path / "train.jsonl"
    honest = preparing._ClassEncoder.pieces

    def growing(self, texts, labels, *, last):
        with path.open("a") as file:
            file.write('{"text": "one more", "label": 1}\n')
        return honest(self, texts, labels, last=last)

    monkeypatch.setattr(preparing._ClassEncoder, "pieces", growing)
    with pytest.raises(DataError, match=r"train\.jsonl: changed while it was read; start again"):
        prepare(streamed(classes(parts)), BPE, 400, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*tokens*"))


@pytest.mark.parametrize("tokenizer", [BPE, WORDPIECE])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"train\.jsonl, line 601: not valid JSON"),
        ('{"text": "good", "label": "great"}', r"train\.jsonl, line 601: label 'great' is not in the set"),
        ('{"text": "good"}', r"train\.jsonl, line 601: no column 'label'"),
        ('{"text": 7, "label": 1}', r"train\.jsonl, line 601: column 'text' holds an int"),
    ],
)
def test_a_broken_row_is_named_before_anything_is_tokenized(parts, tmp_path, line, message, tokenizer):
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(line + "\n")
    progress = Recorder()
    with pytest.raises(DataError, match=message):
        prepare(streamed(classes(parts)), tokenizer, 400, tmp_path / "cache", progress)
    assert "Tokenizing the training set" not in progress.bars


def test_the_limits_of_files_hold(parts, tmp_path):
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb") as file:
        for _ in range(80):
            file.write(b" " * (1 << 20))
    (tmp_path / "line.jsonl").write_bytes(b'{"text": "' + b"a" * (17 << 20) + b'"}\n')
    for name, message in (("bomb.jsonl.gz", "unpacks to more than 200 times"), ("line.jsonl", "longer than 16 MiB")):
        with pytest.raises(DataError, match=message):
            prepare_text(streamed(text({**parts, "train": source(tmp_path / name)})), BPE, 400, tmp_path / "cache")


def test_one_class_only_and_no_paragraph_are_refused(parts, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [row for row in synthetic_reviews(50, 1) if row.label == 1])
    progress = Recorder()
    with pytest.raises(DataError, match=r"one class only: all \d+ rows are labelled 'positive'"):
        prepare(streamed(classes(parts)), BPE, 400, tmp_path / "cache", progress)
    assert "Tokenizing the training set" not in progress.bars
    (tmp_path / "train.jsonl").write_text('{"text": "short"}\n' * 3)
    with pytest.raises(DataError, match=r"data\.parts\.train: none of its 3 paragraphs has more than 20 characters"):
        prepare_text(streamed(text(parts)), BPE, 400, tmp_path / "cache")


@pytest.mark.parametrize("name", ["tokens-*/ids.bin", "tokens-*/facts.json", "tokenizer-*.json", "overlap-*.json"])
def test_damage_in_the_cache_is_found_and_mended(parts, tmp_path, name):
    config, cache = streamed(classes(parts)), tmp_path / "cache"
    first, progress = prepare(config, BPE, 400, cache), Recorder()
    (path,) = cache.glob(name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # the first one goes on reading what it has open
    path.write_bytes(content)
    assert_same(first, prepare(config, BPE, 400, cache, progress))
    assert any("damaged token cache" in message for message in progress.messages) == ("tokens" in name)
    progress = Recorder()
    assert_same(first, prepare(config, BPE, 400, cache, progress))
    assert "Tokenizing the training set" not in progress.bars


def test_what_a_killed_process_left_is_removed(parts, tmp_path):
    config, cache = streamed(classes(parts)), tmp_path / "cache"
    prepare(config, BPE, 400, cache)
    (folder,) = (path for path in cache.glob("tokens-*") if path.is_dir())
    left = cache / f".{folder.name}.x.tmp"
    left.mkdir()
    (left / "ids.bin").write_bytes(b"half")
    prepare(config, BPE, 400, cache)
    assert not left.exists()


def test_one_process_makes_it_and_the_others_wait_for_it(parts, tmp_path):
    config, cache = streamed(classes(parts)), tmp_path / "cache"
    stream = Streaming(preparing.class_stream(config), cache, SILENT)
    progress, found = Recorder(), []
    other = threading.Thread(target=lambda: found.append(prepare(config, BPE, 400, cache, progress)))
    cache.mkdir()
    with claiming(cache / f"stream-{stream._identity[:24]}"):
        other.start()
        other.join(timeout=2)
        assert other.is_alive() and not list(cache.glob("tokens-*"))
    other.join(timeout=60)
    assert len(found) == 1
    assert len([message for message in progress.messages if "is being replaced by process" in message]) == 1


def test_a_vocabulary_is_trimmed_to_a_streamed_set(parts, tmp_path):
    config = classes(parts)
    made = prepare(config, WORDPIECE, 400, tmp_path / "cache")
    given = made.tokenizer, made.summary.fingerprints
    (one, effect), (other, other_effect) = trim_to_training(config, *given), trim_to_training(streamed(config), *given)
    assert np.array_equal(one.kept, other.kept) and len(one.kept) < 400
    assert effect == other_effect
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"text": "one more", "label": 1}\n')
    with pytest.raises(DataError, match="the train set is not the one of this model's training"):
        trim_to_training(streamed(config), *given)


@pytest.mark.parametrize("split", ["random-split", "glue-dev", "given"])
def test_sets_that_are_cut_from_the_training_texts_do_not_stream(parts, split):
    left = {name: found for name, found in parts.items() if split != "given" or name != "validation"}
    classes(left, split=split)
    with pytest.raises(ValueError, match=rf"stream: true .* split '{split}' would draw .* use split: given"):
        classes(left, split=split, stream=True)
