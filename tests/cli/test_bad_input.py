"""Bad input: exit code 2, what is wrong, where, and the remedy; no traceback, nothing half-written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.run_cli import Outcome, edgeformer

HEADER = "label\ttext\n"
GOOD = HEADER + "".join(f"{i % 2}\tthis is review number {i}\n" for i in range(40))
RECIPE = """
name: mine
task: classification
data:
  parts:
    train:
      - {kind: file, path: reviews.tsv}
  split: random-split
  labels: [bad, good]
  max_length: 16
tokenizer: {kind: trained}
model: {kind: encoder, vocab_size: 60, hidden_size: 8, layers: 1, iterations: 2, heads: 2, ffn_size: 16,
        residual_scale: 0.5}
training:
  epochs: 1
  batch_size: 8
  optimizer: {lr: 1e-3}
  schedule: {kind: constant}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "reviews.tsv").write_text(GOOD, encoding="utf-8")
    return tmp_path


def refused(outcome: Outcome, folder: Path, *expected: str) -> None:
    assert outcome.code == 2, outcome.err
    assert "Traceback" not in outcome.err
    flat = " ".join(outcome.err.split())
    for text in expected:
        assert text in flat, outcome.err
    runs = [path for path in folder.glob("artifacts/*") if not path.name.startswith(".")]
    assert runs == [], "a refused command left something behind"


def train(folder: Path, *more: str) -> Outcome:
    return edgeformer("train", "recipe.yaml", *more, cwd=folder)


def test_wrong_recipe_key(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE.replace("epochs:", "epoch:"), encoding="utf-8")
    refused(train(folder), folder, "recipe.yaml:", "unknown key 'training.epoch'; did you mean 'epochs'?")


def test_wrong_type(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE.replace("epochs: 1", "epochs: one"), encoding="utf-8")
    refused(train(folder), folder, "recipe.yaml:", "training.epochs", "integer", "'one'")


def test_missing_recipe(folder: Path) -> None:
    refused(edgeformer("train", "absent.yaml", cwd=folder), folder, "absent.yaml", "quickstart")


def test_missing_data_file(folder: Path) -> None:
    (folder / "reviews.tsv").unlink()
    refused(train(folder), folder, "reviews.tsv", "no such file")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nearest", "reviews.tsv", "--pair", "b"), "--pair: is for classifiers, and --nearest"),
        (("--nearest", "reviews.tsv", "--confidence", "0.5"), "--confidence: is for classifiers, and --nearest"),
        (("--top", "3"), "--top: says how many of --nearest"),
    ],
)
def test_options_of_predict_that_would_do_nothing(folder: Path, options: tuple[str, ...], said: str) -> None:
    refused(edgeformer("predict", "a", "b", *options, cwd=folder), folder, said)


def test_a_setting_that_would_do_nothing(folder: Path) -> None:
    refused(
        train(folder, "--set", "training.layer_decay=0.5"), folder, "training.layer_decay: is for pretrained layers"
    )


def test_missing_column(folder: Path) -> None:
    (folder / "reviews.tsv").write_text(GOOD.replace("label\ttext", "label\ttxt"), encoding="utf-8")
    refused(train(folder), folder, "reviews.tsv", "text", "txt")


def test_empty_file(folder: Path) -> None:
    (folder / "reviews.tsv").write_text("", encoding="utf-8")
    refused(train(folder), folder, "reviews.tsv")


def test_header_only(folder: Path) -> None:
    (folder / "reviews.tsv").write_text(HEADER, encoding="utf-8")
    refused(train(folder), folder, "reviews.tsv")


def test_one_class(folder: Path) -> None:
    (folder / "reviews.tsv").write_text(GOOD.replace("\n0\t", "\n1\t"), encoding="utf-8")
    refused(train(folder), folder, "good")


def test_text_that_is_not_utf8(folder: Path) -> None:
    (folder / "reviews.tsv").write_bytes(GOOD.encode() + "1\tcaf\xe9\n".encode("latin-1"))
    refused(train(folder), folder, "reviews.tsv", "UTF-8")


