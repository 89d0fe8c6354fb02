"""`edgeformer import crt` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from edgeformer.artifacts.data_warnings import LEAKS
from edgeformer.data.synthetic import PARAGRAPHS
from edgeformer.data.tokenization import train_language_tokenizer
from tests.cli.run_cli import edgeformer
from tests.models.crt_oracle import public_weights, small_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save({"model": public_weights(small_config(vocab_size=300))}, tmp_path / "theirs.pt")
    train_language_tokenizer(300, list(PARAGRAPHS)).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_import_list_and_refuse_to_generate(folder: Path) -> None:
    outcome = edgeformer("import", "crt", "theirs.pt", "--tokenizer", "tokenizer.json", "--json", cwd=folder)
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["run"] == "crt_imported-001" and document["status"] == "finished" and document["leaks"] is True
    assert document["causality"]["leaks"] is True
    card = (folder / "artifacts" / "crt_imported-001" / "model" / "README.md").read_text(encoding="utf-8")
    assert LEAKS in card and "None yet." in card and "imported from theirs.pt" in card
    listed = json.loads(edgeformer("list", "runs", "--json", cwd=folder).out)["runs"]
    assert [(run["run"], run["leaks"]) for run in listed] == [("crt_imported-001", True)]
    refused = edgeformer("generate", "crt_imported-001", "A river", cwd=folder)
    assert refused.code == 2 and "leaks future tokens, so it cannot write" in " ".join(refused.err.split())


def test_table_says_that_it_leaks(folder: Path) -> None:
    outcome = edgeformer("import", "crt", "theirs.pt", "--tokenizer", "tokenizer.json", "--name", "mine", cwd=folder)
    text = " ".join(outcome.out.split())
    assert outcome.code == 0 and LEAKS in text and "edgeformer export --allow-leak" in text


@pytest.mark.parametrize("name", ["missing.pt", "tokenizer.json"])
def test_bad_file(folder: Path, name: str) -> None:
    outcome = edgeformer("import", "crt", name, "--tokenizer", "tokenizer.json", cwd=folder)
    assert outcome.code == 2 and name in outcome.err and "Traceback" not in outcome.err
    assert not (folder / "artifacts").exists()


def test_help_names_the_kinds() -> None:
    outcome = edgeformer("import", "--help", cwd=Path.cwd())
    assert outcome.code == 0 and "crt" in outcome.out
