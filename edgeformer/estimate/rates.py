"""From a device profile's facts to the rates that an estimate needs, or which fact is missing."""

from __future__ import annotations

from dataclasses import dataclass

from edgeformer.artifacts.device import Calibration, DeviceProfile, EstimateError, Fact
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.units import format_bytes
from edgeformer.runtimes import library_versions
from edgeformer.system.capability import kernel_flags
from edgeformer.system.host import cpu_name, stated_cache_bytes

# Processors without instructions for INT8 products: no faster than FP32 at worst; at best a register holds four times
# as many numbers, of which widening to 16 and 32 bits costs half.
_INT8_WITHOUT_INSTRUCTIONS = 2.0


RAMP = (0.25, 1.25)
"""As seen in chains of 4 to 96 MiB of weights on a CPU with 32 MiB: their time per byte rises from 8 to 40 MiB."""


@dataclass(frozen=True)
class Rates:
    """What a device can do at one precision.

    Attributes:
        peak: operations per second of matrix products; `sure_peak` is the least that the peak may be (GeForce cards
            halve it where FP16 products are summed in FP32).
        vector_peak: operations per second of everything else.
        bandwidth: bytes per second of the memory.
        cache_bytes: last-level cache; 0: none is known.
        overlap: exponent x of (computing^x + reading^x)^(1/x), which a product takes that computes while it reads
            weights of the cache; 1: one after the other, the larger the more it does both at once.
        ramp: shares of the cache from which on it keeps less than all that is used over and over, and nothing.
        overhead_us: from one kernel or operator to the next.
        cores: streaming multiprocessors of a GPU; None: not known, or a CPU.
    """

    peak: float
    sure_peak: float
    vector_peak: float
    bandwidth: float
    cache_bytes: float
    overhead_us: float
    cores: int | None = None
    gpu: bool = False
    ramp: tuple[float, float] = RAMP
    overlap: float = 1.0


def rates_of(device: DeviceProfile, precision: str) -> Rates:
    """The device's rates for an artifact.

    Args:
        device: its facts.
        precision: of the artifact.

    Raises:
        EdgeformerError: the profile does not say something that is needed.
    """
    fp32 = _value(device, "peaks.fp32", device.peaks.fp32)
    # ONNX Runtime's CPU provider computes FP16 graphs in FP32.
    peak, sure_peak = fp32, fp32
    if device.kind == "cuda":
        peaks = [fact.value for fact in device.peaks.of(precision)]
        if not peaks:
            raise EdgeformerError(f"device profile {device.name!r} does not say peaks.{precision}")
        # ONNX's dynamic INT8 runs as INT8 only where the runtime has kernels for it; else it is widened first.
        peak, sure_peak = max(peaks), fp32 if precision == "int8" else min(peaks)
    elif precision in ("int8", "int4"):  # weights of 4 bits meet activations in INT8
        peak = device.peaks.int8.value if device.peaks.int8 is not None else fp32 * _INT8_WITHOUT_INSTRUCTIONS
    return Rates(
        peak=peak,
        sure_peak=sure_peak,
        vector_peak=fp32,
        bandwidth=_value(device, "bandwidth_bytes_per_s", device.bandwidth_bytes_per_s),
        cache_bytes=device.cache_bytes.value if device.cache_bytes is not None else 0,
        overhead_us=_value(device, "launch_overhead_us", device.launch_overhead_us),
        cores=device.cores.value if device.cores is not None else None,
        gpu=device.kind == "cuda",
        ramp=(device.calibration.cache_ramp if device.calibration is not None else None) or RAMP,
        overlap=device.calibration.overlap if device.calibration is not None else 1.0,
    )


def refused_calibration(device: DeviceProfile) -> str | None:
    """Why the profile's calibration says nothing about the device it stands for; None when it does, or has none.

    A profile without ``match`` stands for this host; copied from another machine it would lie, also where that has a
    processor of the same name: virtual machines call very different ones alike.
    """
    calibration, expected = device.calibration, cpu_name() if device.match is None else device.match
    if calibration is None:
        return None
    if expected.lower() not in calibration.processor.lower():
        return (
            f"device profile {device.name!r} was calibrated for another processor ({calibration.processor}, not "
            f"{expected}); run edgeformer calibrate there"
        )
    differs = _differences(calibration) if device.match is None else []
    if not differs:
        return None
    return f"device profile {device.name!r} was calibrated {'; '.join(differs)}; run edgeformer calibrate"


def _differences(calibration: Calibration) -> list[str]:
    """Return the environment differences that change kernel selection. Missing fields count as equal."""
    runtime = "onnxruntime"
    calibrated, installed = (_release(versions.get(runtime)) for versions in (calibration.versions, library_versions()))
    cache, flags = calibration.stated_cache_bytes, calibration.instructions
    differences = []
    if calibrated is not None and calibrated != installed:
        differences.append(f"with ONNX Runtime {calibrated}, and {installed or 'none'} is installed here")
    if flags is not None and (present := kernel_flags()) is not None and set(flags) != set(present):
        calibrated_flags, present_flags = (", ".join(names) or "none" for names in (flags, present))
        differences.append(f"for the instructions {calibrated_flags}, and here are {present_flags}")
    if cache is not None and (stated := stated_cache_bytes()) is not None and cache != stated:
        differences.append(f"beside a cache of {format_bytes(cache)}, and here are {format_bytes(stated)}")
    return differences


def _release(version: str | None) -> str | None:
    """1.23 of 1.23.2: those that follow mend it, and compute alike."""
    return ".".join(version.split(".")[:2]) if version is not None else None


def speed_words(calibration: Calibration) -> str:
    """Describe the machine speed that the estimates hold for; empty if it was not measured."""
    speed, other = calibration.speed, calibration.other_speed
    if speed is None:
        return ""
    condition = (
        f"at the speed at which the reference product takes {speed.product_us:.0f} µs and the copy {speed.copy_us:.0f}"
    )
    if other is None:
        return condition
    product, copy = other.product_us / speed.product_us, other.copy_us / speed.copy_us
    both = f"{condition}; this machine has two speeds, and at the other"
    if calibration.response is None:
        return f"{both} everything takes about {product:.2f} times as long"
    slower = product**calibration.response.of_product * copy**calibration.response.of_copy
    return f"{both} a call takes about {slower:.2f} times as long"


def _value(device: DeviceProfile, name: str, fact: Fact[float] | None) -> float:
    if fact is None:
        how = "; run edgeformer calibrate" if device.kind == "cpu" and device.match is None else ""
        raise EdgeformerError(f"device profile {device.name!r} does not say {name}{how}")
    return fact.value


def known_error(device: DeviceProfile, host: DeviceProfile | None = None) -> EstimateError | None:
    """How wrong this estimator was where it was checked: on the device itself, else on this host's processor.

    Args:
        device: whose rows are estimated.
        host: this host's calibrated profile, if there is one; another machine's says nothing and is left out.
    """
    for profile in (device, host):
        if profile is not None and profile.calibration is not None and refused_calibration(profile) is None:
            return profile.calibration.error
    return None
