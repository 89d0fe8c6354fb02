"""How much of a change of the machine's speed calls follow is what they show, and nothing where they show nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from edgeformer.artifacts.device import Response, Speed
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.estimate.fit import fit_response
from edgeformer.estimate.profiled import TimedCall
from edgeformer.estimate.speed_probe import UNMOVED, slowness
from edgeformer.estimate.timing import Round

USUAL = Speed(product_us=450.0, copy_us=300.0)


def calls(took: Callable[[Speed], float], runs: int = 4, noise: float = 0.0, artifacts: int = 1) -> list[TimedCall]:
    """Three shapes of each artifact by six processes, at speeds that change by a third."""
    draw, found = np.random.default_rng(5), list[TimedCall]()
    for run in range(runs):
        for number in range(artifacts):
            artifact = ArtifactManifest(id=f"a{number}", file="a", format="onnx", precision="fp32", status="built")
            moved = np.exp(draw.uniform(-0.15, 0.15, size=(6, 2)))
            speeds = [Speed(product_us=450.0 * product, copy_us=300.0 * copy) for product, copy in moved]
            for seq in (8, 16, 24):
                rounds = tuple(
                    Round(us=seq * took(speed) * float(np.exp(draw.normal(scale=noise))), speed=speed, process=process)
                    for process, speed in enumerate(speeds)
                )
                bare = TimedCall(f"r{run}", artifact, ("steady", 1, seq), 1, (), (), (), rounds[0].us, 0.0)
                found.append(replace(bare, rounds=rounds))
    return found


@pytest.mark.parametrize("response", [(0.8, 0.4), (1.0, 0.0), (0.0, 0.9)])
@pytest.mark.parametrize(("runs", "artifacts"), [(4, 1), (1, 2)])
def test_the_exponents_that_made_the_times_are_found(response: tuple[float, float], runs: int, artifacts: int) -> None:
    true = Response(of_product=response[0], of_copy=response[1])
    found = fit_response(calls(lambda speed: slowness(speed, USUAL, true), runs, 0.005, artifacts))
    assert (found.of_product, found.of_copy) == pytest.approx(response, abs=0.05)


def test_times_that_follow_nothing_are_left_as_they_are() -> None:
    """Noise of 3 % that has nothing to do with the reference; and too little to learn from."""
    assert fit_response(calls(lambda speed: 1.0, noise=0.03)) == UNMOVED
    assert fit_response(calls(lambda speed: speed.product_us, runs=1)) == UNMOVED, "nobody could check it"
    assert fit_response([]) == UNMOVED
    once = [replace(call, rounds=call.rounds[:1]) for call in calls(lambda speed: speed.product_us)]
    assert fit_response(once) == UNMOVED, "one process compares with nobody"


def test_what_holds_of_one_model_alone_is_no_response() -> None:
    """One model follows the product, three do not: for those that are left out, a correction is worse than none."""
    some = calls(lambda speed: speed.product_us)[:3] + calls(lambda speed: 450.0, noise=0.01)[3:]
    assert fit_response(some).of_product < 0.3
