"""What published measurements say of estimates: the share of its rates that a device reaches, and the errors.

`python -m benchmarks.published` fits the record ``published.json`` to measurements of others and cross-validates it:
the errors of a device with measurements are those of estimates that were fitted without the measurement's source, the
errors of other devices those of estimates that were fitted without the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.report import PublishedCheck, PublishedTime
from edgeformer.estimate.roofline import WORK

RECORD_FILE = "published.json"
OTHERS = {"cpu": "other CPUs", "cuda": "other GPUs"}
FEWEST = 20
"""Times of a device or a group on which a statement about errors may rest."""
_NEAREST = 3


class Setting(NamedTuple):
    """What the factors and errors of an estimate depend on. ``phase``: call, prefill or decode."""

    kind: str
    device: str
    runtime: str
    precision: str
    phase: str


def effect_names(setting: Setting) -> list[list[str]]:
    """Return the names of the effects whose sum is the logarithm of the factor, for each of :data:`WORK`."""
    kind, device, runtime, precision, phase = setting
    device_effects = [f"device {device}", f"device {device} {runtime} {precision}"]
    groups = f"kind {kind}", f"runtime {kind} {runtime}", f"precision {kind} {runtime} {precision}"
    phases = [f"phase {kind} {runtime} {phase}"] if phase != "call" else []
    return [[*(f"{group}: {work}" for group in groups), *phases, *device_effects] for work in WORK]


def group_names(setting: Setting, *, is_known: bool) -> list[str]:
    """Return the groups whose errors apply to a setting, the narrowest first.

    ``is_known``: errors without the source of a time, where the device has times of other sources; else without the
    device.
    """
    kind, device, runtime, precision, phase = setting
    own = [f"device {device} {runtime} {precision} {phase}", f"device {device} {runtime}"] if is_known else []
    start = f"{'known' if is_known else 'other'} {kind}"
    return [*own, f"{start} {runtime} {precision} {phase}", f"{start} {runtime}", start]


class Errors(Frozen):
    """Errors of a group of estimates. Shares are fractions."""

    factor: float = Field(description="ends of the range: the estimate divided and multiplied by it")
    rows: int
    sources: int
    median_error: float
    worst_error: float
    within: float = Field(description="share inside the range, each with a factor from the other sources or devices")


class PublishedRecord(Frozen):
    """Factors fitted to published times, their errors, and the times.

    ``rows``: device, runtime, precision, phase, model, batch, tokens or pixels, ms, billions of operations, source;
    the first, second, fifth and last as positions in ``names``.
    """

    created: str
    devices: dict[str, Errors] = Field(description="device → errors of all its rows")
    effects: dict[str, float] = Field(description="effect → its part of the factor's logarithm")
    errors: dict[str, Errors]
    names: tuple[str, ...] = Field(strict=False)
    rows: tuple[tuple[int, int, str, str, int, int, int, float, float, int], ...] = Field(strict=False)

    def factors(self, setting: Setting) -> list[float]:
        """Return the factor of each of :data:`~edgeformer.estimate.roofline.WORK`."""
        return [math.exp(sum(self.effects.get(name, 0.0) for name in names)) for names in effect_names(setting)]

    def knows(self, setting: Setting) -> bool:
        """Return whether there are times of the runtime on this kind of device."""
        return f"other {setting.kind} {setting.runtime}" in self.errors

    def errors_of(self, setting: Setting) -> tuple[float, Errors, bool]:
        """Return the factor of the range, the errors of the narrowest group of many rows, and whose they are.

        The last is whether they are of the device itself. Raises KeyError: there are no times on this kind of device.
        """
        own = self.devices.get(setting.device)
        is_known = own is not None and own.rows >= FEWEST
        groups = [self.errors[name] for name in group_names(setting, is_known=is_known) if name in self.errors]
        if not groups:
            raise KeyError(setting)
        if is_known and own is not None:
            narrow = (self.errors.get(name) for name in group_names(setting, is_known=True)[:2])
            quoted = [errors for errors in narrow if errors is not None and errors.rows >= FEWEST]
            return groups[0].factor, (*quoted, own)[0], True
        return groups[0].factor, next((errors for errors in groups if errors.rows >= FEWEST), groups[-1]), False

    def nearest(self, setting: Setting, operations: float) -> tuple[PublishedTime, ...]:
        """Return the three times of the device that are nearest in runtime, precision, phase and operations."""

        def distance(row: tuple[int, int, str, str, int, int, int, float, float, int]) -> float:
            same = (self.names[row[1]] == setting.runtime, row[2] == setting.precision, row[3] == setting.phase)
            return 2 * same.count(False) + abs(math.log(max(row[8], 1e-6) / max(operations / 1e9, 1e-6)))

        of_device = [row for row in self.rows if self.names[row[0]] == setting.device]
        return tuple(
            PublishedTime(
                model=self.names[model], runtime=self.names[runtime], precision=precision, phase=phase, batch=batch,
                size=size, ms=ms, source=self.names[source],
            )
            for _, runtime, precision, phase, model, batch, size, ms, _, source in sorted(of_device, key=distance)[
                :_NEAREST
            ]
        )  # fmt: skip


@lru_cache(maxsize=1)
def published_record() -> PublishedRecord:
    """Read the record that ships with the package."""
    text = resources.files(__package__).joinpath(RECORD_FILE).read_text(encoding="utf-8")
    return PublishedRecord.model_validate_json(text)


class Estimated(NamedTuple):
    """Milliseconds of a call, their range, and what the range rests on."""

    p50: float
    low: float
    high: float
    check: PublishedCheck


def estimate_ms(device: DeviceProfile, setting: Setting, work: Sequence[float], operations: float) -> Estimated:
    """Return the time of a call. ``work``: of :func:`~edgeformer.estimate.roofline.work_ms`.

    Raises KeyError: no published time of this runtime on this kind of device.
    """
    record = published_record()
    p50 = sum(ms * factor for ms, factor in zip(work, record.factors(setting), strict=True))
    factor, errors, is_known = record.errors_of(setting)
    check = PublishedCheck(
        device=device.title if is_known else OTHERS[device.kind], rows=errors.rows, sources=errors.sources,
        median_error=errors.median_error, worst_error=errors.worst_error, within=errors.within,
        nearest=record.nearest(setting, operations),
    )  # fmt: skip
    return Estimated(p50, p50 / factor, p50 * factor, check)
