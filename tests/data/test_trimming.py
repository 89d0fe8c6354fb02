import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.normalizers import Lowercase

from edgeformer.artifacts.errors import DataError
from edgeformer.data.cleaning import normalizers
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.sources import load_parts
from edgeformer.data.splits import split
from edgeformer.data.tokenization import special_ids, tokenizer_from_file, train_tokenizer
from edgeformer.data.trimming import Keeping, Trimmed, trim_effect, trim_to_training, trim_tokenizer
from edgeformer.export.run_source import write_trimmed_companions
from edgeformer.tasks.classification import ClassificationRecipe

TEXTS = [
    "The film is a wonderful, moving story; wonderfully told.",
    "A dull and endless film, told without any wit.",
    "Endlessly moving! The story of 2 wonderful friends.",
    "an unmoving story, dully told by dull friends",
] * 5
USED = TEXTS[:2]
OTHER = ["the endless friends", "wit is wonderful", "unmoving films dully told", "told, untold and retold"]


def used_ids(tokenizer: Tokenizer, texts: list[str] = USED) -> set[int]:
    return {number for text in texts for number in tokenizer.encode(text).ids}


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.encode(text).tokens)


def assert_same_tokens(trimmed: Trimmed, original: Tokenizer, texts: list[str]) -> None:
    """Compare the tokens of texts, and their numbers by ``kept``."""
    for text in texts:
        assert tokens(trimmed.tokenizer, text) == tokens(original, text)
        assert trimmed.kept[trimmed.tokenizer.encode(text).ids].tolist() == original.encode(text).ids


@pytest.fixture(scope="module", params=["wordpiece", "bpe"])
def stored(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = train_tokenizer(request.param, 400, TEXTS, normalizers())
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=20, pad_id=0)
    return tokenizer


