"""Bad input: exit code 2, what is wrong, where, and the remedy; no traceback, nothing half-written."""

from pathlib import Path

import pytest

from tests.cli.run_cli import Outcome, edgeformer

GOOD = "label\ttext\n" + "".join(f"{i % 2}\tthis is review number {i}\n" for i in range(40))
RECIPE = """
name: mine
task: classification
data: {parts: {train: [{kind: file, path: reviews.tsv}]}, split: random-split, labels: [bad, good], max_length: 16}
tokenizer: {kind: trained}
model: {kind: encoder, vocab_size: 60, hidden_size: 8, layers: 1, iterations: 2, heads: 2, ffn_size: 16,
        residual_scale: 0.5}
training: {epochs: 1, batch_size: 8, optimizer: {lr: 1e-3}, schedule: {kind: constant}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "reviews.tsv").write_text(GOOD, encoding="utf-8")
    (tmp_path / "a.conll").write_text("Ada B-PER\nin O\nUlm B-LOC\n", encoding="utf-8")
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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ("reviews.tsv",)),
        (GOOD.replace("\n0\t", "\n1\t").encode(), ("good",)),  # one class
        ((GOOD + "ugly\twhat a film\n").encode(), ("reviews.tsv, line 42", "'ugly'", "bad", "good")),
    ],
)
def test_wrong_data(folder: Path, content: bytes, expected: tuple[str, ...]) -> None:
    (folder / "reviews.tsv").write_bytes(content)
    refused(train(folder), folder, *expected)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train absent.yaml", ("absent.yaml", "quickstart")),
        ("train recipe.yaml --tokenizer absent.json", ("absent.json",)),
        ("train recurrent_sst2", ("nyu-mll/glue", "--data")),  # the hub without a network
        ("train recipe.yaml --set training.optimizer.lr=.inf", ("training.optimizer.lr",)),
        ("plan recipe.yaml --device rtx4051", ("rtx4051", "rtx4050")),
        ("plan recipe.yaml", ("--device",)),
        ("export", ("no finished run", "edgeformer train quickstart")),
        ("evaluate nothing-001", ("nothing-001",)),
        ("init a.conll --delimiter comma", ("--delimiter: is for CSV, and a.conll has texts with spans (conll)",)),
        ("search a.conll --no-source --quote single", ("--quote: is for CSV",)),
    ],
)
def test_wrong_arguments(folder: Path, command: str, expected: tuple[str, ...]) -> None:
    refused(edgeformer(*command.split(), cwd=folder), folder, *expected)
