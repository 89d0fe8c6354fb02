"""Fixtures for every test folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The public test data; a test that uses it is marked ``data`` and skipped where the data is absent."""
    folder = Path(os.environ.get("EDGEFORMER_TEST_DATA", _ROOT / ".." / "shared" / "data"))
    if not (folder / "sst2" / "train.tsv").is_file():
        pytest.skip(f"no public test data in {folder}; set EDGEFORMER_TEST_DATA to its folder")
    return folder
