"""Step and decode artifacts as sessions: the committed runs' graphs give what their torch models give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.bundle import Bundle
from edgeformer.models.encoder.model import EncoderClassifier
from edgeformer.models.weights import load_model
from edgeformer.runtimes import OpenOptions
from edgeformer.runtimes.decoder import StepSession
from edgeformer.tasks.metric import top_probability
from tests.test_old_format import OLD

LOOPS, POSITIONS, WORDS = 4, 64, 300  # of the language model


@pytest.fixture(scope="module")
def encoder() -> EncoderClassifier:
    model = load_model(OLD / "classifier-v1")
    assert isinstance(model, EncoderClassifier)
    return model


@pytest.fixture(scope="module")
def parts() -> dict[str, Path]:
    bundle = Bundle.open(OLD / "classifier-v1" / "bundle")
    return {part: bundle.folder / file for part, file in bundle.artifact("onnx-fp32-step").parts.items()}


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(OLD / "language-v1" / "bundle")


def texts(rows: int = 16, length: int = 9) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, length + 1, size=(rows, 1))
    mask = (np.arange(length) < lengths).astype(np.int64)
    return {"input_ids": rng.integers(1, 40, size=(rows, length)) * mask, "attention_mask": mask}


def exit_logits_of(model: EncoderClassifier, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Logits after loop 1 and loop 2."""
    ids, mask = (torch.from_numpy(inputs[name]) for name in ("input_ids", "attention_mask"))
    with torch.inference_mode():
        first = model.iterate(model.embed(ids), mask)
        return [model.readout(state).numpy() for state in (first, model.iterate(first, mask))]


def logits_of(ids: np.ndarray, loop: int = LOOPS) -> np.ndarray:
    with torch.inference_mode():
        logits: np.ndarray = load_model(OLD / "language-v1").logits(torch.from_numpy(ids), loop).numpy()
    return logits


@pytest.mark.parametrize(("rows", "length"), [(16, 9), (1, 1), (1, 64)])
def test_a_classifiers_steps_are_the_model(
    encoder: EncoderClassifier, parts: dict[str, Path], rows: int, length: int
) -> None:
    inputs = texts(rows, length)
    first, last = exit_logits_of(encoder, inputs)
    with StepSession(parts, 2) as session:
        assert np.abs(session.run(inputs)["logits"] - last).max() < 1e-5
        assert session.provider == "CPUExecutionProvider"
    with StepSession(parts, 2, exits=(1,)) as session:
        assert np.abs(session.run(inputs)["logits_exit1"] - first).max() < 1e-5


@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0, None])
def test_rows_leave_when_they_are_sure(
    encoder: EncoderClassifier, parts: dict[str, Path], quantile: float | None
) -> None:
    inputs = texts()
    exits = exit_logits_of(encoder, inputs)
    sure = top_probability(exits[0])
    # Between two probabilities, so that rounding does not decide.
    thresholds = {} if quantile is None else {1: float(np.quantile(sure, quantile, method="midpoint")) + 1e-4}
    expected = [1 if thresholds and probability >= thresholds[1] else 2 for probability in sure]
    with StepSession(parts, 2, early=thresholds) as session:
        actual = session.run(inputs)
    assert actual["loops"].dtype == np.int64 and actual["loops"].tolist() == expected
    for row, loop in enumerate(expected):
        assert np.abs(actual["logits"][row] - exits[loop - 1][row]).max() < 1e-5
    assert quantile != 0.5 or set(expected) == {1, 2}


def test_refusals(parts: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="no exit after loop 4, because it has 2 loops"):
        StepSession(parts, 2, exits=(4,))
    with pytest.raises(ArtifactError, match="lacks its part 'readout'"):
        StepSession({name: path for name, path in parts.items() if name != "readout"}, 2)
    session = StepSession(parts, 2)
    with pytest.raises(InputError, match="'attention_mask' is missing"):
        session.run({"input_ids": texts()["input_ids"]})
    with pytest.raises(InputError, match="must be int64"):
        session.run({"input_ids": np.zeros((1, 0), np.int64), "attention_mask": np.zeros((1, 0), np.int64)})
    session.close()
    with pytest.raises(EdgeformerError, match="closed"):
        session.run(texts())


@pytest.mark.parametrize(
    ("precision", "tolerance", "shape"),
    [("fp32", 1e-5, (3, 17)), ("fp32", 1e-5, (1, 1)), ("fp16", 1e-2, (1, POSITIONS))],
)
def test_a_language_models_steps_and_decode_graph_are_the_model(
    bundle: Bundle, precision: str, tolerance: float, shape: tuple[int, int]
) -> None:
    ids = np.random.default_rng(0).integers(0, WORDS, size=shape)
    expected = logits_of(ids)
    for role in ("step", "decode"):
        with bundle.session(bundle.artifact(f"onnx-{precision}-{role}"), OpenOptions(threads=1)) as session:
            actual = session.run({"input_ids": ids})["logits"]
            for broken in (np.zeros((1, POSITIONS + 1), np.int64), np.zeros((1, 0), np.int64)):
                with pytest.raises(InputError):
                    session.run({"input_ids": broken})
            with pytest.raises(InputError, match="input_ids"):
                session.run({})
        assert actual.shape == expected.shape and actual.dtype == np.float32
        assert np.abs(actual - expected).max() < tolerance * max(1.0, expected.std())


def test_every_exit_in_one_call(bundle: Bundle) -> None:
    ids = np.arange(24, dtype=np.int64).reshape(2, 12)
    steps = bundle.artifact("onnx-fp32-step")
    with bundle.session(steps, OpenOptions(exits=(2, LOOPS))) as session:
        actual = session.run({"input_ids": ids})
    assert list(actual) == ["logits_exit2", f"logits_exit{LOOPS}"]
    for loop in (2, LOOPS):
        assert np.abs(actual[f"logits_exit{loop}"] - logits_of(ids, loop)).max() < 1e-5
    with pytest.raises(InputError, match="always runs all loops"):
        bundle.session(bundle.artifact("onnx-fp32"), OpenOptions(exits=(2, LOOPS)))
    with pytest.raises(InputError, match="a language model exits early per token"):
        bundle.session(steps, OpenOptions(early={2: 0.5}))
