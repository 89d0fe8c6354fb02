import json

import numpy as np
import pytest

from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.data.encoding import Encoded, Prepared
from edgeformer.data.prepare import encode_file, look, prepare, prepare_test
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.data.tokenization import fingerprint, special_ids
from edgeformer.models import recipe_type
from edgeformer.tasks.classification import ClassificationRecipe

MODEL = {
    "kind": "encoder",
    "hidden_size": 8,
    "layers": 1,
    "iterations": 1,
    "heads": 2,
    "ffn_size": 8,
    "residual_scale": 0,
}
TRAINING = {"epochs": 1, "batch_size": 4, "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant"}}
LABELS = ["negative", "positive"]


def recipe(parts, protocol="random-split", tokenizer=None, vocab_size=250, **data) -> ClassificationRecipe:
    document = {
        "name": "test",
        "task": "classification",
        "data": {"parts": parts, "split": protocol, "labels": LABELS, "max_length": 32, **data},
        "tokenizer": tokenizer or {"kind": "trained"},
        "model": {**MODEL, "vocab_size": vocab_size},
        "training": TRAINING,
    }
    return recipe_type("classification", "encoder").model_validate(document)


def prepared(made, cache) -> Prepared[Encoded]:
    return prepare(made.data, made.tokenizer, made.model.vocab_size, cache)


def synthetic(rows, seed):
    return [{"kind": "synthetic-reviews", "rows": rows, "seed": seed}]


def tsv(path, rows):
    lines = [f"{row.label}\t{row.text}" for row in rows]
    path.write_text("label\ttext\n" + "\n".join(lines) + "\n")
    return [{"kind": "file", "path": str(path)}]


def test_a_recipe_becomes_encoded_sets_and_a_summary(tmp_path):
    made = recipe({"train": synthetic(300, 1), "other": synthetic(50, 2)})
    data = prepared(made, tmp_path / "cache")
    assert (len(data.train), len(data.validation)) == (240, 30)
    assert {name: len(rows) for name, rows in data.tests.items()} == {"random-split": 30, "other": 50}
    assert special_ids(data.tokenizer).cls == data.train.row(0)[0]
    assert data.train.lengths.max() <= 32
    summary = data.summary
    assert summary.synthetic
    assert (summary.split, summary.rows["random-split"], summary.rows["train"]) == ("random-split", 30, 240)
    assert sum(summary.label_rows["train"].values()) == 240
    assert summary.label_rows["other"]["positive"] == int(data.tests["other"].labels.sum())
    assert [counted.test_set for counted in summary.overlap] == ["random-split", "other"]
    assert set(summary.truncated_rows) == set(summary.rows)
    assert DataSummary.model_validate(json.loads(summary.model_dump_json())) == summary


def test_preparing_again_gives_the_same_and_other_data_another_fingerprint(tmp_path):
    made = recipe({"train": synthetic(200, 1)})
    one, again = prepared(made, tmp_path), prepared(made, tmp_path)
    assert one.summary == again.summary
    assert np.array_equal(one.train.ids, again.train.ids)
    assert fingerprint(one.tokenizer) == fingerprint(again.tokenizer)
    other = prepared(recipe({"train": synthetic(200, 1)}, split_seed=7), tmp_path)
    assert other.summary.fingerprint != one.summary.fingerprint


def test_files_are_not_synthetic_and_their_leaks_are_counted(tmp_path):
    rows = list(synthetic_reviews(150, 4))
    parts = {"train": tsv(tmp_path / "a.tsv", rows[:120]), "test": tsv(tmp_path / "b.tsv", rows[100:])}
    summary = prepared(recipe(parts, "given", max_length=8, vocab_size=200), tmp_path / "cache").summary
    assert not summary.synthetic
    (overlap,) = summary.overlap
    assert (overlap.test_set, overlap.test_rows) == ("given", 50)
    assert overlap.duplicates >= 17  # 20 of the test rows were in the training part, a tenth of which is held out
    assert summary.truncated_rows["given"] > 0


@pytest.mark.parametrize("protocol", ["random-split", "glue-dev", "sst-test", "given"])
def test_a_bundle_finds_the_sets_of_training_again(tmp_path, protocol):
    names = {"random-split": ["train"], "glue-dev": ["train", "validation"], "given": ["train", "test"]}
    parts = names.get(protocol, ["train", "validation", "sst-test"])
    made = recipe({name: synthetic(120, number) for number, name in enumerate([*parts, "other"])}, protocol)
    data = prepared(made, tmp_path)
    wanted = {"test": data.tests[protocol], "validation": data.validation, **data.tests}
    for name, expected in wanted.items():
        found = prepare_test(made.data, data.tokenizer, 32, None, name)
        assert np.array_equal(found.ids, expected.ids)
        assert np.array_equal(found.labels, expected.labels)
    for name in ("train", "nonsense"):
        with pytest.raises(
            InputError, match=f"--split '{name}': no such set; allowed: test, validation, {protocol}, other"
        ):
            prepare_test(made.data, data.tokenizer, 32, None, name)


