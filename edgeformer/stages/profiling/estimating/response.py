"""How much of a change of the machine's speed a call's time follows, as the calls themselves show. Pure functions.

The same call was timed by several processes, beside which the reference took different times. How their logarithms go
together is fitted; where that explains nothing of models that it was not fitted on, times are left as they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from edgeformer.formats.device import Response
from edgeformer.stages.profiling.estimating.fit import Floats, nnls
from edgeformer.stages.profiling.estimating.profiled import TimedCall, by_process, process_speeds
from edgeformer.stages.profiling.estimating.reference import UNMOVED

_SETS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1))
# What a correction must take off the deviations of calls that it was not fitted on; less is chance.
_WORTH = 0.95


def fit_response(calls: Sequence[TimedCall]) -> Response:
    """The exponents of product and copy that bring a call's times in different processes nearest together.

    Of both, either or none of them what is best for models that are left out in turn, or for artifacts where there is
    one model.

    Args:
        calls: as they were timed, of several processes each; others say nothing.
    """
    parts = _parts(calls, by_run=True)
    if len(parts) < 2:
        parts = _parts(calls, by_run=False)
    if len(parts) < 2:
        return UNMOVED
    left = {columns: _left(parts, columns) for columns in _SETS}
    best = min(_SETS, key=lambda columns: left[columns])
    if left[best] >= _WORTH * _left(parts, ()):
        return UNMOVED
    product, copy = _exponents(parts, best)
    return Response(of_product=product, of_copy=copy)


def _parts(calls: Sequence[TimedCall], by_run: bool) -> list[tuple[Floats, Floats]]:
    """Per model or artifact: how far the reference [n, 2] and the call [n] were from their means over the processes, as
    logarithms."""
    speeds = process_speeds(calls)
    rows: dict[tuple[str, ...], list[tuple[float, float, float]]] = defaultdict(list)
    for call in calls:
        key = (call.run, call.artifact.id)
        took = by_process(call)
        if len(took) < 2:
            continue
        logs = [
            (math.log(speeds[key][process].product_us), math.log(speeds[key][process].copy_us), math.log(us))
            for process, us in took.items()
        ]
        middle = [fmean(column) for column in zip(*logs, strict=True)]
        rows[key[:1] if by_run else key] += [
            (product - middle[0], copy - middle[1], us - middle[2]) for product, copy, us in logs
        ]
    arrays = (np.array(found) for found in rows.values())
    return [(array[:, :2], array[:, 2]) for array in arrays]


def _exponents(parts: Sequence[tuple[Floats, Floats]], columns: Sequence[int]) -> tuple[float, float]:
    found = [0.0, 0.0]
    if columns:
        moved = np.vstack([moved[:, list(columns)] for moved, _ in parts])
        fitted = nnls(moved, np.concatenate([took for _, took in parts]))
        for column, value in zip(columns, fitted, strict=True):
            found[column] = float(value)
    return found[0], found[1]


def _left(parts: Sequence[tuple[Floats, Floats]], columns: Sequence[int]) -> float:
    """The mean deviation that is left of each part after a correction that was fitted on the others."""
    left = []
    for number, (moved, took) in enumerate(parts):
        others = [part for place, part in enumerate(parts) if place != number]
        left.append(float(np.abs(took - moved @ np.array(_exponents(others, columns))).mean()))
    return fmean(left)
