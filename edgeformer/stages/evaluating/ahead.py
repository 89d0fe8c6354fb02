"""Work that runs ahead in a thread of its own: while one step takes an item, the step before it makes the next."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_WAIT_S = 0.2
"""How soon a thread whose items nobody takes any more sees that."""


class _End(Generic[T]):
    """Behind the last item: what ended them, None for the end."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(
    items: Iterable[T],
    most: int = 1,
    *,
    stopped: threading.Event | None = None,
    taker: threading.Event | None = None,
    leave: Callable[[], bool] = lambda: False,
) -> Generator[T]:
    """The same items, made by a thread that is up to ``most`` of them ahead. An error comes where its item would be.

    When it is closed, the thread ends with the item that it works on, and is waited for.

    Args:
        items: to make; a generator is closed by the thread.
        most: items that may wait to be taken.
        stopped: is set when it is closed; None: nobody needs to know.
        taker: is set when the thread that takes these items shall wait for them no longer; they then end.
        leave: asked when it is closed: the thread waits for something outside that may never come, and is left to
            itself.
    """
    made: queue.Queue[T | _End[T]] = queue.Queue(most)
    closed = stopped or threading.Event()
    thread = threading.Thread(target=_make, args=(items, made, closed), name="ahead", daemon=True)
    thread.start()
    try:
        item = _next(made, taker)
        while not isinstance(item, _End):
            yield item
            item = _next(made, taker)
        if item.error is not None:
            raise item.error
    finally:
        closed.set()
        while thread.is_alive() and not leave():
            thread.join(_WAIT_S)


def _make(items: Iterable[T], made: queue.Queue[T | _End[T]], closed: threading.Event) -> None:
    def put(item: T | _End[T]) -> None:
        while not closed.is_set():
            with suppress(queue.Full):
                made.put(item, timeout=_WAIT_S)
                break

    error: BaseException | None = None
    try:
        for item in items:
            put(item)
            if closed.is_set():
                break
    except BaseException as raised:  # whatever it is, the thread that takes the items must hear of it
        error = raised
    finally:
        if isinstance(items, Generator):
            items.close()
    put(_End(error))


def _next(made: queue.Queue[T | _End[T]], taker: threading.Event | None) -> T | _End[T]:
    """The next item. It wakes up now and then: Windows tells a thread that waits for ever of no Ctrl-C."""
    while taker is None or not taker.is_set():
        with suppress(queue.Empty):
            return made.get(timeout=_WAIT_S)
    return _End(None)