def test_a_test_set_of_its_own_is_found_without_the_training_data(tmp_path):
    rows = list(synthetic_reviews(150, 4))
    parts = {"train": tsv(tmp_path / "a.tsv", rows[:120]), "test": tsv(tmp_path / "b.tsv", rows[120:])}
    made = recipe(parts, "given", vocab_size=200)
    data = prepared(made, tmp_path / "cache")
    (tmp_path / "a.tsv").unlink()
    assert len(prepare_test(made.data, data.tokenizer, 32, tmp_path / "cache", "test")) == 30
    with pytest.raises(DataError, match=r"a\.tsv: no such file"):
        prepare_test(made.data, data.tokenizer, 32, None, "validation")


def test_a_file_to_evaluate_on_is_read_by_well_known_columns(tmp_path):
    made = recipe({"train": synthetic(200, 1)})
    data = prepared(made, tmp_path / "cache")
    path = tmp_path / "mine.csv"
    path.write_text('id,review,sentiment\n1,"the menu was great",positive\n2,bad,0\n')
    encoded = encode_file(path, made.data, data.tokenizer)
    assert encoded.labels.tolist() == [1, 0]
    assert encoded.row(0).tolist() == data.tokenizer.encode("the menu was great").ids
    path.write_text("id,words,sentiment\n1,a,positive\n")
    with pytest.raises(DataError, match=r"mine\.csv: no text column; columns: id, words, sentiment"):
        encode_file(path, made.data, data.tokenizer)
    path.write_text("text,label\na,great\n")
    with pytest.raises(
        DataError, match=r"mine\.csv, line 2: label 'great' is not in the set; allowed: negative, positive"
    ):
        encode_file(path, made.data, data.tokenizer)


@pytest.mark.parametrize(("other", "protocol"), [("test", "given"), ("validation", "glue-dev")])
def test_an_imported_model_is_not_trained_with_one_set_for_validation_and_test(tmp_path, other, protocol):
    parts = {"train": synthetic(60, 1), other: synthetic(20, 2)}
    made = recipe(parts, "imported")
    with pytest.raises(DataError, match=f"data.split: imported has one part, {other}, .* --set data.split={protocol}"):
        prepared(made, tmp_path)
    held_out = recipe(parts, protocol)
    data = prepared(held_out, tmp_path)
    assert (len(data.validation), len(data.tests[protocol])) == (6, 20)
    assert len(prepare_test(made.data, data.tokenizer, 32, None, "validation")) == 20  # judging may use the other
    data = prepared(recipe({**parts, "test": synthetic(20, 2), "validation": synthetic(20, 3)}, "imported"), tmp_path)
    assert (len(data.train), len(data.validation), len(data.tests["test"])) == (60, 20, 20)


def test_nothing_is_written_where_the_data_is_refused(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("label\ttext\n" + "1\tfine\n" * 40)
    with pytest.raises(DataError, match="one class only"):
        prepared(recipe({"train": [{"kind": "file", "path": str(path)}]}), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.data
def test_sst2_with_bert_base_uncased(data_folder, tmp_path):
    folder = data_folder / "sst2"
    files = {
        "train": ("train.tsv", "sentence"),
        "validation": ("dev.tsv", "content"),
        "sst-test": ("test.tsv", "content"),
    }
    parts = {part: [{"kind": "file", "path": str(folder / name), "text": text}] for part, (name, text) in files.items()}
    tokenizer = {
        "kind": "file",
        "path": str(data_folder / "tokenizers" / "bert-base-uncased" / "tokenizer.json"),
    }
    made = recipe(parts, tokenizer=tokenizer, vocab_size=30_522, max_length=128)
    made = made.model_copy(update={"data": made.data.model_copy(update={"max_length": 128})})
    summary = prepared(made, tmp_path).summary
    assert summary.rows == {"train": 54_576, "validation": 6_822, "random-split": 6_823, "sst-test": 1_821}
    assert summary.label_rows["sst-test"] == {"negative": 912, "positive": 909}
    assert summary.truncated_rows == dict.fromkeys(summary.rows, 0)
    assert not summary.synthetic
    leaks = {counted.test_set: counted.duplicates + counted.contained for counted in summary.overlap}
    assert leaks["random-split"] > 6_500
    assert leaks["sst-test"] < 300


@pytest.mark.parametrize("stream", [False, True])
def test_a_column_that_is_not_there_is_named_before_a_row_is_read(tmp_path, stream):
    train = tsv(tmp_path / "train.tsv", synthetic_reviews(50, 1))
    (tmp_path / "train.tsv").write_text("label\ttext\n1\tfine\nbroken line\n")  # never read
    other = tsv(tmp_path / "other.tsv", synthetic_reviews(50, 2))
    made = recipe(
        {"train": train, "validation": other, "test": [{**other[0], "label": "Lable"}]}, "given", stream=stream
    )
    for read in (lambda: prepared(made, tmp_path / "cache"), lambda: look(made.data)):
        with pytest.raises(DataError) as caught:
            read()
        place = f"data.parts.test.0: {tmp_path / 'other.tsv'}"
        assert str(caught.value).startswith(f"{place}: no column 'Lable'; did you mean 'label'? columns: label, text;")


def test_an_unknown_label_names_the_nearest(tmp_path):
    (tmp_path / "train.tsv").write_text("label\ttext\nPositve \tgood\n")
    made = recipe({"train": [{"kind": "file", "path": str(tmp_path / "train.tsv")}]})
    with pytest.raises(DataError, match=r"label 'Positve ' is not in the set; did you mean 'positive'\? allowed"):
        prepared(made, tmp_path / "cache")
