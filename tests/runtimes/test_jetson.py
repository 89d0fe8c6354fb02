"""What doctor says of a Jetson, from files as a Jetson has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgeformer.runtimes.tensorrt import RUNTIME, state
from edgeformer.runtimes.tensorrt.state import jetson_capability

LINE = "# R{} (release), REVISION: {}, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Sep 11 2025\n"


def release(root: Path, number: int, revision: str) -> Path:
    (root / "etc").mkdir(parents=True)
    (root / "etc/nv_tegra_release").write_text(LINE.format(number, revision), encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("number", "revision", "status", "expected_detail"),
    [
        (32, "7.4", "unavailable", "JetPack 4 or older"),
        (35, "4.1", "unavailable", "Python is 3.8"),
        (36, "3.0", "unavailable", "TensorRT 8.6 has no strongly typed networks"),
        (36, "4.7", "available", "JetPack 6.1 or 6.2"),
        (39, "2.0", "available", "JetPack 7"),
    ],
)
def test_the_release_says_what_works(
    tmp_path: Path, number: int, revision: str, status: str, expected_detail: str
) -> None:
    (capability,) = jetson_capability(release(tmp_path, number, revision))
    assert (capability.name, capability.status, capability.version) == ("jetpack", status, f"L4T {number}.{revision}")
    assert expected_detail in capability.detail and "edgeformer is untested on a Jetson" in capability.detail
    assert (capability.remedy is None) == (status == "available")


def test_a_venv_that_hides_jetpacks_tensorrt_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.util, "find_spec", lambda name: None)
    root = release(tmp_path, 36, "4.7")
    package = root / f"usr/lib/python3.{sys.version_info.minor}/dist-packages/tensorrt"
    package.mkdir(parents=True)
    (capability,) = jetson_capability(root)
    assert capability.status == "unavailable" and "is not seen from this environment" in capability.detail
    assert "--system-site-packages" in str(capability.remedy) and "no index has TensorRT" in str(capability.remedy)
    package.rename(package.parents[1].with_name("moved"))
    other = root / f"usr/lib/python3.{sys.version_info.minor + 1}/dist-packages/tensorrt"
    other.mkdir(parents=True)
    (capability,) = jetson_capability(root)
    assert f"is for Python 3.{sys.version_info.minor + 1}, and this is Python" in capability.detail
    monkeypatch.setattr(state.util, "find_spec", lambda name: object())
    assert jetson_capability(root)[0].status == "available"


def test_a_file_that_names_no_release_is_told_and_other_machines_have_no_such_line(tmp_path: Path) -> None:
    assert jetson_capability(tmp_path) == []
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("strange", encoding="utf-8")
    assert "names no release" in jetson_capability(tmp_path)[0].detail


def test_doctor_asks() -> None:
    jetpack_lines = [line for line in RUNTIME.capabilities(20.0) if line.name == "jetpack"]
    assert jetpack_lines == jetson_capability()
