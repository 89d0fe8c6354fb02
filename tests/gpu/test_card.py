"""What a card says of itself, and times that are taken on it."""

import time

import numpy as np
import pytest
import torch

from benchmarks.gpu.timing import SHORT, TINY, times
from edgeformer.measurement.trackers import energy_counter, measure_energy
from edgeformer.system import nvidia
from edgeformer.system.cuda_driver import Cuda, DeviceMemory, devices

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def test_a_call_is_not_over_before_the_card_has_finished() -> None:
    matrix = torch.randn(6144, 6144, device="cuda")
    measured = times(lambda: matrix @ matrix, "cuda", TINY)
    assert measured["p50_ms"] >= 0.5 * measured["device_p50_ms"] > 0


def test_the_drivers_own_events_agree_with_torch() -> None:
    cuda = Cuda()
    try:
        memory = DeviceMemory(cuda, 64 * MIB)
        array = np.zeros(64 * MIB, np.uint8)
        cuda.upload(array, memory)
        cuda.synchronise()
        assert 0 < cuda.timed_ms(lambda: cuda.upload(array, memory)) < 1000
        memory.free()
    finally:
        cuda.close()


def test_torch_the_driver_and_nvml_know_the_same_card(gpu: nvidia.Gpu, card: str) -> None:
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    assert card in [device.name for device in devices()] and gpu.compute_capability == capability
    assert gpu.memory_bytes is not None
    assert gpu.memory_bytes == pytest.approx(torch.cuda.get_device_properties(0).total_memory, rel=0.1)


def test_nvml_sees_memory_that_is_taken(gpu: nvidia.Gpu) -> None:
    torch.zeros(1, device="cuda")
    used_bytes = nvidia.card_used_bytes(gpu.uuid)
    block = torch.zeros(512 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    increased = nvidia.card_used_bytes(gpu.uuid)
    assert used_bytes is not None and increased is not None and increased - used_bytes >= 400 * MIB
    del block


def test_work_costs_energy(gpu: nvidia.Gpu) -> None:
    state = nvidia.state(gpu.uuid)
    if state is None or state.energy_mj is None:
        pytest.skip("this card has no energy counter")
    matrix = torch.randn(8192, 8192, device="cuda")
    began = time.monotonic()
    while time.monotonic() - began < 1:
        matrix @ matrix
        torch.cuda.synchronize()
    final = nvidia.state(gpu.uuid)
    assert final is not None and final.energy_mj is not None and final.energy_mj - state.energy_mj > 10_000

    def call(_: int) -> None:
        matrix @ matrix
        torch.cuda.synchronize()

    energy = measure_energy(call, energy_counter("torch-cuda", gpu.uuid), SHORT)
    assert energy.status == "measured" and energy.value is not None and energy.value > 0
