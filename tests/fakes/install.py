"""Example packages in this folder with a model or a runtime, installed temporarily."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgeformer import registry

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODELS = sorted(folder.name for folder in HERE.glob("*_model"))
RUNTIMES = sorted(folder.name for folder in HERE.glob("*_runtime"))


@contextmanager
def installed(*names: str) -> Iterator[None]:
    """Put example packages on the path of this process and of processes that it starts.

    Args:
        names: folders with a package and its ``dist-info``, e.g. ``averaging_model``.
    """
    folders = [str(HERE / name) for name in names]
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([*folders, str(ROOT), os.environ.get("PYTHONPATH", "")]))
        registry._announced.cache_clear()
        yield
    registry._announced.cache_clear()
