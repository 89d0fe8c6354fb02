"""From measured nodes and calls to efficiencies. Pure functions on numpy arrays.

First every operator's efficiency is fitted to the durations of its nodes, without what ONNX Runtime's profiler adds to
them (:mod:`.profiled`); operators of which little was seen are held to their class. Overheads and rates are then
scaled, each by one factor, until the sums meet the calls that were timed without the profiler.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from statistics import fmean

import numpy as np
import numpy.typing as npt

from edgeformer.artifacts.device import Calibration, Efficiency, OperatorClass, Response
from edgeformer.estimate.operators import NodeWork
from edgeformer.estimate.profiled import TimedCall, by_process, process_speeds
from edgeformer.estimate.rates import Rates
from edgeformer.estimate.roofline import Amounts, efficiency_of, fitted_nodes_us, together
from edgeformer.estimate.speed_probe import UNMOVED

Floats = npt.NDArray[np.float64]

# An operator seen at fewer different sizes than this is described by its class.
_LEAST_SIZES = 4
# Caches are not more than this many times faster than the memory.
_LARGEST_RATIO = 8.0
# The profiler's clock ticks in whole microseconds; nothing takes none.
_TICK_US = 0.5
# What the profiler adds was taken off before, so that both remain about what they are.
_USUAL, _HELD = (1.0, 1.0), 0.1
# How firmly an operator is held to its class, beside samples that together make up one whole call.
_TOWARD_CLASS = 0.1
_FREE = 1e-6
# Of a rate's own time: what rounding leaves of a factor that is none.
_NOTHING = 1e-9
_ROUNDS, _LEAST_FOUND = 6, 0.2
_COMPUTING, _READING = 1, 3
"""Columns that overlap in a product: what it computes, and weights that it reads from the cache."""
# Least share of a column that takes much less than its neighbour, so that the next round still weighs it.
_LEAST_PART = 0.02
_SHARES = {"of_peak", "of_bandwidth", "of_weights", "of_memory"}


@dataclass(frozen=True)
class NodeSample:
    """A node's duration: what it was, what it did, how long it took and how long the whole call took."""

    precision: str
    work: NodeWork
    amount: Amounts
    duration_us: float
    call_us: float


@dataclass(frozen=True)
class CallSample:
    """A whole call timed without the profiler."""

    precision: str
    works: tuple[NodeWork, ...]
    measured_us: float
    weight_bytes: float
    counts: tuple[int, ...] = ()

    @property
    def times(self) -> tuple[int, ...]:
        """How often each of ``works`` is done; where that is not said, once."""
        return self.counts or (1,) * len(self.works)


def nnls(matrix: Floats, target: Floats) -> Floats:
    """x ≥ 0 with the least |matrix · x − target|²: the best of what the sets of columns give that are used at all.

    Args:
        matrix: float64 [n, k], k small: all 2ᵏ sets are tried.
        target: float64 [n].

    Returns:
        float64 [k].
    """
    # Not scipy.optimize.nnls: `edgeformer calibrate` runs on devices, and the base installation has no scipy.
    # The same problem in k rows: what of the target no column reaches is off by the same for every x.
    rotation, matrix = np.linalg.qr(matrix)
    target = rotation.T @ target
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(target @ target)
    for used in map(list, chain.from_iterable(combinations(range(columns), size + 1) for size in range(columns))):
        trial = np.zeros(columns)
        trial[used] = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
        off = float(np.square(matrix @ trial - target).sum())
        if off < least and (trial >= 0).all():
            best, least = trial, off
    return best


def memory_ratio(samples: Sequence[NodeSample], rates: Rates) -> float:
    """How much longer a byte takes from memory than from the cache: 1 or more.

    Args:
        samples: products whose weights are held by the cache in some and not in others; a model's own graphs do not
            show it, since the same share of their weights comes from memory at every shape.
    """
    _, _, moved, kept, far = (float(value) for value in _coefficients(samples, rates))
    near = kept or moved
    if near <= 0 or far <= near:
        return 1.0
    return min(_LARGEST_RATIO, far / near)


