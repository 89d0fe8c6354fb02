"""Fewer rows: of a source, of a set, the longest and shortest texts, equal numbers; what is refused, and who agrees."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from edgeformer.artifacts.data_config import DataConfig, PairsConfig, TextConfig
from edgeformer.artifacts.errors import DataError
from edgeformer.data.prepare import prepare, prepare_test
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.sources import load_part, load_parts
from edgeformer.data.splits import row_count, sample, set_parts, split
from edgeformer.models import load_recipe
from tests.data.test_prepare import recipe

LABELS = ["bad", "good", "odd"]
VOCABULARY = 60
"""Tokens: as many as few texts have."""


def jsonl(path, rows, label="good"):
    """A file of numbered texts; ``label``: of all of them, or of each by its number."""
    labels = [label if isinstance(label, str) else label(n) for n in range(rows)]
    lines = (json.dumps({"text": f"{path.stem} {n}" + " word" * (n % 7), "label": labels[n]}) for n in range(rows))
    path.write_text("\n".join(lines) + "\n")
    return {"kind": "file", "path": str(path)}


def config(parts, protocol="random-split", **settings) -> DataConfig:
    document = {"parts": parts, "split": protocol, "labels": LABELS, **settings}
    return DataConfig.model_validate(document)


def sets_of(made: DataConfig) -> dict[str, LabelledTexts]:
    return split(made, load_parts(made))


@pytest.fixture
def mixed(tmp_path):
    """300 rows: 60 % good, 30 % bad, 10 % odd."""
    return jsonl(tmp_path / "mixed.jsonl", 300, lambda n: LABELS[(2 if n % 10 == 0 else 0) if n % 10 < 4 else 1])


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_shares_add_up_and_are_within_one_row(sizes, data):
    strata = np.repeat(np.arange(len(sizes)), sizes)
    count = data.draw(st.integers(0, len(strata)))
    sampled = np.bincount(strata[sample(strata, count, 0)], minlength=len(sizes))
    assert sampled.sum() == count
    assert all(
        abs(share - size * count / max(1, len(strata))) < 1 and share <= size
        for share, size in zip(sampled, sizes, strict=True)
    )


def test_a_sample_is_stratified_seeded_in_order_and_lies_inside_a_larger_one():
    strata = np.arange(1000) % 10 // 4  # 40 %, 40 %, 20 %
    small, large = sample(strata, 100, 7), sample(strata, 500, 7)
    assert np.bincount(strata[small]).tolist() == [40, 40, 20]
    assert (np.diff(small) > 0).all() and set(small.tolist()) <= set(large.tolist())
    assert sample(strata, 100, 7).tolist() == small.tolist() != sample(strata, 100, 8).tolist()
    assert sample(strata, 1000, 7).tolist() == list(range(1000))


def test_counts_and_fractions():
    assert [row_count(amount, 68_221, "rows") for amount in (10, 0.1, 0.5, 1.0, 1e-9)] == [10, 6822, 34_110, 68_221, 1]
    with pytest.raises(DataError, match=r"data.rows.train: 12 of 11 rows cannot be taken; lower it"):
        row_count(12, 11, "data.rows.train")


def test_rows_of_a_source_are_read_with_its_shares_of_labels(mixed, tmp_path):
    other = jsonl(tmp_path / "other.jsonl", 40, "odd")
    made = config({"train": [{**mixed, "rows": 100}, {**other, "rows": 0.25}]})
    found = load_part(made, "train")
    assert np.bincount(found.labels).tolist() == [30, 60, 10 + 10]
    numbers = [int(text.split()[1]) for text in found.texts]
    assert numbers[:100] == sorted(numbers[:100]) and numbers[100:] == sorted(numbers[100:])
    everything = load_part(config({"train": [mixed, other]}), "train")
    assert set(found.texts) < set(everything.texts)
    assert load_part(made, "train").texts == found.texts
    assert load_part(made.model_copy(update={"split_seed": 1}), "train").texts != found.texts
    whole = load_part(config({"train": [{**mixed, "rows": 1.0}, {**other, "rows": 40}]}), "train")
    assert whole.fingerprint() == everything.fingerprint()


def test_fewer_rows_to_train_on_leave_the_test_sets_as_they_are(mixed):
    whole, tenth = (sets_of(config({"train": [mixed]}, rows=rows)) for rows in ({}, {"train": 0.1, "validation": 7}))
    assert [len(found) for found in tenth.values()] == [24, 7, 30]
    assert tenth["random-split"].fingerprint() == whole["random-split"].fingerprint()
    assert set(tenth["train"].texts) < set(whole["train"].texts)
    places = [whole["train"].texts.index(text) for text in tenth["train"].texts]
    assert places == sorted(places)
    shares = [Counter(found["train"].labels.tolist())[1] / len(found["train"]) for found in (whole, tenth)]
    assert shares[0] == pytest.approx(shares[1], abs=1 / 24)


def test_the_longest_texts_are_taken_of_the_pool_before_it_is_cut(mixed, tmp_path):
    further = jsonl(tmp_path / "further.jsonl", 70)
    parts = {"train": [mixed], "validation": [jsonl(tmp_path / "dev.jsonl", 70)], "further": [further]}
    everything = [*load_parts(config({"train": [mixed], "validation": parts["validation"]})).values()]
    words = sorted((len(text.split()) for found in everything for text in found.texts), reverse=True)
    for key, expected in (("longest", words[:111]), ("shortest", words[::-1][:111])):
        sets = sets_of(config(parts, **{key: 0.3}))
        pool = [text for name, found in sets.items() if name != "further" for text in found.texts]
        assert sorted(map(len, map(str.split, pool))) == sorted(expected)
        assert len(sets["further"]) == 21, "a set of its own is cut by itself"


def test_words_are_counted_after_cleaning(tmp_path):
    texts = ["one <b>two</b>"] * 10 + ["<br /> a <br /> http://x.org/y"] * 10
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": t, "label": i % 2}) for i, t in enumerate(texts)))
    parts = {"train": [{"kind": "file", "path": str(tmp_path / "t.jsonl")}]}
    paper, raw = (sets_of(config(parts, longest=0.5, cleaning=cleaning)) for cleaning in ("paper", "none"))
    assert {text for found in paper.values() for text in found.texts} == {texts[0]}
    assert {text for found in raw.values() for text in found.texts} == {texts[-1]}


@pytest.mark.parametrize("protocol", ["random-split", "stratified"])
def test_labels_and_sources_come_out_equal_in_every_set(protocol, mixed, tmp_path):
    parts = {"train": [mixed, jsonl(tmp_path / "odd.jsonl", 90, "odd")]}
    for name, found in sets_of(config(parts, protocol, balance="label")).items():
        assert len(set(np.bincount(found.labels).tolist())) == 1, name
    for found in sets_of(config(parts, protocol, balance="source")).values():
        assert Counter(text.split()[0] for text in found.texts)["odd"] * 2 == len(found)
    found = sets_of(config(parts, protocol, balance="label-and-source"))["train"]
    kinds = Counter(zip((text.split()[0] for text in found.texts), found.labels.tolist(), strict=True))
    assert len(kinds) == 4 and len(set(kinds.values())) == 1
    for key, expected in (("label", [13, 13, 13]), ("source", [20, 20])):
        some = sets_of(config(parts, protocol, balance=key, rows={"train": 41}))["train"]
        assert np.bincount(some.labels if key == "label" else some.sources).tolist() == expected
    pooled = config({**parts, "validation": [jsonl(tmp_path / "more.jsonl", 50, "bad")]}, protocol, balance="source")
    found = sum((Counter(text.split()[0] for text in rows.texts) for rows in sets_of(pooled).values()), Counter())
    assert set(found) == {"mixed", "odd", "more"} and max(found.values()) - min(found.values()) <= 12


@pytest.mark.parametrize("protocol", ["random-split", "stratified", "glue-dev", "given"])
def test_training_and_evaluation_agree_on_every_set(protocol, mixed, tmp_path):
    parts = {
        "train": [{**mixed, "rows": 200}],
        "hotels": [jsonl(tmp_path / "hotels.jsonl", 40, lambda n: LABELS[n % 3])],
    }
    parts["validation" if protocol == "glue-dev" else "test" if protocol == "given" else "further"] = [mixed]
    keys = {"longest": 0.9, "balance": "label", "rows": {"train": 0.5, "validation": 2, "hotels": 10}}
    made = recipe(parts, protocol, vocab_size=VOCABULARY, labels=LABELS, **keys)
    data = prepare(made.data, made.tokenizer, made.model.vocab_size, tmp_path / "cache")
    (tmp_path / "again.yaml").write_text(made.to_yaml(), encoding="utf-8")
    same = load_recipe(str(tmp_path / "again.yaml"))
    assert same == made, "what --resume compares"
    resumed = prepare(same.data, same.tokenizer, same.model.vocab_size, tmp_path / "cache")
    assert resumed.summary == data.summary
    assert data.summary.label_rows["hotels"] == dict.fromkeys(LABELS, 3), "ten of them, of which equal thirds are nine"
    for name in [name for name in set_parts(made.data) if name != "train"]:
        again = prepare_test(made.data, data.tokenizer, 32, None, name, data.summary.fingerprints)
        expected = data.validation if name == "validation" else data.tests[name]
        assert np.array_equal(again.ids, expected.ids)


def test_a_streamed_training_set_takes_the_same_rows_of_its_sources(mixed, tmp_path):
    parts = {name: [{**mixed, "rows": 100}] for name in ("train", "validation", "test")}
    found = []
    for stream in (False, True):
        made = recipe(parts, "given", vocab_size=VOCABULARY, labels=LABELS, stream=stream)
        found.append(prepare(made.data, made.tokenizer, made.model.vocab_size, tmp_path / f"cache{stream}").summary)
    assert found[0].fingerprints == found[1].fingerprints
    other = recipe(parts, "given", vocab_size=VOCABULARY, labels=LABELS, stream=True, split_seed=1)
    seeded = prepare(other.data, other.tokenizer, other.model.vocab_size, tmp_path / "cacheTrue").summary
    assert seeded.fingerprints["train"] != found[1].fingerprints["train"]


def test_what_cannot_be_is_refused(mixed, tmp_path):
    whole = {name: [mixed] for name in ("train", "validation", "test")}
    cases = [
        ({"longest": 0.3, "shortest": 0.3}, "longest and shortest: leave one of them out"),
        ({"longest": 1.5}, "less than or equal to 1"),
        ({"rows": {"trian": 5}}, "no set is called 'trian'; split 'given' has train, validation, given"),
        ({"rows": {"test": 5}}, "no set is called 'test'"),
        ({"rows": {"train": 1.5}}, "must be a count of rows .* or a fraction"),
        ({"rows": {"train": 0}}, "must be a count of rows"),
        ({"balance": "domain"}, "label-and-source"),
        ({"stream": True, "longest": 0.3}, "stream: true reads .* longest needs all of its texts in memory"),
        ({"stream": True, "rows": {"train": 9}}, "rows.train needs all"),
        ({"stream": True, "balance": "label"}, "balance needs all"),
    ]
    for keys, message in cases:
        with pytest.raises(ValidationError, match=message):
            config(whole, "given", **keys)
    few = config({"train": [{**mixed, "rows": 301}]})
    with pytest.raises(DataError, match=r"data.parts.train.0.rows: 301 of 300 rows cannot be taken"):
        load_parts(few)
    some = {"train": [{**mixed, "rows": 9}], "validation": [mixed]}
    with pytest.raises(ValidationError, match="is for texts with labels; a language model takes"):
        TextConfig.model_validate({"parts": some, "mode": "packed", "sequence_length": 8})
    with pytest.raises(ValidationError, match="is for texts with labels; pairs"):
        PairsConfig.model_validate({"parts": some, "max_length": 8})


def test_recipes_without_these_keys_keep_their_name(mixed):
    """A run that an earlier version began is found by the hash of its recipe."""
    known = load_recipe("recurrent_sst2_fast").fingerprint()
    assert known == "fbdce53e8bf70b0a1b469d0634f6339a89a3c3c4b1834c9eeeb4b721d9e2b6a9"
    changes = ("data.rows.train=0.1", "data.longest=0.3", "data.balance=label", "data.parts.train.0.rows=100")
    fewer = [load_recipe("recurrent_sst2_fast", [change]).fingerprint() for change in changes]
    assert len({known, *fewer}) == 5
