"""`edgeformer generate` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.run_cli import edgeformer
from tests.inference.language_run import TEXT

GREEDY = ("--temperature", "0")


@pytest.fixture
def folder(language_run: Path) -> Path:
    return language_run.parent.parent  # holds artifacts/tiny


def test_prompt_and_text_on_stdout_figures_on_stderr(folder: Path) -> None:
    outcome = edgeformer("generate", "The café", *GREEDY, "--runtime", "torch-cpu", cwd=folder)
    assert outcome.code == 0 and outcome.out == TEXT + "\n"
    assert "tiny: " in outcome.err and "3.00 loops per token" in outcome.err and "tokens/s on torch-cpu" in outcome.err


def test_json(folder: Path) -> None:
    outcome = edgeformer(
        "generate", "tiny", "The café", *GREEDY, "--confidence", "--floor", "0.1", "--json", cwd=folder
    )
    document = json.loads(outcome.out)
    keys = {"text", "prompt", "tokens", "loops", "mean_loops", "seconds", "tokens_per_s", "stopped", "run"}
    assert keys <= document.keys()
    assert document["prompt"] + document["text"] == TEXT
    assert len(document["loops"]) == len(document["tokens"]) and document["stopped"] == "boundary"


def test_prompt_from_stdin(folder: Path) -> None:
    outcome = edgeformer("generate", "tiny", *GREEDY, cwd=folder, stdin="The café\n")
    assert outcome.out == TEXT + "\n"


def test_without_a_number_as_much_is_written_as_there_is_room_for(folder: Path) -> None:
    prompt = "The café " * 12
    asked = edgeformer("generate", "tiny", prompt, *GREEDY, "--max-tokens", "96", cwd=folder)
    assert asked.code == 2 and "so at most " in asked.err
    room = int(asked.err.split("so at most ")[1].split()[0])
    assert 1 < room < 64
    outcome = edgeformer("generate", "tiny", prompt, *GREEDY, "--json", cwd=folder)
    found = json.loads(outcome.out)
    assert outcome.code == 0 and len(found["tokens"]) <= room
    assert any(f"at most {room} can be written" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["The café", "--exit", "9"], "--exit 9: tiny has exits after the loops 1, 2, 3"),
        (["tiny", "a", "b"], "one prompt at a time"),
        (["nothing", "The café"], "no run 'nothing'"),
        (["a", "--max-tokens", "0"], "max-tokens"),
        (["a", "--max-tokens", "900"], "takes at most 96"),
        (["a", "--top-p", "0"], "top_p must be above 0"),
        (["a", "--floor", "0.5"], "belong to --confidence"),
        (["a", "--exit", "1", "--confidence"], "either a fixed exit or exit by confidence"),
        (["a", "--runtime", "onnxruntime"], "--runtime onnxruntime: computes no run's own weights; that is torch"),
        ([], "no prompt given"),
    ],
)
def test_bad_input(folder: Path, arguments: list[str], message: str) -> None:
    outcome = edgeformer("generate", *arguments, cwd=folder)
    assert outcome.code == 2 and outcome.out == ""
    assert message in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


def test_a_classifier_is_sent_to_predict(finished_run: Path) -> None:
    outcome = edgeformer("generate", "small", "a film", cwd=finished_run.parent.parent)
    assert outcome.code == 2
    assert "is a classifier and writes no text; use: edgeformer predict small TEXT" in " ".join(outcome.err.split())
