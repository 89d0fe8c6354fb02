"""One search over the candidates of several models: limits, front and recommendation."""

from typing import Any

import pytest

from edgeformer.artifacts.report import Choice
from edgeformer.benchmark.choice import combine_choices
from edgeformer.benchmark.limits import Limit
from tests.benchmark.choice_cases import accuracy, artifact, bundle, estimate, row, run


def limits(**values: float) -> tuple[Limit, ...]:
    return tuple(Limit(quantity, value) for quantity, value in values.items())  # type: ignore[arg-type]


def search_of(score: float, ms: float, size: int, **changes: Any) -> Choice:
    """The search of a model with one artifact, measured on the device."""
    return run(bundle(artifact("onnx-int8", validation=accuracy(score))), [row("onnx-int8", ms, size=size, **changes)])


SEARCHES = {"linear": search_of(0.82, 0.1, 200), "light": search_of(0.86, 2.0, 11_000)}
SEARCHES["pretrained"] = search_of(0.91, 9.0, 23_000)


@pytest.mark.parametrize(
    ("kept", "picked"),
    [
        (limits(), "pretrained/onnx-int8"),
        (limits(score=0.80), "linear/onnx-int8"),
        (limits(score=0.85), "light/onnx-int8"),
        (limits(score=0.90), "pretrained/onnx-int8"),
        (limits(score=0.90, latency=5.0), None),
        (limits(score=0.85, size=10_000), None),
    ],
)
def test_the_cheapest_model_within_the_limits_is_recommended(kept: tuple[Limit, ...], picked: str | None) -> None:
    result = combine_choices(SEARCHES, kept, "latency")
    assert (None if result.pick is None else result.candidates[result.pick].artifact) == picked
    assert [candidate.on_front for candidate in result.candidates] == [True, True, True]


def test_without_a_limit_the_best_model_may_lose_one_standard_error() -> None:
    """Rows of `accuracy` are 1,000: the error is 0.0090 at 0.91."""
    scores = {"onnx-fp32": 0.91, "onnx-int8": 0.905}
    manifest = bundle(*(artifact(name, validation=accuracy(score)) for name, score in scores.items()))
    both = run(manifest, [row("onnx-fp32", 9.0, size=900), row("onnx-int8", 3.0, size=300)])
    searches = {"linear": search_of(0.906, 0.1, 200), "pretrained": both}
    result = combine_choices(searches, limits(), "latency")
    assert result.pick is not None and result.candidates[result.pick].artifact == "pretrained/onnx-int8"
    assert "from the model with the best accuracy" in result.reason


def test_refused_and_dominated_models_and_the_smallest() -> None:
    searches, reason = {**SEARCHES, "slow": search_of(0.81, 3.0, 12_000)}, "without a teacher it scores 0.92"
    result = combine_choices(searches, limits(), "latency", {"pretrained": reason})
    assert result.pick is not None and result.candidates[result.pick].artifact == "light/onnx-int8"
    assert result.candidates[2].reason == reason
    assert [c.artifact for c in result.candidates if not c.on_front] == ["slow/onnx-int8"]
    searches = {"wide": search_of(0.9, 1.0, 900), "small": search_of(0.9, 3.0, 300)}
    result = combine_choices(searches, limits(), "size")
    assert result.pick is not None and result.candidates[result.pick].artifact == "small/onnx-int8"


def test_refusals_name_figure_limit_and_the_best() -> None:
    result = combine_choices(SEARCHES, limits(score=0.85, latency=5.0, size=10_000), "latency")
    reasons = {candidate.artifact: candidate.reason for candidate in result.candidates}
    assert reasons == {
        "linear/onnx-int8": "accuracy 0.8200 is below 0.85",
        "light/onnx-int8": "size 10.7 KiB is over 9.8 KiB",
        "pretrained/onnx-int8": "latency 9.00 ms is over 5.00 ms; size 22.5 KiB is over 9.8 KiB",
    }
    assert result.reason.startswith("none of 3 candidates is known to have accuracy ≥ 0.85")
    result = combine_choices(SEARCHES, limits(score=0.95, latency=5.0), "latency")
    assert result.pick is None and result.closest is not None
    assert result.candidates[result.closest].artifact == "pretrained/onnx-int8"


def test_an_estimate_keeps_a_limit_with_its_whole_range_only() -> None:
    manifest = bundle(artifact("onnx-int8", validation=accuracy(0.9)))
    estimated = run(manifest, [estimate("onnx-int8", 3.0, 6.0)], on_target=False)
    for limit_ms, unknown, is_feasible in ((7.0, (), True), (5.0, ("latency",), True), (2.0, (), False)):
        (candidate,) = combine_choices({"light": estimated}, limits(latency=limit_ms), "latency").candidates
        assert (candidate.unknown, candidate.feasible) == (unknown, is_feasible)
