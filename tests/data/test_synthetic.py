import hashlib

from edgeformer.data.synthetic import WHERE, synthetic_reviews


def test_reviews_do_not_change_between_versions():
    """Recorded runs and golden inputs were trained on them: balanced, short, no text with both labels."""
    rows = list(synthetic_reviews(2000, 7))
    content = "".join(f"{row.label} {row.text}\n" for row in rows).encode()
    assert hashlib.sha256(content).hexdigest()[:32] == "11523f6c39b365d200d3f303cb409a1a"
    assert {row.where for row in rows} == {WHERE} and "generated" in WHERE


def test_longer_set_begins_with_a_shorter_set():
    assert list(synthetic_reviews(80, 1))[:50] == list(synthetic_reviews(50, 1)) != list(synthetic_reviews(50, 2))