def fit_operators(
    samples: Sequence[NodeSample], rates: Mapping[str, Rates], ratio: float
) -> tuple[dict[str, dict[OperatorClass, Efficiency]], dict[str, dict[str, Efficiency]]]:
    """Efficiencies per precision and class, and per precision and operator where there are enough sizes.

    Args:
        rates: precision → what the shares are of.
        ratio: as :func:`memory_ratio` gives it.
    """
    by_class: dict[tuple[str, OperatorClass], list[NodeSample]] = defaultdict(list)
    by_key: dict[tuple[str, str], list[NodeSample]] = defaultdict(list)
    for sample in samples:
        by_class[sample.precision, sample.work.cls].append(sample)
        by_key[sample.precision, sample.work.key].append(sample)
    classes: dict[str, dict[OperatorClass, Efficiency]] = defaultdict(dict)
    operators: dict[str, dict[str, Efficiency]] = defaultdict(dict)
    for (precision, cls), members in sorted(by_class.items(), key=lambda item: (item[0][0] != "fp32", item[0])):
        fitted = fit_efficiency(members, rates[precision], ratio)
        plain = classes["fp32"].get(cls)
        if plain is not None and precision != "fp32" and not any(map(_reads_far, members)):
            fitted = _from_memory(fitted, plain)
        classes[precision][cls] = fitted
    for (precision, key), members in sorted(by_key.items()):
        if len({sample.amount for sample in members}) >= _LEAST_SIZES:
            toward = classes[precision][members[0].work.cls]
            operators[precision][key] = fit_efficiency(members, rates[precision], ratio, toward)
    return dict(classes), dict(operators)


def fit_efficiency(
    samples: Sequence[NodeSample], rates: Rates, ratio: float, toward: Efficiency | None = None
) -> Efficiency:
    """Overhead and shares of the rates with the least relative error.

    A sample counts by its share of its call: what matters is that sums come out right. Where the samples never read
    from memory, a byte from there takes ``ratio`` times longer than one of weights in the cache.

    Args:
        samples: of one operator, or of one class of them.
        rates: what the shares are of.
        ratio: as :func:`memory_ratio` gives it.
        toward: of the operator's class: what little is known of an operator that was seen at small sizes only, or that
            takes next to nothing, is not stretched to large ones. None: the samples alone.
    """
    prior = None if toward is None else _costs(toward)
    overhead, of_peak, moved, kept, far = (float(value) for value in _coefficients(samples, rates, prior))
    near = kept or moved
    if toward is None and not any(map(_reads_far, samples)):
        far = ratio * near
    elif near > 0:  # few bytes from memory among many others may be given anything
        far = min(far, _LARGEST_RATIO * near)
    if moved > 0:  # an absent share would mean that of what is moved
        kept, far = max(kept, _FREE * moved), max(far, _FREE * moved)
    shares = {"of_peak": of_peak, "of_bandwidth": moved, "of_weights": kept, "of_memory": far}
    return Efficiency(overhead_us=overhead, **{name: 1 / cost for name, cost in shares.items() if cost > _NOTHING})


def _reads_far(sample: NodeSample) -> bool:
    """Whether weights of it come from memory; of a node without weights, whether anything does."""
    weights, amount = sample.work.weight_bytes, sample.amount
    return amount.kept_bytes < weights if weights else amount.far_bytes > 0


def _from_memory(fitted: Efficiency, fp32: Efficiency) -> Efficiency:
    """A class whose weights always were in the cache: a byte from memory takes as much more as it does in FP32, not as
    many times more, since what else is done with a byte differs."""
    own_near, near, far = (
        (fitted.of_weights or fitted.of_bandwidth),
        (fp32.of_weights or fp32.of_bandwidth),
        fp32.of_memory,
    )
    if own_near is None or near is None or far is None:
        return fitted
    return fitted.model_copy(update={"of_memory": 1 / (1 / own_near + max(0.0, 1 / far - 1 / near))})


