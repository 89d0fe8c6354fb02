"""What published measurements say of estimates: the share of its rates that a device reaches, and the errors.

`python -m benchmarks.published` fits the record ``published.json`` to measurements of others and cross-validates it:
the errors of a device with measurements are those of estimates that were fitted without the measurement's source, the
errors of other devices those of estimates that were fitted without the device.
"""

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from importlib import resources
from typing import Literal, NamedTuple, cast

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.report import PublishedCheck, PublishedTime
from edgeformer.estimate.roofline import WORK

Phase = Literal["call", "convolutions", "prefill", "decode"]
PUBLISHED_FILE = "published.json"
KINDS = {"cpu": "CPUs", "cuda": "GPUs"}
FEWEST = 20  # times of a device on which statements about it may rest
_NEAREST = 3


class Setting(NamedTuple):
    """What the factors and errors of an estimate depend on. ``phase``: of :func:`phase_of`."""

    kind: str
    device: str
    runtime: str
    precision: str
    phase: str


def phase_of(phase: str, work: Sequence[float]) -> Phase:
    """Return ``prefill``, ``decode``, or of another call ``convolutions`` where these are most of its products.

    ``work``: of :func:`~edgeformer.estimate.roofline.work_ms`.
    """
    if phase in ("prefill", "decode"):
        return cast(Phase, phase)
    by_kind = dict(zip(WORK, work, strict=True))
    convolutions = by_kind["convolutions"] + by_kind["depthwise"]
    return "convolutions" if convolutions > by_kind["products"] + by_kind["attention"] else "call"


def effect_names(setting: Setting) -> list[list[str]]:
    """Return the names of the effects whose sum is the logarithm of the factor, for each of :data:`WORK`."""
    kind, device, runtime, precision, phase = setting
    device_effects = [f"device {device}", f"device {device} {runtime} {precision}"]
    groups = f"kind {kind}", f"runtime {kind} {runtime}", f"precision {kind} {runtime} {precision}"
    phases = [f"phase {kind} {runtime} {phase}"] if phase in ("prefill", "decode") else []
    return [[*(f"{group}: {work}" for group in groups), *phases, *device_effects] for work in WORK]


def group_names(setting: Setting, *, is_known: bool) -> list[str]:
    """Return the groups whose errors apply to a setting, the narrowest first.

    ``is_known``: errors without the source of a time, where the device has times of other sources; else without the
    device.
    """
    kind, device, runtime, precision, phase = setting
    if is_known:
        own, wider = f"device {device} {runtime} {precision} {phase}", f"known {kind}"
        return [own, f"{wider} {runtime} {phase}", f"{wider} {runtime}", wider]
    return [f"other {kind} {runtime}", f"other {kind}"]


class Errors(Frozen):
    """Errors of a group of estimates. Shares are fractions."""

    factor: float = Field(description="ends of the range: the estimate divided and multiplied by it")
    rows: int
    sources: int
    median_error: float
    worst_error: float
    within: float = Field(description="share inside the range, each with a factor from the other sources or devices")


class Estimated(NamedTuple):
    """Milliseconds of a call, their range, and what the range rests on."""

    p50: float
    low: float
    high: float
    check: PublishedCheck


PublishedRow = tuple[int, int, str, str, int, int, int, float, float, int]


class PublishedRecord(Frozen):
    """Factors fitted to published times, their errors, and the times.

    ``rows``: device, runtime, precision, phase, model, batch, tokens or pixels, ms, billions of operations, source;
    the first, second, fifth and last as positions in ``names``.
    """

    created: str
    tf32: tuple[str, ...] = Field(strict=False, description="runtimes that multiply FP32 in TF32 on cards since Ampere")
    devices: dict[str, Errors] = Field(description="device → errors of all its rows")
    effects: dict[str, float] = Field(description="effect → its part of the factor's logarithm")
    errors: dict[str, Errors]
    names: tuple[str, ...] = Field(strict=False)
    rows: tuple[PublishedRow, ...] = Field(strict=False)

    def factors(self, setting: Setting) -> list[float]:
        """Return the factor of each of :data:`~edgeformer.estimate.roofline.WORK`."""
        return [math.exp(sum(self.effects.get(name, 0.0) for name in names)) for names in effect_names(setting)]

    def knows(self, setting: Setting) -> bool:
        """Return whether there are times of the runtime on this kind of device."""
        return any(name.startswith(f"runtime {setting.kind} {setting.runtime}: ") for name in self.effects)

    def errors_of(self, setting: Setting) -> tuple[float, Errors, str]:
        """Return the factor of the range, the errors of the narrowest group, and what its measurements are of.

        Raises KeyError: there are no times on this kind of device.
        """
        own = self.devices.get(setting.device)
        is_known = own is not None and own.rows >= FEWEST
        names = group_names(setting, is_known=is_known)
        name = next((name for name in names if name in self.errors), None)
        if name is None:
            raise KeyError(setting)
        errors, runtime = self.errors[name], f"of {setting.runtime} "
        if name.startswith("device"):
            return errors.factor, errors, f"{runtime}in {setting.precision} on this device"
        # The device's own times, of other settings, show that it is harder to estimate than others.
        factor = max(errors.factor, own.factor) if own is not None and is_known else errors.factor
        kind = KINDS[setting.kind] if is_known else f"other {KINDS[setting.kind]}"
        return factor, errors, f"{runtime if setting.runtime in name.split() else ''}on {kind}"

    def nearest(self, setting: Setting, operations: float) -> tuple[PublishedTime, ...]:
        """Return the three times of the device that are nearest in runtime, precision, phase and operations."""

        def distance(row: PublishedRow) -> float:
            same = (self.names[row[1]] == setting.runtime, row[2] == setting.precision, row[3] == setting.phase)
            return 2 * same.count(False) + abs(math.log(max(row[8], 1e-6) / max(operations / 1e9, 1e-6)))

        rows = sorted((row for row in self.rows if self.names[row[0]] == setting.device), key=distance)[:_NEAREST]
        return tuple(
            PublishedTime(
                model=self.names[model], runtime=self.names[runtime], precision=precision, phase=cast(Phase, phase),
                batch=batch, size=size, ms=ms, source=self.names[source],
            )
            for _, runtime, precision, phase, model, batch, size, ms, _, source in rows
        )  # fmt: skip

    def estimate_ms(self, setting: Setting, work: Sequence[float], operations: float) -> Estimated:
        """Return the time of a call. ``work``: of :func:`~edgeformer.estimate.roofline.work_ms`.

        Raises KeyError: no published time of this runtime on this kind of device.
        """
        p50 = sum(ms * factor for ms, factor in zip(work, self.factors(setting), strict=True))
        factor, errors, subject = self.errors_of(setting)
        facts = errors.model_dump(exclude={"factor"})
        check = PublishedCheck(subject=subject, nearest=self.nearest(setting, operations), **facts)
        return Estimated(p50, p50 / factor, p50 * factor, check)


@lru_cache(maxsize=1)
def published_record() -> PublishedRecord:
    text = resources.files(__package__).joinpath(PUBLISHED_FILE).read_text(encoding="utf-8")
    return PublishedRecord.model_validate_json(text)


def product_type(device: DeviceProfile, runtime: str, precision: str, tf32: Collection[str]) -> str:
    """Return ``tf32`` where a runtime multiplies FP32 so, as some do on cards since Ampere; else the precision.

    ``tf32``: these runtimes.
    """
    capability = device.compute_capability
    has_tf32 = capability is not None and float(capability.value) >= 8.0
    return "tf32" if precision == "fp32" and has_tf32 and runtime in tf32 else precision
