from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.errors import DataError
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.data.encoding import Encoded, Prepared, encode
from edgeformer.data.prepare import lengths_of_sets, prepare
from edgeformer.data.sources import file_source, imported_data, load_part
from edgeformer.data.splits import split
from edgeformer.data.tokenization import special_ids
from edgeformer.models import recipe_type
from edgeformer.tasks.classification import ClassificationRecipe
from tests.data.conftest import file_sources, read_file, read_set, write
from tests.tasks.test_embedding import tiny_tokenizer

MODEL = {"kind": "encoder", "hidden_size": 8, "layers": 1, "iterations": 1, "heads": 2, "ffn_size": 8}
TRAINING = {"epochs": 1, "batch_size": 4, "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant"}}
CLS, SEP, A, B, C, D = range(2, 8)
"""Tokens of tiny_tokenizer."""


def recipe(parts, protocol="random-split", tokenizer=None, vocab_size=250, **data) -> ClassificationRecipe:
    section = {"parts": parts, "split": protocol, "labels": ["negative", "positive"], "max_length": 32, **data}
    document = {
        "name": "test", "task": "classification", "data": section, "tokenizer": tokenizer or {"kind": "trained"},
        "model": {**MODEL, "residual_scale": 0, "vocab_size": vocab_size}, "training": TRAINING,
    }  # fmt: skip
    return recipe_type("classification", "encoder").model_validate(document)


def prepared(of_recipe, cache) -> Prepared[Encoded]:
    return prepare(of_recipe.data, of_recipe.tokenizer, of_recipe.model.vocab_size, cache)


def synthetic(rows, seed):
    return [{"kind": "synthetic-reviews", "rows": rows, "seed": seed}]


def test_recipe_becomes_encoded_sets_and_a_summary(tmp_path):
    data = prepared(recipe({"train": synthetic(300, 1), "other": synthetic(50, 2)}), tmp_path / "cache")
    sets, summary = {"train": data.train, "validation": data.validation, **data.tests}, data.summary
    assert {name: len(rows) for name, rows in sets.items()} == summary.rows
    assert special_ids(data.tokenizer).cls == data.train.row(0)[0]
    assert data.train.lengths.max() <= 32
    more = recipe({"train": synthetic(300, 1)}, labels=["negative", "positive", "mixed"])
    assert prepared(more, tmp_path / "cache").summary.label_rows["train"]["mixed"] == 0, "another entry of the cache"
    assert (summary.split, summary.synthetic) == ("random-split", True)
    assert summary.rows == {"train": 240, "validation": 30, "random-split": 30, "other": 50}
    assert sum(summary.label_rows["train"].values()) == 240
    assert summary.label_rows["other"]["positive"] == int(data.tests["other"].labels.sum())
    assert [count.test_set for count in summary.overlap] == ["random-split", "other"]
    assert set(summary.truncated_rows) == set(summary.rows)
    assert {name: sum(lengths.texts) for name, lengths in summary.text_words.items()} == summary.rows
    assert summary.text_tokens["train"].max <= 32
    assert DataSummary.model_validate_json(summary.model_dump_json()) == summary


def test_file_to_evaluate_has_well_known_columns(tmp_path):
    trained = recipe({"train": synthetic(200, 1)})
    data = prepared(trained, tmp_path / "cache")
    path = write(tmp_path, "mine.csv", 'id,review,sentiment\n1,"the menu was great",positive\n2,bad,0\n')
    encoded = read_file(trained.data, data.tokenizer, path)
    assert encoded.labels.tolist() == [1, 0]
    assert encoded.row(0).tolist() == data.tokenizer.encode("the menu was great").ids