def _coefficients(samples: Sequence[NodeSample], rates: Rates, prior: Floats | None = None) -> Floats:
    """Factors of the columns of :func:`_columns` by which the samples take their durations."""
    durations = np.maximum([sample.duration_us for sample in samples], _TICK_US)
    shares = np.sqrt(durations / np.array([sample.call_us for sample in samples]))
    columns = np.array([_columns(sample, rates) for sample in samples])
    factors = np.zeros(columns.shape[1]) if prior is None else prior.copy()  # of what was not seen, the class knows
    used = columns.max(axis=0) > 0
    matrix = columns[:, used]
    # Columns of very different size make the active set's tolerance meaningless.
    scales = matrix.max(axis=0)
    prior_rows, prior_targets = _held_rows(None if prior is None else prior[used] * scales, len(scales))
    expected_us, parts = durations, np.ones_like(columns)
    # Errors relative to what was measured favour what is too short: from the second round on they are relative to the
    # middle of what was measured and what was found.
    for _ in range(_ROUNDS):
        weights = shares / expected_us
        scaled = np.vstack([matrix * parts[:, used] / scales * weights[:, None], prior_rows])
        factors[used] = nnls(scaled, np.concatenate([durations * weights, prior_targets])) / scales
        parts = _parts_of_columns(columns, factors, rates.overlap)
        expected_us = np.maximum(np.sqrt(durations * ((columns * parts) @ factors)), _LEAST_FOUND * durations)
    return factors


def _parts_of_columns(columns: Floats, factors: Floats, overlap: float) -> Floats:
    """How much of what a column takes alone it adds to a sample's time at these factors: all of it, but of the two that
    overlap the derivative by their factor, so that the columns again sum to the time.

    Args:
        whole: float64 [n, columns].
        found: float64 [columns].
        overlap: as of :class:`Rates`.

    Returns:
        float64 [n, columns].
    """
    parts = np.ones_like(columns)
    alone = columns[:, [_COMPUTING, _READING]] * factors[[_COMPUTING, _READING]]
    both = together(alone[:, 0], alone[:, 1], overlap)
    for column, took in zip((_COMPUTING, _READING), alone.T, strict=True):
        some = took > 0
        parts[some, column] = np.maximum((took[some] / both[some]) ** (overlap - 1), _LEAST_PART)
    return parts


def _held_rows(prior: Floats | None, columns: int) -> tuple[Floats, Floats]:
    """Rows of a least-squares problem that hold factors near ``prior``, relative to it; a prior of 0 holds nothing."""
    places = [] if prior is None else [place for place in range(columns) if prior[place] > 0]
    rows = np.zeros((len(places), columns))
    for row, place in enumerate(places):
        assert prior is not None
        rows[row, place] = _TOWARD_CLASS / prior[place]
    return rows, np.full(len(places), _TOWARD_CLASS)


def _columns(sample: NodeSample, rates: Rates) -> list[float]:
    """One, and the microseconds that operations, moved bytes and weights of the cache, and bytes of the memory take at
    full rates; only products are limited by arithmetic."""
    amount = sample.amount
    compute = 1e6 * amount.operations / rates.peak if sample.work.is_product else 0.0
    moved, byte_us = amount.near_bytes - amount.kept_bytes, 1e6 / rates.bandwidth
    return [1.0, compute, moved * byte_us, amount.kept_bytes * byte_us, amount.far_bytes * byte_us]


def _costs(efficiency: Efficiency) -> Floats:
    """The factors of the columns of :func:`_columns` that an efficiency stands for."""
    shares = (efficiency.of_peak, efficiency.of_bandwidth, efficiency.of_weights, efficiency.of_memory)
    return np.array([efficiency.overhead_us, *(1 / share if share else 0.0 for share in shares)])


def meet_calls(calibration: Calibration, calls: Sequence[CallSample], rates: Mapping[str, Rates]) -> Calibration:
    """Scale overheads and rates per precision, and find the cost of a call, so that sums meet the timed calls.

    Args:
        rates: precision → what the shares are of.
    """
    result = calibration
    call_us: dict[str, float] = {}
    for precision in sorted({call.precision for call in calls}):
        members = [call for call in calls if call.precision == precision]
        parts = np.array([_parts(call, calibration, rates[precision]) for call in members])
        measured = np.array([call.measured_us for call in members])
        matrix = np.column_stack([np.ones(len(members)), parts]) / measured[:, None]
        # Two rows more hold the factors near what they usually are, where the calls alone cannot tell them apart.
        prior_rows = np.array([[0.0, _HELD, 0.0], [0.0, 0.0, _HELD]])
        target = np.concatenate([np.ones(len(members)), _HELD * np.array(_USUAL)])
        fixed, of_overhead, of_work = (float(value) for value in nnls(np.vstack([matrix, prior_rows]), target))
        call_us[precision] = fixed
        result = _scaled(result, precision, of_overhead, of_work)
    return result.model_copy(update={"call_overhead_us": call_us})


