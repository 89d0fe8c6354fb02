"""What documents and messages tell people to install: the clone or its wheel, never the name on the public index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.documents import load_profile, shipped_names
from edgeformer.artifacts.errors import install_hint
from edgeformer.system.capability import CUDA_13_DRIVER

ROOT = Path(__file__).resolve().parents[2]
# pip install [options] edgeformer, quoted or not, unless it is a path or a wheel's file name; edgeformer[extra]
BY_NAME = re.compile(r"pip3? install (?:-\S+ )*[\"'`\\]*edgeformer(?![-\w/.])|\bedgeformer\[(?=[\w{])")
PLACES = (
    "README.md", "Makefile", "pyproject.toml", ".github", "benchmarks", "docs", "edgeformer", "profiles", "recipes",
    "tests",
)  # fmt: skip
AS_THEY_WERE = (ROOT / "tests" / "old_format", ROOT / "benchmarks" / "results")
"""Records of former versions, which stay as they were written."""


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of every file that a person may read, but of this one."""
    for place in PLACES:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            skipped = "__pycache__" in file.parts or any(folder in file.parents for folder in AS_THEY_WERE)
            if file.is_file() and not skipped and file != Path(__file__).resolve():
                yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8", errors="replace")


def test_nothing_installs_edgeformer_by_its_name() -> None:
    """A stranger could claim the name on the public index."""
    read = dict(texts())
    assert len(read) > 300
    assert [f"{name}: {hit[0]}" for name, text in read.items() for hit in BY_NAME.finditer(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install edgeformer",
        'python -m pip install -q "edgeformer[rtx]"',
        "pip install 'edgeformer'",
        "edgeformer[trt]",
    ],
)
def test_the_names_are_recognised(text: str) -> None:
    assert BY_NAME.search(text)


@pytest.mark.parametrize(
    "text",
    [
        install_hint("rtx"),
        install_hint("train", reinstall=True),
        'pip install "dist/edgeformer-0.1.0-py3-none-any.whl[train]"',
    ],
)
def test_the_clone_and_the_wheel_are_no_names(text: str) -> None:
    assert BY_NAME.search(text) is None


def readme_row(start: str) -> str:
    """The commands of a machine in the README's table."""
    rows = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith(start)]
    assert len(rows) == 1, start
    return rows[0]


def test_an_rtx_card_wants_python_3_11_and_the_driver_that_doctor_wants() -> None:
    row = readme_row("| Linux, RTX card")
    assert "Python 3.11 or newer" in row and f"driver R{CUDA_13_DRIVER} or newer" in row
    assert "onnxruntime-ep-nv-tensorrt-rtx" in row


@pytest.mark.parametrize("machine", ["| CPU only", "| Jetson"])
def test_a_machine_that_trains_on_its_processor_takes_a_cpu_torch_first(machine: str) -> None:
    row = readme_row(machine)
    first, extra = row.index("first torch"), row.index('".[train]"')
    assert first < extra, "pip keeps a torch that is installed already"
    assert "pytorch.org" in readme_row("| CPU only")


def test_the_readme_names_what_older_drivers_and_python_3_14_cannot_run() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"CUDA 13, which needs NVIDIA driver R{CUDA_13_DRIVER} or newer; `edgeformer doctor` compares" in text
    assert "torch-tensorrt, which `trt` installs, has no wheel for Python 3.14" in text


def test_the_readme_assigns_each_card_the_tensorrt_of_its_profile() -> None:
    profiles = [load_profile(name) for name in shipped_names("profiles")]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rtx, other = re.findall(r"for (RTX 20, .*?) cards\).*?the extra `trt`: (.*?) \(`tensorrt:`", text)[0]

    def series(profile: DeviceProfile) -> str:
        results = re.search(r"RTX \d0|GTX \d\d|\b[ATHL]\d+", profile.title)
        assert results is not None, profile.title
        return results[0].removeprefix("RTX ")

    for profile in profiles:
        if profile.tensorrt == "none" or "Jetson" in profile.title or profile.name == "h200":
            continue
        assert series(profile) in (rtx if profile.tensorrt == "rtx" else other), profile.name
