import numpy as np
import pytest

from edgeformer.artifacts.data_config import TrainedTokenizer
from edgeformer.artifacts.progress import Silent
from edgeformer.data.encoding import encode
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.data.tokenization import load_tokenizer
from edgeformer.system.lock import claiming

ROWS = list(synthetic_reviews(200, 0))
TEXTS = LabelledTexts([row.text for row in ROWS], np.array([row.label for row in ROWS]))


class Recorder(Silent):
    def __init__(self):
        self.messages: list[str] = []
        self.rows = 0

    def message(self, text):
        self.messages.append(text)

    def advance(self, amount=1, **fields):
        self.rows += amount


@pytest.fixture(scope="module")
def tokenizer():
    config = TrainedTokenizer(kind="trained")
    return load_tokenizer(config, cleaning="paper", vocab_size=250, training_texts=TEXTS.texts)


@pytest.fixture
def encodings(monkeypatch):
    """How often texts were really encoded."""
    from edgeformer.data import encoding

    calls = []
    honest = encoding.encode_texts
    monkeypatch.setattr(encoding, "encode_texts", lambda *given: calls.append(1) or honest(*given))
    return calls


def same(one, other) -> bool:
    arrays = ("ids", "offsets", "labels")
    equal = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
    return equal and one.truncated == other.truncated


def test_the_second_time_nothing_is_encoded(tmp_path, tokenizer, encodings):
    progress = Recorder()
    first = encode(TEXTS, tokenizer, 10, tmp_path, progress)
    second = encode(TEXTS, tokenizer, 10, tmp_path, progress)
    assert len(encodings) == 1
    assert same(first, second)
    assert first.truncated > 0
    assert (progress.rows, progress.messages) == (400, [])
    assert same(first, encode(TEXTS, tokenizer, 10, None))
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]


def test_anything_that_matters_changes_the_key(tmp_path, tokenizer):
    config = TrainedTokenizer(kind="trained", algorithm="bpe")
    other = load_tokenizer(config, cleaning="paper", vocab_size=300, training_texts=TEXTS.texts)
    relabelled = LabelledTexts(TEXTS.texts, 1 - TEXTS.labels)
    encode(TEXTS, tokenizer, 10, tmp_path)
    encode(TEXTS, tokenizer, 11, tmp_path)
    encode(TEXTS, other, 10, tmp_path)
    encode(relabelled, tokenizer, 10, tmp_path)
    encode(TEXTS.take(np.arange(199)), tokenizer, 10, tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def shuffled(offsets):
    return np.array([offsets[0], *offsets[-2:0:-1], offsets[-1]])


def damage(path, how, tmp_path, tokenizer):
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif how == "pickle":
        np.savez(path, key=np.array([object()], dtype=object))
    elif how == "foreign":
        (other,) = (tmp_path / "other").glob("*.npz")
        path.write_bytes(other.read_bytes())
    else:
        with np.load(path) as stored:
            arrays = dict(stored)
        arrays["offsets"] = arrays["offsets"][::-1].copy() if how == "reversed" else shuffled(arrays["offsets"])
        np.savez(path, **arrays)


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "pickle", "foreign", "reversed", "shuffled"])
def test_a_damaged_file_is_made_again(tmp_path, tokenizer, encodings, how):
    folder = tmp_path / "cache"
    good = encode(TEXTS, tokenizer, 10, folder)
    encode(TEXTS, tokenizer, 11, tmp_path / "other")
    (path,) = folder.glob("*.npz")
    damage(path, how, tmp_path, tokenizer)
    progress = Recorder()
    assert same(encode(TEXTS, tokenizer, 10, folder, progress), good)
    assert len(encodings) == 3
    assert len(progress.messages) == 1
    assert "damaged token cache" in progress.messages[0]
    assert same(encode(TEXTS, tokenizer, 10, folder, progress), good)
    assert len(encodings) == 3


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, tokenizer):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    progress = Recorder()
    assert len(encode(TEXTS, tokenizer, 10, blocked, progress)) == 200
    assert "not written" in progress.messages[0]


def test_what_a_killed_process_left_goes_and_what_another_one_writes_stays(tmp_path, tokenizer):
    encode(TEXTS, tokenizer, 16, tmp_path)
    (made,) = tmp_path.iterdir()
    left = tmp_path / f".{made.name}.k1ll3d.tmp.npz"
    made.unlink()
    left.write_bytes(b"half")
    with claiming(made):
        said = Recorder()
        encode(TEXTS, tokenizer, 16, tmp_path, said)
        assert left.exists() and not made.exists() and said.messages == []
    encode(TEXTS, tokenizer, 16, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [made.name]
