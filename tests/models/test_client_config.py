"""A bundle's config.json opens in clients that know nothing of ours, and still says what the model is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeformer.artifacts.manifest import Precision
from edgeformer.bundle import Bundle
from edgeformer.models import CLIENT_TYPE
from edgeformer.models.crt import MODEL as CRT_DEEP
from edgeformer.models.encoder import MODEL as ENCODER

OF_RUN = {
    "model_type": "edgeformer-encoder",
    "architectures": ["EncoderClassifier"],
    "vocab_size": 100,
    "hidden_size": 8,
    "layers": 3,
    "iterations": 2,
    "heads": 4,
    "max_positions": 64,
    "id2label": {"0": "bad", "1": "good"},
    "label2id": {"bad": 0, "good": 1},
    "max_length": 16,
    "pad_token_id": 7,
}


def test_a_classifier_is_described_twice() -> None:
    found = ENCODER.client_config(OF_RUN)
    assert found["model_type"] == CLIENT_TYPE and found["edgeformer"] == OF_RUN
    assert found["num_hidden_layers"] == 6 and found["iterations"] == 2
    for key in ("vocab_size", "hidden_size", "pad_token_id", "id2label", "label2id"):
        assert found[key] == OF_RUN[key]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_transformers_js_gets_a_graph_that_is_there(precision: Precision) -> None:
    assert ENCODER.client_config(OF_RUN, precision)["transformers.js_config"] == {"dtype": precision}


def test_a_language_model_stays_what_it_is() -> None:
    config = {"model_type": "edgeformer-crt", "loops": 4}
    assert CRT_DEEP.client_config(config) == config


def test_export_writes_it(fresh_run: Path) -> None:
    bundle = fresh_run / "bundle"
    config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    of_run = json.loads((fresh_run / "model" / "config.json").read_text(encoding="utf-8"))
    assert config == ENCODER.client_config(of_run)
    assert tuple(config["id2label"].values()) == Bundle.open(bundle).manifest.labels
