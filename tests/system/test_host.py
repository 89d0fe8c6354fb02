"""The processor's name on systems that are not this one, from copies of their files."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from edgeformer.system.host import board_names, cpu_name

X86 = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t\t: 190\nmodel name\t: Intel(R) N100\nflags\t\t: fpu avx2\n"
# NVIDIA's kernels write a "model name" that is the same on every board.
TEGRA = "processor\t: 0\nmodel name\t: ARMv8 Processor rev 1 (v8l)\nCPU implementer\t: 0x41\nCPU part\t: 0xd42\n"
PI = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n"
SERVER = "processor\t: 0\nBogoMIPS\t: 2100.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
UNIVERSAL = platform.processor() or platform.machine()


def write_root(root: Path, cpuinfo: str | None = None, **tree: bytes) -> Path:
    """A root folder with /proc/cpuinfo and the entries of /proc/device-tree."""
    folder = root / "proc" / "device-tree"
    folder.mkdir(parents=True)
    if cpuinfo is not None:
        (root / "proc" / "cpuinfo").write_text(cpuinfo, encoding="utf-8")
    for name, content in tree.items():
        (folder / name).write_bytes(content)
    return root


def test_an_x86_processor_is_named_by_cpuinfo(tmp_path: Path) -> None:
    assert cpu_name(write_root(tmp_path, X86), "linux") == "Intel(R) N100"


def test_a_board_is_named_by_its_device_tree_where_cpuinfo_has_no_name(tmp_path: Path) -> None:
    jetson = write_root(tmp_path / "jetson", TEGRA, model=b"NVIDIA Jetson Orin Nano Developer Kit Super\0")
    assert cpu_name(jetson, "linux") == "NVIDIA Jetson Orin Nano Developer Kit Super"
    pi = write_root(tmp_path / "pi", SERVER, model=b"Raspberry Pi 5 Model B Rev 1.1\0")
    assert cpu_name(pi, "linux") == "Raspberry Pi 5 Model B Rev 1.1"


def test_a_raspberry_pi_in_a_container_is_named_by_cpuinfo(tmp_path: Path) -> None:
    assert cpu_name(write_root(tmp_path, PI), "linux") == "Raspberry Pi 5 Model B Rev 1.0"


def test_arm_servers_are_told_apart_by_their_identification_register(tmp_path: Path) -> None:
    found = cpu_name(write_root(tmp_path, SERVER), "linux")
    assert found.endswith("(implementer 0x41, part 0xd40)")


def test_jetsons_kernel_name_is_better_than_nothing(tmp_path: Path) -> None:
    assert cpu_name(write_root(tmp_path, "model name\t: ARMv8 Processor rev 1 (v8l)\n"), "linux") == (
        "ARMv8 Processor rev 1 (v8l)"
    )


@pytest.mark.parametrize("content", [None, "", "\x00\xff garbage without a colon\n"])
def test_a_system_that_says_nothing_leaves_the_architecture(tmp_path: Path, content: str | None) -> None:
    assert cpu_name(write_root(tmp_path, content), "linux") == UNIVERSAL


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for sysctl is a shell script")
@pytest.mark.parametrize(
    ("script", "name"),
    [
        ('[ "$*" = "-n machdep.cpu.brand_string" ] && echo "Apple M4"', "Apple M4"),
        ("echo unknown oid >&2; exit 1", UNIVERSAL),
    ],
)
def test_macos_is_asked_with_sysctl(tmp_path: Path, script: str, name: str) -> None:
    program = tmp_path / "usr" / "sbin" / "sysctl"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    assert cpu_name(tmp_path, "darwin") == name


def test_board_names_are_the_model_and_what_it_is_compatible_with(tmp_path: Path) -> None:
    compatible = b"nvidia,p3768-0000+p3767-0003-super\0nvidia,p3767-0003\0nvidia,tegra234\0"
    root = write_root(
        tmp_path / "jetson", model=b"NVIDIA Jetson Orin Nano Developer Kit Super\0", compatible=compatible
    )
    assert board_names(root) == (
        "NVIDIA Jetson Orin Nano Developer Kit Super",
        "nvidia,p3768-0000+p3767-0003-super",
        "nvidia,p3767-0003",
        "nvidia,tegra234",
    )
    assert board_names(tmp_path / "nothing here") == ()


def test_this_host_has_a_name() -> None:
    assert cpu_name().strip() == cpu_name() != ""
