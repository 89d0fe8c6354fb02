import json
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from edgeformer.artifacts.data_config import FileTokenizer, HubTokenizer, TrainedTokenizer
from edgeformer.artifacts.errors import DataError
from edgeformer.data.cleaning import VERSIONS, clean
from edgeformer.data.cleaning import normalizers as cleaning_steps
from edgeformer.data.encoding import encode, encode_texts
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.data.tokenization import cleaning_as_now, fingerprint, load_tokenizer, special_ids

TEXTS = [row.text for row in synthetic_reviews(400, seed=5)]
ALGORITHMS = ("wordpiece", "bpe")
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def trained(algorithm="wordpiece", vocab_size=320, cleaning="paper", texts=TEXTS) -> Tokenizer:
    config = TrainedTokenizer(kind="trained", algorithm=algorithm)
    return load_tokenizer(config, cleaning=cleaning, vocab_size=vocab_size, training_texts=texts)


def load(path, vocab_size=320, cleaning="paper") -> Tokenizer:
    config = FileTokenizer(kind="file", path=str(path))
    return load_tokenizer(config, cleaning=cleaning, vocab_size=vocab_size, training_texts=None)


def saved(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def ids_of(tokenizer, texts, max_length=128):
    encoded = encode(LabelledTexts.unlabelled(texts), tokenizer, max_length)
    return [encoded.row(index).tolist() for index in range(len(encoded))]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_trained_tokenizer_is_a_classifiers(algorithm):
    tokenizer = trained(algorithm)
    special = special_ids(tokenizer)
    assert tokenizer.get_vocab_size() == 320
    assert [tokenizer.id_to_token(number) for number in range(5)] == [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
    ]
    assert (special.pad, special.unk, special.cls) == (0, 1, 2)
    (row,) = ids_of(tokenizer, [TEXTS[0]])
    assert (row[0], row[-1]) == (2, 3)
    assert 1 not in row
    # Nothing of the text is lost.
    assert tokenizer.decode(row).replace(" ", "") == clean(TEXTS[0]).replace(" ", "")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_is_the_same_in_another_process(algorithm):
    program = (
        "from edgeformer.data.synthetic import synthetic_reviews\n"
        "from edgeformer.data.tokenization import fingerprint, load_tokenizer\n"
        "from edgeformer.artifacts.data_config import TrainedTokenizer\n"
        "texts = [row.text for row in synthetic_reviews(400, seed=5)]\n"
        f"config = TrainedTokenizer(kind='trained', algorithm={algorithm!r})\n"
        "print(fingerprint(load_tokenizer(config, cleaning='paper', vocab_size=320, training_texts=texts)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint(trained(algorithm))


def test_wordpiece_learns_what_the_librarys_own_trainer_learns():
    from tokenizers.trainers import WordPieceTrainer

    # Counts without ties: with ties that trainer gives another vocabulary in every process.
    words = {"hug": 10, "pug": 5, "pun": 12, "bun": 4, "hugs": 7}
    texts = [word for word, count in words.items() for _ in range(count)]
    other = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    other.normalizer, other.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    letters, starts_and_insides, merges = 7, 7 + 4, 4
    trainer = WordPieceTrainer(vocab_size=5 + starts_and_insides + merges, special_tokens=SPECIALS, show_progress=False)
    other.train_from_iterator(texts, trainer)
    ours = trained(vocab_size=5 + 2 * letters + merges, texts=texts)

    def learnt(tokenizer):
        return {token for token in tokenizer.get_vocab() if len(token.removeprefix("##")) > 1} - set(SPECIALS)

    assert learnt(ours) == learnt(other) == {"hug", "##un", "pun", "##ug"}


def test_words_never_seen_are_spelled_out():
    tokenizer = trained(texts=[*TEXTS, "xylophone"])
    assert tokenizer.encode("oxxo", add_special_tokens=False).tokens == ["o", "##x", "##x", "##o"]
    assert tokenizer.encode("日", add_special_tokens=False).tokens == ["[UNK]"]


def test_a_small_text_fills_a_smaller_vocabulary():
    small = trained(vocab_size=4000)
    size = small.get_vocab_size()
    assert size < 4000 and trained(vocab_size=size).to_str() == small.to_str()
    with pytest.raises(DataError, match="too small for a trained tokenizer"):
        trained(vocab_size=5)
    with pytest.raises(DataError, match="needs the training texts"):
        trained(texts=None)


def test_stored_truncation_and_padding_are_switched_off(tmp_path):
    tokenizer = trained()
    expected = ids_of(tokenizer, TEXTS[:8])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=64)
    path = saved(tokenizer, tmp_path)
    assert json.loads(path.read_text())["truncation"]["max_length"] == 5
    loaded = load(path)
    assert (loaded.truncation, loaded.padding) == (None, None)
    assert ids_of(loaded, TEXTS[:8]) == expected


def test_cleaning_is_put_in_front_once(tmp_path):
    plain = trained(cleaning="none")
    cleaning = load(saved(plain, tmp_path))
    assert fingerprint(cleaning) != fingerprint(plain)
    dirty, tidy = "SEE <br/>http://x.org  the   Menu!!!", "see the menu!"
    assert ids_of(cleaning, [dirty]) == ids_of(cleaning, [tidy])
    assert ids_of(plain, [dirty]) != ids_of(plain, [tidy])
    again = load(saved(cleaning, tmp_path))
    assert fingerprint(again) == fingerprint(cleaning)
    assert fingerprint(load(saved(plain, tmp_path), cleaning="none")) == fingerprint(plain)


def test_the_cleaning_of_an_earlier_version_stays(tmp_path):
    """A model reads as it was trained to; beside a new model, it is compared as if it were new."""
    plain, now = trained(cleaning="none"), trained()
    earlier = Tokenizer.from_str(plain.to_str())
    earlier.normalizer = normalizers.Sequence([*cleaning_steps(VERSIONS[1]), plain.normalizer])
    found = load(saved(earlier, tmp_path))
    assert fingerprint(found) == fingerprint(earlier) != fingerprint(load(saved(plain, tmp_path)))
    assert found.normalizer.normalize_str("no！！") == "no！！" and now.normalizer.normalize_str("no！！") == "no！"
    assert fingerprint(cleaning_as_now(found)) == fingerprint(load(saved(plain, tmp_path)))
    assert fingerprint(cleaning_as_now(plain)) == fingerprint(plain)


def test_a_tokenizer_without_normalizer_gets_the_cleaning(tmp_path):
    tokenizer = trained("bpe", cleaning="none")
    assert tokenizer.normalizer is None
    loaded = load(saved(tokenizer, tmp_path))
    assert ids_of(loaded, ["GOOD!!!  menu"]) == ids_of(loaded, ["good! menu"])


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"gone\.json: no such file"):
        load(tmp_path / "gone.json")
    path = tmp_path / "tokenizer.json"
    for content in (b"{}", b"no", b"\xff\xfe", b"", b'{"model": {"type": "Nonsense"}}'):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer: .*tokenizer\.path"):
            load(path)


