"""``predict``: answers, errors of single texts, early exit, and what it imports."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.inference.predict import predict
from edgeformer.run import Location, locate
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks.task import Unanswered
from tests.conftest import OLD_FORMAT

CLASSIFIER = OLD_FORMAT / "classifier-v1"
TEXTS = ["a fine film", "dull and long", "neither good nor bad, and much too long for its own good"]
OVERFLOW = "the model's answer is not a number (overflow)"


@pytest.fixture
def location() -> Location:
    return locate(str(CLASSIFIER), OLD_FORMAT)


def answers_of(location: Location, texts: list[Any], **options: Any) -> list[Any]:
    return list(predict(location, texts, **options)[1])


def test_a_prediction_is_the_likeliest_label(finished_run: Path) -> None:
    location = locate(str(finished_run), finished_run.parent)
    predictions = answers_of(location, ["Wonderful!!! <br /> I loved it", "terrible, awful, boring " * 40])
    assert [prediction.truncated for prediction in predictions] == [False, True]
    for prediction in predictions:
        probabilities: dict[str, float] = prediction.probabilities
        assert prediction.label == max(probabilities, key=probabilities.__getitem__)
        assert prediction.probability == max(probabilities.values())
        assert sum(probabilities.values()) == pytest.approx(1.0)


def test_texts_without_an_answer_have_an_error_and_no_text_is_refused(location, edgeformer):
    empty, answer = answers_of(location, [" ", "a"])
    assert isinstance(empty, Unanswered) and np.isfinite(answer.probability)
    document = json.loads(edgeformer("predict", str(CLASSIFIER), "", "--json", code=3))
    assert document["predictions"] == [{"text": "", "error": "the text is empty"}]
    table = edgeformer("predict", str(CLASSIFIER), "", "good film", code=3)
    assert "the text is empty" in table and "good film" in table
    assert "error" not in edgeformer("predict", str(CLASSIFIER), "good film")
    with pytest.raises(InputError, match="there is no text"):
        predict(location, [])
    with pytest.raises(InputError, match=r"is a language model.*edgeformer generate"):
        predict(locate(str(OLD_FORMAT / "language-v1"), OLD_FORMAT), ["a text"])


def test_an_overflow_is_an_error_and_no_label(tmp_path, monkeypatch, edgeformer):
    """Graphs return NaN and infinity for the longer text."""
    run_session = OnnxSession.run

    def run(session: OnnxSession, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = run_session(session, inputs)
        outputs["logits"][inputs["attention_mask"].sum(axis=1) > 12] = np.nan, np.inf
        return outputs

    monkeypatch.setattr(OnnxSession, "run", run)
    texts = ["a fine film", "long " * 12, "", "dull"]
    predictions = json.loads(edgeformer("predict", str(CLASSIFIER), *texts, "--json", code=3))["predictions"]
    errors = [prediction.get("error") for prediction in predictions]
    assert errors == [None, OVERFLOW, "the text is empty", None]
    assert {prediction.get("label", "none") for prediction in predictions} <= {"positive", "negative", "none"}
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    options = ("--file", str(file), "--output", str(tmp_path / "out.csv"), "--json")
    assert json.loads(edgeformer("predict", str(CLASSIFIER), *options, code=3))["errors"] == 2
    assert OVERFLOW in (tmp_path / "out.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize("confidence", [0.0, 0.5001, 1.0])
def test_texts_leave_a_step_artifact_at_the_confidence(location: Location, confidence: float) -> None:
    artifact, answers = predict(location, TEXTS, confidence=confidence)
    assert artifact == "onnx-fp32-step"
    first, last = (answers_of(location, TEXTS, artifact=name) for name in ("onnx-fp32-exit1", "onnx-fp32"))
    for answer, early, late in zip(answers, first, last, strict=True):
        leaves = early.probability >= confidence
        assert answer.as_dict()["loops"] == (1 if leaves else 2)
        assert answer.as_dict()["probability"] == pytest.approx((early if leaves else late).probability, abs=1e-5)


NOT_NEEDED = (
    "torch", "datasets", "matplotlib", "jinja2", "rich", "safetensors", "accelerate", "pynvml", "yaml", "tabulate",
    "edgeformer.report", "edgeformer.models", "edgeformer.training", "edgeformer.benchmark", "edgeformer.measurement",
    "edgeformer.runtimes.tensorrt",
)  # fmt: skip

PROGRAM = f"""
import sys
from edgeformer.cli import main
try:
    main()
finally:
    print([name for name in {NOT_NEEDED!r} if name in sys.modules], file=sys.stderr)
"""


def test_an_answer_imports_only_what_it_needs() -> None:
    """Imports take most of the time until the first answer."""
    arguments = ["predict", str(CLASSIFIER / "bundle"), "a fine film", "--json"]
    result = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["predictions"][0]["text"] == "a fine film"
    assert result.stderr.strip() == "[]"
