from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from edgeformer.stages.profiling import conditions
from edgeformer.stages.profiling.conditions import CpuReading, used_between
from edgeformer.stages.profiling.memory import (
    KernelPeak,
    PolledPeak,
    WindowsPeak,
    added,
    peak_meter,
    resident_bytes,
)

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own peak is Linux's")
def test_the_kernels_peak_sees_an_allocation_and_can_be_reset() -> None:
    meter = peak_meter()
    assert isinstance(meter, KernelPeak)
    block = bytearray(64 * MIB)
    del block
    now = resident_bytes()
    assert meter.peak_bytes() > now + 32 * MIB
    if meter.reset():
        assert meter.peak_bytes() < now + 16 * MIB


def test_polling_sees_an_allocation() -> None:
    meter = PolledPeak()
    try:
        before = resident_bytes()
        block = bytearray(64 * MIB)
        time.sleep(0.1)
        del block
        assert meter.peak_bytes() > before + 32 * MIB
        assert meter.reset()
        assert meter.peak_bytes() < before + 32 * MIB
    finally:
        meter.close()


def test_a_kernel_without_a_peak_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name: x\n", encoding="ascii")
    with pytest.raises(OSError, match="no VmHWM"):
        KernelPeak(tmp_path).peak_bytes()
    assert KernelPeak(tmp_path / "absent").reset() is False


def test_a_peak_that_could_not_be_reset_says_what_it_holds() -> None:
    class Fixed(WindowsPeak):
        def peak_bytes(self) -> int:
            return 500

    memory = added(Fixed(), baseline_bytes=200, since_reset=False)
    assert (memory.status, memory.peak, memory.baseline) == ("measured", 300, 200)
    assert "cannot reset" in str(memory.method)
    assert "cannot reset" not in str(added(Fixed(), baseline_bytes=200, since_reset=True).method)


def test_foreign_work_is_told_apart_from_our_own() -> None:
    before = CpuReading(at_s=10, busy_s=100, own_s=50, stolen_s=0, throttled=3)
    after = CpuReading(at_s=12, busy_s=105, own_s=53.9, stolen_s=0, throttled=3)
    use = used_between(before, after)
    assert (round(use.own_cores, 2), round(use.foreign_cores, 2)) == (1.95, 0.55)
    assert use.warnings() == ["other processes used 0.6 cores while this was measured"] or use.warnings() == [
        "other processes used 0.5 cores while this was measured"
    ]
    quiet = used_between(before, CpuReading(at_s=12, busy_s=104, own_s=53.9, stolen_s=0, throttled=3))
    assert quiet.warnings() == []


def test_stolen_time_and_throttling_are_named() -> None:
    before = CpuReading(at_s=0, busy_s=0, own_s=0, stolen_s=0, throttled=3)
    after = CpuReading(at_s=1, busy_s=1, own_s=1, stolen_s=0.5, throttled=4)
    noted = " / ".join(used_between(before, after).warnings())
    assert "hypervisor took 0.5 cores" in noted and "throttled because of heat" in noted


def test_a_real_spin_is_our_own_work() -> None:
    before = conditions.read_cpu()
    until = time.perf_counter() + 0.3
    while time.perf_counter() < until:
        pass
    assert used_between(before, conditions.read_cpu()).own_cores > 0.3


def test_conditions_leave_out_what_is_not_known() -> None:
    described = conditions.describe(threads=2, gpu_uuid=None)
    assert described["threads"] == 2
    assert "power" in described
    assert None not in described.values()
