"""What NVML says, through the real pynvml: cards of several platforms, each of which leaves something out."""

import subprocess
import sys

from edgeformer.system import nvidia
from tests.fakes.nvml import FUNCTION_NOT_FOUND, JETSON, LAPTOP, MIB, UUID, WINDOWS, Driver


def test_a_laptops_card_at_one_moment(nvml: Driver) -> None:
    assert nvidia.gpus() == [] and nvidia.state(UUID) is None and nvidia.driver_version() is None
    nvml.answer(LAPTOP)
    (card,) = nvidia.gpus()
    assert card == nvidia.Gpu(0, "NVIDIA GeForce RTX 4050 Laptop GPU", UUID, 6141 * MIB, "8.9")
    clocks = {"sm_clock_mhz": 1500, "memory_clock_mhz": 8001, "temperature_c": 67, "power_limit_w": 55.0}
    uses = {"energy_mj": 1_000_000, "process_ids": (3, 5, 7)}  # who draws uses the card, too
    slowed = {"throttle_reasons": "0x25", "slowed_by": ("power limit", "heat (software)")}  # idling is no slowdown
    assert nvidia.state(UUID) == nvidia.GpuState(**clocks, **uses, **slowed)
    assert nvidia.card_used_bytes(UUID) == 412 * MIB and nvidia.driver_version() == "580.95.05"
    assert nvidia.process_memory_bytes(7) == 500 and nvidia.process_memory_bytes(9) is None
    assert not nvidia.uses_wddm(UUID)
    assert nvidia.state("GPU-of-another-machine") is None
    assert nvml.opened == 0


def test_windows_hides_the_memory_of_processes(nvml: Driver) -> None:
    nvml.answer(WINDOWS)
    assert nvidia.uses_wddm(UUID)
    assert nvidia.process_memory_bytes(7) is None
    state = nvidia.state(UUID)
    assert state is not None and state.process_ids == (5, 7)
    for other in (1, 2):  # TCC, MCDM
        nvml.answer({**WINDOWS, "nvmlDeviceGetDriverModel_v2": other})
        assert not nvidia.uses_wddm(UUID)
    for model in (0, 1):  # an older driver has an older function for it
        older = {"nvmlDeviceGetDriverModel_v2": FUNCTION_NOT_FOUND, "nvmlDeviceGetDriverModel": model}
        nvml.answer({**WINDOWS, **older})
        assert nvidia.uses_wddm(UUID) is (model == 0)


def test_a_jetson_supports_next_to_nothing(nvml: Driver) -> None:
    nvml.answer(JETSON)
    assert nvidia.gpus() == [nvidia.Gpu(0, "Orin (nvgpu)", "", None, "8.7")]
    assert nvidia.state("") is None and nvidia.card_used_bytes("") is None and not nvidia.uses_wddm("")
    assert nvidia.process_memory_bytes(1) is None


def test_pynvml_finds_the_library_by_its_name(nvml: Driver) -> None:
    """In a process of its own, which loads it as it loads the driver's."""
    nvml.answer(LAPTOP)
    program = "from edgeformer.system import nvidia; print(*[card.name for card in nvidia.gpus()])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == LAPTOP["nvmlDeviceGetName"]
