import hashlib

import numpy as np
import pytest

from edgeformer.artifacts.errors import DataError
from edgeformer.data.rows import LabelledTexts, Row, number_labels
from edgeformer.data.synthetic import WHERE, synthetic_reviews


def indices(values, labels=("negative", "positive")):
    rows = [Row("x", value, f"f, line {n}") for n, value in enumerate(values, 1)]
    return [index for _, index in number_labels(rows, labels)]


def test_labels_are_numbers_numerals_or_names() -> None:
    assert indices([1, "0", "positive", "negative", 0]) == [1, 0, 1, 0, 0]
    assert indices([1, "2", 5, "3"], labels=("1", "2", "3", "4", "5")) == [0, 1, 4, 2], "names win over numbers"
    with pytest.raises(DataError, match=r"line 2: label '0' is not in data.labels; allowed: 1, 2, 3; correct"):
        indices([1, 0], labels=("1", "2", "3"))
    assert indices([" positive", "negative ", " 0", "1.0", "0.0"]) == [1, 0, 0, 1, 0]
    assert indices(["1", " 2.0", "1.0"], labels=("1.0", "2.0")) == [0, 1, 0], "a name, not an index"
    assert indices(["0", "0.0"], labels=("0", "0.0")) == [0, 1], "as in recipes that list both"
    with pytest.raises(DataError, match="f, line 1: has no label"):
        indices([None])
    with pytest.raises(DataError, match=r"label 'Positve ' is not in data.labels; did you mean 'positive'\? allowed"):
        indices(["Positve "])


@pytest.mark.parametrize("value", [2, -1, "2", "Positive", "posi tive", "1.5", "٣", "9" * 5000])
def test_unknown_label_is_refused(value):
    with pytest.raises(DataError) as caught:
        indices([1, value])
    message = str(caught.value)
    assert message.startswith("f, line 2: label ")
    assert "allowed: negative, positive (or their numbers 0 to 1)" in message


def test_fingerprint_sees_texts_labels_and_order():
    contents = [*(([text], [0]) for text in ("ab", "a b", ("a", "b"), ("b", "a"), ("a b", "")))]
    contents += [(["ab", "c"], [1, 1]), *((texts, [0, 1]) for texts in (["a", "bc"], ["c", "ab"], ["ab", "c"]))]
    fingerprints = [LabelledTexts(texts, np.array(labels)).fingerprint() for texts, labels in contents]
    assert len(set(fingerprints)) == len(contents)
    assert LabelledTexts(["ab", "c"], np.array([0, 1])).fingerprint() == fingerprints[-1]


def test_reviews_do_not_change_between_versions():
    """Recorded runs and golden inputs were trained on them: balanced, short, no text with both labels."""
    rows = list(synthetic_reviews(2000, 7))
    content = "".join(f"{row.label} {row.text}\n" for row in rows).encode()
    assert hashlib.sha256(content).hexdigest()[:32] == "11523f6c39b365d200d3f303cb409a1a"
    assert {row.where for row in rows} == {WHERE} and "generated" in WHERE
