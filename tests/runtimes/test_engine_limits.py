"""Engines take so many rows, and so many tokens, in one call; whoever has more makes several calls of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgeformer.bundle import Bundle
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.generate import GenerateOptions, generate
from edgeformer.inference.predict import predict
from edgeformer.inference.serving_engine import open_served_predictor
from edgeformer.run import Location
from tests.runtimes import stand_in_tensorrt
from tests.runtimes.stand_in_tensorrt import stand_in
from tests.runtimes.test_step_engines import with_engines

TEXTS = [f"the {food} was {how} indeed" for food in ("pizza", "soup", "tea", "bread", "fish") for how in "abcd"]
"""As long as each other, so that they share a call; an engine takes 16."""


@pytest.fixture
def classifier(tmp_path: Path) -> Iterator[Path]:
    with stand_in():
        yield with_engines("classifier-v1", tmp_path / "bundle")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Path]:
    """A language model whose engines read 5 tokens at a time."""
    with stand_in(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_in_tensorrt, "MAX_TOKENS_PER_CALL", 5)
        yield with_engines("language-v1", tmp_path / "bundle")


@pytest.mark.parametrize("kind", ["", "-step"])
def test_more_texts_than_an_engine_takes_are_answered(classifier: Path, kind: str) -> None:
    location = Location(None, classifier)
    _, expected = predict(location, TEXTS, f"onnx-fp32{kind}")
    _, actual = predict(location, TEXTS, f"tensorrt-rtx-fp32{kind}")
    assert [answer.as_dict()["label"] for answer in actual] == [answer.as_dict()["label"] for answer in expected]
    opened = Bundle.open(classifier)
    with open_served_predictor(opened, f"tensorrt-rtx-fp32{kind}") as model:
        window = model.answering.read(TEXTS)
        answers = model.answering.answers(window, model.answering.run(model.run, window))
    assert [answer.as_dict()["label"] for answer in answers] == [answer.as_dict()["label"] for answer in expected]


def test_more_rows_than_an_engine_takes_are_scored(classifier: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    label = Bundle.open(classifier).manifest.labels[0]
    file.write_text("\n".join(["label\ttext", *(f"{label}\t{text}" for text in TEXTS)]), encoding="utf-8")
    rows = {}
    for name in ("onnx-fp32-step", "tensorrt-rtx-fp32-step"):
        actual = evaluate(Location(None, classifier), EvaluateOptions(artifact=name, data=file)).rows
        rows[name] = [(row.exit, row.n, row.accuracy, pytest.approx(row.loss, abs=1e-6)) for row in actual]
        assert actual[0].batch == (16 if "rtx" in name else 20), "what one call had"
    assert rows["onnx-fp32-step"] == rows["tensorrt-rtx-fp32-step"]


@pytest.mark.parametrize("kind", ["step", "decode"])
def test_a_prompt_that_is_longer_than_a_call_is_read_in_several(writer: Path, kind: str) -> None:
    prompt = "the food was not good and the staff was not friendly"
    options = GenerateOptions(max_tokens=8)
    expected = generate(Location(None, writer), prompt, replace(options, artifact=f"onnx-fp32-{kind}"))
    actual = generate(Location(None, writer), prompt, replace(options, artifact=f"tensorrt-rtx-fp32-{kind}"))
    assert actual.prompt_tokens > 10 and actual.tokens == expected.tokens


def test_tokens_that_waited_for_longer_than_a_call_are_caught_up_with_in_several(writer: Path) -> None:
    opened = Bundle.open(writer)
    early, *_, late = opened.manifest.exits
    answers = []
    for artifact in ("onnx-fp32-step", "tensorrt-rtx-fp32-step"):
        decoder = opened.decoder(opened.artifact(artifact), (early, late))
        for token in range(1, 13):  # none of them goes behind the first exit
            decoder.read([token])
            decoder.advance(early)
        decoder.advance(late)
        answers.append(decoder.logits(late).tolist())
        decoder.close()
    assert answers[0] == pytest.approx(answers[1], abs=1e-6)