def _parts(call: CallSample, calibration: Calibration, rates: Rates) -> tuple[float, float]:
    """Microseconds of all overheads, and of all the rest."""
    each = fitted_nodes_us(call.works, rates, calibration, call.precision, call.weight_bytes)
    overheads = [efficiency_of(work, calibration, call.precision).overhead_us for work in call.works]
    overhead = float(np.dot(overheads, call.times))
    return overhead, float(np.dot(each, call.times)) - overhead


def _scaled(calibration: Calibration, precision: str, of_overhead: float, of_work: float) -> Calibration:
    def scaled(efficiency: Efficiency) -> Efficiency:
        shares = efficiency.model_dump(include=_SHARES, exclude_none=True)
        faster = {name: share / of_work for name, share in shares.items()} if of_work > 0 else {}
        return efficiency.model_copy(update={"overhead_us": efficiency.overhead_us * of_overhead, **faster})

    classes = {key: scaled(value) for key, value in calibration.efficiencies.get(precision, {}).items()}
    operators = {key: scaled(value) for key, value in calibration.operators.get(precision, {}).items()}
    return calibration.model_copy(
        update={
            "efficiencies": {**calibration.efficiencies, precision: classes},
            "operators": {**calibration.operators, precision: operators},
        }
    )


# How much of a change of the machine's speed a call's time follows, as the calls themselves show. Pure functions.
#
# The same call was timed by several processes, beside which the reference took different times. How their logarithms
# go together is fitted; where that explains nothing of models that it was not fitted on, times are left as they are.


_SETS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1))
# What a correction must take off the deviations of calls that it was not fitted on; less is chance.
_WORTH = 0.95


def fit_response(calls: Sequence[TimedCall]) -> Response:
    """The exponents of product and copy that bring a call's times in different processes nearest together.

    Of both, either or none of them what is best for models that are left out in turn, or for artifacts where there is
    one model.

    Args:
        calls: unscaled times of several processes each; calls of a single process are ignored.
    """
    parts = _time_parts(calls, by_run=True)
    if len(parts) < 2:
        parts = _time_parts(calls, by_run=False)
    if len(parts) < 2:
        return UNMOVED
    residuals = {columns: _left(parts, columns) for columns in _SETS}
    best = min(_SETS, key=lambda columns: residuals[columns])
    if residuals[best] >= _WORTH * _left(parts, ()):
        return UNMOVED
    product, copy = _exponents(parts, best)
    return Response(of_product=product, of_copy=copy)


def _time_parts(calls: Sequence[TimedCall], by_run: bool) -> list[tuple[Floats, Floats]]:
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
    arrays = (np.array(part_rows) for part_rows in rows.values())
    return [(array[:, :2], array[:, 2]) for array in arrays]


def _exponents(parts: Sequence[tuple[Floats, Floats]], columns: Sequence[int]) -> tuple[float, float]:
    exponents = [0.0, 0.0]
    if columns:
        moved = np.vstack([moved[:, list(columns)] for moved, _ in parts])
        fitted = nnls(moved, np.concatenate([took for _, took in parts]))
        for column, value in zip(columns, fitted, strict=True):
            exponents[column] = float(value)
    return exponents[0], exponents[1]


def _left(parts: Sequence[tuple[Floats, Floats]], columns: Sequence[int]) -> float:
    """The mean deviation that is left of each part after a correction that was fitted on the others."""
    residuals = []
    for number, (moved, took) in enumerate(parts):
        training_parts = [part for place, part in enumerate(parts) if place != number]
        residuals.append(float(np.abs(took - moved @ np.array(_exponents(training_parts, columns))).mean()))
    return fmean(residuals)
