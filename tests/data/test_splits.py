"""Splits into sets, and samples of rows."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from edgeformer.artifacts.data_config import DataConfig, PairsConfig, TextConfig
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.data.cleaning import clean
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.sources import load_part, load_parts
from edgeformer.data.splits import OverlapCounter, hold_out, make_sets, row_count, sample, set_parts, split
from edgeformer.models import load_recipe
from tests.data.conftest import read_set
from tests.data.test_prepare import prepared, recipe, synthetic

PARTS = {"random-split": ["train"], "glue-dev": ["train", "validation"], "given": ["train", "test"]}
PARTS |= {"sst-test": ["train", "validation", "sst-test"], "stratified": ["train"]}
LABELS = ["bad", "good", "odd"]


def config(protocol, parts, **options) -> DataConfig:
    """Return a config of parts by name (their sources do not matter) or with sources."""
    parts = parts if isinstance(parts, dict) else dict.fromkeys(parts, synthetic(1, 0))
    document = {"parts": parts, "split": protocol, "labels": ["negative", "positive"], **options}
    return DataConfig.model_validate(document)


def part(name, rows) -> LabelledTexts:
    return LabelledTexts([f"{name}{n}" for n in range(rows)], np.arange(rows) % 2)


def parts_of(**rows) -> dict[str, LabelledTexts]:
    return {name.replace("_", "-"): part(name, count) for name, count in rows.items()}


def split_parts(protocol, parts, **options):
    return split(config(protocol, list(parts), **options), parts)


def test_random_split_pools_and_cuts_without_loss():
    parts = parts_of(train=90, validation=17)
    sets, reseeded = (split_parts("random-split", parts, split_seed=seed) for seed in (42, 1))
    assert [len(rows) for rows in sets.values()] == [85, 10, 12]
    texts = [text for rows in sets.values() for text in rows.texts]
    assert sorted(texts) == sorted(parts["train"].texts + parts["validation"].texts)
    for rows in sets.values():  # labels stay with their texts
        assert [int(text.lstrip("trainvldo")) % 2 for text in rows.texts] == rows.labels.tolist()
    assert sorted(sets["train"].texts) != sets["train"].texts != reseeded["train"].texts


def test_stratified_split_holds_out_two_tenths_of_every_label():
    labels = np.array([0] * 100 + [1] * 60 + [2] * 4 + [3] * 2)
    rows = LabelledTexts([f"text {n}" for n in range(len(labels))], labels)
    parts = {"train": rows.take(np.arange(120)), "validation": rows.take(np.arange(120, len(labels)))}
    sets = split_parts("stratified", parts, labels=list("abcd"))
    counts = {name: np.bincount(subset.labels, minlength=4).tolist() for name, subset in sets.items()}
    assert counts == {"train": [80, 48, 2, 2], "validation": [10, 6, 1, 0], "test": [10, 6, 1, 0]}
    assert sorted(text for subset in sets.values() for text in subset.texts) == sorted(rows.texts)
    reseeded = split_parts("stratified", parts, labels=list("abcd"), split_seed=1)
    assert reseeded["test"].texts != sets["test"].texts and len(reseeded["test"]) == len(sets["test"])
    texts = [f"{' A  Fine' if n % 2 else 'a fine'} film {n // 2}" for n in range(100)]
    sets = split_parts("stratified", {"train": LabelledTexts(texts, np.arange(100) // 2 % 2)})
    films = [{text.split()[-1] for text in rows.texts} for rows in sets.values()]
    assert [len(rows) for rows in sets.values()] == [84, 8, 8]
    assert len(set.union(*films)) == sum(map(len, films)), "equal texts stay together"


@pytest.mark.parametrize(("protocol", "test"), [("sst-test", "sst-test"), ("given", "test")])
def test_protocols_that_use_parts_uncut(protocol, test):
    parts = {name: part(name, rows) for name, rows in {"train": 30, "validation": 5, test: 7}.items()}
    assert split_parts(protocol, parts) == {protocol if name == test else name: rows for name, rows in parts.items()}
    if protocol == "given":
        del parts["validation"]
        sets = split_parts(protocol, parts)
        assert (len(sets["train"]), len(sets["validation"])) == (27, 3)
    else:
        parts = parts_of(train=100, validation=20)
        sets = split_parts("glue-dev", parts)
        assert sets["glue-dev"] == parts["validation"]
        assert (len(sets["train"]), len(sets["validation"])) == (90, 10)
        assert {*sets["train"].texts, *sets["validation"].texts} == {*parts["train"].texts}


@pytest.mark.parametrize("protocol", list(PARTS))
def test_unused_parts_are_test_sets_and_each_set_can_be_drawn_alone(protocol):
    chosen = config(protocol, [*PARTS[protocol], "hotels"])
    parts = {name: part(name, 40) for name in chosen.parts}
    sets = split(chosen, parts)
    assert list(sets) == ["train", "validation", chosen.test_set, "hotels"]
    assert sets["hotels"] == parts["hotels"]
    for name, sources in set_parts(chosen).items():
        rows = make_sets(chosen, (name,), {source: parts[source] for source in sources})[name]
        assert rows.fingerprint() == sets[name].fingerprint()


@pytest.mark.parametrize(
    ("protocol", "rows", "message"),
    [
        ("random-split", {"train": 40, "random_split": 10}, "a part must not have the name 'random-split' of a set"),
        ("random-split", {"train": 9}, "9 rows; split 'random-split' needs at least 10"),
        ("given", {"train": 40, "test": 0}, "the given set would be empty"),
        ("given", {"train": 40, "validation": 0, "test": 3}, "the validation set would be empty"),
    ],
)
def test_unusable_parts_are_refused(protocol, rows, message):
    with pytest.raises(DataError, match=message):
        split_parts(protocol, parts_of(**rows))


def phrases(sentences: int) -> list[str]:
    """Sentences of ten words and all their phrases of two words or more, in a mixed order, plus shared short ones."""
    texts = []
    for number in range(sentences):
        words = [f"w{number}x{place}" for place in range(9)] + ["fun"]
        texts += [" ".join(words[a:b]) for a in range(10) for b in range(a + 2, 11)]
    texts += ["fun", "Fun!"]
    np.random.default_rng(0).shuffle(texts)
    return texts


def test_hold_out_has_no_phrase_of_a_training_text():
    texts = phrases(40)
    train, held_out = hold_out(texts, seed=3)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(len(texts)))
    assert 0.05 * len(texts) < len(held_out) <= len(texts) // 10
    haystack = "".join(f" {clean(texts[row])} |" for row in train)
    assert not any(f" {clean(texts[row])} " in haystack for row in held_out)
    assert set(held_out.tolist()) != set(hold_out(texts, seed=4)[1].tolist())


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        *(([f"text{n}" for n in range(rows)], rows // 10) for rows in (10, 11, 99, 1000)),
        ([" ".join("abcdefghijklmnopqrst"[: n + 1]) for n in range(20)], 2),  # each contains the one before
        (["same"] * 30, 3),
    ],
)
def test_hold_out_is_a_tenth(texts, expected):
    train, held_out = hold_out(texts, seed=0)
    assert (len(train), len(held_out)) == (len(texts) - expected, expected)
    texts = [f"text{n // 4}" for n in range(400)]
    train, held_out = hold_out(texts, seed=0)
    assert not {texts[row] for row in train} & {texts[row] for row in held_out} and len(held_out) == 40


def jsonl(path, rows, label="good"):
    """A source of numbered texts; ``label``: of all texts, or a function of the number."""
    labels = [label if isinstance(label, str) else label(n) for n in range(rows)]
    lines = (json.dumps({"text": f"{path.stem} {n}" + " word" * (n % 7), "label": labels[n]}) for n in range(rows))
    path.write_text("\n".join(lines) + "\n")
    return {"kind": "file", "path": str(path)}


def sets_of(parts, protocol="random-split", **options) -> dict[str, LabelledTexts]:
    chosen = config(protocol, parts, **{"labels": LABELS, **options})
    return split(chosen, load_parts(chosen))


@pytest.fixture
def mixed(tmp_path):
    """300 rows: 60% good, 30% bad, 10% odd."""
    return jsonl(tmp_path / "mixed.jsonl", 300, lambda n: LABELS[(2 if n % 10 == 0 else 0) if n % 10 < 4 else 1])


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_sample_has_the_share_of_each_stratum(sizes, data):
    strata = np.repeat(np.arange(len(sizes)), sizes)
    count = data.draw(st.integers(0, len(strata)))
    sampled = np.bincount(strata[sample(strata, count, 0)], minlength=len(sizes))
    assert sampled.sum() == count
    for share, size in zip(sampled, sizes, strict=True):
        assert abs(share - size * count / max(1, len(strata))) < 1 and share <= size


def test_sample_is_seeded_ordered_and_part_of_a_larger_sample():
    strata = np.arange(1000) % 10 // 4  # 40%, 40%, 20%
    small, large = sample(strata, 100, 7), sample(strata, 500, 7)
    assert np.bincount(strata[small]).tolist() == [40, 40, 20]
    assert (np.diff(small) > 0).all() and set(small.tolist()) <= set(large.tolist())
    assert sample(strata, 100, 7).tolist() == small.tolist() != sample(strata, 100, 8).tolist()
    assert sample(strata, 1000, 7).tolist() == list(range(1000))
    assert [row_count(amount, 68_221, "rows") for amount in (10, 0.1, 0.5, 1.0, 1e-9)] == [10, 6822, 34_110, 68_221, 1]


def test_sample_of_a_source_keeps_its_shares_of_labels(mixed, tmp_path):
    odd = jsonl(tmp_path / "other.jsonl", 40, "odd")
    sampled = config("random-split", {"train": [{**mixed, "rows": 100}, {**odd, "rows": 0.25}]}, labels=LABELS)
    rows = load_part(sampled, "train")
    assert np.bincount(rows.labels).tolist() == [30, 60, 10 + 10]
    numbers = [int(text.split()[1]) for text in rows.texts]
    assert numbers[:100] == sorted(numbers[:100]) and numbers[100:] == sorted(numbers[100:])
    all_rows = load_part(config("random-split", {"train": [mixed, odd]}, labels=LABELS), "train")
    assert set(rows.texts) < set(all_rows.texts)
    assert load_part(sampled, "train").texts == rows.texts
    assert load_part(sampled.model_copy(update={"split_seed": 1}), "train").texts != rows.texts
    complete = {"train": [{**mixed, "rows": 1.0}, {**odd, "rows": 40}]}
    assert load_part(config("random-split", complete, labels=LABELS), "train").fingerprint() == all_rows.fingerprint()


def test_fewer_training_rows_do_not_change_the_without_training(mixed):
    full, tenth = (sets_of({"train": [mixed]}, rows=rows) for rows in ({}, {"train": 0.1, "validation": 7}))
    assert [len(rows) for rows in tenth.values()] == [24, 7, 30]
    assert tenth["random-split"].fingerprint() == full["random-split"].fingerprint()
    places = [full["train"].texts.index(text) for text in tenth["train"].texts]
    assert places == sorted(places)
    shares = [Counter(sets["train"].labels.tolist())[1] / len(sets["train"]) for sets in (full, tenth)]
    assert shares[0] == pytest.approx(shares[1], abs=1 / 24)


@pytest.mark.parametrize("key", ["longest", "shortest"])
def test_longest_texts_are_selected_before_the_split(mixed, tmp_path, key):
    dev, other = jsonl(tmp_path / "dev.jsonl", 70), jsonl(tmp_path / "other.jsonl", 70)
    parts = {"train": [mixed], "validation": [dev]}
    pool = sets_of(parts)
    words = sorted((len(text.split()) for rows in pool.values() for text in rows.texts), reverse=key == "longest")
    sets = sets_of({**parts, "other": [other]}, **{key: 0.3})
    selected = [len(text.split()) for name, rows in sets.items() if name != "other" for text in rows.texts]
    assert sorted(selected) == sorted(words[:111])
    assert len(sets["other"]) == 21, "a set of its own is selected on its own"


@pytest.mark.parametrize("protocol", ["random-split", "stratified"])
def test_balanced_sets_have_equal_groups(protocol, mixed, tmp_path):
    parts = {"train": [mixed, jsonl(tmp_path / "odd.jsonl", 90, "odd")]}
    for name, rows in sets_of(parts, protocol, balance="label").items():
        assert len(set(np.bincount(rows.labels).tolist())) == 1, name
    for rows in sets_of(parts, protocol, balance="source").values():
        assert Counter(text.split()[0] for text in rows.texts)["odd"] * 2 == len(rows)
    rows = sets_of(parts, protocol, balance="label-and-source")["train"]
    groups = Counter(zip((text.split()[0] for text in rows.texts), rows.labels.tolist(), strict=True))
    assert len(groups) == 4 and len(set(groups.values())) == 1
    for key, field, expected in (("label", "labels", [13, 13, 13]), ("source", "sources", [20, 20])):
        rows = sets_of(parts, protocol, balance=key, rows={"train": 41})["train"]
        assert np.bincount(getattr(rows, field)).tolist() == expected
    parts["validation"] = [jsonl(tmp_path / "more.jsonl", 50, "bad")]
    sets = sets_of(parts, protocol, balance="source")
    counts = Counter(text.split()[0] for rows in sets.values() for text in rows.texts)
    assert set(counts) == {"mixed", "odd", "more"} and max(counts.values()) - min(counts.values()) <= 12


@pytest.mark.parametrize("protocol", ["stratified", "glue-dev", "random-split"])
def test_resume_and_evaluation_read_the_sets_of_training(protocol, mixed, tmp_path):
    hotels = jsonl(tmp_path / "hotels.jsonl", 40, lambda n: LABELS[n % 3])
    parts = {"train": [{**mixed, "rows": 200}], "hotels": [hotels]}
    parts[{"glue-dev": "validation", "given": "test"}.get(protocol, "other")] = [mixed]
    keys = {"longest": 0.9, "balance": "label", "rows": {"train": 0.5, "validation": 2, "hotels": 10}}
    trained = recipe(parts, protocol, vocab_size=60, labels=LABELS, **keys)
    data = prepared(trained, tmp_path / "cache")
    (tmp_path / "saved.yaml").write_text(trained.to_yaml(), encoding="utf-8")
    reloaded = load_recipe(str(tmp_path / "saved.yaml"))
    assert reloaded == trained, "what --resume compares"
    assert prepared(reloaded, tmp_path / "cache").summary == data.summary
    assert data.summary.label_rows["hotels"] == dict.fromkeys(LABELS, 3), "ten of them, of which equal thirds are nine"
    sets = {"test": data.tests[trained.data.test_set], "validation": data.validation, **data.tests}
    for name, expected in sets.items():
        encoded = read_set(trained.data, data.tokenizer, name, data.summary.fingerprints)
        assert np.array_equal(encoded.ids, expected.ids) and np.array_equal(encoded.labels, expected.labels)
    missing = f"no such set; allowed: .*{trained.data.test_set}, .*hotels"
    for name, reason in (("train", "the training set is not scored"), ("x", missing)):
        with pytest.raises(InputError, match=f"--split '?{name}'?: {reason}"):
            read_set(trained.data, data.tokenizer, name)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"longest": 0.3, "shortest": 0.3}, "longest and shortest cannot be combined"),
        ({"rows": {"trian": 5}}, "split 'given' has no set 'trian'; it has train, validation, given"),
        ({"rows": {"train": 1.5}}, "must be a number of rows .* or a fraction"),
        ({"stream": True, "longest": 0.3}, "not possible with longest, which needs all texts"),
        ({"stream": True, "rows": {"train": 9}}, "not possible with rows.train"),
    ],
)
def test_conflicting_keys_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        config("given", ("train", "validation", "test"), **keys)


def test_sampling_is_refused_where_rows_are_missing_or_unlabelled(mixed):
    with pytest.raises(DataError, match=r"data.parts.train.0.rows: 301 rows requested, but there are 300"):
        load_parts(config("random-split", {"train": [{**mixed, "rows": 301}]}, labels=LABELS))
    parts = {"train": [{**mixed, "rows": 9}], "validation": [mixed]}
    with pytest.raises(ValidationError, match="applies to texts with labels; to use fewer texts"):
        TextConfig.model_validate({"parts": parts, "mode": "packed", "sequence_length": 8})
    with pytest.raises(ValidationError, match="applies to texts with labels; all scored pairs"):
        PairsConfig.model_validate({"parts": parts, "max_length": 8})


def test_recipes_without_sampling_keep_their_fingerprint():
    """A run of an earlier version is found by the hash of its recipe."""
    fingerprint = load_recipe("recurrent_sst2_fast").fingerprint()
    assert fingerprint == "fbdce53e8bf70b0a1b469d0634f6339a89a3c3c4b1834c9eeeb4b721d9e2b6a9"
    changes = ("data.rows.train=0.1", "data.longest=0.3", "data.balance=label", "data.parts.train.0.rows=100")
    changed = [load_recipe("recurrent_sst2_fast", [change]).fingerprint() for change in changes]
    assert len({fingerprint, *changed}) == 5


WORDS = st.sampled_from(["a", "b", "c", "the", "film", "Film!", "!!", "é"])
WORD_LISTS = st.lists(st.lists(WORDS, max_size=9).map(" ".join), max_size=14)


def inside(inner: list[str], outer: list[str]) -> bool:
    return any(outer[start : start + len(inner)] == inner for start in range(len(outer) - len(inner) + 1))


@settings(max_examples=200, deadline=None)
@given(WORD_LISTS, WORD_LISTS)
@example(["x a b c"], ["x a b", "c x", "a b c"])  # in a row only across two texts
@example(["x a b c"], ["a b c x a b x a b x"])  # in a row only from the end to the start
def test_overlap_equals_a_plain_search(test, train):
    counter, training = OverlapCounter({"set": test}), [clean(text) for text in train]
    counter.add(train)
    (result,) = counter.counts()
    further = [text.split() for text in map(clean, test) if text not in training]
    contained = sum(
        (bool(words) and any(inside(words, other.split()) for other in training))
        or any(len(other.split()) >= 3 and inside(other.split(), words) for other in training)
        for words in further
    )
    assert (result.duplicates, result.contained) == (len(test) - len(further), contained)
    assert (result.test_set, result.test_rows) == ("set", len(test))
