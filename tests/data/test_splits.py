import numpy as np
import pytest

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.errors import DataError
from edgeformer.data.cleaning import clean
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.sources import load_parts
from edgeformer.data.splits import draw, hold_out, set_parts, split

PARTS = {"random-split": ["train"], "glue-dev": ["train", "validation"], "given": ["train", "test"]}
PARTS |= {"sst-test": ["train", "validation", "sst-test"], "stratified": ["train"]}


def config(protocol, parts, **settings) -> DataConfig:
    source = [{"kind": "synthetic-reviews", "rows": 1}]
    document = {"parts": dict.fromkeys(parts, source), "split": protocol, "labels": ["negative", "positive"]}
    return DataConfig.model_validate({**document, **settings})


def part(name, rows) -> LabelledTexts:
    return LabelledTexts([f"{name}{n}" for n in range(rows)], np.arange(rows) % 2)


def parts_of(**rows) -> dict[str, LabelledTexts]:
    return {name.replace("_", "-"): part(name, count) for name, count in rows.items()}


def further(sets):
    assert list(sets)[:2] == ["train", "validation"]
    return {name: sets[name] for name in list(sets)[2:]}


def test_random_split_pools_and_cuts_without_loss():
    parts = parts_of(train=90, validation=17)
    splits = split(config("random-split", parts), parts)
    assert (len(splits["train"]), len(splits["validation"]), len(splits["random-split"])) == (85, 10, 12)
    everything = splits["train"].texts + splits["validation"].texts + splits["random-split"].texts
    assert sorted(everything) == sorted(parts["train"].texts + parts["validation"].texts)
    # Labels travel with their texts, and the order is shuffled.
    for texts in (splits["train"], splits["validation"]):
        assert [int(text.lstrip("trainvldo")) % 2 for text in texts.texts] == texts.labels.tolist()
    assert splits["train"].texts != sorted(splits["train"].texts)


def test_the_seed_decides_the_random_split():
    parts = parts_of(train=100)
    one, same, other = (split(config("random-split", parts, split_seed=seed), parts) for seed in (1, 1, 2))
    assert one["train"].texts == same["train"].texts
    assert set(one["random-split"].texts) != set(other["random-split"].texts)


def test_stratified_holds_out_two_tenths_of_every_label():
    labels = np.array([0] * 100 + [1] * 60 + [2] * 4 + [3] * 2)
    whole = LabelledTexts([f"text {n}" for n in range(len(labels))], labels)
    parts = {"train": whole.take(np.arange(120)), "validation": whole.take(np.arange(120, len(labels)))}
    made = config("stratified", parts, labels=list("abcd"))
    sets = split(made, parts)
    counts = {name: np.bincount(found.labels, minlength=4).tolist() for name, found in sets.items()}
    assert counts == {"train": [80, 48, 2, 2], "validation": [10, 6, 1, 0], "test": [10, 6, 1, 0]}
    assert sorted(text for found in sets.values() for text in found.texts) == sorted(whole.texts)
    assert made.test_set == "test"
    other = split(made.model_copy(update={"split_seed": 1}), parts)
    assert other["test"].texts != sets["test"].texts and len(other["test"]) == len(sets["test"])


