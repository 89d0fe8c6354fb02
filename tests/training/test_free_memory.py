"""What is free where a recipe trains, what was taken, and whether files fit: systems and cards as they tell it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from edgeformer.artifacts.data_config import DataConfig, DataSection, FileSource, SyntheticSource, TextConfig
from edgeformer.artifacts.errors import InputError
from edgeformer.system import memory as free_memory
from edgeformer.system.memory import group_free_bytes
from edgeformer.training import memory
from edgeformer.training.memory import KINDS, Event, check_data_fits, free_bytes


def test_free_memory_of_this_host() -> None:
    free, what = free_bytes("cpu")
    assert free > 2**20 and "now" in what


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Path]:
    """A control group /a/b, version 2, without limits."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/a/b\n", encoding="utf-8")
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        (folder / "memory.max").write_text("max\n", encoding="utf-8")
        (folder / "memory.current").write_text("700\n", encoding="utf-8")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 200\n", encoding="utf-8")
    yield tmp_path


def test_a_control_groups_limit_counts(groups: Path) -> None:
    membership = groups / "membership"
    assert group_free_bytes(groups, membership) is None
    (groups / "a" / "memory.max").write_text("1000\n", encoding="utf-8")  # a limit further up
    assert group_free_bytes(groups, membership) == 1000 - (700 - 200)
    (groups / "a" / "b" / "memory.max").write_text("600\n", encoding="utf-8")
    assert group_free_bytes(groups, membership) == 100
    (groups / "a" / "b" / "memory.max").write_text("400\n", encoding="utf-8")
    assert group_free_bytes(groups, membership) == 0
    assert group_free_bytes(groups, groups / "no such file") is None


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "box"
    folder.mkdir(parents=True)
    (tmp_path / "membership").write_text("5:cpu,memory:/box\n3:pids:/x\n", encoding="utf-8")
    (folder / "memory.limit_in_bytes").write_text("5000", encoding="utf-8")
    (folder / "memory.usage_in_bytes").write_text("4000", encoding="utf-8")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 300\n", encoding="utf-8")
    assert group_free_bytes(tmp_path, tmp_path / "membership") == 1300


def test_the_tighter_of_the_hosts_memory_and_the_groups_limit_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    for limited, expected in ((None, 1000), (999, 999), (1000, 1000), (1001, 1000)):
        monkeypatch.setattr(free_memory, "group_free_bytes", lambda groups, membership, limited=limited: limited)
        free, what = free_bytes("cpu")
        assert free == expected and ("cgroup" in what) == (limited == 999)


def test_free_memory_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card 1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7, 9))
    assert free_bytes("cuda") == (7, "free on Card 1 now")


def test_the_groups_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(free_memory, "group_free_bytes", lambda *given: asked.append(given))
    free_bytes("cpu")
    assert asked == [(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))]


def test_only_groups_that_limit_memory_count_and_those_of_both_versions(tmp_path: Path) -> None:
    """A hybrid of version 1 and 2, as systemd mounts it; the root's limit counts where the path leads nowhere."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "membership").write_text("3:pids,cpu:/x:y\n2:cpu,memory:/go:ne\n0::/gone\n", encoding="utf-8")
    assert group_free_bytes(tmp_path, tmp_path / "membership") is None
    for folder, names, limit in (
        (tmp_path / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), 500),
        (tmp_path, ("memory.max", "memory.current"), 400),
    ):
        for name, value in zip(names, (limit, 100), strict=True):
            (folder / name).write_text(f"{value}\n", encoding="utf-8")
    assert group_free_bytes(tmp_path, tmp_path / "membership") == 300, "without memory.stat nothing is a cache"
    (tmp_path / "memory.stat").write_text("anon 7\n", encoding="utf-8")
    assert group_free_bytes(tmp_path, tmp_path / "membership") == 300
    (tmp_path / "memory.stat").write_text("inactive_file 250\n", encoding="utf-8")
    assert group_free_bytes(tmp_path, tmp_path / "membership") == 400, "now version 1's is the tighter one"


@pytest.mark.parametrize(("platform", "peak"), [("linux", 5 * 1024), ("darwin", 5)])
def test_the_systems_peak_is_in_kilobytes_or_on_macos_in_bytes(
    platform: str, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    usage = {resource.RUSAGE_SELF: SimpleNamespace(ru_maxrss=5), resource.RUSAGE_CHILDREN: SimpleNamespace(ru_maxrss=9)}
    monkeypatch.setattr(resource, "getrusage", usage.__getitem__)
    found, what = memory.measured_peak("cpu")
    assert found == peak and "resident set" in what


def test_a_cards_peak_is_its_allocators_and_windows_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    found, what = memory.measured_peak("cuda")
    assert found == 123 and "CUDA" in what
    monkeypatch.setattr(sys, "platform", "win32")
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=77))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    found, what = memory.measured_peak("cpu")
    assert found == 77 and "working set" in what


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=str,
)
def test_memory_that_ran_out_is_recognised(error: Exception) -> None:
    assert memory.is_out_of_memory(error)


class OutOfResources(Exception):
    """As Triton's, which derives from Exception."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        ValueError("DefaultCPUAllocator"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: too many resources requested for launch"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        OutOfResources("out of resource: shared memory, Required: 132096, Hardware limit: 101376"),
        RuntimeError("OutOfResources: out of resource: shared memory, Required: 132096, Hardware limit: 101376"),
    ],
    ids=str,
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not memory.is_out_of_memory(error)