@pytest.fixture(scope="module")
def original(stored: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(stored.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


@pytest.fixture(scope="module")
def trimmed(stored: Tokenizer, original: Tokenizer) -> Trimmed:
    return trim_tokenizer(stored, used_ids(original))


def test_used_texts_are_cut_as_before(original: Tokenizer, trimmed: Trimmed) -> None:
    assert len(trimmed.kept) == trimmed.tokenizer.get_vocab_size() < original.get_vocab_size()
    texts = [*USED, USED[0].upper(), "A moving,  <b>moving</b> story;;; https://example.com/x told"]
    assert_same_tokens(trimmed, original, texts)
    assert trimmed.tokenizer.truncation is None and trimmed.tokenizer.padding is None
    assert trimmed.kept.dtype == np.int64 and (np.diff(trimmed.kept[5:]) > 0).all()
    assert trimmed.kept[:5].tolist() == [0, 1, 2, 3, 4]  # special tokens, in their old order
    with pytest.raises(DataError, match="token 100000 of the text is not in the tokenizer"):
        trim_tokenizer(original, [0, 100_000])


def test_other_texts_are_spelled_with_smaller_pieces(original: Tokenizer, trimmed: Trimmed) -> None:
    for text in OTHER:
        assert "[UNK]" not in tokens(trimmed.tokenizer, text)
        assert trimmed.tokenizer.decode(trimmed.tokenizer.encode(text).ids).replace(" ", "") == text.replace(" ", "")
    assert any(len(tokens(trimmed.tokenizer, text)) > len(tokens(original, text)) for text in OTHER)
    larger = trim_tokenizer(original, used_ids(original), frequent=320)
    numbers = sorted(original.get_vocab(with_added_tokens=True).values())
    assert {*trimmed.kept.tolist(), *numbers[:320]} <= {*larger.kept.tolist()}, "frequent tokens stay unused"


def test_bpe_keeps_all_merges_of_its_tokens() -> None:
    """A token can have two merges, of which the text uses one."""
    letters = {letter: number for number, letter in enumerate(["[UNK]", *"abcd"])}
    vocabulary = {**letters, "ab": 5, "bc": 6, "abc": 7, "cd": 8, "abcd": 9}
    merges = [("b", "c"), ("a", "bc"), ("a", "b"), ("ab", "c"), ("c", "d"), ("abc", "d")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokens(tokenizer, "abc") == ["abc"] and tokens(tokenizer, "abcd") == ["abcd"]
    result = trim_tokenizer(tokenizer, [7]).tokenizer
    assert set(result.get_vocab()) == {"[UNK]", *"abcd", "ab", "bc", "abc"}
    assert tokens(result, "abc") == ["abc"] and tokens(result, "abcd") == ["abc", "d"]


def test_unigram_pieces_are_cut_as_before() -> None:
    """Special tokens inside and behind the vocabulary, as DeBERTa's [MASK]; scores stay, unknown letters too."""
    original = Tokenizer(models.Unigram())
    original.normalizer, original.pre_tokenizer = Lowercase(), pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    original.train_from_iterator(TEXTS, trainer)
    original.add_special_tokens(["<mask>"])
    original.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    result = trim_tokenizer(original, used_ids(original))
    assert len(result.kept) == result.tokenizer.get_vocab_size() < original.get_vocab_size()
    assert_same_tokens(result, original, [*USED, "A dull <mask> film, ☃ told", USED[0].upper()])
    unknown = result.tokenizer.token_to_id("<unk>")
    for text in OTHER:
        assert unknown not in result.tokenizer.encode(text).ids
        assert "".join(tokens(result.tokenizer, text)[1:-1]) == "▁" + text.replace(" ", "▁")
    assert unknown in result.tokenizer.encode("☃").ids
    effect = trim_effect(original, result, LabelledTexts.unlabelled([*OTHER, "2"]), 128)
    assert effect.unknown > 0 and effect.changed_rows > 0


@pytest.mark.parametrize("kind", ["bert", "roberta", "sequence", "none"])
def test_post_processors_get_new_numbers(kind: str, original: Tokenizer) -> None:
    # One unused token before all others, so that every number changes.
    numbers = {"zzz": 0, **{name: number + 1 for name, number in original.get_vocab().items()}}
    document = {**json.loads(original.to_str()), "post_processor": None}
    document["model"]["vocab"] = numbers
    document["added_tokens"] = [{**token, "id": numbers[token["content"]]} for token in document["added_tokens"]]
    tokenizer = Tokenizer.from_str(json.dumps(document))
    cls, sep = ("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])
    bert = processors.BertProcessing(sep, cls)
    post_processors = {
        "bert": bert,
        "roberta": processors.RobertaProcessing(sep, cls, trim_offsets=False, add_prefix_space=False),
        "sequence": processors.Sequence([processors.ByteLevel(trim_offsets=False), bert]),
    }
    if kind != "none":
        tokenizer.post_processor = post_processors[kind]
    result = trim_tokenizer(tokenizer, used_ids(tokenizer))
    assert "zzz" not in result.tokenizer.get_vocab()
    assert ("[CLS]" in tokens(tokenizer, USED[0])) is (kind != "none")
    assert_same_tokens(result, tokenizer, USED)
    if kind != "none":
        assert result.tokenizer.encode("a film", "a story").tokens.count("[SEP]") == (3 if kind == "roberta" else 2)


def test_added_tokens_are_kept(original: Tokenizer) -> None:
    copy = Tokenizer.from_str(original.to_str())
    copy.add_tokens(["covfefe"])
    copy.add_special_tokens(["<extra>"])
    result = trim_tokenizer(copy, used_ids(copy))
    assert {"covfefe", "<extra>"} <= set(result.tokenizer.get_vocab())
    assert result.kept[result.tokenizer.token_to_id("<extra>")] == copy.get_vocab_size() - 1
    assert result.tokenizer.token_to_id("<extra>") == 5  # after the five other special tokens
    assert_same_tokens(result, copy, ["a covfefe <extra> film"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (models.WordLevel({"[UNK]": 0, "film": 1}, unk_token="[UNK]"), "WordLevel; only WordPiece, byte-level BPE"),
        (models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]), "BPE that does not start from bytes"),
    ],
)
def test_other_models_are_refused(model: models.Model, message: str) -> None:
    with pytest.raises(DataError, match=f"the tokenizer is {message}"):
        trim_tokenizer(Tokenizer(model), [1])


def test_effect_on_other_texts_is_counted() -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "xyz", "a", "##b", "##a", "b", "##d", "d"]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(names[:4])
    trimmed = trim_tokenizer(tokenizer, [names.index("good"), names.index("bad")])
    texts = ["good film", "bad", "xyz ??? good", "good good ab"]
    effect = trim_effect(tokenizer, trimmed, LabelledTexts.unlabelled(texts), 128)
    assert tokens(trimmed.tokenizer, "dab") == ["d", "##a", "##b"], "letters of kept tokens"
    # Of 10 tokens "film" and "xyz" are removed; "???" was unknown before; "a" and "##b" are letters of "bad".
    assert effect.rows == 4 and effect.changed_rows == 2
    assert (effect.coverage, effect.unknown) == (pytest.approx(8 / 10), pytest.approx(2 / 10))
    assert effect.kept == len(names) - 2 and effect.original == len(names)


def test_run_is_trimmed_to_its_training_text(small_recipe: ClassificationRecipe) -> None:
    config = small_recipe.data
    sets = split(config, load_parts(config))
    texts = [str(text) for text in sets["train"].texts]
    tokenizer = train_tokenizer("wordpiece", small_recipe.model.vocab_size, texts + OTHER * 100, [])
    fingerprints = {name: sets[name].fingerprint() for name in ("train", "validation")}
    trimmed, effect = trim_to_training(config, tokenizer, fingerprints)
    assert effect.kept == len(trimmed.kept) < effect.original == tokenizer.get_vocab_size()
    assert effect.rows == len(sets["validation"]) and 0.9 < effect.coverage <= 1.0
    assert_same_tokens(trimmed, tokenizer, texts[:200])
    small, small_effect = trim_to_training(config, tokenizer, fingerprints, Keeping(max_used=100))
    assert 100 <= small_effect.kept == len(small.kept) < effect.kept
    assert small_effect.changed_rows > effect.changed_rows
    with pytest.raises(DataError, match=r"the train set differs from the one .* export without --vocab-trim"):
        trim_to_training(config, tokenizer, {"train": "another"})


@pytest.mark.data
def test_bert_base_uncased_and_gpt2(data_folder: Path) -> None:
    bert = tokenizer_from_file(data_folder / "tokenizers" / "bert-base-uncased" / "tokenizer.json")
    lines = (data_folder / "sst2" / "train.tsv").read_text(encoding="utf-8").splitlines()[1:4001]
    texts = [line.split("\t")[1] for line in lines]
    trimmed = trim_tokenizer(bert, used_ids(bert, texts[:2000]))
    assert special_ids(trimmed.tokenizer).pad == 0 and len(trimmed.kept) < 8000
    assert_same_tokens(trimmed, bert, texts[:2000])
    effect = trim_effect(bert, trimmed, LabelledTexts.unlabelled(texts), 128)
    assert 0 < effect.changed_rows < effect.rows / 2
    assert 0.8 < effect.coverage < 1 and effect.unknown < 0.001
    # A word with a letter that no kept token has is unknown.
    assert tokens(trimmed.tokenizer, "日 film") == ["[CLS]", "[UNK]", "film", "[SEP]"]
    gpt2 = tokenizer_from_file(data_folder / "tokenizers" / "gpt2" / "tokenizer.json")
    trimmed = trim_tokenizer(gpt2, used_ids(gpt2))
    for text in (*TEXTS, *OTHER, "日本 ☃ naïve"):
        assert trimmed.tokenizer.decode(trimmed.tokenizer.encode(text).ids) == text
    assert_same_tokens(trimmed, gpt2, USED)
    assert 256 < len(trimmed.kept) < 400


def test_companions_are_renumbered(original: Tokenizer, trimmed: Trimmed, tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path
    source.mkdir()
    config = {"model_type": "edgeformer-encoder", "vocab_size": original.get_vocab_size(), "hidden_size": 32}
    ids = {f"{name}_token_id": original.token_to_id(f"[{name.upper()}]") for name in ("pad", "cls", "sep", "unk")}
    (source / "config.json").write_text(json.dumps({**config, **ids, "bos_token_id": None}), encoding="utf-8")
    described = {"pad_token": "[PAD]", "added_tokens_decoder": {str(ids["cls_token_id"]): {"content": "[CLS]"}}}
    (source / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    moved = Trimmed(trimmed.tokenizer, trimmed.kept[::-1].copy())  # so that the ids of special tokens change, too
    write_trimmed_companions(source, moved, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == len(trimmed.kept) and config["hidden_size"] == 32 and config["bos_token_id"] is None
    for name in ("pad", "cls", "sep", "unk"):
        assert moved.kept[config[f"{name}_token_id"]] == original.token_to_id(f"[{name.upper()}]")
        assert config[f"{name}_token_id"] != original.token_to_id(f"[{name.upper()}]")
    described = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert described["pad_token"] == "[PAD]"
    assert described["added_tokens_decoder"] == {str(config["cls_token_id"]): {"content": "[CLS]"}}
    assert Tokenizer.from_file(str(target / "tokenizer.json")).get_vocab() == trimmed.tokenizer.get_vocab()
