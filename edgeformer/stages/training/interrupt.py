"""Ctrl-C during training: finish the step, then stop; a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """True once the user has asked to stop."""

    def __init__(self) -> None:
        self.requested = False

    def __bool__(self) -> bool:
        return self.requested


@contextmanager
def stop_on_interrupt() -> Iterator[StopRequest]:
    """Turn the first SIGINT (or SIGTERM, where the system has it) into a flag that the loop looks at after each step.

    Outside the main thread signals cannot be caught; then the flag stays false.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request.requested:
            raise KeyboardInterrupt
        request.requested = True

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
