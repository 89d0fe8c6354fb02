from collections import Counter

import numpy as np

from edgeformer.artifacts.progress import SILENT
from edgeformer.data.splits import count_overlaps
from edgeformer.data.synthetic import WHERE, synthetic_reviews


def test_rows_depend_on_the_seed_only():
    assert list(synthetic_reviews(50, 1)) == list(synthetic_reviews(50, 1))
    assert list(synthetic_reviews(50, 1)) != list(synthetic_reviews(50, 2))
    assert list(synthetic_reviews(80, 1))[:50] == list(synthetic_reviews(50, 1)), (
        "a longer set begins with a shorter set"
    )


def test_rows_name_their_origin():
    assert {row.where for row in synthetic_reviews(20, 0)} == {WHERE}
    assert "generated" in WHERE


def test_reviews_are_short_balanced_and_rarely_repeat():
    rows = list(synthetic_reviews(4000, 0))
    words = [len(row.text.split()) for row in rows]
    assert min(words) >= 4
    assert max(words) <= 40
    positive = sum(row.label == 1 for row in rows)
    assert 0.47 < positive / len(rows) < 0.53
    texts = [row.text for row in rows]
    (overlap,) = count_overlaps(texts[1000:], {"set": texts[:1000]}, "sets", SILENT)
    assert overlap.duplicates + overlap.contained < 60


def test_no_text_has_both_labels():
    labels: dict[str, set[object]] = {}
    for row in synthetic_reviews(20_000, 3):
        labels.setdefault(row.text, set()).add(row.label)
    assert all(len(values) == 1 for values in labels.values())


def test_single_words_do_not_decide():
    """Naive Bayes on single words is far worse than a model that reads words in order (0.93 and more)."""
    rows, held_out = list(synthetic_reviews(6000, 0)), list(synthetic_reviews(1500, 1))
    counts = [Counter(), Counter()]
    for row in rows:
        counts[row.label].update(set(row.text.split()))
    weights = {word: np.log((counts[1][word] + 1) / (counts[0][word] + 1)) for word in {*counts[0], *counts[1]}}
    correct = sum((sum(weights.get(word, 0.0) for word in set(row.text.split())) > 0) == row.label for row in held_out)
    assert 0.6 < correct / len(held_out) < 0.85
