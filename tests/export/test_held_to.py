"""What an artifact is held to once it has answered: parity first, overflow, then FP32's score on the same rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.manifest import Parity
from edgeformer.artifacts.scores import Score
from edgeformer.export.audit import sum_counts
from edgeformer.export.fp16 import FP16_MAX
from edgeformer.export.judging import Judge
from edgeformer.export.variants import Variant
from edgeformer.tasks.parity import measure_parity

REFERENCE = np.array([[1.0, -1.0, 0.5], [-2.0, 2.0, 0.0]], dtype=np.float32)
OTHER = REFERENCE[::-1].copy()


class Asked:
    """The task, which finds no loss unless told so, and a model with two exits; whatever it is asked is kept."""

    def __init__(self) -> None:
        self.lost_of: list[Any] = []
        self.scored: list[int] = []
        self.validated: list[Any] = []
        self.finds: str | None = None

    def missing(self, result: Score, expected: Score, precision: str, *, trimmed: bool) -> str | None:
        self.lost_of.append((result.loss, expected.loss, precision, trimmed))
        return self.finds

    def parity(self, exit_: int, outputs: Any, precision: Any, provider: str) -> Parity:
        return measure_parity(outputs, {1: OTHER, 2: REFERENCE}[exit_], precision, provider)

    def score(self, exit_: int, logits: np.ndarray) -> Score:
        assert logits.shape == REFERENCE.shape
        self.scored.append(exit_)
        return Score(n=2, loss=float(exit_))

    def validation(self, run: Any, exit_: int) -> Score:
        self.validated.append((run, exit_))
        return Score(n=9, loss=10.0 * exit_)


@pytest.fixture
def task() -> Asked:
    return Asked()


def judge(
    task: Asked, precision: Any = "fp16", *, trimmed: bool = False, max_activation: float = 1.0, **changes: Any
) -> Judge:
    reference: Any = SimpleNamespace(
        last=2, task=task, parity=task.parity, score=task.score, rejection_hint="; import real inputs"
    )
    arguments: dict[str, Any] = {"validation": task.validation, "baseline": {}, **changes}
    return Judge(
        folder=Path(),
        reference=reference,
        variant=Variant(precision, trimmed),
        max_activation=max_activation,
        **arguments,
    )


def run(inputs: Any) -> Any:
    raise AssertionError("the validation of these tests runs nothing")


HELD = {1: (Score(n=2, loss=1.5), Score(n=9, loss=15.0)), 2: (Score(n=2, loss=2.5), Score(n=9, loss=25.0))}


def test_fp32_sets_what_the_others_are_held_to_and_is_held_to_nothing(task: Asked) -> None:
    first = judge(task, "fp32")
    result = first.compare(2, REFERENCE, run, "CPU")
    assert (result["reason"], result["score"], result["validation"]) == (
        None,
        Score(n=2, loss=2.0),
        Score(n=9, loss=20.0),
    )
    assert first.baseline == {2: (Score(n=2, loss=2.0), Score(n=9, loss=20.0))}
    assert task.validated == [(run, 2)] and task.lost_of == []
    parity: Any = result["parity"]
    assert (parity.provider, parity.max_abs_error, parity.tolerance_kind) == ("CPU", 0.0, "absolute")
    kept = judge(task, "fp32", baseline=dict(HELD))
    kept.compare(2, REFERENCE, run, "CPU")
    assert kept.baseline == HELD, "step graphs come later, and are judged on the golden inputs alone"


@pytest.mark.parametrize(("exit_", "logits"), [(1, OTHER), (2, REFERENCE)])
def test_each_exit_is_compared_with_its_own_reference_and_scores(task: Asked, exit_: int, logits: np.ndarray) -> None:
    result = judge(task, baseline=dict(HELD)).compare(exit_, logits, run, "CPU")
    assert result["reason"] is None and task.scored == [exit_]
    assert task.lost_of == [(10.0 * exit_, 10.0 * exit_ + 5, "fp16", False)], "on the validation split"
    task.finds = "accuracy 0.5 below FP32's"
    assert judge(task, baseline=dict(HELD)).compare(exit_, logits, run, "CPU")["reason"] == task.finds


@pytest.mark.parametrize(
    ("changes", "ran"),
    [
        ({}, None),
        ({"validation": None}, run),
        ({"baseline": {2: (Score(n=2, loss=2.5), None)}}, run),  # FP32 was not validated
    ],
)
def test_without_a_validation_of_both_the_golden_inputs_decide(
    task: Asked, changes: dict[str, Any], ran: Callable[..., Any] | None
) -> None:
    judge(task, "int8", **{"baseline": dict(HELD), **changes}).compare(2, REFERENCE, ran, "CPU")
    assert task.lost_of == [(2.0, 2.5, "int8", False)]
    assert task.validated == ([(run, 2)] if "baseline" in changes else [])


def test_a_trimmed_fp32_graph_is_held_to_the_untrimmed_one(task: Asked) -> None:
    scores = dict(HELD)
    judge(task, "fp32", trimmed=True, baseline=scores).compare(2, REFERENCE, run, "CPU")
    assert task.lost_of == [(20.0, 25.0, "fp32", True)] and scores == HELD


def test_without_a_score_of_fp32_nothing_is_compared(task: Asked) -> None:
    result = judge(task, baseline={1: HELD[1]}).compare(2, REFERENCE, run, "CPU")
    assert result["reason"] is None and task.lost_of == []


def test_who_is_out_of_tolerance_is_not_compared_any_more(task: Asked) -> None:
    task.finds = "a loss"
    result = judge(task, baseline=dict(HELD)).compare(2, REFERENCE + np.float32(1), run, "CPU")
    assert "relative error" in str(result["reason"]) and task.lost_of == []
    assert (result["score"], result["validation"]) == (Score(n=2, loss=2.0), Score(n=9, loss=20.0))


@pytest.mark.parametrize(
    ("precision", "max_activation", "overflows"),
    [
        ("fp16", FP16_MAX, False),
        ("fp16", np.nextafter(FP16_MAX, 1e9), True),
        ("fp16", float("inf"), True),
        ("fp32", float("inf"), False),
        ("int8", 1e9, False),
    ],
)
def test_an_activation_beyond_fp16_rejects_fp16(
    task: Asked, precision: str, max_activation: float, *, overflows: bool
) -> None:
    output = judge(task, precision, max_activation=max_activation, baseline=dict(HELD))
    reason = output.compare(2, REFERENCE, run, "CPU")["reason"]
    assert (reason is not None) is overflows
    if overflows:
        assert "FP16 ends at 65504 (overflow)" in str(reason) and task.lost_of == []


def test_of_what_is_no_number_no_score_is_made(task: Asked) -> None:
    wrong = REFERENCE.copy()
    wrong[0, 0] = np.nan
    result = judge(task, baseline=dict(HELD)).compare(2, wrong, run, "CPU")
    assert set(result) == {"parity", "reason"} and "not finite" in str(result["reason"])
    assert task.scored == task.validated == task.lost_of == []


@pytest.mark.parametrize("loss", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_on_validation_text_rejects(task: Asked, loss: float) -> None:
    baseline: dict[int, Any] = {}
    for precision in ("fp32", "fp16"):
        output = judge(
            task, precision, baseline=baseline, validation=lambda run, exit_: Score.model_construct(n=9, loss=loss)
        )
        result = output.compare(2, REFERENCE, run, "CPU")
        assert result["reason"] == "its loss is not finite on validation text"
        assert result["score"] == Score(n=2, loss=2.0) and set(result) == {"parity", "score", "reason"}
    assert baseline == {} and task.lost_of == []
    far = judge(task, baseline=baseline, validation=lambda run, exit_: Score.model_construct(n=9, loss=loss))
    assert "relative error" in str(far.compare(2, REFERENCE + np.float32(1), run, "CPU")["reason"]), "the first reason"


def test_answers_of_batches_are_rows_and_counts_areadded() -> None:
    assert sum_counts([{"a": 1, "b": 2}, {"b": 3}, {}]) == {"a": 1, "b": 5}
    assert sum_counts([]) == {}
