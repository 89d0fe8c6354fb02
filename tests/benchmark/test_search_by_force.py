"""What a search picks is what looking at every candidate finds."""

from __future__ import annotations

from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from edgeformer.artifacts.report import Energy
from edgeformer.benchmark.search import SearchOptions
from edgeformer.benchmark.verdict import Limits
from tests.benchmark.search_cases import accuracy, artifact, bundle, row, run

Case = tuple[float, float, int, int, float]
"""accuracy, p50, bytes of the file, bytes of memory, stated energy"""

# Few values, so that equal and nearly equal ones are common.
CASES = st.lists(
    st.tuples(
        st.sampled_from([0.80, 0.90, 0.91, 0.95]),
        st.sampled_from([1.0, 1.02, 1.03, 2.0, 5.0]),
        st.sampled_from([100, 200, 400]),
        st.sampled_from([1000, 1010, 2000]),
        st.sampled_from([0.5, 1.0, 3.0]),
    ),
    min_size=1,
    max_size=7,
)


def brute_force(cases: list[Case], limits: Limits, bound: float | None, minimize: str) -> tuple[set[int], set[int]]:
    """Positions that may be picked, and the Pareto front, straight from the definitions."""
    column = {"latency": 1, "size": 2, "memory": 3, "energy": 4}[minimize]
    allowed = []
    for position, (score, p50, size, peak, energy) in enumerate(cases):
        if bound is not None and score < bound:
            continue
        if limits.latency_ms is not None and p50 > limits.latency_ms:
            continue
        if limits.size_bytes is not None and size > limits.size_bytes:
            continue
        if limits.memory_bytes is not None and peak > limits.memory_bytes:
            continue
        if limits.energy_mj is not None and energy > limits.energy_mj:
            continue
        allowed.append(position)
    front = set()
    for position, mine in enumerate(cases):
        beaten = False
        for other in cases:
            no_worse = other[0] >= mine[0] and other[1] <= mine[1] and other[2] <= mine[2]
            better = other[0] > mine[0] or other[1] < mine[1] or other[2] < mine[2]
            beaten = beaten or (no_worse and better)
        if not beaten:
            front.add(position)
    if not allowed:
        return set(), front
    least = min(cases[position][column] for position in allowed)
    near = [p for p in allowed if cases[p][column] <= least * (1.025 if minimize != "size" else 1)]
    smallest = min(cases[position][2] for position in near)
    return {position for position in near if cases[position][2] == smallest}, front


@settings(max_examples=200, deadline=None)
@given(
    cases=CASES,
    bound=st.sampled_from([None, 0.85, 0.90, 0.93]),
    minimize=st.sampled_from(["latency", "size", "memory", "energy"]),
    bounds=st.tuples(
        st.sampled_from([None, 1.02, 4.0]),
        st.sampled_from([None, 100, 300]),
        st.sampled_from([None, 1005]),
        st.sampled_from([None, 1.0]),
    ),
)
def test_the_pick_and_the_front_are_those_of_a_brute_force(
    cases: list[Case],
    bound: float | None,
    minimize: Literal["latency", "size", "memory", "energy"],
    bounds: tuple[float | None, int | None, int | None, float | None],
) -> None:
    latency, size, memory, energy = bounds
    limits = Limits(size_bytes=size, latency_ms=latency, memory_bytes=memory, batch=1, seq=128, energy_mj=energy)
    manifest = bundle(*(artifact(f"a{n}", validation=accuracy(case[0])) for n, case in enumerate(cases)))
    rows = [
        row(f"a{n}", case[1], case[2], case[3], energy_mj=Energy(status="measured", value=case[4]))
        for n, case in enumerate(cases)
    ]
    found = run(manifest, rows, limits, SearchOptions({} if bound is None else {"accuracy": bound}, minimize))
    expected, front = brute_force(cases, limits, bound, minimize)
    assert (found.pick is None) == (not expected)
    assert found.pick is None or found.pick in expected
    assert {position for position, candidate in enumerate(found.candidates) if candidate.on_front} == front
