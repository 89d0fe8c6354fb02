import numpy as np
import pytest
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import TrainedTokenizer
from edgeformer.data import encoding
from edgeformer.data.encoding import PlainText, encode, encode_texts
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.data.tokenization import fingerprint, load_language_tokenizer, load_tokenizer
from edgeformer.system.lock import lock_path
from tests.data.conftest import Recorder

ROWS = list(synthetic_reviews(200, 0))
TEXTS = LabelledTexts([row.text for row in ROWS], np.array([row.label for row in ROWS]))
BPE = TrainedTokenizer(kind="trained", algorithm="bpe")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    config = TrainedTokenizer(kind="trained")
    return load_tokenizer(config, cleaning="paper", vocab_size=250, training_texts=TEXTS.texts)


@pytest.fixture
def encodings(monkeypatch) -> list[int]:
    """One item for each set that is encoded."""
    calls: list[int] = []
    monkeypatch.setattr(encoding, "encode_texts", lambda *arguments: calls.append(1) or encode_texts(*arguments))
    return calls


def same(one, other) -> bool:
    equal = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("ids", "offsets", "labels"))
    return equal and one.truncated == other.truncated


def test_truncated_text_keeps_its_last_special_token(tokenizer):
    original = fingerprint(tokenizer)
    texts = LabelledTexts(TEXTS.texts[:4], np.arange(4, dtype=np.int64))
    uncut, cut = encode(texts, tokenizer, 128), encode(texts, tokenizer, 6)
    assert (uncut.truncated, cut.truncated) == (0, 4)
    assert cut.lengths.tolist() == [6, 6, 6, 6]
    for index in range(4):
        assert cut.row(index).tolist() == [*uncut.row(index)[:5].tolist(), 3]
    assert (cut.ids.dtype, cut.offsets.dtype, cut.labels.tolist()) == (np.int32, np.int64, [0, 1, 2, 3])
    assert encode(texts.take(np.arange(1)), tokenizer, int(uncut.lengths[0])).truncated == 0
    assert fingerprint(tokenizer) == original


def test_chunks_do_not_change_the_encoding(tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "_CHUNK", 7)
    advances = []
    texts = [*TEXTS.texts[:40], "", " "]
    encoded, _ = encode_texts(tokenizer, texts, 128, advances.append)
    assert sum(advances) == len(encoded) == 42
    assert [encoded.row(i).tolist() for i in range(42)] == [tokenizer.encode(text).ids for text in texts]
    assert len(encode(LabelledTexts.unlabelled([]), tokenizer, 128)) == 0


def test_cached_set_is_not_encoded_again(tmp_path, tokenizer, encodings):
    progress = Recorder()
    first = encode(TEXTS, tokenizer, 10, tmp_path, progress)
    second = encode(TEXTS, tokenizer, 10, tmp_path, progress)
    assert len(encodings) == 1
    assert same(first, second) and same(first, encode(TEXTS, tokenizer, 10, None))
    assert first.truncated > 0
    assert (progress.rows, progress.messages) == (400, [])
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]


def test_texts_labels_tokenizer_and_length_decide_the_cache_file(tmp_path, tokenizer):
    other_tokenizer = load_tokenizer(BPE, cleaning="paper", vocab_size=300, training_texts=TEXTS.texts)
    encode(TEXTS, tokenizer, 10, tmp_path)
    encode(TEXTS, tokenizer, 11, tmp_path)
    encode(TEXTS, other_tokenizer, 10, tmp_path)
    encode(LabelledTexts(TEXTS.texts, 1 - TEXTS.labels), tokenizer, 10, tmp_path)
    encode(TEXTS.take(np.arange(199)), tokenizer, 10, tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def damage(path, kind, foreign):
    content = path.read_bytes()
    middle = len(content) // 2
    if kind in ("cut", "empty", "flipped", "foreign"):
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        contents = {"cut": content[:middle], "empty": b"", "flipped": flipped, "foreign": foreign.read_bytes()}
        path.write_bytes(contents[kind])
    elif kind == "pickle":
        np.savez(path, key=np.array([object()], dtype=object))
    else:
        with np.load(path) as stored:
            arrays = dict(stored)
        offsets = arrays["offsets"]
        arrays["offsets"] = offsets[::-1].copy()
        if kind == "shuffled":
            arrays["offsets"] = np.array([offsets[0], *offsets[-2:0:-1], offsets[-1]])
        np.savez(path, **arrays)


@pytest.mark.parametrize("kind", ["cut", "empty", "flipped", "pickle", "foreign", "reversed", "shuffled"])
def test_damaged_cache_file_is_written_again(tmp_path, tokenizer, encodings, kind):
    folder = tmp_path / "cache"
    expected = encode(TEXTS, tokenizer, 10, folder)
    encode(TEXTS, tokenizer, 11, tmp_path / "other")
    (path,), (foreign,) = folder.glob("*.npz"), (tmp_path / "other").glob("*.npz")
    damage(path, kind, foreign)
    progress = Recorder()
    for _ in range(2):
        assert same(encode(TEXTS, tokenizer, 10, folder, progress), expected)
        assert len(encodings) == 3
    assert len(progress.messages) == 1 and "damaged token cache" in progress.messages[0]


def test_unwritable_cache_is_no_error(tmp_path, tokenizer):
    (tmp_path / "file").write_text("not a folder")
    progress = Recorder()
    assert len(encode(TEXTS, tokenizer, 10, tmp_path / "file", progress)) == 200
    assert "not written" in progress.messages[0]


def test_leftovers_are_removed_unless_another_process_writes(tmp_path, tokenizer):
    encode(TEXTS, tokenizer, 16, tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    leftover = tmp_path / f".{path.name}.k1ll3d.tmp.npz"
    leftover.write_bytes(b"half")
    with lock_path(path):
        progress = Recorder()
        encode(TEXTS, tokenizer, 16, tmp_path, progress)
        assert leftover.exists() and not path.exists() and progress.messages == []
    encode(TEXTS, tokenizer, 16, tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_boundary_inside_a_text_is_spelled_out(tmp_path):
    tokenizer = load_language_tokenizer(BPE, vocab_size=400, training_texts=TEXTS.texts)
    plain, texts = PlainText(tokenizer), ["fine food", "one <|endoftext|> two", "", "<|endoftext|>"]
    assert 0 in tokenizer.encode(texts[1]).ids
    for cache in (None, tmp_path, tmp_path):  # without cache, written, read
        encoded = plain.encode_all(texts, cache)
        assert 0 not in encoded.ids
        rows = [encoded.row(index).tolist() for index in range(len(encoded))]
        assert [tokenizer.decode(row, skip_special_tokens=False) for row in rows] == texts
        assert rows[0] == tokenizer.encode(texts[0]).ids
    assert [plain.encode(text).ids for text in texts] == rows


def test_plain_text_has_no_special_tokens(tokenizer):
    plain = PlainText(tokenizer)
    assert plain.boundary == tokenizer.token_to_id("[SEP]")
    row = plain.encode_all(TEXTS.texts[:1], None).ids.tolist()
    assert row == tokenizer.encode(TEXTS.texts[0], add_special_tokens=False).ids
    assert row == tokenizer.encode(TEXTS.texts[0]).ids[1:-1]
