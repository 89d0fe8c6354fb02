"""Rows in files: what was written is what is read, nothing stays mapped, and damage is found."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.data.encoding import Encoded
from edgeformer.data.streaming import DiskArray, read_stored, writing

FACTS = {"key": "this", "fingerprint": "f", "truncated": 3}


def build(pieces):
    return Encoded(pieces["ids"], pieces["offsets"], pieces["labels"], 0)


@pytest.fixture
def written(tmp_path):
    """1000 rows of 0 to 12 tokens in pieces of any size, and the same in memory."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 13, 1000)
    ids = generator.integers(0, 2**31, lengths.sum(), dtype=np.int32)
    whole = Encoded(ids, np.concatenate(([0], np.cumsum(lengths))), generator.integers(0, 5, 1000), 0)
    with writing(tmp_path / "set") as writer:
        for start, stop in ((0, 0), (0, 1), (1, 700), (700, 700), (700, 1000)):
            begin, end = whole.offsets[start], whole.offsets[stop]
            offsets = whole.offsets[start : stop + 1] - begin
            writer.append({"ids": ids[begin:end], "offsets": offsets, "labels": whole.labels[start:stop]})
        writer.finish(FACTS)
    return tmp_path / "set", whole


def test_rows_come_back_in_any_order(written):
    folder, whole = written
    rows = read_stored(folder, "this", build)
    assert (len(rows), rows.truncated) == (1000, 3)
    for numbers in (
        np.arange(1000),
        np.array([5]),
        np.array([999, 0, 7, 7]),
        np.random.default_rng(1).permutation(1000),
    ):
        loaded, places = rows.loaded(numbers)
        assert places.tolist() == list(range(len(numbers)))
        assert np.array_equal(rows.sizes(numbers), whole.lengths[numbers])
        assert np.array_equal(loaded.labels, whole.labels[numbers])
        for place, number in enumerate(numbers.tolist()):
            assert np.array_equal(loaded.row(place), whole.row(number))


@pytest.mark.skipif(sys.platform != "linux", reason="the mappings of a process are read from /proc")
def test_nothing_that_was_read_stays_mapped(written):
    folder, _ = written
    rows = read_stored(folder, "this", build)
    kept = [rows.loaded(np.arange(1000)), rows.sizes(np.arange(1000))]
    assert str(folder) not in Path("/proc/self/maps").read_text() and kept


@pytest.mark.skipif(sys.platform == "win32", reason="Windows deletes no open file")
def test_an_emptied_cache_ends_no_run(written):
    folder, whole = written
    rows = read_stored(folder, "this", build)
    shutil.rmtree(folder)
    loaded, _ = rows.loaded(np.array([500]))
    assert np.array_equal(loaded.row(0), whole.row(500))


@pytest.mark.parametrize("name", ["ids.bin", "offsets.bin", "labels.bin"])
def test_a_flipped_bit_is_found(written, name):
    path = written[0] / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"{name}: is not what was written"):
        read_stored(written[0], "this", build)


def test_other_and_missing_files_are_refused(written):
    with pytest.raises(ArtifactError, match="is of other data"):
        read_stored(written[0], "that", build)
    facts = written[0] / "facts.json"
    facts.write_text(facts.read_text().replace('"ids"', '"../ids"'))
    with pytest.raises(ArtifactError, match="is not what was written"):
        read_stored(written[0], "this", build)
    facts.unlink()
    with pytest.raises(FileNotFoundError):
        read_stored(written[0], "this", build)


def test_what_ends_early_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), writing(tmp_path / "set") as writer:
        writer.append({"ids": np.arange(3), "offsets": np.array([0, 3])})
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_array_of_many_more_places_than_are_mapped_at_once(tmp_path):
    numbers = np.arange(10_000, dtype="<i8")
    numbers.tofile(tmp_path / "a.bin")
    array = DiskArray(tmp_path / "a.bin", "<i8")
    places = np.random.default_rng(0).permutation(10_000)
    assert len(array) == 10_000
    assert np.array_equal(array[places], places)
    assert np.array_equal(array.read_spans(places[:999], np.full(999, 1)), places[:999])
