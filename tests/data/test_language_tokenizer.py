import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import FileTokenizer, TrainedTokenizer
from edgeformer.artifacts.errors import DataError
from edgeformer.data.encoding import PlainText
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.data.tokenization import boundary_id, fingerprint, load_language_tokenizer, load_tokenizer

TEXTS = [row.text for row in synthetic_reviews(300, seed=5)]
BPE = TrainedTokenizer(kind="trained", algorithm="bpe")


def trained(vocab_size=400) -> Tokenizer:
    return load_language_tokenizer(BPE, vocab_size=vocab_size, training_texts=TEXTS)


def load(path, vocab_size) -> Tokenizer:
    config = FileTokenizer(kind="file", path=str(path))
    return load_language_tokenizer(config, vocab_size=vocab_size, training_texts=None)


def saved(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained()


@pytest.fixture(scope="module")
def plain(tokenizer) -> PlainText:
    return PlainText(tokenizer)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_exactly(tokenizer, plain, text):
    assert tokenizer.decode(plain.encode(text).ids, skip_special_tokens=False) == text


def test_a_trained_tokenizer_has_one_special_token(tokenizer):
    assert tokenizer.get_vocab_size() == 400
    assert boundary_id(tokenizer) == tokenizer.token_to_id("<|endoftext|>") == 0
    assert {token.content for token in tokenizer.get_added_tokens_decoder().values()} == {"<|endoftext|>"}
    assert tokenizer.encode("the").ids == tokenizer.encode("the", add_special_tokens=False).ids
    assert fingerprint(tokenizer) == fingerprint(trained())


def test_a_boundary_inside_a_text_is_spelled_out(tokenizer, plain, tmp_path):
    texts = ["fine food", "one <|endoftext|> two", "", "<|endoftext|>"]
    assert 0 in tokenizer.encode(texts[1]).ids
    for cache in (None, tmp_path, tmp_path):  # made, written, read
        encoded = plain.encode_all(texts, cache)
        assert 0 not in encoded.ids
        rows = [encoded.row(index).tolist() for index in range(len(encoded))]
        assert [tokenizer.decode(row, skip_special_tokens=False) for row in rows] == texts
        assert rows[0] == tokenizer.encode(texts[0]).ids
    assert plain.encode(texts[0]).ids == rows[0]
    assert plain.encode(texts[1]).ids == rows[1]


def test_no_special_tokens_around_a_text():
    config = TrainedTokenizer(kind="trained", algorithm="wordpiece")
    classifier = load_tokenizer(config, cleaning="none", vocab_size=300, training_texts=TEXTS)
    plain = PlainText(classifier)
    assert plain.boundary == classifier.token_to_id("[SEP]")
    (row,) = [plain.encode_all(TEXTS[:1], None).ids.tolist()]
    assert row == classifier.encode(TEXTS[0], add_special_tokens=False).ids
    assert row == classifier.encode(TEXTS[0]).ids[1:-1]


def test_stored_truncation_and_padding_are_switched_off(tmp_path):
    tokenizer = trained()
    expected = tokenizer.encode(TEXTS[0]).ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    path = saved(tokenizer, tmp_path)
    assert json.loads(path.read_text())["truncation"]["max_length"] == 3
    loaded = load(path, 400)
    assert loaded.encode(TEXTS[0]).ids == expected
    # PlainText is given bundles' tokenizers as well, which nobody has switched anything off in.
    assert PlainText(tokenizer).encode_all(TEXTS[:1], None).ids.tolist() == expected


def test_what_cannot_be_used_is_refused(tmp_path):
    wordpiece = TrainedTokenizer(kind="trained")
    with pytest.raises(DataError, match=r"wordpiece loses case and spaces.*set tokenizer\.algorithm: bpe"):
        load_language_tokenizer(wordpiece, vocab_size=400, training_texts=TEXTS)
    with pytest.raises(DataError, match="needs the training texts"):
        load_language_tokenizer(BPE, vocab_size=400, training_texts=None)
    with pytest.raises(DataError, match=r"trained bpe tokenizer: has 257 tokens, the model 9; set model\.vocab_size"):
        trained(9)
    assert trained(trained(40_000).get_vocab_size()).to_str() == trained(40_000).to_str()  # there is no more to learn
    path = saved(trained(), tmp_path)
    with pytest.raises(DataError, match=r"tokenizer\.json: has 400 tokens, the model 300; set model\.vocab_size: 400"):
        load(path, 300)
    with pytest.raises(DataError, match=r"gone\.json: no such file"):
        load(tmp_path / "gone.json", 300)
    document = json.loads(path.read_text())
    document["added_tokens"][0]["content"] = "<stop>"
    vocabulary = document["model"]["vocab"]
    vocabulary["<stop>"] = vocabulary.pop("<|endoftext|>")
    path.write_text(json.dumps(document))
    message = r"tokenizer\.json: has no token for the end of a text; looked for <\|endoftext\|>, </s>.*\[SEP\]"
    with pytest.raises(DataError, match=message):
        load(path, 400)


@pytest.mark.data
def test_gpt2_and_bert(data_folder):
    gpt2 = load(data_folder / "tokenizers" / "gpt2" / "tokenizer.json", 50_257)
    assert boundary_id(gpt2) == 50_256
    text = "The <unk> of 1 @,@ 000 – naïve"
    assert gpt2.decode(PlainText(gpt2).encode(text).ids) == text
    bert = load(data_folder / "tokenizers" / "bert-base-uncased" / "tokenizer.json", 30_522)
    assert boundary_id(bert) == bert.token_to_id("[SEP]") == 102
