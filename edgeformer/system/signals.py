"""Signal handlers for an orderly shutdown, and the thread switch interval of the interpreter."""

import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def handle_signals(names: Sequence[str], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call ``handler`` for these signals within the block, and restore the previous handlers at the end.

    Ignored signals stay ignored (``nohup``, background jobs of a shell). No effect outside the main thread. Of the
    ``names`` (``SIGTERM``…), those unknown to this system are skipped.
    """
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        active = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, handler) for number in active}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


_SWITCH_S = 0.0005
"""Thread switch interval of the interpreter in seconds. The default of 5 ms equals the time of a small model's call."""


@contextmanager
def switch_threads_often() -> Generator[None]:
    """Shorten the interpreter's thread switch interval within the block."""
    previous = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(previous)