MIB = 2**20


def test_what_libraries_and_allocators_keep() -> None:
    counted = dict.fromkeys(KINDS, 10 * MIB)
    assert memory._cuda_reserve(counted) == 64 * MIB + 2 * MIB
    events = [
        Event(0, 20 * MIB, "activations"),
        Event(1, 10 * MIB, "temporary"),
        Event(2, 32 * MIB, "activations"),  # a block of its own, beside the heap
        Event(3, 10 * MIB, "gradients"),
    ]
    assert memory._cpu_reserve(events, "fp32") == 35 * MIB + 21 * MIB
    assert memory._cpu_reserve(events, "bf16") == 35 * MIB + 36 * MIB, "primitives lie between the tensors"
    block = [Event(0, 40 * MIB, "temporary"), Event(0, 0, "gradients"), Event(1, 1, "temporary")]
    assert memory._cpu_reserve(block, "fp32") == 35 * MIB + 1, "also where it becomes a gradient"
    early = [Event(0, 40 * MIB, "temporary"), *(Event(1, size, "temporary") for size in (MIB, -MIB))]
    assert memory._cpu_reserve([*early, Event(0, 0, "gradients")], "fp32") == 35 * MIB + round(0.7 * MIB)
    assert memory._cpu_reserve([Event(0, 32 * MIB - 10, "temporary")], "fp32") == 35 * MIB + round(
        0.7 * (32 * MIB - 10)
    )


def data_of(folder: Path, **changes: Any) -> DataSection:
    """Files of 100 bytes to train on, of 30 and 5 to validate on, of 7 to test on; and text that is in no file."""
    sources = {}
    for name, size in (("train", 100), ("validation", 30), ("more", 5), ("test", 7)):
        (folder / name).write_bytes(b"x" * size)
        sources[name] = FileSource(kind="file", path=str(folder / name))
    parts = {
        "train": (sources["train"], SyntheticSource(kind="synthetic-reviews", rows=9)),
        "validation": (sources["validation"], sources["more"]),
        "test": (sources["test"], FileSource(kind="file", path=str(folder / "not there yet"))),
    }
    return TextConfig(parts=parts, mode="packed", sequence_length=8, **changes)


@pytest.mark.parametrize(
    ("changes", "processes", "needed"),
    [
        ({}, 1, 2 * 142),
        ({}, 3, 6 * 142),
        ({"stream": True}, 1, 2 * 42),
        ({"first_n": 5}, 2, 4 * 42),  # of the training set no more is read than that
    ],
)
def test_files_take_twice_their_size_in_every_process_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], processes: int, needed: int
) -> None:
    data, asked = data_of(tmp_path, **changes), []

    def free(kind: str) -> tuple[int, str]:
        asked.append(kind)
        return needed - len(asked) + 1, "free"

    monkeypatch.setattr(memory, "free_bytes", free)
    check_data_fits(data, processes)
    with pytest.raises(InputError) as refused:
        check_data_fits(data, processes)
    assert asked == ["cpu", "cpu"]
    said = str(refused.value)
    assert said.startswith(f"data.parts: {needed // 2} B of files {'(' if processes > 1 else 'take'}")
    assert f"at least {needed} B in memory, and {needed - 1} B are free;" in said
    assert (f"(those of {processes} processes)" in said) == (processes > 1)
    assert ("make the sets besides train smaller" in said) == ("stream" in changes)
    assert ("--set data.stream=true" in said) == ("stream" not in changes)


def test_one_process_reads_files_unless_there_are_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda kind: (2 * 142, "free"))
    check_data_fits(data_of(tmp_path))
    # a classifier's data, which knows no first_n
    labelled = DataConfig(parts=data_of(tmp_path).parts, split="given", labels=("bad", "good"))
    check_data_fits(labelled)
    monkeypatch.setattr(memory, "free_bytes", lambda kind: (2 * 142 - 1, "free"))
    with pytest.raises(InputError, match="142 B of files take"):
        check_data_fits(labelled)
