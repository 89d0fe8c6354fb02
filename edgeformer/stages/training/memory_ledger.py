"""Which tensors come and go while a piece of torch code runs, and what of them exists at the worst moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["weights", "gradients", "optimizer", "activations", "temporary"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_TO_COPY = torch.ops.aten._to_copy.default
_DEVICE_OF = torch.ops.prim.device.default


class Event(NamedTuple):
    """A storage appears (its size), goes (minus its size), or becomes the gradient of a parameter (0)."""

    storage: int
    size_bytes: int
    kind: Kind


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the life of every tensor storage, real or fake, that the code in its blocks makes.

    It finds the same totals as ``torch.distributed._tools.mem_tracker.MemTracker`` (a test compares them) in a quarter
    of the time. That one also hooks into every module to attribute memory to it, and cannot follow a model whose parts
    are called from outside its ``forward``, as CRT's heads are by the loss. What a kernel takes for itself is not seen.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._numbers: dict[int, int] = {}  # address of a storage → its number; an address is used again later
        self._guards: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._weights = {tensor.untyped_storage()._cdata for tensor in weights}
        self._kind: Kind = "activations"
        self._count = 0

    @contextmanager
    def making(self, kind: Kind) -> Iterator[None]:
        """Record what is made in this block as ``kind``."""
        before, self._kind = self._kind, kind
        try:
            with self:
                yield
        finally:
            self._kind = before

    def is_gradient_of(self, parameter: Tensor) -> None:
        """What ``parameter`` holds as its gradient is one from now on."""
        if parameter.grad is None:  # of a loss that leaves it out: torch calls the hook all the same
            return
        number = self._numbers.get(parameter.grad.untyped_storage()._cdata)
        if number is not None:
            self.events.append(Event(number, 0, "gradients"))

    def enter(self, tensor: Tensor, kind: Kind) -> None:
        """``tensor`` exists, if that is news."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._numbers or address in self._weights or not size:
            return
        number = self._numbers[address] = self._count
        self._count += 1
        self.events.append(Event(number, size, kind))

        def gone(_: object) -> None:
            del self._numbers[address], self._guards[number]
            self.events.append(Event(number, -size, kind))

        self._guards[number] = weakref.ref(storage, gone)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not _DEVICE_OF:  # asked twice as often as everything else together
            casts_a_weight = func is _TO_COPY and args[0].untyped_storage()._cdata in self._weights
            kind: Kind = "temporary" if casts_a_weight else self._kind
            for made in tree_leaves(result):
                if isinstance(made, Tensor):
                    self.enter(made, kind)
        return result


def with_gradients(events: list[Event]) -> tuple[int, list[Event]]:
    """A micro-batch as it is when an earlier one has left its gradients: their bytes, and the events.

    Then a new gradient is added to the old one and goes at once, where the first one stays.
    """
    sizes = {event.storage: event.size_bytes for event in events if event.size_bytes > 0}
    added: set[int] = set()
    result = []
    for event in events:
        if event.size_bytes == 0 and event.storage not in added:
            added.add(event.storage)
            result.append(Event(event.storage, -sizes[event.storage], "temporary"))
        elif event.storage not in added:
            result.append(event)
    return sum(sizes[storage] for storage in added), result


def worst_moment(existing: dict[Kind, int], events: Iterable[Event]) -> dict[Kind, int]:
    """Bytes of each kind when their sum is largest."""
    now = {kind: existing.get(kind, 0) for kind in KINDS}
    worst, largest = dict(now), sum(now.values())
    total = largest
    held: dict[int, Event] = {}
    for event in events:
        if event.size_bytes == 0:  # the same bytes under another name
            old = held[event.storage]
            now[old.kind] -= old.size_bytes
            now[event.kind] += old.size_bytes
            held[event.storage] = old._replace(kind=event.kind)
            if total == largest:
                worst = dict(now)
            continue
        if event.size_bytes > 0:
            held[event.storage] = event
            now[event.kind] += event.size_bytes
        else:
            now[held.pop(event.storage).kind] += event.size_bytes
        total += event.size_bytes
        if total > largest:
            worst, largest = dict(now), total
    return worst
