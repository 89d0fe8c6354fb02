"""predict does everything once, and imports nothing that an answer does not need."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.inference.predict import predict
from edgeformer.run import locate
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from tests.cli.in_process import in_process

OLD = Path(__file__).parents[1] / "old_format"
LONG = 12
"""Tokens."""
TEXTS = ["a fine film", "dull and long", "neither good nor bad, and much too long for its own good"]


class CountedTokenizer:
    """A real tokenizer whose calls are counted."""

    def __init__(self, tokenizer: Any, calls: list[int]) -> None:
        self._tokenizer, self._calls = tokenizer, calls

    def encode_batch_fast(self, texts: list[str]) -> Any:
        self._calls.append(len(texts))
        return self._tokenizer.encode_batch_fast(texts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("encode"):
            raise AssertionError(f"{name}: texts are encoded in one place")
        return getattr(self._tokenizer, name)


def test_texts_are_encoded_once_and_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once every text was encoded a second time for its length, and the first batch ran a second time to warm up."""
    location = locate(str(OLD / "classifier-v1"), OLD)
    expected = predict(location, TEXTS)[1]
    encoded: list[int] = []
    ran: list[int] = []
    real_run = OnnxSession.run

    def counted(session: OnnxSession, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        ran.append(len(inputs["input_ids"]))
        return real_run(session, inputs)

    bundle = location.open_bundle()
    reader = bundle.reader()
    object.__setattr__(reader, "tokenizer", CountedTokenizer(reader.tokenizer, encoded))
    monkeypatch.setattr(OnnxSession, "run", counted)
    assert predict(location, TEXTS)[1] == expected
    assert encoded == [3] and ran == [3]


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that answer texts of more than LONG tokens with what is no number."""
    real_run = OnnxSession.run

    def run(session: OnnxSession, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = real_run(session, inputs)
        lengths = inputs["attention_mask"].sum(axis=1)
        outputs["logits"][lengths > LONG] = np.nan, np.inf
        return outputs

    monkeypatch.setattr(OnnxSession, "run", run)


@pytest.mark.usefixtures("overflowing")
def test_what_is_no_number_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A label was given for it: the first one, with the probability NaN, which is no JSON either."""
    run, texts = in_process(monkeypatch, capsys), ["a fine film", "long " * LONG, "", "dull"]
    model = str(OLD / "classifier-v1")
    why = "the model's answer is no number (overflow)"
    errors = [None, why, "the text is empty", None]
    document = json.loads(run("predict", model, *texts, "--json", code=3))
    assert [one.get("error") for one in document["predictions"]] == errors
    assert {one["label"] for one in document["predictions"] if "label" in one} <= {"positive", "negative"}
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    command = ("predict", model, "--file", str(file), "--output", str(tmp_path / "out.csv"), "--json")
    assert json.loads(run(*command, code=3))["errors"] == 2
    assert why in (tmp_path / "out.csv").read_text(encoding="utf-8")


@pytest.mark.usefixtures("overflowing")
def test_where_nothing_is_a_number_a_file_has_its_columns_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LONG", 0)
    file, out = tmp_path / "texts.txt", tmp_path / "out.csv"
    file.write_text("a fine film\n", encoding="utf-8")
    in_process(monkeypatch, capsys)(
        "predict", str(OLD / "classifier-v1"), "--file", str(file), "--output", str(out), code=3
    )
    head, row = out.read_text(encoding="utf-8").splitlines()
    assert head.startswith("text,label,probability") and row.endswith("the model's answer is no number (overflow)")


def test_more_texts_than_a_batch_keep_their_order() -> None:
    location = locate(str(OLD / "classifier-v1"), OLD)
    texts = [f"{'very ' * (number % 7)}good film number {number}" for number in range(70)]
    together = predict(location, texts)[1]
    assert [found.text for found in together] == texts
    for number in (0, 13, 69):
        alone = predict(location, [texts[number]])[1][0]
        assert alone.probability == pytest.approx(together[number].probability, abs=1e-5)


def test_the_tokenizer_cuts_nothing_afterwards() -> None:
    location = locate(str(OLD / "classifier-v1"), OLD)
    long = "good film " * 200
    assert [found.truncated for found in predict(location, [long, "good film"])[1]] == [True, False]
    tokenizer = location.open_bundle().reader().tokenizer
    assert tokenizer.truncation is None and len(tokenizer.encode(long).ids) > 200


@pytest.mark.parametrize("confidence", [0.0, 0.5001, 1.0])
def test_rows_leave_a_step_artifact_when_they_are_sure(confidence: float) -> None:
    location = locate(str(OLD / "classifier-v1"), OLD)
    artifact, found = predict(location, TEXTS, confidence=confidence)
    assert artifact == "onnx-fp32-step"
    first, last = (predict(location, TEXTS, name)[1] for name in ("onnx-fp32-exit1", "onnx-fp32"))
    for one, early, late in zip(found, first, last, strict=True):
        sure = early.probability >= confidence
        assert one.loops == (1 if sure else 2)
        assert one.probability == pytest.approx((early if sure else late).probability, abs=1e-5)


NOT_NEEDED = (
    "torch", "datasets", "matplotlib", "jinja2", "rich", "safetensors", "accelerate", "pynvml", "yaml", "tabulate",
    "edgeformer.report", "edgeformer.models", "edgeformer.training", "edgeformer.benchmark",
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


def test_an_answer_imports_nothing_that_it_does_not_need() -> None:
    """What decides how long one waits for it; `benchmarks/predict_start.py` measures that."""
    arguments = ["predict", str(OLD / "classifier-v1" / "bundle"), "a fine film", "--json"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["predictions"][0]["text"] == "a fine film"
    assert done.stderr.strip() == "[]"
