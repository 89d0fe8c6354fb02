"""[RUN] TEXT…: a name that is no run's is an error; a text is never taken for one."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.run_cli import edgeformer
from tests.conftest import OLD_FORMAT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("names")
    shutil.copytree(OLD_FORMAT / "classifier-v1", built / "artifacts" / "shops-1")
    return built


def refused(folder: Path, *arguments: str, stdin: str = "") -> str:
    outcome = edgeformer(*arguments, cwd=folder, stdin=stdin)
    assert outcome.code == 2 and outcome.out == "", outcome.out
    return " ".join(outcome.err.split())


def texts(folder: Path, *arguments: str, stdin: str = "") -> list[str]:
    outcome = edgeformer("predict", *arguments, "--json", cwd=folder, stdin=stdin)
    assert outcome.code == 0, outcome.err
    return [prediction["text"] for prediction in json.loads(outcome.out)["predictions"]]


def test_a_wrong_name_is_no_text(folder: Path) -> None:
    messages = refused(folder, "predict", "shops-01", "the food was wonderful")
    assert "no run 'shops-01'; did you mean shops-1?" in messages
    assert "if 'shops-01' is a text: edgeformer predict --run shops-1 shops-01 …" in messages
    assert "no run 'shops-01'" in refused(folder, "predict", "shops-01", stdin="good\n")
    assert "no run 'shops-01'" in refused(folder, "generate", "shops-01", stdin="Once\n")
    messages = refused(folder, "generate", "shops-01", "Once upon a time")
    assert "edgeformer generate --run shops-1 shops-01 …" in messages
    assert "there is no text" in refused(folder, "predict", "shops-1"), "a run alone is no text"


def test_what_can_only_be_a_text_is_one(folder: Path) -> None:
    assert texts(folder, "great fun", "dull") == ["great fun", "dull"]
    odd = ["Great!", "9/10, would watch again", "a <br /> tag"]
    assert texts(folder, *odd) == odd
    assert texts(folder, "9/10, would watch again", "another") == ["9/10, would watch again", "another"]
    assert texts(folder, "great") == ["great"]
    assert texts(folder, "shops-1", "shops-01") == ["shops-01"]
    assert texts(folder, "--run", "shops-1", "shops-01", "shops-1") == ["shops-01", "shops-1"]
    assert texts(folder, "shops-1", stdin="good\n\nbad food\n") == ["good", "bad food"]
    assert texts(folder, "--run", "shops-1", stdin="good\n") == ["good"]
    assert "no run 'shops-01'" in refused(folder, "predict", "--run", "shops-01", "a text")