def test_another_vocabulary_size_is_refused_with_the_remedy(tmp_path):
    path = saved(trained(), tmp_path)
    with pytest.raises(DataError, match=r"tokenizer\.json: has 320 tokens, the model 300; set model\.vocab_size: 320"):
        load(path, vocab_size=300)
    # Numbers with holes: the embedding needs a row for the largest.
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] = 399
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"set model\.vocab_size: 400"):
        load(path)


def test_missing_special_tokens_are_refused(tmp_path):
    tokenizer = trained()
    document = json.loads(tokenizer.to_str())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**document, "post_processor": None}))
    with pytest.raises(DataError, match=r"no special token \(\[CLS\]\)"):
        load(path)
    for name, problem in (("[PAD]", "no padding token"), ("[UNK]", "no unknown token")):
        renamed = json.loads(tokenizer.to_str().replace(name, "[XXX]").replace("[MASK]", "[M]"))
        path.write_text(json.dumps(renamed))
        if name == "[UNK]":  # the model's own unknown token is found whatever it is called
            assert special_ids(load(path)).unk == 1
            continue
        with pytest.raises(DataError, match=problem):
            load(path)


def test_a_hub_name_that_cannot_be_had_says_what_to_do(monkeypatch):
    def refuse(name, revision):
        raise Exception(f"Cannot reach the hub for {name}\nlong story")

    class Offline:
        from_pretrained = staticmethod(refuse)

    monkeypatch.setattr("edgeformer.data.tokenization.Tokenizer", Offline)
    config = HubTokenizer(kind="hub", name="bert-base-uncased")
    with pytest.raises(DataError) as caught:
        load_tokenizer(config, cleaning="paper", vocab_size=30_522, training_texts=None)
    message = str(caught.value)
    assert "hub tokenizer bert-base-uncased" in message
    assert "--tokenizer PATH/tokenizer.json" in message
    assert "long story" not in message


