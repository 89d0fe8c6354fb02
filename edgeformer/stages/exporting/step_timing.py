"""Full graph or step bundle? Both are timed side by side on this host, and the break-even is said in words."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.tasks import Run

Array = NDArray[Any]
ROUNDS, CALLS = 7, 3


def step_note(name: str, runs: tuple[Run, Run, Run], inputs: Mapping[str, Array], loops: int) -> str:
    """A sentence on which of the two is faster, and from how many loops on.

    All variants take turns, A B C A B C …; of each round the ratio of medians is taken, so that a slower moment of
    the machine meets all of them.

    Args:
        name: the precision, for the sentence.
        runs: the full graph, and the step bundle answering after one loop and after all of them.
        inputs: one row, without padding.
    """
    variants = dict(zip(("full", "first", "last"), runs, strict=True))
    for run in variants.values():
        run(inputs)
    rounds = [{key: _median_ms(run, inputs) for key, run in variants.items()} for _ in range(ROUNDS)]
    ratios = sorted(times["last"] / times["full"] for times in rounds)
    even = statistics.median(
        1 + (loops - 1) * (times["full"] - times["first"]) / max(times["last"] - times["first"], 1e-9)
        for times in rounds
    )
    length = inputs["input_ids"].shape[1]
    measured = (
        f"step bundle ({name}): {statistics.median(ratios):.2f}× the time of the full graph over all {loops} loops "
        f"({ratios[0]:.2f}–{ratios[-1]:.2f}, 1×{length} tokens, this host)"
    )
    if even <= 1:
        return f"{measured}; even one loop takes longer than the full graph: deploy that, or an exit of its own"
    if even >= loops:
        return f"{measured}; it costs nothing extra, and every loop that an input does not need is time won"
    return f"{measured}; it wins where inputs need fewer than {even:.1f} loops on average, the full graph above that"


def _median_ms(run: Run, inputs: Mapping[str, Array]) -> float:
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        run(inputs)
        times.append(1000 * (time.perf_counter() - started))
    return float(np.median(times))
