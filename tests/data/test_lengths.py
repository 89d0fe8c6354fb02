"""How long texts are: counted after cleaning, told of each set, the same for a set in memory and one on disk."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeformer.artifacts.manifest import DataSummary
from edgeformer.data.cleaning import count_words
from edgeformer.data.encoding import count_values
from edgeformer.data.prepare import lengths_of_sets, prepare
from edgeformer.models.card import data_tables
from tests.data.test_prepare import recipe, synthetic


def test_words_are_those_of_the_cleaned_text_and_of_both_of_a_pair():
    texts = ["<p>Two   words</p>", "", "see http://x.org/y", ("one", "and <br/> two")]
    assert count_words(texts, "paper").tolist() == [2, 0, 1, 3]
    assert count_words(texts, "none").tolist() == [2, 0, 2, 4]


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=60))
def test_what_is_said_of_a_set_is_what_numpy_says(lengths):
    found = lengths_of_sets({"set": count_values(np.array(lengths))})["set"]
    assert (found.min, found.max) == (min(lengths), max(lengths))
    assert found.median == np.median(lengths) and found.mean == pytest.approx(np.mean(lengths), abs=1e-3)
    assert len(found.texts) == len(found.edges) - 1 <= 41 and sum(found.texts) == len(lengths)
    inside = [*found.edges[:-1], 1 << 40]  # the last bin is open
    assert list(found.texts) == np.histogram(lengths, inside)[0].tolist()


def test_one_long_text_does_not_widen_the_bins_and_sets_share_them():
    found = lengths_of_sets({"train": Counter({2: 500, 3: 499, 900: 1}), "test": Counter({30: 5}), "none": {}})
    assert list(found) == ["train", "test"]
    assert found["train"].edges == found["test"].edges == tuple(range(32))
    assert found["train"].texts[2:4] == (500, 499) and found["train"].texts[-1] == 1


def test_a_run_tells_labels_and_lengths_of_its_sets(tmp_path):
    made = recipe(
        {name: synthetic(rows, rows) for name, rows in {"train": 200, "validation": 30, "test": 40}.items()}, "given"
    )
    summary = prepare(made.data, made.tokenizer, made.model.vocab_size, tmp_path).summary
    streamed = made.model_copy(update={"data": made.data.model_copy(update={"stream": True})})
    again = prepare(streamed.data, made.tokenizer, made.model.vocab_size, tmp_path / "streamed")
    assert (again.summary.text_words, again.summary.text_tokens) == (summary.text_words, summary.text_tokens)
    kept = prepare(streamed.data, made.tokenizer, made.model.vocab_size, tmp_path / "streamed")
    assert kept.summary.text_words == summary.text_words, "found again without reading the texts"
    assert {name: sum(found.texts) for name, found in summary.text_words.items()} == summary.rows
    assert summary.text_tokens["train"].max <= 32
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in data_tables(summary).splitlines()]
    positive = summary.label_rows["given"]["positive"]
    assert ["given", "40", f"{40 - positive} ({1 - positive / 40:.2%})", f"{positive} ({positive / 40:.2%})"] in cells
    words, cut = summary.text_words["validation"], summary.truncated_rows["validation"]
    told = next(row for row in cells if row[:2] == ["validation", str(words.min)] and len(row) == 8)
    assert told[2:5] == [f"{words.median:g}", f"{words.mean:.1f}", str(words.max)]
    assert told[7] == f"{cut} ({cut / 30:.1%})"
    older = summary.model_copy(update={"text_words": {}, "text_tokens": {}, "label_rows": {}})
    assert data_tables(older) == "" and DataSummary.model_validate_json(summary.model_dump_json()) == summary