def test_encoding_cuts_but_keeps_the_last_special_token():
    tokenizer = trained()
    before = fingerprint(tokenizer)
    texts = LabelledTexts(TEXTS[:4], np.arange(4, dtype=np.int64))
    whole = encode(texts, tokenizer, 128)
    cut = encode(texts, tokenizer, 6)
    assert (whole.truncated, cut.truncated) == (0, 4)
    assert cut.lengths.tolist() == [6, 6, 6, 6]
    for index in range(4):
        assert cut.row(index).tolist() == [*whole.row(index)[:5].tolist(), 3]
    assert (cut.ids.dtype, cut.offsets.dtype, cut.labels.tolist()) == (np.int32, np.int64, [0, 1, 2, 3])
    exact = int(whole.lengths[0])
    assert encode(texts.take(np.arange(1)), tokenizer, exact).truncated == 0
    assert fingerprint(tokenizer) == before


def test_encoding_in_chunks_is_encoding_one_by_one(monkeypatch):
    tokenizer = trained()
    monkeypatch.setattr("edgeformer.data.encoding._CHUNK", 7)
    done = []
    texts = [*TEXTS[:40], "", " "]
    encoded, _ = encode_texts(tokenizer, texts, 128, done.append)
    assert sum(done) == len(encoded) == 42
    assert [encoded.row(i).tolist() for i in range(42)] == [tokenizer.encode(text).ids for text in texts]
    assert len(encode(LabelledTexts.unlabelled([]), tokenizer, 128)) == 0


@pytest.mark.data
def test_bert_base_uncased(data_folder, tmp_path):
    stored = data_folder / "tokenizers" / "bert-base-uncased" / "tokenizer.json"
    tokenizer = load(stored, vocab_size=30_522)
    special = special_ids(tokenizer)
    assert (special.pad, special.unk, special.cls) == (0, 100, 101)
    assert ids_of(tokenizer, ["Hide NEW   secretions!!!"]) == [[101, 5342, 2047, 3595, 8496, 999, 102]]
    # Files in the wild carry truncation and padding.
    wild = Tokenizer.from_file(str(stored))
    wild.enable_truncation(128)
    wild.enable_padding(length=128)
    long_text = "word " * 300
    assert len(ids_of(load(saved(wild, tmp_path), vocab_size=30_522), [long_text], 512)[0]) == 302
    with pytest.raises(DataError, match=r"set model\.vocab_size: 30522"):
        load(stored, vocab_size=30_000)


@pytest.mark.data
def test_gpt2_is_no_classifiers_tokenizer(data_folder):
    with pytest.raises(DataError, match=r"\[CLS\]"):
        load(data_folder / "tokenizers" / "gpt2" / "tokenizer.json", vocab_size=50_257)