def test_stratified_keeps_rows_of_one_text_together():
    texts = [f"{' A  Fine' if n % 2 else 'a fine'} film {n // 2}" for n in range(100)]
    rows = LabelledTexts(texts, np.arange(100) // 2 % 2)
    sets = split(config("stratified", ["train"]), {"train": rows})
    ends = {name: {text.split()[-1] for text in found.texts} for name, found in sets.items()}
    assert [len(found) for found in sets.values()] == [84, 8, 8]
    assert not ends["train"] & (ends["validation"] | ends["test"]) and not ends["validation"] & ends["test"]


def test_glue_dev_trains_without_the_validation_part():
    parts = parts_of(train=100, validation=20)
    splits = split(config("glue-dev", parts), parts)
    assert further(splits) == {"glue-dev": parts["validation"]}
    assert (len(splits["train"]), len(splits["validation"])) == (90, 10)
    assert set(splits["train"].texts) | set(splits["validation"].texts) == set(parts["train"].texts)


def test_sst_test_and_given_use_their_parts_whole():
    parts = parts_of(train=30, validation=5, sst_test=7)
    splits = split(config("sst-test", parts), parts)
    assert (splits["train"], splits["validation"]) == (parts["train"], parts["validation"])
    assert further(splits) == {"sst-test": parts["sst-test"]}
    parts = parts_of(train=30, validation=5, test=7)
    splits = split(config("given", parts), parts)
    assert (splits["validation"], further(splits)) == (parts["validation"], {"given": parts["test"]})
    del parts["validation"]
    splits = split(config("given", parts), parts)
    assert (len(splits["train"]), len(splits["validation"])) == (27, 3)


@pytest.mark.parametrize("protocol", list(PARTS))
def test_parts_that_a_protocol_does_not_use_are_further_test_sets(protocol):
    parts = {name: part(name, 40) for name in [*PARTS[protocol], "hotels"]}
    splits = split(config(protocol, parts), parts)
    assert list(further(splits)) == [config(protocol, parts).test_set, "hotels"]
    assert splits["hotels"] == parts["hotels"]


@pytest.mark.parametrize("protocol", list(PARTS))
def test_one_set_alone_is_the_same_as_with_all_others(protocol):
    chosen = config(protocol, [*PARTS[protocol], "hotels"])
    parts = {name: part(name, 40) for name in chosen.parts}
    expected = split(chosen, parts)
    for name, sources in set_parts(chosen).items():
        alone = draw(chosen, (name,), {source: parts[source] for source in sources})[name]
        assert alone.texts == expected[name].texts
        assert alone.labels.tolist() == expected[name].labels.tolist()


def test_a_part_may_not_be_named_like_another_set():
    parts = parts_of(train=40, random_split=10)
    with pytest.raises(DataError, match="no part may be called 'random-split'"):
        split(config("random-split", parts), parts)


def test_too_little_data_is_refused():
    parts = parts_of(train=9)
    with pytest.raises(DataError, match="9 rows; split 'random-split' needs at least 10"):
        split(config("random-split", parts), parts)
    parts = parts_of(train=40, test=0)
    with pytest.raises(DataError, match="the given set is empty"):
        split(config("given", parts), parts)
    parts = parts_of(train=40, validation=0, test=3)
    with pytest.raises(DataError, match="the validation set is empty"):
        split(config("given", parts), parts)


def test_training_rows_of_one_class_are_refused():
    parts = {"train": LabelledTexts([f"t{n}" for n in range(40)], np.ones(40, dtype=np.int64))}
    with pytest.raises(DataError, match=r"one class only: all 32 rows are labelled 'positive'.*negative, positive"):
        split(config("random-split", parts), parts)


def phrases(sentences: int) -> list[str]:
    """Sentences of ten words and all their phrases of two words or more, in a mixed order, plus shared short ones."""
    texts = []
    for number in range(sentences):
        words = [f"w{number}x{place}" for place in range(9)] + ["fun"]
        texts += [" ".join(words[a:b]) for a in range(10) for b in range(a + 2, 11)]
    texts += ["fun", "Fun!"]
    np.random.default_rng(0).shuffle(texts)
    return texts


def test_a_hold_out_takes_whole_groups_of_phrases():
    texts = phrases(40)
    train, held_out = hold_out(texts, seed=3)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(len(texts)))
    assert 0.05 * len(texts) < len(held_out) <= len(texts) // 10
    # No held-out text is a training text, or inside one.
    haystack = "".join(f" {clean(texts[row])} |" for row in train)
    assert not any(f" {clean(texts[row])} " in haystack for row in held_out)
    # Another seed holds out other sentences.
    assert set(held_out.tolist()) != set(hold_out(texts, seed=4)[1].tolist())


def test_a_hold_out_of_unrelated_texts_is_a_plain_tenth():
    for rows in (10, 11, 99, 1000):
        train, held_out = hold_out([f"text{n}" for n in range(rows)], seed=0)
        assert (len(train), len(held_out)) == (rows - rows // 10, rows // 10)


def test_equal_texts_stay_together():
    texts = [f"text{n // 4}" for n in range(400)]
    train, held_out = hold_out(texts, seed=0)
    assert not {texts[row] for row in train} & {texts[row] for row in held_out}
    assert len(held_out) == 40


def test_texts_that_all_hang_together_are_held_out_one_by_one():
    train, held_out = hold_out([" ".join("abcdefghijklmnopqrst"[: n + 1]) for n in range(20)], seed=0)
    assert (len(train), len(held_out)) == (18, 2)
    train, held_out = hold_out(["same"] * 30, seed=0)
    assert (len(train), len(held_out)) == (27, 3)


@pytest.fixture(scope="module")
def sst2(data_folder):
    files = {
        "train": ("train.tsv", "sentence"),
        "validation": ("dev.tsv", "content"),
        "sst-test": ("test.tsv", "content"),
    }
    parts = {
        name: [{"kind": "file", "path": str(data_folder / "sst2" / file), "text": text}]
        for name, (file, text) in files.items()
    }
    document = {"parts": parts, "split": "random-split", "labels": ["negative", "positive"]}
    chosen = DataConfig.model_validate(document)
    return chosen, load_parts(chosen)


@pytest.mark.data
def test_sst2_has_the_sizes_of_the_paper(sst2):
    chosen, parts = sst2
    splits = split(chosen, parts)
    assert [len(splits["train"]), len(splits["validation"])] == [54_576, 6_822]
    assert {name: len(rows) for name, rows in further(splits).items()} == {
        "random-split": 6_823,
        "sst-test": 1_821,
    }
    positives = sum(int(rows.labels.sum()) for rows in (splits["train"], splits["validation"], splits["random-split"]))
    assert positives == 37_569 + 444


@pytest.mark.data
def test_sst2_holds_out_no_phrase_of_a_training_sentence(sst2):
    chosen, parts = sst2
    splits = split(chosen.model_copy(update={"split": "glue-dev"}), parts)
    assert {name: len(rows) for name, rows in further(splits).items()} == {"glue-dev": 872, "sst-test": 1_821}
    assert len(splits["train"]) + len(splits["validation"]) == 67_349
    assert 6_500 < len(splits["validation"]) <= 6_734
    haystack = "".join(f" {clean(text)} |" for text in splits["train"].texts)
    assert not any(f" {clean(text)} " in haystack for text in splits["validation"].texts[::37])
