"""A run's own weights are scored, asked and written with on the card, and say so."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.generate import GenerateOptions, generate
from edgeformer.inference.predict import open_predictor, predict
from edgeformer.inference.sampling import Sampling
from edgeformer.run import Location, find_bundle, locate

pytestmark = pytest.mark.gpu


def at(run: Path) -> Location:
    return locate(str(run), run.parent)


def test_a_classifier_is_scored_and_answers_on_the_card_as_on_the_cpu(finished_run: Path) -> None:
    fast = evaluate(at(finished_run), EvaluateOptions("torch")).rows[0]
    by_cpu = evaluate(at(finished_run), EvaluateOptions("torch", runtime="torch-cpu")).rows[0]
    assert (fast.provider, by_cpu.provider) == ("torch-cuda", "torch-cpu")
    assert fast.loss == pytest.approx(by_cpu.loss, rel=1e-4)
    assert fast.accuracy == pytest.approx(by_cpu.accuracy, abs=0.01)
    texts = ["a warm and funny film", "dull", "neither good nor bad"]
    usual = predict(at(finished_run), texts, "torch")[1]
    slow = predict(at(finished_run), texts, "torch", runtime="torch-cpu")[1]
    with open_predictor(at(finished_run), "torch") as model:
        assert model.notes() == ("torch: the weights of the run, computed by torch-cuda",)
    labels = [[answer.as_dict()["label"] for answer in answers] for answers in (usual, slow)]
    assert labels[0] == labels[1]


def test_a_language_model_is_scored_and_writes_on_the_card(finished_language_run: Path) -> None:
    where = at(finished_language_run)
    assert find_bundle(finished_language_run) is None
    providers = (None, "torch-cpu")
    usual, slow = (evaluate(where, EvaluateOptions("torch", runtime=name)).rows[0] for name in providers)
    assert usual.perplexity is not None and math.isfinite(usual.perplexity)
    assert usual.perplexity == pytest.approx(slow.perplexity, rel=1e-3)
    options = GenerateOptions(12, Sampling(temperature=0.0), artifact="torch")
    written = generate(where, "The film", options)
    assert written.provider == "torch-cuda"
    by_cpu = generate(where, "The film", replace(options, runtime="torch-cpu"))
    assert by_cpu.provider == "torch-cpu" and written.tokens[:4] == by_cpu.tokens[:4]