def test_label_that_is_not_in_the_set(folder: Path) -> None:
    (folder / "reviews.tsv").write_text(GOOD + "ugly\twhat a film\n", encoding="utf-8")
    refused(train(folder), folder, "reviews.tsv, line 42", "'ugly'", "bad", "good")


def test_vocabulary_that_the_text_cannot_fill(folder: Path) -> None:
    outcome = train(folder, "--set", "model.vocab_size=5000")
    assert outcome.code == 0, outcome.err
    messages = re.search(r"model\.vocab_size is (\d+) instead of 5000, here and in the saved recipe", outcome.err)
    assert messages is not None
    (saved,) = folder.glob("artifacts/*/recipe.yaml")
    assert f"vocab_size: {messages[1]}\n" in saved.read_text(encoding="utf-8")


def test_missing_tokenizer(folder: Path) -> None:
    refused(train(folder, "--tokenizer", "absent.json"), folder, "absent.json")


def test_unknown_device(folder: Path) -> None:
    refused(edgeformer("plan", "recipe.yaml", "--device", "rtx4051", cwd=folder), folder, "rtx4051", "rtx4050")


def test_plan_without_a_device(folder: Path) -> None:
    refused(edgeformer("plan", "recipe.yaml", cwd=folder), folder, "--device")


def test_hub_without_a_network(folder: Path) -> None:
    refused(edgeformer("train", "recurrent_sst2", cwd=folder), folder, "nyu-mll/glue", "--data")


def test_no_run_yet(folder: Path) -> None:
    refused(edgeformer("export", cwd=folder), folder, "no finished run", "edgeformer train quickstart")


def test_unknown_run(folder: Path) -> None:
    refused(edgeformer("evaluate", "nothing-001", cwd=folder), folder, "nothing-001")


def test_error_as_json_is_one_document(folder: Path) -> None:
    outcome = edgeformer("train", "absent.yaml", "--json", cwd=folder)
    assert outcome.code == 2
    document = json.loads(outcome.out)
    assert document["exit_code"] == 2 and "absent.yaml" in document["error"]


@pytest.mark.parametrize(
    "arguments", [["train"], ["train", "quickstart", "--epochs", "3"], ["profile", "--batch", "x"]]
)
def test_usage_error_as_json_is_one_document(folder: Path, arguments: list[str]) -> None:
    outcome = edgeformer(*arguments, "--json", cwd=folder)
    assert outcome.code == 2
    assert json.loads(outcome.out)["exit_code"] == 2


def test_path_that_does_not_exist_is_no_shipped_recipe(folder: Path) -> None:
    refused(edgeformer("train", "no/such/quickstart.yaml", cwd=folder), folder, "no/such/quickstart.yaml")


@pytest.mark.parametrize("override", ["seed=-1", "data.split_seed=-1", "training.optimizer.lr=.inf"])
def test_number_out_of_range(folder: Path, override: str) -> None:
    refused(train(folder, "--set", override), folder, override.split("=")[0])


@pytest.mark.parametrize("command", [["evaluate"], ["predict", "good film"], ["profile", "--device", "host"]])
def test_truncated_graph(finished_run: Path, tmp_path: Path, command: list[str]) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(finished_run / "bundle", bundle)
    graph = bundle / "onnx" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:5000])
    outcome = edgeformer(command[0], str(bundle), *command[1:], cwd=tmp_path)
    refused(outcome, tmp_path, "model.onnx", "export")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--max-size", "20", "--max-size"),
        ("--batch", "0", "at least 1"),
        ("--seq", "600", "512"),
        ("--batch", "x", "1,16"),
    ],
)
def test_wrong_profile_option(finished_run: Path, tmp_path: Path, option: str, value: str, expected: str) -> None:
    command = ["profile", str(finished_run), "--device", "host", option, value]
    refused(edgeformer(*command, cwd=tmp_path), tmp_path, expected)
