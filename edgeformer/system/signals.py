"""Signals that ask a process to end: caught while there is something to be left in order, unless they are ignored."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def catching(names: Sequence[str], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Within, these signals call ``handler``; what was done about them before is done afterwards.

    One that this process ignores stays ignored: ``nohup`` has it so, and a shell that starts a job in the background.
    Outside the main thread no signal can be caught; then nothing of this happens.

    Args:
        names: ``SIGTERM``…; those that this system does not know are passed over.
        handler: as :func:`signal.signal` takes it.
    """
    caught: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        caught = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, before in caught.items():
            signal.signal(number, before)


# Threads of one Python process that take turns often, for a model that is called from one of them.


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