@pytest.mark.parametrize(("other", "protocol"), [("test", "given"), ("validation", "glue-dev")])
def test_imported_model_is_not_trained_with_one_set_for_validation_and_test(tmp_path, other, protocol):
    parts = {"train": synthetic(60, 1), other: synthetic(20, 2)}
    imported = recipe(parts, "imported")
    message = f"data.split: imported would use the part {other} for .* --set data.split={protocol}"
    with pytest.raises(DataError, match=message):
        prepared(imported, tmp_path)
    data = prepared(recipe(parts, protocol), tmp_path)
    assert (len(data.validation), len(data.tests[protocol])) == (6, 20)
    assert len(read_set(imported.data, data.tokenizer, "validation")) == 20  # judging may use the other
    data = prepared(recipe({**parts, "test": synthetic(20, 2), "validation": synthetic(20, 3)}, "imported"), tmp_path)
    assert (len(data.train), len(data.validation), len(data.tests["test"])) == (60, 20, 20)


@pytest.mark.data
@pytest.mark.slow
def test_sst2_with_bert_base_uncased(data_folder, tmp_path):
    files = {"train": ("train", "sentence"), "validation": ("dev", "content"), "sst-test": ("test", "content")}
    folder = data_folder / "sst2"
    parts = {part: file_sources(folder / f"{stem}.tsv", text=text) for part, (stem, text) in files.items()}
    tokenizer = {"kind": "file", "path": str(data_folder / "tokenizers" / "bert-base-uncased" / "tokenizer.json")}
    summary = prepared(recipe(parts, tokenizer=tokenizer, vocab_size=30_522, max_length=128), tmp_path).summary
    assert summary.rows == {"train": 54_576, "validation": 6_822, "random-split": 6_823, "sst-test": 1_821}
    assert summary.label_rows["sst-test"] == {"negative": 912, "positive": 909}
    assert summary.truncated_rows == dict.fromkeys(summary.rows, 0) and not summary.synthetic
    leaks = {count.test_set: count.duplicates + count.contained for count in summary.overlap}
    assert leaks["random-split"] > 6_500 and leaks["sst-test"] < 300


def test_length_distribution_equals_numpy():
    lengths = np.random.default_rng(0).integers(0, 3000, 60)
    result = lengths_of_sets({"set": Counter(lengths.tolist())})["set"]
    assert (result.min, result.max) == (lengths.min(), lengths.max())
    assert result.median == np.median(lengths) and result.mean == pytest.approx(np.mean(lengths), abs=1e-3)
    assert len(result.texts) == len(result.edges) - 1 <= 41 and sum(result.texts) == len(lengths)
    assert list(result.texts) == np.histogram(lengths, [*result.edges[:-1], 1 << 40])[0].tolist()
    # A long text does not widen the bins, which sets share.
    result = lengths_of_sets({"train": Counter({2: 500, 3: 499, 900: 1}), "test": Counter({30: 5}), "none": {}})
    assert list(result) == ["train", "test"]
    assert result["train"].edges == result["test"].edges == tuple(range(32))
    assert result["train"].texts[2:4] == (500, 499) and result["train"].texts[-1] == 1


PAIRS = "premise\thypothesis\tlabel\na b\tc\tyes\nb\td a\tno\nc c c c\td\tyes\n"


@pytest.fixture
def table(tmp_path):
    return write(tmp_path, "nli.tsv", PAIRS)


def pair_config(path, protocol="imported", **changes) -> DataConfig:
    names = ("train", "validation", "test") if protocol == "given" else ("test",)
    parts = dict.fromkeys(names, file_sources(path, text="premise", text_pair="hypothesis"))
    document = {"split": protocol, "labels": ["no", "yes"], "max_length": 8, "cleaning": "none", "parts": parts}
    return DataConfig.model_validate({**document, **changes})


def test_tokenizer_joins_pairs_and_cuts_the_longer_text(table):
    texts = load_part(pair_config(table), "test")
    assert texts.texts[1] == ("b", "d a") and texts.labels.tolist() == [1, 0, 1]
    encoded = encode(texts, tiny_tokenizer(), 7)
    assert encoded.row(0).tolist() == [CLS, A, B, SEP, C, SEP]
    assert encoded.row(2).tolist() == [CLS, C, C, C, SEP, D, SEP] and encoded.truncated == 1


