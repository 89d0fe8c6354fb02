"""Work that runs ahead in a thread of its own: while one step takes an item, the step before it makes the next."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_WAIT_S = 0.2
"""How soon a thread whose items nobody takes any more sees that."""


class _End(Generic[T]):
    """Behind the last item: what ended them, None for the end."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterable[T], most: int = 1) -> Generator[T]:
    """The same items, made by a thread that is up to ``most`` of them ahead. An error comes where its item would be.

    When it is closed, the thread ends with the item that it works on, and is waited for.
    """
    made: queue.Queue[T | _End[T]] = queue.Queue(most)
    stopped = threading.Event()

    def put(item: T | _End[T]) -> None:
        while not stopped.is_set():
            with suppress(queue.Full):
                made.put(item, timeout=_WAIT_S)
                break

    def work() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    break
        except BaseException as raised:  # whatever it is, the thread that takes the items must hear of it
            error = raised
        finally:
            if isinstance(items, Generator):
                items.close()
        put(_End(error))

    thread = threading.Thread(target=work, name="ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(item := made.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        thread.join()
