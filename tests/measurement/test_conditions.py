"""What else the machine, and the measuring process itself, did while something was measured."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edgeformer.artifacts.report import Conditions
from edgeformer.measurement import conditions
from edgeformer.measurement.conditions import CpuReading, CpuUse, doubts, used_between
from edgeformer.system import nvidia

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def reading(at_s: float = 0.0, busy_s: float = 0.0, own_s: float = 0.0, **more: object) -> CpuReading:
    return CpuReading(**{"at_s": at_s, "busy_s": busy_s, "own_s": own_s, "stolen_s": 0.0, "throttled": None, **more})


def use(**changes: object) -> CpuUse:
    return CpuUse(**{"own_cores": 1.0, "foreign_cores": 0.0, "stolen_cores": 0.0, "throttled": False, **changes})


@pytest.mark.parametrize(
    ("changes", "cores", "disturbed"),
    [
        ({}, 2, False),
        ({"foreign_cores": 0.15}, 2, False),
        ({"foreign_cores": 0.3}, 2, True),
        ({"foreign_cores": 0.15, "stolen_cores": 0.1}, 2, True),
        ({"foreign_cores": 0.3}, 16, False),  # a warning, but not a tenth of this machine
        ({"foreign_cores": 1.7}, 16, True),
        ({"throttled": True}, 16, True),
        ({"own_cores": 1.31}, 16, True),
        ({"own_cores": 1.0, "busy_threads": {1: 0.5}}, 2, True),  # two threads share a core, where there should be one
    ],
)
def test_too_much_other_work_is_a_disturbance(changes: dict[str, object], cores: int, disturbed: bool) -> None:
    assert use(**changes).disturbed(cores, 1) is disturbed


def test_a_crowd_counts_cores_and_threads_of_every_graph() -> None:
    two = use(own_cores=1.6, busy_threads={1: 0.4, 2: 0.4})
    assert two.crowd(2) and not two.crowd(2, pools=3)
    assert two.warnings(2, pools=3) == [] and not two.disturbed(2, 2, pools=3)
    (noted,) = use(busy_threads={999999998: 0.5, 999999999: 0.6}).warnings(2)
    assert noted == "the measuring process used 1.0 cores with 3 threads, but the artifact was given 2 threads"
    assert use(busy_threads={999999998: 0.5}).warnings(2) == [], "the artifact's second thread"
    (noted,) = use(own_cores=2.6).warnings(2)
    assert noted == "the measuring process used 2.6 cores with 1 threads, but the artifact was given 2 threads"


def test_a_real_spinning_thread_is_seen_beside_the_one_that_measures() -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    first = conditions.read_cpu()
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        sum(range(1000))
    use_after = used_between(first, conditions.read_cpu())
    stop.set()
    thread.join()
    assert use_after.crowd(1) and not use_after.crowd(2)
    assert list(use_after.busy_threads) == [thread.native_id]


def test_battery_governor_heat_and_power_supply_are_doubts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doubts(Conditions(power="mains", governor="performance"), CPU) == []
    noted = doubts(Conditions(power="battery 83%", governor="powersave"), CPU)
    assert "measured on battery 83%" in noted[0] and "lowest clock" in noted[1]
    assert doubts(Conditions(power="mains", governor="powersave", governor_scales=True), CPU) == []
    monkeypatch.setattr(conditions, "slowdowns", lambda: ["the supply voltage is too low"])
    described = conditions.describe(1, None)
    assert "the system slows the processor: the supply voltage is too low" in doubts(Conditions(**described), CPU)
    folder = tmp_path / "cpu0" / "cpufreq"
    folder.mkdir(parents=True)
    (folder / "scaling_governor").write_text("powersave\n", encoding="ascii")
    monkeypatch.setattr(conditions, "_CPU", tmp_path)
    described = conditions.describe(1, None)
    assert described["governor"] == "powersave" and "governor_scales" not in described


def test_card_slowdowns_and_foreign_processes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        slowed = ("power limit", "heat (software)")
        state = nvidia.GpuState(1500, 8000, 71, 55.0, "0x24", None, (other.pid, 2**31 - 1), slowed)
        monkeypatch.setattr(nvidia, "state", lambda uuid: state)
        described = conditions.describe(1, "GPU-1")
        other.kill()
    assert described["gpu_slowed_by"] == slowed
    process, ended = described["gpu_foreign_processes"]
    assert process.endswith(f"({other.pid})") and "python" in process.lower()
    assert ended == f"process {2**31 - 1}", "a process that cannot be asked keeps its number"
    noted = doubts(Conditions(**described), CUDA)
    assert noted[-3:-1] == ["the card lowered its clocks: power limit", "the card lowered its clocks: heat (software)"]
    assert process in noted[-1]
    assert not any("card" in note for note in doubts(Conditions(**described), CPU))


@pytest.mark.parametrize(
    ("first", "second", "warnings"),
    [
        ({"mhz": 4000.0}, {"mhz": 3800.0}, []),
        ({"mhz": 4000.0}, {"mhz": 2000.0}, ["the processor's clock fell by 50%"]),
        ({"mhz": None}, {"mhz": 2000.0}, []),
        ({"busy_s": 9.0, "own_s": 5.0}, {"busy_s": 11.5, "own_s": 6.9}, ["other processes used 0.6 cores"]),
        ({"busy_s": 9.0, "own_s": 5.0}, {"busy_s": 11.05, "own_s": 6.9}, []),
        ({"throttled": 3}, {"stolen_s": 0.5, "throttled": 4},
         ["the hypervisor took 0.5 cores away", "the processor throttled because of heat"]),
        ({"throttled": 3}, {"throttled": 3}, []),
    ],
)  # fmt: skip
def test_what_happened_between_two_readings_is_named(first, second, warnings):
    """Other work is what the machine did without this process."""
    result = used_between(reading(**first), reading(**{"at_s": 1.0, **second}))
    assert result.warnings() == [f"{text} while this was measured" for text in warnings]


def test_android_shows_no_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/stat and /proc/loadavg are forbidden to programs there; a check that was not made is no good result."""

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(conditions.psutil, "cpu_times", forbidden)
    monkeypatch.setattr(conditions.os, "getloadavg", forbidden)
    used = used_between(conditions.read_cpu(), conditions.read_cpu())
    assert used.foreign_cores is None and not used.disturbed(8, None)
    assert "this system does not say whether other processes computed while this was measured" in used.warnings()
    assert "load_average_1min" not in conditions.describe(1, None)