@pytest.mark.parametrize("columns", [("question", "sentence"), ("text", "text_pair")])
def test_file_is_read_as_the_model_reads_texts(table, columns):
    path = table.with_name("other.tsv")
    path.write_text("\t".join(columns) + "\tlabel\na b\tc\tyes\nb\td a\tno\n", encoding="utf-8")

    def first_row(config: DataConfig) -> list[int]:
        return read_file(config, tiny_tokenizer(), path).row(0).tolist()

    single = [CLS, C, SEP] if columns[0] == "question" else [CLS, A, B, SEP]
    assert first_row(pair_config(table, parts={"train": synthetic(9, 0)})) == single
    assert first_row(pair_config(table, parts={"test": file_sources("gone.tsv")})) == single
    assert first_row(pair_config(table)) == [CLS, A, B, SEP, C, SEP]
    with pytest.raises(DataError, match=r"could be single texts \((sentence|text)\) or pairs"):
        first_row(pair_config(table, parts={}))
    assert len(read_file(pair_config(table, parts={}), tiny_tokenizer(), table)) == 3  # can be pairs only


def test_pair_columns_of_the_model_are_used(table):
    path = table.with_name("own.tsv")
    path.write_text("left\tright\tsame\na b\tc\tyes\n", encoding="utf-8")
    names = {"text": "left", "text_pair": "right", "label": "same"}
    config = pair_config(table, parts={"train": file_sources("gone.tsv", **names, skip_unlabelled=True)})
    assert read_file(config, tiny_tokenizer(), path).row(0).tolist() == [CLS, A, B, SEP, C, SEP]
    path.write_text("left\tright\tsame\na\tb\t\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 2: has no label"):  # skip_unlabelled is for the recipe's own sources
        read_file(config, tiny_tokenizer(), path)
    path.write_text("text\tlabel\na\tyes\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"no pairs of texts; columns: text, label; .* left and right, sentence1 and"):
        read_file(config, tiny_tokenizer(), path)


def test_pairs_are_prepared_for_training(tmp_path):
    table = tmp_path / "many.tsv"
    lines = [f"a{n} b\tc d{n % 7}\t{('no', 'yes')[n % 2]}" for n in range(40)]
    table.write_text("premise\thypothesis\tlabel\n" + "\n".join(lines) + "\n", encoding="utf-8")
    source = file_source(table).model_dump()
    data = prepared(recipe({"train": [source]}, labels=["no", "yes"], vocab_size=74), tmp_path)
    assert (data.validation.row(0) == data.tokenizer.token_to_id("[SEP]")).sum() == 2
    with pytest.raises(ValidationError, match="stream: true is not possible with pairs"):
        pair_config(table, "given", stream=True)


def test_sets_of_an_imported_model_replace_each_other(table, tmp_path):
    assert len(read_set(pair_config(table), tiny_tokenizer(), "validation")) == 3
    section, notes = imported_data(None, ("no", "yes"), 8)
    assert section["parts"] == {} and notes == []
    without_data = DataConfig.model_validate(section)
    with pytest.raises(DataError, match="this imported model has no test set; import it again"):
        read_set(without_data, tiny_tokenizer(), "test")
    with pytest.raises(DataError, match=r"this imported model has no training text; import it again .*: --data DIR$"):
        split(without_data, {})
    with pytest.raises(DataError, match="none of the parts train, validation, test has a file"):
        imported_data(tmp_path, ("no", "yes"), 8)
    write(tmp_path, "dev.tsv", PAIRS)
    section, notes = imported_data(tmp_path, ("no", "yes"), 8)
    assert [*section["parts"]] == ["validation"] and len(notes) == 2
