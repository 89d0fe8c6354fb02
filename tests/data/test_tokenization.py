import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.trainers import WordPieceTrainer

from edgeformer.artifacts.data_config import FileTokenizer, HubTokenizer, TrainedTokenizer
from edgeformer.artifacts.errors import DataError
from edgeformer.data import cleaning, encoding, tokenization
from edgeformer.data.encoding import PlainText, encode, encode_texts
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.data.tokenization import SPECIAL_TOKENS, boundary_id, fingerprint

TEXTS = [row.text for row in synthetic_reviews(400, seed=5)]
BPE = TrainedTokenizer(kind="trained", algorithm="bpe")


def trained(algorithm="wordpiece", vocab_size=320, cleaning="paper", texts=TEXTS) -> Tokenizer:
    config = TrainedTokenizer(kind="trained", algorithm=algorithm)
    return tokenization.load_tokenizer(config, cleaning=cleaning, vocab_size=vocab_size, training_texts=texts)


def load(path, vocab_size=320, cleaning="paper") -> Tokenizer:
    config = FileTokenizer(kind="file", path=str(path))
    return tokenization.load_tokenizer(config, cleaning=cleaning, vocab_size=vocab_size, training_texts=None)


def saved(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def ids_of(tokenizer, text) -> list[int]:
    return list(tokenizer.encode(text).ids)


@pytest.mark.parametrize("algorithm", ["wordpiece", "bpe"])
def test_trained_tokenizer_suits_a_classifier_and_is_reproducible(algorithm):
    tokenizer = trained(algorithm)
    special = tokenization.special_ids(tokenizer)
    assert tokenizer.get_vocab_size() == 320
    assert [tokenizer.id_to_token(number) for number in range(5)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert (special.pad, special.unk, special.cls) == (0, 1, 2)
    row = ids_of(tokenizer, TEXTS[0])
    assert (row[0], row[-1]) == (2, 3) and 1 not in row
    assert tokenizer.decode(row).replace(" ", "") == cleaning.clean(TEXTS[0]).replace(" ", "")
    program = f"from tests.data.test_tokenization import *; print(fingerprint(trained({algorithm!r})))"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == fingerprint(tokenizer), "in another process"


def test_wordpiece_learns_the_vocabulary_of_the_library():
    # Counts without ties: with ties the library's trainer gives another vocabulary in every process.
    words = {"hug": 10, "pug": 5, "pun": 12, "bun": 4, "hugs": 7}
    texts = [word for word, count in words.items() for _ in range(count)]
    library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    letters, starts_and_insides, merges = 7, 7 + 4, 4
    size = len(SPECIAL_TOKENS) + starts_and_insides + merges
    trainer = WordPieceTrainer(vocab_size=size, special_tokens=SPECIAL_TOKENS, show_progress=False)
    library.train_from_iterator(texts, trainer)
    tokenizer = trained(vocab_size=5 + 2 * letters + merges, texts=texts)

    def learned(tokenizer):
        return {token for token in tokenizer.get_vocab() if len(token.removeprefix("##")) > 1} - {*SPECIAL_TOKENS}

    assert learned(tokenizer) == learned(library) == {"hug", "##un", "pun", "##ug"}
    assert tokenizer.encode("nubb", add_special_tokens=False).tokens == ["n", "##u", "##b", "##b"], "a new word"


def test_small_text_gives_a_smaller_vocabulary():
    small = trained(vocab_size=4000)
    size = small.get_vocab_size()
    assert size < 4000 and trained(vocab_size=size).to_str() == small.to_str()
    with pytest.raises(DataError, match="too small for a trained tokenizer"):
        trained(vocab_size=5)
    with pytest.raises(DataError, match="needs the training texts"):
        trained(texts=None)


def test_stored_truncation_and_padding_are_turned_off(tmp_path):
    for tokenizer, open_file in ((trained(), load), (trained_language(), lambda path: load_language(path, 400))):
        expected = ids_of(tokenizer, TEXTS[0])
        tokenizer.enable_truncation(5)
        tokenizer.enable_padding(length=64)
        path = saved(tokenizer, tmp_path)
        assert json.loads(path.read_text())["truncation"]["max_length"] == 5
        loaded = open_file(path)
        assert (loaded.truncation, loaded.padding) == (None, None)
        assert ids_of(loaded, TEXTS[0]) == expected
    assert PlainText(tokenizer).encode_all(TEXTS[:1]).ids.tolist() == expected  # as of a bundle


def test_cleaning_is_added_once_and_that_of_an_earlier_version_stays(tmp_path) -> None:
    plain = trained(cleaning="none")
    cleaned = load(saved(plain, tmp_path))
    assert fingerprint(cleaned) != fingerprint(plain)
    dirty, tidy = "SEE <br/>http://x.org  the   Menu!!!", "see the menu!"
    assert ids_of(cleaned, dirty) == ids_of(cleaned, tidy)
    assert ids_of(plain, dirty) != ids_of(plain, tidy)
    assert fingerprint(load(saved(cleaned, tmp_path))) == fingerprint(cleaned)
    assert fingerprint(load(saved(plain, tmp_path), cleaning="none")) == fingerprint(plain)
    plain, current = trained(cleaning="none"), trained()
    earlier = Tokenizer.from_str(plain.to_str())
    earlier.normalizer = normalizers.Sequence([*cleaning.normalizers(cleaning.VERSIONS[1]), plain.normalizer])
    loaded = load(saved(earlier, tmp_path))
    assert fingerprint(loaded) == fingerprint(earlier) != fingerprint(load(saved(plain, tmp_path)))
    assert loaded.normalizer.normalize_str("no！！") == "no！！"
    assert current.normalizer.normalize_str("no！！") == "no！"
    assert fingerprint(tokenization.with_current_cleaning(loaded)) == fingerprint(load(saved(plain, tmp_path)))
    assert fingerprint(tokenization.with_current_cleaning(plain)) == fingerprint(plain)


def test_files_that_do_not_fit_are_refused(tmp_path) -> None:
    with pytest.raises(DataError, match=r"gone\.json: no such file"):
        load(tmp_path / "gone.json")
    path = tmp_path / "tokenizer.json"
    for content in (b"{}", b"no", b"\xff\xfe", b"", b'{"model": {"type": "Nonsense"}}'):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer: .*use a tokenizer\.json file"):
            load(path)
    path = saved(trained(), tmp_path)
    message = r"tokenizer\.json: has 320 tokens, but the model has 300; set model\.vocab_size: 320"
    with pytest.raises(DataError, match=message):
        load(path, vocab_size=300)
    # Numbers with gaps: the embedding needs a row for the largest.
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 399
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"set model\.vocab_size: 400"):
        load(path)
    tokenizer = trained()
    path.write_text(json.dumps({**json.loads(tokenizer.to_str()), "post_processor": None}))
    with pytest.raises(DataError, match=r"no special token \(\[CLS\]\)"):
        load(path)
    path.write_text(tokenizer.to_str().replace("[PAD]", "[XXX]"))
    with pytest.raises(DataError, match="no padding token"):
        load(path)
    # The model's own unknown token may have any name.
    path.write_text(tokenizer.to_str().replace("[UNK]", "[XXX]").replace("[MASK]", "[M]"))
    assert tokenization.special_ids(load(path)).unk == 1


def test_hub_error_has_a_remedy(monkeypatch):
    def refuse(name, revision):
        raise Exception(f"Cannot reach the hub for {name}\nlong story")

    monkeypatch.setattr(tokenization, "Tokenizer", SimpleNamespace(from_pretrained=refuse))
    config = HubTokenizer(kind="hub", name="bert-base-uncased")
    message = r"^(?!.*long story).*hub tokenizer bert-base-uncased.*--tokenizer PATH/tokenizer\.json"
    with pytest.raises(DataError, match=message):
        tokenization.load_tokenizer(config, cleaning="paper", vocab_size=30_522, training_texts=None)


@pytest.mark.data
def test_bert_base_uncased_and_gpt2(data_folder, tmp_path):
    stored = data_folder / "tokenizers" / "bert-base-uncased" / "tokenizer.json"
    tokenizer = load(stored, vocab_size=30_522)
    special = tokenization.special_ids(tokenizer)
    assert (special.pad, special.unk, special.cls) == (0, 100, 101)
    assert ids_of(tokenizer, "Hide NEW   secretions!!!") == [101, 5342, 2047, 3595, 8496, 999, 102]
    assert boundary_id(load_language(stored, 30_522)) == tokenizer.token_to_id("[SEP]") == 102
    stored = data_folder / "tokenizers" / "gpt2" / "tokenizer.json"
    with pytest.raises(DataError, match=r"\[CLS\]"):
        load(stored, vocab_size=50_257)
    gpt2 = load_language(stored, 50_257)
    assert boundary_id(gpt2) == 50_256
    text = "The <unk> of 1 @,@ 000 – naïve"
    assert gpt2.decode(PlainText(gpt2).encode(text).ids) == text


def trained_language(vocab_size=400) -> Tokenizer:
    return tokenization.load_language_tokenizer(BPE, vocab_size=vocab_size, training_texts=TEXTS)


def load_language(path, vocab_size) -> Tokenizer:
    config = FileTokenizer(kind="file", path=str(path))
    return tokenization.load_language_tokenizer(config, vocab_size=vocab_size, training_texts=None)


@pytest.fixture(scope="module")
def language_tokenizer() -> Tokenizer:
    return trained_language()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_language_tokenizer_decodes_every_text_exactly(language_tokenizer, text):
    ids = PlainText(language_tokenizer).encode(text).ids
    assert language_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_language_tokenizer_has_one_special_token(language_tokenizer, tmp_path):
    assert boundary_id(language_tokenizer) == language_tokenizer.token_to_id("<|endoftext|>") == 0
    assert {token.content for token in language_tokenizer.get_added_tokens_decoder().values()} == {"<|endoftext|>"}
    assert fingerprint(language_tokenizer) == fingerprint(trained_language())
    with pytest.raises(DataError, match=r"wordpiece does not keep spaces.*set tokenizer\.algorithm: bpe"):
        tokenization.load_language_tokenizer(TrainedTokenizer(kind="trained"), vocab_size=400, training_texts=TEXTS)
    message = r"trained bpe tokenizer: has 257 tokens, but the model has 9; set model\.vocab_size"
    with pytest.raises(DataError, match=message):
        trained_language(9)
    document = json.loads(language_tokenizer.to_str())
    document["added_tokens"][0]["content"] = "<stop>"
    vocabulary = document["model"]["vocab"]
    vocabulary["<stop>"] = vocabulary.pop("<|endoftext|>")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    message = r"tokenizer\.json: has no token for the end of a text \(one of <\|endoftext\|>, </s>.*\[SEP\]"
    with pytest.raises(DataError, match=message):
        load_language(path, 400)


REVIEWS = [row.text for row in synthetic_reviews(200, 0)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained(vocab_size=250, texts=REVIEWS)


def test_truncated_text_keeps_its_last_special_token(tokenizer):
    original = fingerprint(tokenizer)
    texts = LabelledTexts(REVIEWS[:4], np.arange(4, dtype=np.int64))
    uncut, cut = encode(texts, tokenizer, 128), encode(texts, tokenizer, 6)
    assert (uncut.truncated, cut.truncated) == (0, 4) and cut.lengths.tolist() == [6, 6, 6, 6]
    for index in range(4):
        assert cut.row(index).tolist() == [*uncut.row(index)[:5].tolist(), 3]
    assert (cut.ids.dtype, cut.offsets.dtype, cut.labels.tolist()) == (np.int32, np.int64, [0, 1, 2, 3])
    assert encode(texts.take(np.arange(1)), tokenizer, int(uncut.lengths[0])).truncated == 0
    assert fingerprint(tokenizer) == original


def test_chunks_do_not_change_the_encoding(tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "_CHUNK", 7)
    advances, texts = [], [*REVIEWS[:40], "", " "]
    encoded, _ = encode_texts(tokenizer, texts, 128, advances.append)
    assert sum(advances) == len(encoded) == 42
    assert [encoded.row(i).tolist() for i in range(42)] == [tokenizer.encode(text).ids for text in texts]
    assert len(encode(LabelledTexts.unlabelled([]), tokenizer, 128)) == 0


def test_boundary_inside_a_text_is_spelled_out(language_tokenizer):
    tokenizer = language_tokenizer
    plain, texts = PlainText(tokenizer), ["fine food", "one <|endoftext|> two", "", "<|endoftext|>"]
    assert 0 in tokenizer.encode(texts[1]).ids
    encoded = plain.encode_all(texts)
    assert 0 not in encoded.ids
    rows = [encoded.row(index).tolist() for index in range(len(encoded))]
    assert [tokenizer.decode(row, skip_special_tokens=False) for row in rows] == texts
    assert rows[0] == tokenizer.encode(texts[0]).ids
    assert [plain.encode(text).ids for text in texts] == rows
