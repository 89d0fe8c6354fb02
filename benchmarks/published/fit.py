"""Fit the factors of :mod:`edgeformer.estimate.published` to published rows, and cross-validate them.

The time of a call is the sum over seven kinds of work of work divided by the profile's rate, times a factor for each
kind. The logarithm of a factor is a sum of effects: of the kind of processor, of the runtime, of the precision, of the
phase, and of the device. Each effect has a normal prior around 0, so that a runtime or a device with few rows stays
near the others (partial pooling). The maximum of the posterior is found by scipy's least squares.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import least_squares

from edgeformer.estimate.published import Errors, Setting, effect_names, group_names
from edgeformer.estimate.roofline import WORK

_NOISE = 0.25
"""Standard deviation of the logarithm of a row that no effect explains: boards, versions, power modes."""
_PRIORS = {"kind": 2.0, "runtime": 0.7, "precision": 0.5, "phase": 0.5, "device": 0.35, "device and runtime": 0.25}
"""Standard deviations of effects; those of a device apply to all kinds of work alike."""
_FOLDS = 10
_FEWEST = 5
"""Rows of a group that has a range of its own."""
_LEVEL = 0.92
"""Share of a group's errors that its range holds: 90% of the rows are then inside the range that the rows of other
sources or devices give them."""
_REPEATED = 0.25
"""A row counts with the number of rows of its device, runtime and precision to this power less: they share an error."""
_PRIOR_ROWS = 10
"""Rows for which the next wider group counts beside those of a group."""
Floats = NDArray[np.float64]


def _prior(name: str) -> float:
    """Return the standard deviation of an effect; ``device NAME RUNTIME PRECISION`` is one of device and runtime."""
    first = name.partition(" ")[0]
    return _PRIORS["device and runtime" if first == "device" and name.count(" ") > 1 else first]


def fit(features: Floats, settings: Sequence[Setting], ms: Floats) -> dict[str, float]:
    """Return the effects with the largest posterior.

    Args:
        features: work of the rows at the rates of their profiles, in ms, [n, 7].
        settings: of the rows [n].
        ms: measured times [n].
    """
    same = Counter((setting.device, setting.runtime, setting.precision) for setting in settings)
    weights = np.array([same[setting.device, setting.runtime, setting.precision] ** -_REPEATED for setting in settings])
    weights /= _NOISE
    names = {setting: effect_names(setting) for setting in dict.fromkeys(settings)}
    index: dict[str, int] = {}
    for of_setting in names.values():
        for each in of_setting:
            for name in each:
                index.setdefault(name, len(index))
    count, width = len(ms), len(WORK)
    places = [
        (number * width + work, index[name])
        for number, setting in enumerate(settings)
        for work, each in enumerate(names[setting])
        for name in each
    ]
    rows, cols = np.array(places).T
    design = sparse.csr_array((np.ones(len(rows)), (rows, cols)), shape=(count * width, len(index)))
    prior = np.array([_prior(name) for name in index])
    of_row = np.repeat(np.arange(count), width), np.arange(count * width)
    together = sparse.csr_array((np.ones(count * width), of_row))

    def parts(values: Floats) -> Floats:
        return features * np.exp(np.clip(design @ values, -8, 8)).reshape(count, width)

    def residuals(values: Floats) -> Floats:
        return np.concatenate([weights * np.log(parts(values).sum(1) / ms), values / prior])

    def jacobian(values: Floats) -> sparse.csr_array:
        each = parts(values)
        shares = sparse.diags_array((weights[:, None] * each / each.sum(1, keepdims=True)).ravel()) @ design
        return sparse.csr_array(sparse.vstack([together @ shares, sparse.diags_array(1 / prior)]))

    start = np.zeros(len(index))
    result = least_squares(residuals, start, jac=jacobian, loss="soft_l1", tr_solver="lsmr", method="trf", max_nfev=60)
    return dict(zip(index, result.x.tolist(), strict=True))


def estimated_ms(features: Floats, settings: Sequence[Setting], effects: dict[str, float]) -> Floats:
    """Return the estimated times of rows [n]."""
    logs = [[sum(effects.get(name, 0.0) for name in each) for each in effect_names(setting)] for setting in settings]
    return np.asarray((features * np.exp(np.clip(logs, -8, 8))).sum(1))


def left_out(features: Floats, settings: Sequence[Setting], ms: Floats, groups: Sequence[str]) -> Floats:
    """Return log(estimated / measured) of each row, by a fit to the rows of other groups (ten folds of groups)."""
    folds = {group: number % _FOLDS for number, (group, _) in enumerate(Counter(groups).most_common())}
    fold_of_row = np.array([folds[group] for group in groups])
    errors = np.zeros(len(ms))
    for fold in range(_FOLDS):
        train, test = (np.flatnonzero(chosen).tolist() for chosen in (fold_of_row != fold, fold_of_row == fold))
        effects = fit(features[train], [settings[row] for row in train], ms[train])
        errors[test] = np.log(estimated_ms(features[test], [settings[row] for row in test], effects) / ms[test])
    return errors


def quantile(sizes: Floats) -> float:
    """Return the error that holds the share of errors, with the correction of conformal prediction for few of them."""
    place = min(len(sizes), int(np.ceil(_LEVEL * (len(sizes) + 1) - 1e-9)))
    return float(np.sort(sizes)[place - 1])


class Groups:
    """Rows by the groups of their settings, with their errors without their source, or without their device.

    ``errors``: log(estimated / measured) of the rows; ``keys``: source or device of each.
    """

    def __init__(self, errors: Floats, settings: Sequence[Setting], keys: Sequence[str], *, is_known: bool) -> None:
        self._sizes, self._settings, self._keys = np.abs(errors), settings, np.array(keys)
        self._is_known = is_known
        rows: dict[str, list[int]] = defaultdict(list)
        self._chains: dict[str, list[str]] = {}
        for row, setting in enumerate(settings):
            names = group_names(setting, is_known=is_known)
            for place, name in enumerate(names):
                rows[name].append(row)
                self._chains[name] = names[place:]
        self._rows = {name: np.array(of_group) for name, of_group in rows.items()}
        self.names = [name for name, of_group in self._rows.items() if len(of_group) >= _FEWEST]

    def factor(self, name: str, key: str | None = None) -> float:
        """Return the factor of a group's range from its rows and those of wider groups, without those of a key."""
        pooled: float | None = None
        for wider in reversed(self._chains[name]):
            rows = self._rows[wider]
            sizes = self._sizes[rows[self._keys[rows] != key] if key is not None else rows]
            if pooled is None:
                pooled = quantile(sizes)
            elif len(sizes):
                weight = len(sizes) / (len(sizes) + _PRIOR_ROWS)
                pooled = math.sqrt(weight * quantile(sizes) ** 2 + (1 - weight) * pooled**2)
        assert pooled is not None
        return math.exp(pooled)

    def factors(self) -> Floats:
        """Return the factor of every row's range, from rows with another key."""
        factor_by_key: dict[tuple[str, str], float] = {}
        result = []
        for setting, key in zip(self._settings, self._keys, strict=True):
            name = group_names(setting, is_known=self._is_known)[0]
            if (name, key) not in factor_by_key:
                factor_by_key[name, key] = self.factor(name, key)
            result.append(factor_by_key[name, key])
        return np.array(result)

    def rows(self, name: str) -> NDArray[np.int64]:
        """Return the rows of a group."""
        return self._rows[name]


def summary(errors: Floats, factors: Floats, sources: Sequence[str], factor: float) -> Errors:
    """Return the errors of rows; ``factors``: of their ranges, without the row's source or device; ``factor``: with."""
    sizes = np.abs(errors)
    return Errors(
        factor=round(factor, 3),
        rows=len(errors),
        sources=len({*sources}),
        median_error=round(float(np.expm1(np.median(sizes))), 3),
        worst_error=round(float(np.expm1(sizes.max())), 3),
        within=round(float(np.mean(sizes <= np.log(factors))), 3),
    )
