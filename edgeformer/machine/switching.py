"""Threads of one Python process that take turns often, for a model that is called from one of them."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

_SWITCH_S = 0.0005
"""How long one thread may keep Python from the others. The usual 5 ms are as long as a small model's call: after every
call its thread would wait as long again for its turn."""


@contextmanager
def switching_often() -> Generator[None]:
    """Within the block no thread waits long for its turn; what the process had before is there again afterwards."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
