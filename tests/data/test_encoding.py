import numpy as np
import pytest
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import TrainedTokenizer
from edgeformer.data import encoding
from edgeformer.data.encoding import PlainText, encode, encode_texts
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.data.tokenization import fingerprint, load_language_tokenizer, load_tokenizer

ROWS = list(synthetic_reviews(200, 0))
TEXTS = LabelledTexts([row.text for row in ROWS], np.array([row.label for row in ROWS]))
BPE = TrainedTokenizer(kind="trained", algorithm="bpe")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    config = TrainedTokenizer(kind="trained")
    return load_tokenizer(config, cleaning="paper", vocab_size=250, training_texts=TEXTS.texts)


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


def test_boundary_inside_a_text_is_spelled_out():
    tokenizer = load_language_tokenizer(BPE, vocab_size=400, training_texts=TEXTS.texts)
    plain, texts = PlainText(tokenizer), ["fine food", "one <|endoftext|> two", "", "<|endoftext|>"]
    assert 0 in tokenizer.encode(texts[1]).ids
    encoded = plain.encode_all(texts)
    assert 0 not in encoded.ids
    rows = [encoded.row(index).tolist() for index in range(len(encoded))]
    assert [tokenizer.decode(row, skip_special_tokens=False) for row in rows] == texts
    assert rows[0] == tokenizer.encode(texts[0]).ids
    assert [plain.encode(text).ids for text in texts] == rows
