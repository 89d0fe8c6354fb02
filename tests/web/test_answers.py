"""What the page makes of logits, by its own module in Node.js, which needs no browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from edgeformer.tasks.text_answers import NO_NUMBER

PROGRAM = """
import { probabilities } from "./text.js";
const given = [[1, 3], [NaN, 1], [-Infinity, 1], [Infinity, Infinity]];
const answers = given.map((logits) => [false, true].map((several) => {
  try { return probabilities(Float32Array.from(logits), several); } catch (error) { return error.message; }
}));
console.log(JSON.stringify(answers));
"""


@pytest.fixture
def answers(tmp_path: Path) -> list[list[Any]]:
    """Of four lists of two logits: as one of two classes, and as labels by themselves."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")
    site = resources.files("edgeformer.web") / "site"
    for name in ("text.js", "files.js"):
        (tmp_path / name).write_text((site / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (tmp_path / "ask.js").write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run([node, "ask.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    found: list[list[Any]] = json.loads(done.stdout)
    return found


def test_logits_become_probabilities(answers: list[list[Any]]) -> None:
    one, several = answers[0]
    assert one == pytest.approx([0.119203, 0.880797], abs=1e-6)
    assert several == pytest.approx([0.731059, 0.952574], abs=1e-6)


def test_logits_that_are_no_numbers_are_no_probabilities_and_it_is_said_as_predict_says_it(
    answers: list[list[Any]],
) -> None:
    assert answers[1:] == [[NO_NUMBER, NO_NUMBER]] * 3
