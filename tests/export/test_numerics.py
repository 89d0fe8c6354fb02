"""Overflow and drift of made-up models whose numbers are known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.export.fp16 import max_abs_activation
from edgeformer.export.judging import DRIFT_TOLERANCE, measure_drift


class Chain(nn.Module):
    """Each stage gives what the next one takes; nobody but the stages sees the numbers between them."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Times(factor) for factor in factors)

    def forward(self, ids: Tensor) -> Tensor:
        x = ids.float()
        for stage in self.stages:
            x = stage(x)
        return x


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize(
    ("factors", "largest"),
    [
        ((1.0,), 3.0),
        ((1e5, 1e-6), 3e5),  # only between the two
        ((-1e5, 1e-6), 3e5),
        ((0.01,), 3.0),  # what goes in
        ((math.nan, 0.0), math.inf),
        ((-math.inf, 1.0), math.inf),
    ],
)
def test_the_largest_number_between_any_two_modules_counts(factors: tuple[float, ...], largest: float) -> None:
    result = max_abs_activation(Chain(*factors), np.array([[1, -2], [0, 3]]))
    assert result == pytest.approx(largest)


class Taking(nn.Module):
    def forward(self, arguments: Any) -> None:
        """What it gives is none."""


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taking, self.same = Taking(), nn.Identity()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        for arguments in (ids, mask.bool(), torch.zeros(0), None):
            self.taking(arguments)
        return self.same(torch.full((2,), -0.5))


def test_whole_numbers_and_nothing_at_all_do_not_overflow() -> None:
    model = Watched()
    ids = np.full((2, 3), 10**6)
    assert max_abs_activation(model, ids, np.ones((2, 3), dtype=np.int64)) == 0.5


def test_nothing_stays_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(1.0, 2.0)
    max_abs_activation(model, np.array([1]))

    def broken(self: Times, x: Tensor) -> Tensor:
        raise RuntimeError("no")

    monkeypatch.setattr(Times, "forward", broken)
    with pytest.raises(RuntimeError, match="no"):
        max_abs_activation(model, np.array([1]))
    assert not any(module._forward_hooks for module in model.modules())


class Attention(nn.Module):
    """One head of 4 numbers; every query is 6 and every key 7 in all of them, values are small."""

    def forward(self, ids: Tensor) -> Tensor:
        q, k = torch.full((1, 2, 3, 4), 6.0), torch.full((1, 2, 5, 4), -7.0)
        v = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 2, 5, 4)
        last = torch.full((3, 5), -torch.inf).index_fill(1, torch.tensor([4]), 0.0)
        self.given = F.scaled_dot_product_attention(q, k, v, attn_mask=last)
        return self.given


def test_scores_of_attention_are_seen_as_a_graph_computes_them() -> None:
    model = Attention()
    assert max_abs_activation(model, np.array([1])) == 4 * 6 * 7 / 4**0.5
    assert torch.equal(model.given, torch.full((1, 2, 3, 4), 4.0)), "and it answers as ever, mask and all"


def drifted(precision: Any = "fp16", **errors: float) -> Any:
    """Loops whose reference is 3 and 4 by turns (root mean square √12.5), off by an error in the second half."""
    reference = np.tile(np.array([3.0, 4.0], dtype=np.float32), (2, 2, 1))
    references = {int(name[4:]): reference for name in errors}
    states = {}
    for name, error in errors.items():
        states[int(name[4:])] = reference.copy()
        states[int(name[4:])][1] += np.float32(error)
    return measure_drift(states, references, precision)


def test_drift_is_relative_to_the_size_of_the_state_and_told_loop_by_loop() -> None:
    result = drifted(loop10=0.5, loop2=0.0, loop3=-0.25)
    assert [row.loop for row in result.loops] == [2, 3, 10]
    size = math.sqrt(12.5)
    assert [row.rms_error for row in result.loops] == pytest.approx([0.0, 0.25 / 2**0.5 / size, 0.5 / 2**0.5 / size])
    assert [row.max_error for row in result.loops] == pytest.approx([0.0, 0.25 / size, 0.5 / size])
    assert (result.tolerance, result.first_beyond) == (DRIFT_TOLERANCE["fp16"], 3)


@pytest.mark.parametrize(("precision", "beyond"), [("fp32", 1), ("fp16", 1), ("int8", None)])
def test_each_precision_may_drift_so_far(precision: str, beyond: int | None) -> None:
    result = drifted(precision, loop1=0.2)
    assert (result.tolerance, result.first_beyond) == (DRIFT_TOLERANCE[precision], beyond)  # type: ignore[index]


def test_the_tolerance_itself_is_no_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    exactly = drifted(loop1=0.5).loops[0].rms_error
    monkeypatch.setitem(DRIFT_TOLERANCE, "fp16", exactly)
    assert drifted(loop1=0.5).first_beyond is None


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_state_that_is_not_finite_has_drifted_beyond_all_bounds(wrong: float) -> None:
    result = drifted(loop1=0.0, loop2=wrong)
    assert (result.loops[1].rms_error, result.loops[1].max_error, result.first_beyond) == (None, None, 2)


def test_a_reference_of_nothing_has_no_relative_error() -> None:
    zeros = {1: np.zeros((1, 2, 3), dtype=np.float32)}
    result = measure_drift({1: np.ones((1, 2, 3), dtype=np.float32)}, zeros, "fp32")
    assert (result.loops[0].rms_error, result.first_beyond) == (None, 1)


def test_small_errors_of_large_states_are_not_rounded_away() -> None:
    reference = {1: np.full((1, 1, 4), 2.0**30, dtype=np.float32)}
    states = {1: reference[1].astype(np.float64) + 1.0}
    assert measure_drift(states, reference, "fp32").loops[0].max_error == pytest.approx(2.0**-30)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1e20, 0.5, 1e-20])
def test_drift_is_the_same_whatever_the_size_of_the_state(size: float) -> None:
    reference = {1: np.full((1, 2, 3), size, dtype=np.float32)}
    result = measure_drift({1: reference[1] * np.float32(1.5)}, reference, "fp32").loops[0]
    assert (result.rms_error, result.max_error) == (pytest.approx(0.5), pytest.approx(0.5))
