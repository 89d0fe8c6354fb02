import numpy as np
import pytest

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.errors import DataError
from edgeformer.data.rows import LabelledTexts, Row, label_rows
from edgeformer.data.sources import load_parts

SENTIMENT = ("negative", "positive")


def indices(values, labels=SENTIMENT):
    return label_rows([Row("x", value, f"f, line {n}") for n, value in enumerate(values, 1)], labels).labels.tolist()


def test_labels_are_numbers_numerals_or_names():
    assert indices([1, "0", "positive", "negative", 0]) == [1, 0, 1, 0, 0]


def test_a_name_goes_before_a_number():
    assert indices([1, "2", 5, "3"], labels=("1", "2", "3", "4", "5")) == [0, 1, 4, 2]


def test_a_number_is_no_index_where_names_are_numbers():
    """A "1" would be the first of them in one row, and a "0" as well in another."""
    with pytest.raises(DataError, match=r"line 2: label '0' is not in the set; allowed: 1, 2, 3; change"):
        indices([1, 0], labels=("1", "2", "3"))


@pytest.mark.parametrize("value", [2, -1, "2", "Positive", " positive", "1.5", "٣", "9" * 5000])
def test_a_label_outside_the_set_is_named_with_its_row(value):
    with pytest.raises(DataError) as caught:
        indices([1, value])
    message = str(caught.value)
    assert message.startswith("f, line 2: label ")
    assert "allowed: negative, positive (or their numbers 0 to 1)" in message


def test_an_unlabelled_row_is_not_a_class():
    with pytest.raises(DataError, match="f, line 1: has no label"):
        indices([None])


def test_the_fingerprint_sees_texts_labels_and_order():
    base = LabelledTexts(["ab", "c"], np.array([0, 1]))
    same = LabelledTexts(["ab", "c"], np.array([0, 1]))
    others = [
        LabelledTexts(["a", "bc"], np.array([0, 1])),
        LabelledTexts(["c", "ab"], np.array([0, 1])),
        LabelledTexts(["ab", "c"], np.array([1, 1])),
        LabelledTexts(["ab"], np.array([0])),
    ]
    assert base.fingerprint() == same.fingerprint()
    assert len({base.fingerprint(), *(other.fingerprint() for other in others)}) == 5


def test_sources_of_a_part_follow_each_other(tmp_path):
    (tmp_path / "a.txt").write_text("good\nfine\n")
    (tmp_path / "b.txt").write_text("bad\n")
    sources = [
        {"kind": "file", "path": str(tmp_path / "a.txt"), "label_value": "positive"},
        {"kind": "file", "path": str(tmp_path / "b.txt"), "label_value": 0},
    ]
    config = DataConfig.model_validate({"parts": {"train": sources}, "split": "random-split", "labels": SENTIMENT})
    (part,) = load_parts(config).values()
    assert (part.texts, part.labels.tolist(), part.labels.dtype) == (
        ["good", "fine", "bad"],
        [1, 1, 0],
        np.int64,
    )


@pytest.mark.data
def test_sst2_as_it_is(data_folder):
    files = {
        "train": ("train.tsv", "sentence"),
        "validation": ("dev.tsv", "content"),
        "sst-test": ("test.tsv", "content"),
    }
    parts = {
        part: [{"kind": "file", "path": str(data_folder / "sst2" / name), "text": text}]
        for part, (name, text) in files.items()
    }
    config = DataConfig.model_validate({"parts": parts, "split": "sst-test", "labels": SENTIMENT})
    loaded = load_parts(config)
    assert {name: np.bincount(part.labels).tolist() for name, part in loaded.items()} == {
        "train": [29780, 37569],
        "validation": [428, 444],
        "sst-test": [912, 909],
    }
