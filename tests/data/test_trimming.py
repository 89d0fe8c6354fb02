"""Trimmed tokenizers: the training text is cut as before, everything else can still be spelled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from edgeformer.artifacts.errors import DataError
from edgeformer.data.cleaning import normalizers
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.sources import load_parts
from edgeformer.data.splits import split
from edgeformer.data.tokenization import special_ids, tokenizer_from_file, train_tokenizer
from edgeformer.data.trimming import Keeping, Trimmed, trim_effect, trim_to_training, trim_tokenizer
from edgeformer.tasks.classification import ClassificationRecipe

TEXTS = [
    "The film is a wonderful, moving story; wonderfully told.",
    "A dull and endless film, told without any wit.",
    "Endlessly moving! The story of 2 wonderful friends.",
    "an unmoving story, dully told by dull friends",
] * 5
USED = TEXTS[:2]
OTHER = ["the endless friends", "wit is wonderful", "unmoving films dully told", "told, untold and retold"]


def used_ids(tokenizer: Tokenizer, texts: list[str]) -> set[int]:
    return {number for text in texts for number in tokenizer.encode(text).ids}


@pytest.fixture(scope="module", params=["wordpiece", "bpe"])
def original(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = train_tokenizer(request.param, 400, TEXTS, normalizers())
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=20, pad_id=0)
    return tokenizer


@pytest.fixture(scope="module")
def plain(original: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(original.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


@pytest.fixture(scope="module")
def trimmed(original: Tokenizer, plain: Tokenizer) -> Trimmed:
    return trim_tokenizer(original, used_ids(plain, USED))


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    found: list[str] = tokenizer.encode(text).tokens
    return found


def test_it_is_smaller_and_cuts_the_used_texts_as_before(plain: Tokenizer, trimmed: Trimmed) -> None:
    assert len(trimmed.kept) == trimmed.tokenizer.get_vocab_size() < plain.get_vocab_size()
    for text in (*USED, USED[0].upper(), "A moving,  <b>moving</b> story;;; https://example.com/x told"):
        assert tokens(trimmed.tokenizer, text) == tokens(plain, text)
        assert trimmed.kept[trimmed.tokenizer.encode(text).ids].tolist() == plain.encode(text).ids


def test_kept_holds_old_numbers_in_the_order_of_the_new_ones(plain: Tokenizer, trimmed: Trimmed) -> None:
    assert trimmed.kept.dtype == np.int64
    assert [plain.id_to_token(old) for old in trimmed.kept.tolist()] == [
        trimmed.tokenizer.id_to_token(new) for new in range(len(trimmed.kept))
    ]
    assert trimmed.kept[:5].tolist() == [0, 1, 2, 3, 4]  # special tokens, in their old order
    assert (np.diff(trimmed.kept[5:]) > 0).all()


def test_special_tokens_stand_around_a_text_with_their_new_numbers(plain: Tokenizer) -> None:
    document = json.loads(plain.to_str())
    # As in bert-base-uncased: special tokens in the middle of the vocabulary.
    order = sorted(document["model"]["vocab"], key=lambda name: (name.startswith("["), name))
    numbers = {name: number for number, name in enumerate(order)}
    document["model"]["vocab"] = numbers
    document["added_tokens"] = [{**t, "id": numbers[t["content"]]} for t in document["added_tokens"]]
    for token in document["post_processor"]["special_tokens"].values():
        token["ids"] = [numbers[token["id"]]]
    moved = Tokenizer.from_str(json.dumps(document))
    found = trim_tokenizer(moved, used_ids(moved, USED))
    names = [found.tokenizer.id_to_token(number) for number in range(5)]
    assert names == sorted(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), key=numbers.__getitem__)
    single, pair = found.tokenizer.encode("a film"), found.tokenizer.encode("a film", "a story")
    assert single.tokens[0] == "[CLS]" and single.tokens[-1] == "[SEP]" and pair.tokens.count("[SEP]") == 2
    assert [found.kept[i] for i in single.ids] == moved.encode("a film").ids
    assert special_ids(found.tokenizer).cls == single.ids[0]


def test_other_texts_are_cut_into_smaller_pieces_not_into_unknown_ones(plain: Tokenizer, trimmed: Trimmed) -> None:
    shorter = 0
    for text in OTHER:
        assert "[UNK]" not in tokens(trimmed.tokenizer, text)
        assert trimmed.tokenizer.decode(trimmed.tokenizer.encode(text).ids).replace(" ", "") == text.replace(" ", "")
        shorter += len(tokens(trimmed.tokenizer, text)) > len(tokens(plain, text))
    assert shorter


def test_frequent_tokens_stay_although_the_text_does_not_use_them(plain: Tokenizer, trimmed: Trimmed) -> None:
    more = trim_tokenizer(plain, used_ids(plain, USED), frequent=320)
    numbers = sorted(plain.get_vocab(with_added_tokens=True).values())
    assert {*trimmed.kept.tolist(), *numbers[:320]} <= {*more.kept.tolist()} and len(more.kept) > len(trimmed.kept)
    cut = [len(tokenizer.encode(" ".join(OTHER)).ids) for tokenizer in (plain, more.tokenizer, trimmed.tokenizer)]
    assert cut[0] <= cut[1] < cut[2]


def test_stored_truncation_and_padding_are_switched_off(trimmed: Trimmed) -> None:
    assert trimmed.tokenizer.truncation is None and trimmed.tokenizer.padding is None


def test_everything_else_of_the_tokenizer_stays(plain: Tokenizer, trimmed: Trimmed) -> None:
    before, after = json.loads(plain.to_str()), json.loads(trimmed.tokenizer.to_str())
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        assert after[part] == before[part]
    assert {k: v for k, v in after["model"].items() if k not in ("vocab", "merges")} == {
        k: v for k, v in before["model"].items() if k not in ("vocab", "merges")
    }


def test_trimming_twice_changes_nothing(trimmed: Trimmed) -> None:
    again = trim_tokenizer(trimmed.tokenizer, used_ids(trimmed.tokenizer, USED))
    assert again.kept.tolist() == list(range(len(trimmed.kept)))
    assert again.tokenizer.to_str() == trimmed.tokenizer.to_str()


def test_every_kept_bpe_token_can_still_be_made() -> None:
    """Also where a token can be made in two ways, of which the text uses one."""
    letters = {letter: number for number, letter in enumerate(["[UNK]", *"abcd"])}
    made = {**letters, "ab": 5, "bc": 6, "abc": 7, "cd": 8, "abcd": 9}
    merges = [("b", "c"), ("a", "bc"), ("a", "b"), ("ab", "c"), ("c", "d"), ("abc", "d")]
    tokenizer = Tokenizer(models.BPE(made, merges, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer.encode("abc").tokens == ["abc"] and tokenizer.encode("abcd").tokens == ["abcd"]
    found = trim_tokenizer(tokenizer, [7])
    kept = set(found.tokenizer.get_vocab())
    assert kept == {"[UNK]", *"abcd", "ab", "bc", "abc"}
    assert found.tokenizer.encode("abc").tokens == ["abc"]
    assert found.tokenizer.encode("abcd").tokens == ["abc", "d"]


def test_wordpiece_keeps_the_letters_of_kept_tokens_and_no_others() -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "film", "##s", "f", "##f", "##i", "##l", "m", "##m", "x", "##x", "P", "xx"]
    tokenizer = Tokenizer(models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[PAD]", "[CLS]"])
    found = trim_tokenizer(tokenizer, [names.index("film"), names.index("##s")])
    assert set(found.tokenizer.get_vocab()) == set(names) - {"x", "##x", "P", "xx"}
    assert found.tokenizer.encode("mill").tokens == ["m", "##i", "##l", "##l"]
    assert found.tokenizer.encode("xx").tokens == ["[UNK]"]


@pytest.mark.parametrize("kind", ["bert", "roberta", "sequence", "none"])
def test_post_processors_get_the_new_numbers(kind: str, plain: Tokenizer) -> None:
    document = json.loads(plain.to_str())
    # One token before all others, which nothing uses, so that every number changes.
    numbers = {"zzz": 0, **{name: number + 1 for name, number in document["model"]["vocab"].items()}}
    document["model"]["vocab"] = numbers
    document["added_tokens"] = [{**t, "id": numbers[t["content"]]} for t in document["added_tokens"]]
    document["post_processor"] = None
    shifted = Tokenizer.from_str(json.dumps(document))
    cls, sep = ("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])
    chosen = {
        "bert": processors.BertProcessing(sep, cls),
        "roberta": processors.RobertaProcessing(sep, cls, trim_offsets=False, add_prefix_space=False),
        "sequence": processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), processors.BertProcessing(sep, cls)]
        ),
    }
    if kind in chosen:
        shifted.post_processor = chosen[kind]
    found = trim_tokenizer(shifted, used_ids(shifted, USED))
    assert "zzz" not in found.tokenizer.get_vocab()
    for text in USED:
        assert ("[CLS]" in tokens(shifted, text)) is (kind != "none")
        assert tokens(found.tokenizer, text) == tokens(shifted, text)
        assert found.kept[found.tokenizer.encode(text).ids].tolist() == shifted.encode(text).ids


def test_added_tokens_beyond_the_model_are_kept(plain: Tokenizer) -> None:
    copy = Tokenizer.from_str(plain.to_str())
    copy.add_tokens(["covfefe"])
    copy.add_special_tokens(["<extra>"])
    size = copy.get_vocab_size()
    found = trim_tokenizer(copy, used_ids(copy, USED))
    assert {"covfefe", "<extra>"} <= set(found.tokenizer.get_vocab())
    assert found.kept[found.tokenizer.token_to_id("<extra>")] == size - 1
    assert found.tokenizer.token_to_id("<extra>") == 5  # behind the five other special tokens
    text = "a covfefe <extra> film"
    assert tokens(found.tokenizer, text) == tokens(copy, text)


def test_other_models_and_foreign_numbers_are_refused(plain: Tokenizer) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "film": 1}, unk_token="[UNK]"))
    with pytest.raises(DataError, match="the tokenizer is WordLevel; only WordPiece and byte-level BPE"):
        trim_tokenizer(words, [1])
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("film", -1.0)], unk_id=0, byte_fallback=False))
    with pytest.raises(DataError, match="the tokenizer is Unigram"):
        trim_tokenizer(pieces, [1])
    letters = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    with pytest.raises(DataError, match="BPE that does not start from bytes"):
        trim_tokenizer(letters, [2])
    with pytest.raises(DataError, match="token 100000 is in the text but not in the tokenizer"):
        trim_tokenizer(plain, [0, 100_000])


def test_the_effect_on_other_texts_is_counted() -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "xyz", "a", "##b", "##a", "b", "##d", "d"]
    tokenizer = Tokenizer(models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(names[:4])
    found = trim_tokenizer(tokenizer, [names.index("good"), names.index("bad")])
    rows = ["good film", "bad", "xyz ??? good", "good good ab"]
    effect = trim_effect(tokenizer, found, LabelledTexts(rows, np.zeros(4, dtype=np.int64)), 128)
    # 10 tokens: of "film" and "xyz" nothing is left; "???" was unknown before; "a", "##b" are letters of "bad"
    assert effect.rows == 4 and effect.changed_rows == 2
    assert effect.coverage == pytest.approx(8 / 10)
    assert effect.unknown == pytest.approx(2 / 10)
    assert effect.kept == len(names) - 2 and effect.original == len(names)


def test_a_run_is_trimmed_to_its_own_training_text(small_recipe: ClassificationRecipe) -> None:
    config = small_recipe.data
    sets = split(config, load_parts(config))
    tokenizer = train_tokenizer("wordpiece", small_recipe.model.vocab_size, sets["train"].texts + OTHER * 100, [])
    fingerprints = {"train": sets["train"].fingerprint(), "validation": sets["validation"].fingerprint()}
    found, effect = trim_to_training(config, tokenizer, fingerprints)
    assert effect.kept == len(found.kept) < effect.original == tokenizer.get_vocab_size()
    assert effect.rows == len(sets["validation"]) and 0.9 < effect.coverage <= 1.0
    for text in sets["train"].texts[:200]:
        assert tokens(found.tokenizer, text) == tokens(tokenizer, text)
    small, cut = trim_to_training(config, tokenizer, fingerprints, Keeping(max_used=100))
    assert 100 <= cut.kept == len(small.kept) < effect.kept and cut.changed_rows > effect.changed_rows
    with pytest.raises(DataError, match=r"the train set is not the one .* export without --vocab-trim"):
        trim_to_training(config, tokenizer, {"train": "another"})


@pytest.mark.data
def test_bert_base_uncased(data_folder: Path) -> None:
    tokenizer = tokenizer_from_file(data_folder / "tokenizers" / "bert-base-uncased" / "tokenizer.json")
    lines = (data_folder / "sst2" / "train.tsv").read_text(encoding="utf-8").splitlines()[1:4001]
    texts = [line.split("\t")[1] for line in lines]
    found = trim_tokenizer(tokenizer, used_ids(tokenizer, texts[:2000]))
    assert special_ids(found.tokenizer).pad == 0 and len(found.kept) < 8000
    for text in texts[:2000]:
        assert tokens(found.tokenizer, text) == tokens(tokenizer, text)
    effect = trim_effect(tokenizer, found, LabelledTexts(texts, np.zeros(len(texts), dtype=np.int64)), 128)
    assert 0 < effect.changed_rows < effect.rows / 2
    assert 0.8 < effect.coverage < 1 and effect.unknown < 0.001
    # A word with a letter that no kept token has is unknown, as a whole.
    assert tokens(found.tokenizer, "日 film") == ["[CLS]", "[UNK]", "film", "[SEP]"]


@pytest.mark.data
def test_gpt2_gives_every_text_back(data_folder: Path) -> None:
    tokenizer = tokenizer_from_file(data_folder / "tokenizers" / "gpt2" / "tokenizer.json")
    found = trim_tokenizer(tokenizer, used_ids(tokenizer, USED))
    for text in (*TEXTS, *OTHER, "日本 ☃ naïve"):
        assert found.tokenizer.decode(found.tokenizer.encode(text).ids) == text
    for text in USED:
        assert tokens(found.tokenizer, text) == tokens(tokenizer, text)
    assert 256 < len(found.kept) < 400


def test_of_the_tokens_that_are_used_the_most_frequent_stay() -> None:
    counts = {5: 3, 2: 9, 7: 3, 1: 1}
    assert Keeping(max_used=2).used(counts) == [2, 5]  # 5 and 7 are used as often
    assert Keeping(max_used=9).used(counts) == Keeping().used(counts) == [2, 5, 7, 1]
