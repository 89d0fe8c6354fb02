"""How far the outputs of a graph are from another's, and how golden inputs become calls of other shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.golden import Golden, GoldenError
from edgeformer.tasks import task_named
from edgeformer.tasks.parity import out_of_tolerance
from edgeformer.tasks.tensors import Axis, TensorData, agreement, as_parity, measure_error, measure_errors, score_of

RNG = np.random.default_rng(0)
REFERENCE = RNG.normal(size=(4, 2, 5)).astype(np.float32)
TASK = task_named("tensors")


def test_noise_in_shares_of_the_spread() -> None:
    noise = RNG.normal(size=REFERENCE.shape).astype(np.float32)
    error = measure_error("y", REFERENCE + 0.02 * noise, REFERENCE)
    assert error.relative_rms == pytest.approx(0.02 * np.sqrt(np.square(noise).mean()) / REFERENCE.std(), rel=1e-4)
    assert error.relative_largest == pytest.approx(0.02 * np.abs(noise).max() / REFERENCE.std(), rel=1e-4)
    assert error.cosine == pytest.approx(1 - error.relative_rms**2 / 2, abs=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_the_bars(precision: str) -> None:
    bar = {"fp32": 1e-3, "fp16": 1e-2, "int8": 2e-1}[precision]
    for share, passes in ((0.9, True), (1.1, False)):
        wrong = np.full_like(REFERENCE, share * bar * REFERENCE.std())
        errors = measure_errors({"y": REFERENCE + wrong}, {"y": REFERENCE})
        parity = as_parity(errors, None, 4, precision, "here")  # type: ignore[arg-type]
        assert (out_of_tolerance(parity) is None) is passes


def test_one_wild_number_is_no_matter_in_fp16_but_in_fp32() -> None:
    large = RNG.normal(size=(1, 100_000)).astype(np.float32)
    wild = large.copy()
    wild[0, 7] += 1
    errors = measure_errors({"y": wild}, {"y": large})
    assert out_of_tolerance(as_parity(errors, None, 1, "fp16", "here")) is None
    assert out_of_tolerance(as_parity(errors, None, 1, "fp32", "here")) is not None


def test_the_worst_output_counts() -> None:
    errors = measure_errors({"a": REFERENCE, "b": REFERENCE * 1.5}, {"a": REFERENCE, "b": REFERENCE})
    parity = as_parity(errors, None, 4, "int8", "here")
    assert parity.output == "b" and "output 'b'" in str(out_of_tolerance(parity))
    score = score_of(errors, 4)
    assert score is not None and score.loss == pytest.approx(
        0.5 * np.sqrt(np.square(REFERENCE).mean()) / REFERENCE.std()
    )


def test_whole_numbers_by_the_share_that_differs() -> None:
    reference = np.arange(10)
    found = reference.copy()
    found[:2] += 5
    assert measure_error("y", found, reference).relative_rms == 0.2


def test_what_is_not_finite() -> None:
    masked = REFERENCE.copy()
    masked[0, 0, 0] = -np.inf
    assert measure_error("y", masked, masked).relative_rms == 0
    broken = measure_error("y", masked, REFERENCE)
    parity = as_parity([broken], None, 4, "fp16", "here")
    assert "output 'y' is not finite" in str(out_of_tolerance(parity)) and score_of([broken], 4) is None


def test_a_constant_output() -> None:
    ones = np.ones((2, 3), np.float32)
    assert measure_error("y", ones * 1.1, ones).relative_rms == pytest.approx(0.1, rel=1e-5)
    assert measure_error("y", ones, ones * 0).relative_rms == np.inf
    assert measure_error("y", ones * 0, ones * 0).relative_rms == 0


def test_agreement_where_an_output_has_answers() -> None:
    share = np.array([[[0.9, 0.1]], [[0.2, 0.8]]], np.float32)
    assert agreement({"y": share[:, :, ::-1]}, {"y": share}) == 0
    assert agreement({"y": REFERENCE}, {"y": REFERENCE}) is None
    assert agreement({"class_logits": REFERENCE}, {"class_logits": REFERENCE}) == 1


def golden(**arrays: np.ndarray) -> Golden:  # type: ignore[type-arg]
    return Golden(Path("golden.npz"), {name.replace("_", ".", 1): array for name, array in arrays.items()})


class TestCalls:
    DATA = TensorData(
        inputs={
            "x": (Axis(size=1, takes="batch", role="batch"), Axis(size=2), Axis(size=3, takes="seq", role="seq")),
            "rate": (),
        },
        drawn={},
    )

    def test_rows_come_from_several_golden_calls_and_lengths_repeat(self) -> None:
        x = np.arange(2 * 1 * 2 * 3).reshape(2, 1, 2, 3)
        calls = TASK.calls(golden(in_x=x, in_rate=np.array([5, 6])), TASK.axes(self.DATA), (3, 4), 2)
        assert calls[0]["x"].shape == (3, 2, 4) and calls[0]["x"].flags.c_contiguous
        assert calls[0]["x"][:, 0].tolist() == [[0, 1, 2, 0], [6, 7, 8, 6], [0, 1, 2, 0]]
        assert calls[1]["x"][0, 0].tolist() == [6, 7, 8, 6], "another call begins with another row"
        assert [call["rate"].tolist() for call in calls] == [5, 6] and calls[0]["rate"].shape == ()

    def test_shapes_that_a_graph_can_take(self) -> None:
        assert TASK.fit_shape(self.DATA, 16, 128) == (16, 128)
        assert TASK.input_shapes(self.DATA, 16, 128) == {"x": (16, 2, 128), "rate": ()}
        fixed = TensorData(inputs={"x": (Axis(size=4, role="batch"), Axis(size=9))}, drawn={})
        assert TASK.fit_shape(fixed, 16, 128) == (4, 1) and "all sizes are fixed" in TASK.shape_notes(fixed)[0]


def test_other_outputs_than_golden_ones() -> None:
    kept = golden(in_x=np.ones((2, 3)), out_y=np.ones((2, 4), np.float32))
    for outputs, says in (({"z": np.ones((2, 4))}, "no output 'y'"), ({"y": np.ones((2, 5))}, r"the shape \[5\]")):
        with pytest.raises(GoldenError, match=says):
            TASK.golden_parity(kept.arrays, outputs, None, "fp32", "here")


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"in.x": np.ones((2, 3)), "out.y": np.ones((3, 3))}, "not of the same calls"),
        ({"in.x": np.ones((2, 0))}, "is empty"),
        ({"in.x": np.ones((2, 3)), "labels": np.ones(2)}, "neither an input"),
        ({"in.x": np.ones((2, 3), complex)}, "not numbers"),
    ],
)
def test_damaged_golden_calls(arrays: dict[str, np.ndarray], says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(GoldenError, match=says):
        Golden(Path("golden.npz"), arrays)


def test_nothing_can_be_trained_or_scored() -> None:
    with pytest.raises(InputError, match="came without recipe"):
        TASK.prepare(None, Path(), None)  # type: ignore[arg-type]
