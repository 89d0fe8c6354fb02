"""The machine's speed beside every measurement, and a machine that has two."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from edgeformer.artifacts.device import Response, Speed
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.benchmark.conditions import CpuReading
from edgeformer.estimate import timing
from edgeformer.estimate.listing import ItemNodes, Listing, in_turn, together
from edgeformer.estimate.operators import NodeWork
from edgeformer.estimate.profiled import TimedCall, at_one_speed, profiler_us, without_profiler
from edgeformer.estimate.speed_probe import UNMOVED, Reference, between, slowness, two_speeds, typical
from edgeformer.estimate.timing import Round
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode

FAST, SLOW = Speed(product_us=450.0, copy_us=300.0), Speed(product_us=600.0, copy_us=400.0)
ADD = NodeWork("elementwise", "Add", 0.0, 0.0, 100.0)


def test_the_reference_takes_some_milliseconds_and_tells_the_speed() -> None:
    reference = Reference()
    began = time.perf_counter()
    speeds = [reference.speed() for _ in range(3)]
    assert time.perf_counter() - began < 1.0
    reference.close()
    assert all(speed.product_us > 10 and speed.copy_us > 10 for speed in speeds)


BOTH = Response(of_product=0.75, of_copy=0.25)


def test_slowness_is_how_many_times_longer_things_take() -> None:
    assert slowness(SLOW, FAST, BOTH) == pytest.approx(4 / 3) and slowness(FAST, SLOW, BOTH) == pytest.approx(3 / 4)
    assert slowness(FAST, FAST, BOTH) == 1.0 and slowness(SLOW, FAST, UNMOVED) == 1.0
    twice = Speed(product_us=450.0, copy_us=600.0)
    assert slowness(twice, FAST, BOTH) == pytest.approx(2**0.25)
    assert between(FAST, SLOW).product_us == pytest.approx((450 * 600) ** 0.5)
    assert typical([FAST, FAST, SLOW]) == FAST
    with pytest.raises(ValueError, match="no speed"):
        typical([])


def noisy(around: Speed, count: int, seed: int) -> list[Speed]:
    factors = np.exp(np.random.default_rng(seed).normal(scale=0.015, size=count))
    return [Speed(product_us=around.product_us * f, copy_us=around.copy_us * f) for f in factors]


def test_a_machine_that_switches_is_called_one_with_two_speeds() -> None:
    found = two_speeds([*noisy(FAST, 30, 1), *noisy(SLOW, 12, 2)])
    assert found is not None
    assert [speed.product_us for speed in found] == pytest.approx([450, 600], rel=0.02)


@pytest.mark.parametrize(
    "speeds",
    [
        noisy(FAST, 40, 3),
        [Speed(product_us=us, copy_us=us) for us in np.linspace(400.0, 600.0, 40)],
        [*noisy(FAST, 40, 4), SLOW],
        [*noisy(FAST, 4, 5), *noisy(SLOW, 4, 6)],
        [FAST] * 20,
        [],
    ],
    ids=["one speed", "a slow drift", "one disturbance", "too few", "all alike", "none"],
)
def test_a_machine_with_one_speed_is_not(speeds: list[Speed]) -> None:
    assert two_speeds(speeds) is None


def call(speed: Speed, call_us: float, durations_us: tuple[float, ...] = (4.0,), count: int = 10) -> TimedCall:
    artifact = ArtifactManifest(id="a", file="a", format="onnx", precision="fp32", status="built")
    works = tuple(replace(ADD, moved_bytes=float(number)) for number in range(len(durations_us)))
    return TimedCall(
        "r", artifact, ("steady", 1, 8), 1, works, (count,) * len(works), durations_us, call_us, 0.0,
        (Round(us=call_us, speed=speed),),
    )  # fmt: skip


def swept(*rounds: tuple[Speed, float], run: str = "r", seq: int = 8) -> TimedCall:
    """One call by several processes, each at a speed of its own."""
    seen = tuple(Round(us=us, speed=speed, process=process) for process, (speed, us) in enumerate(rounds))
    return replace(call(FAST, rounds[0][1]), run=run, item=("steady", 1, seq), rounds=seen)


def test_times_of_a_slow_process_are_brought_to_the_usual_speed() -> None:
    calls, speed = at_one_speed([swept((FAST, 30.0), (SLOW, 40.0), (FAST, 31.0))], None, BOTH)
    assert speed == FAST and calls[0].call_us == pytest.approx(30.0), "40 µs at the slow speed are 30 at the fast one"
    slow, held = at_one_speed([swept((SLOW, 40.0), (SLOW, 40.0), (FAST, 30.0))], SLOW, BOTH)
    assert held == SLOW and slow[0].call_us == pytest.approx(40.0)
    assert at_one_speed(slow, SLOW, BOTH)[0] == slow, "times that were brought to a speed stay there"
    faster = at_one_speed(slow, FAST, BOTH)[0][0]
    assert faster.durations_us[0] == pytest.approx(3.0), "nodes as their call"
    nobody = replace(call(FAST, 30.0), rounds=())
    assert at_one_speed([nobody]) == ([nobody], None)


def test_a_process_has_one_speed_the_median_of_its_probes() -> None:
    """A probe that was disturbed changes nothing of the time beside it."""
    disturbed = Speed(product_us=900.0, copy_us=600.0)
    rounds = [swept((FAST, 30.0), seq=8), swept((disturbed, 60.0), seq=16), swept((FAST, 90.0), seq=24)]
    calls, _ = at_one_speed(rounds, FAST, BOTH)
    assert [one.call_us for one in calls] == [30.0, 60.0, 90.0]


def test_a_sweep_goes_through_everything_and_every_other_one_backwards() -> None:
    assert [in_turn("abc", sweep) for sweep in range(3)] == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def listing(us: float, *durations_us: float, seqs: tuple[int, ...] = (8, 16)) -> Listing:
    nodes = tuple(ExecutedNode("Add", "n", (), (), 0, duration) for duration in durations_us)
    items = {
        item: ItemNodes(
            item=item, nodes=nodes, runs=1, feed_bytes=1, call_us=us, rounds=(Round(us=us, speed=FAST),)
        )
        for item in (("steady", 1, seq) for seq in seqs)
    }  # fmt: skip
    return Listing(items, {} if 16 in seqs else {("steady", 1, 16): "no time"})


def test_an_artifact_takes_the_median_over_the_processes_and_has_the_nodes_of_the_first() -> None:
    """The first process was slow, by 30 %; so were its nodes. The third had no time for the longer item."""
    found = together({0: listing(13.0, 6.5, 3.9), 1: listing(10.0), 3: listing(9.0, seqs=(8,))})
    short, long = found.items["steady", 1, 8], found.items["steady", 1, 16]
    assert (short.call_us, long.call_us) == (10.0, 11.5)
    assert [node.duration_us for node in short.nodes] == pytest.approx([5.0, 3.0])
    assert [(seen.process, seen.us) for seen in short.rounds] == [(0, 13.0), (1, 10.0), (3, 9.0)]
    late = together({0: listing(13.0, 6.5, seqs=(8,)), 1: listing(10.0)})
    assert set(late.items) == {("steady", 1, 8)} and late.refused == {("steady", 1, 16): "no time"}


@pytest.mark.parametrize(("busy_s", "disturbed"), [(1.0, False), (1.15, False), (1.9, True)])
def test_what_other_processes_do_beside_a_measurement_is_seen(
    monkeypatch: pytest.MonkeyPatch, busy_s: float, disturbed: bool
) -> None:
    """One second, in which this process used one core."""
    before, after = (
        CpuReading(at_s=second, busy_s=second * busy_s, own_s=second, stolen_s=0.0, throttled=None)
        for second in (0.0, 1.0)
    )
    monkeypatch.setattr(timing, "read_cpu", lambda: after)
    found = timing.beside(before)
    assert found.disturbed is disturbed and ("other processes used 0.9 cores" in found.doubts) is disturbed


def test_nodes_that_cannot_be_those_of_their_call_are_not_believed() -> None:
    """They were timed while something else used the processor: five times what the call takes."""
    timed = [call(FAST, 70.0, (3.0, 7.0)), call(FAST, 70.0, (3.0, 7.0)), call(FAST, 70.0, (3.0, 7.0))]
    believed = [one.believed for one in without_profiler([*timed, call(FAST, 700.0, (10.0,), count=400)])]
    assert believed == [True, True, True, False]


def test_what_the_profiler_adds_to_nodes_is_taken_off() -> None:
    """Ten nodes of 1 and of 5 µs, each 2 µs longer under the profiler; a call has 10 µs of its own."""
    timed = [call(FAST, 70.0, (3.0, 7.0)) for _ in range(3)]
    assert profiler_us(timed) == pytest.approx(1.5), "the call's own 10 µs hide some of it"
    for one in without_profiler(timed, 10.0):
        assert one.nodes_us == pytest.approx(60.0)
        assert one.durations_us[1] / one.durations_us[0] == pytest.approx(5.5 / 1.5)
    assert profiler_us([]) == 0.0
