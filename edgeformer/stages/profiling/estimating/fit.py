"""From measured nodes and calls to efficiencies. Pure functions on numpy arrays.

First every operator's efficiency is fitted to the durations of its nodes. ONNX Runtime's profiler makes small nodes
longer than they are in production, so overheads and rates are then scaled, each by one factor, until the sums
meet the calls that were timed without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np
import numpy.typing as npt

from edgeformer.formats.device import Calibration, Efficiency, OperatorClass
from edgeformer.stages.profiling.estimating.rates import Rates
from edgeformer.stages.profiling.estimating.roofline import Amounts, efficiency_of, fitted_us
from edgeformer.stages.profiling.estimating.work import NodeWork

Floats = npt.NDArray[np.float64]

# An operator seen at fewer different sizes than this is described by its class.
_LEAST_SIZES = 4
# Caches are not more than this many times faster than the memory.
_LARGEST_RATIO = 8.0
# The profiler's clock ticks in whole microseconds; nothing takes none.
_TICK_US = 0.5
# Of the profiled overheads about a third remains without the profiler; rates stay what they are.
_USUAL, _HELD = (0.35, 1.0), 0.15


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


def nnls(matrix: Floats, target: Floats) -> Floats:
    """x ≥ 0 with the least |matrix · x − target|²: the best of what the sets of columns give that are used at all.

    Args:
        matrix: float64 [n, k], k small: all 2ᵏ sets are tried.
        target: float64 [n].

    Returns:
        float64 [k].
    """
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
        samples: products whose weights are held by the cache in some and not in others; the model's own graphs do not
            show it, since the same share of their weights comes from memory at every shape.
    """
    near, far = (float(value) for value in _coefficients(samples, [_four(sample, rates) for sample in samples])[2:])
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
    for (precision, cls), members in sorted(by_class.items()):
        classes[precision][cls] = fit_efficiency(members, rates[precision], ratio)
    for (precision, key), members in sorted(by_key.items()):
        if len({sample.amount for sample in members}) >= _LEAST_SIZES:
            operators[precision][key] = fit_efficiency(members, rates[precision], ratio)
    return dict(classes), dict(operators)


def fit_efficiency(samples: Sequence[NodeSample], rates: Rates, ratio: float) -> Efficiency:
    """Overhead and shares of the rates with the least relative error; a byte from memory takes ``ratio`` times longer.

    A sample counts by its share of its call: what matters is that sums come out right.

    Args:
        samples: of one operator, or of one class of them.
        rates: what the shares are of.
        ratio: as :func:`memory_ratio` gives it.
    """
    rows = [(*row[:2], row[2] + ratio * row[3]) for row in (_four(sample, rates) for sample in samples)]
    overhead, of_peak, near = (float(value) for value in _coefficients(samples, rows))
    return Efficiency(
        overhead_us=overhead,
        of_peak=1 / of_peak if of_peak > 0 else None,
        of_bandwidth=1 / near if near > 0 else None,
        of_memory=1 / (near * ratio) if near > 0 else None,
    )


def _coefficients(samples: Sequence[NodeSample], rows: Sequence[Sequence[float]]) -> Floats:
    """Factors of the columns of ``rows`` (microseconds at full rates) that sum to the samples' durations."""
    durations = np.maximum([sample.duration_us for sample in samples], _TICK_US)
    weights = np.sqrt(durations / np.array([sample.call_us for sample in samples])) / durations
    matrix = np.array(rows)
    # Columns of very different size make the active set's tolerance meaningless.
    scales = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    found: Floats = nnls(matrix / scales * weights[:, None], durations * weights) / scales
    return found


def _four(sample: NodeSample, rates: Rates) -> list[float]:
    """One, and the microseconds that operations, bytes of the cache and bytes of the memory take at full rates; only
    products are limited by arithmetic."""
    amount = sample.amount
    compute = 1e6 * amount.operations / rates.peak if sample.work.is_product else 0.0
    return [1.0, compute, 1e6 * amount.near_bytes / rates.bandwidth, 1e6 * amount.far_bytes / rates.bandwidth]


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
        held = np.array([[0.0, _HELD, 0.0], [0.0, 0.0, _HELD]])
        target = np.concatenate([np.ones(len(members)), _HELD * np.array(_USUAL)])
        fixed, of_overhead, of_work = (float(value) for value in nnls(np.vstack([matrix, held]), target))
        call_us[precision] = fixed
        result = _scaled(result, precision, of_overhead, of_work)
    return result.model_copy(update={"call_overhead_us": call_us})


def _parts(call: CallSample, calibration: Calibration, rates: Rates) -> tuple[float, float]:
    """Microseconds of all overheads, and of all the rest."""
    overhead = sum(efficiency_of(work, calibration, call.precision).overhead_us for work in call.works)
    return overhead, fitted_us(call.works, rates, calibration, call.precision, call.weight_bytes) - overhead


def _scaled(calibration: Calibration, precision: str, of_overhead: float, of_work: float) -> Calibration:
    def scaled(efficiency: Efficiency) -> Efficiency:
        shares = efficiency.model_dump(include={"of_peak", "of_bandwidth", "of_memory"}, exclude_none=True)
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


def alike(samples: Iterable[NodeSample]) -> list[NodeSample]:
    """Nodes of one call that do the same, as one sample with their mean duration and the weight of all of them."""
    groups: dict[tuple[str, NodeWork, Amounts], list[NodeSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.precision, sample.work, sample.amount].append(sample)
    return [
        replace(
            members[0],
            duration_us=float(np.mean([member.duration_us for member in members])),
            # Its share of the call is that of all of them together.
            call_us=members[0].call_us / len(members),
        )
        for members in groups.values()
    ]
