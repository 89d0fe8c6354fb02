"""Errors of graph outputs, and how golden inputs become calls of other shapes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.golden import Golden, GoldenError
from edgeformer.artifacts.manifest import Parity
from edgeformer.tasks import get_task
from edgeformer.tasks.metric import out_of_tolerance
from edgeformer.tasks.tensors import Axis, TensorData, agreement, measure_error

GENERATOR = np.random.default_rng(0)
REFERENCE = GENERATOR.normal(size=(4, 2, 5)).astype(np.float32)
TASK = get_task("tensors")
DATA = TensorData(
    inputs={
        "x": (Axis(size=1, takes="batch", role="batch"), Axis(size=2), Axis(size=3, takes="seq", role="seq")),
        "rate": (),
    },
    drawn={},
)


def parity_of(outputs: dict[str, Any], reference: dict[str, Any], precision: Any) -> Parity:
    arrays = {f"out.{name}": array for name, array in reference.items()}
    return TASK.golden_parity(arrays, outputs, None, precision, "CPU")


def failure(output: Any, reference: Any, precision: Any) -> str | None:
    return out_of_tolerance(parity_of({"y": output}, {"y": reference}, precision))


def test_errors_are_relative_to_the_scale_of_the_reference() -> None:
    noise = GENERATOR.normal(size=REFERENCE.shape).astype(np.float32)
    error = measure_error("y", REFERENCE + 0.02 * noise, REFERENCE)
    assert error.relative_rms == pytest.approx(0.02 * np.sqrt(np.square(noise).mean()) / REFERENCE.std(), rel=1e-4)
    assert error.relative_largest == pytest.approx(0.02 * np.abs(noise).max() / REFERENCE.std(), rel=1e-4)
    assert error.cosine == pytest.approx(1 - error.relative_rms**2 / 2, abs=1e-4)
    # Constant outputs and integers have other scales.
    integers, ones = np.arange(10), np.ones((2, 3), np.float32)
    assert measure_error("y", np.where(integers < 2, -1, integers), integers).relative_rms == 0.2
    assert measure_error("y", ones * 1.1, ones).relative_rms == pytest.approx(0.1, rel=1e-5)
    assert measure_error("y", ones, ones * 0).relative_rms == np.inf
    assert measure_error("y", ones * 0, ones * 0).relative_rms == 0


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("fp16", 1e-2), ("int8", 2e-1)])
def test_each_precision_has_a_tolerance(precision: str, tolerance: float) -> None:
    for factor, passes in ((0.9, True), (1.1, False)):
        shifted = REFERENCE + np.float32(factor * tolerance * REFERENCE.std())
        assert (failure(shifted, REFERENCE, precision) is None) is passes
    output = np.tile(REFERENCE, (1, 1, 2000))
    outlier = output.copy()
    outlier[0, 0, 7] += 1
    assert (failure(outlier, output, precision) is None) is (precision != "fp32"), "an outlier matters in FP32 only"


def test_the_worst_output_counts_and_classes_agree() -> None:
    outputs, reference = {"a": REFERENCE, "b": REFERENCE * 1.5}, {"a": REFERENCE, "b": REFERENCE}
    parity = parity_of(outputs, reference, "int8")
    assert parity.output == "b" and "output 'b'" in str(out_of_tolerance(parity))
    score = TASK.golden_score(0, outputs, reference)
    assert score.loss == pytest.approx(0.5 * np.sqrt(np.square(REFERENCE).mean()) / REFERENCE.std())
    share = np.array([[[0.9, 0.1]], [[0.2, 0.8]]], np.float32)
    assert agreement({"y": share[:, :, ::-1]}, {"y": share}) == 0
    assert agreement({"y": REFERENCE}, {"y": REFERENCE}) is None
    assert agreement({"class_logits": REFERENCE}, {"class_logits": REFERENCE}) == 1


def test_infinite_numbers_must_be_those_of_the_reference() -> None:
    masked = REFERENCE.copy()
    masked[0, 0, 0] = -np.inf
    assert measure_error("y", masked, masked).relative_rms == 0
    assert "output 'y' is not finite" in str(failure(masked, REFERENCE, "fp16"))
    with pytest.raises(GoldenError, match="output 'y' is not finite"):
        TASK.golden_score(0, {"y": masked}, {"y": REFERENCE})


def test_calls_and_shapes_fit_the_graph() -> None:
    x = np.arange(2 * 1 * 2 * 3).reshape(2, 1, 2, 3)
    golden = Golden(Path("golden.npz"), {"in.x": x, "in.rate": np.array([5, 6])})
    calls = TASK.calls(golden, TASK.axes(DATA), (3, 4), 2)
    assert calls[0]["x"].shape == (3, 2, 4) and calls[0]["x"].flags.c_contiguous
    assert calls[0]["x"][:, 0].tolist() == [[0, 1, 2, 0], [6, 7, 8, 6], [0, 1, 2, 0]]
    assert calls[1]["x"][0, 0].tolist() == [6, 7, 8, 6], "the next call starts with another row"
    assert [call["rate"].tolist() for call in calls] == [5, 6] and calls[0]["rate"].shape == ()
    assert TASK.fit_shape(DATA, 16, 128) == (16, 128)
    assert TASK.input_shapes(DATA, 16, 128) == {"x": (16, 2, 128), "rate": ()}
    assert TASK.shape_notes(DATA) == ["inputs: x [B, 2, S], rate [] (B: batch, S: seq of a row)"]
    fixed = TensorData(inputs={"x": (Axis(size=4, role="batch"), Axis(size=9))}, drawn={})
    assert TASK.fit_shape(fixed, 16, 128) == (4, 1) and "all sizes are fixed" in TASK.shape_notes(fixed)[0]


def test_other_outputs_than_those_of_golden_npz_and_training_are_refused() -> None:
    for name, size, message in (("z", 4, "no output 'y'"), ("y", 5, r"the shape \[5\]")):
        with pytest.raises(GoldenError, match=message):
            parity_of({name: np.ones((2, size))}, {"y": np.ones((2, 4), np.float32)}, "fp32")
    with pytest.raises(InputError, match="has no texts and labels to score"):
        TASK.rows.prepare(None, Path(), None)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"in.x": np.ones((2, 3)), "out.y": np.ones((3, 3))}, "different numbers of calls"),
        ({"in.x": np.ones((2, 0))}, "is empty"),
        ({"in.x": np.ones((2, 3)), "labels": np.ones(2)}, "neither an input"),
        ({"in.x": np.ones((2, 3), complex)}, "not numbers"),
    ],
)
def test_damaged_golden_calls_are_refused(arrays: Any, message: str) -> None:
    with pytest.raises(GoldenError, match=message):
        Golden(Path("golden.npz"), arrays)
