"""Packages that stand in this folder, installed for a while: what somebody else's runtime or family would be."""

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
"""What there is: nothing else lists them."""


@contextmanager
def installed(*names: str) -> Iterator[None]:
    """Put folders of this one on the path, for this process and for those that it starts meanwhile.

    Args:
        names: e.g. ``averaging_model``; each holds a package and its ``dist-info``.
    """
    folders = [str(HERE / name) for name in names]
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([*folders, str(ROOT), os.environ.get("PYTHONPATH", "")]))
        registry._announced.cache_clear()
        yield
    registry._announced.cache_clear()
