"""A trained language run, shared by this folder's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inference.language_run import write_language_run


@pytest.fixture(scope="session")
def language_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """artifacts/tiny, which has memorized one text. Read only."""
    return write_language_run(tmp_path_factory.mktemp("language") / "artifacts" / "tiny")
