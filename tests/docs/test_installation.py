"""What documents and messages tell people to install: the clone or its wheel, never the name on the public index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeformer.formats.errors import install_hint

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
        install_hint("train", again=True),
        'pip install "dist/edgeformer-0.1.0-py3-none-any.whl[train]"',
    ],
)
def test_the_clone_and_the_wheel_are_no_names(text: str) -> None:
    assert BY_NAME.search(text) is None
