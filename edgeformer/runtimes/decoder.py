"""Decoder: texts read and written token by token, with the work for earlier tokens kept. No runtime in here.

**The rule for tokens that left early.** A token that answers after loop e has no state in the loops behind e. Its
hidden state waits in front of loop e + 1. As soon as a later token goes into that loop, all tokens that wait there go
through it first, in one batch, in their order. So every loop sees exactly what it would see without early exit: the
cached result equals the uncached one for any sequence of exits, and early exit costs only the quality of the exit heads
themselves. The work of a token that left is postponed, and saved for good where the text ends before anyone needs it;
done in a batch it reads the weights once for all tokens that waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from edgeformer.artifacts.errors import InputError
from edgeformer.runtimes.session import Array

State = TypeVar("State")


class LoopEngine(Protocol[State]):
    """What computes for a :class:`Decoder`, and keeps keys, values and convolution inputs of the tokens it has seen.

    A ``State`` is its own affair: the hidden states of some consecutive tokens, an array or tensor [B, n, C].
    """

    provider: str
    """What computes: ``CPUExecutionProvider``, ``torch-cpu``…"""

    stops: tuple[int, ...]
    """Loops after which it can stop, in rising order; the last one is the model's last loop."""

    max_positions: int | None
    """Tokens of the longest text; None: not known."""

    def embed(self, ids: Array, start: int, *, keep: bool) -> State:
        """New tokens, int64 [B, n], the first of them at place ``start``; ``keep`` False: forget them again."""

    def advance(self, stretch: int, state: State, *, keep: bool) -> State:
        """Tokens through the loops between two stops.

        Args:
            stretch: 0 for the loops up to the first stop, 1 for those behind it up to the second…
            state: of tokens that follow, without a gap, those that went through this stretch before.
            keep: False: forget them again.
        """

    def joined(self, states: Sequence[State]) -> State:
        """Consecutive tokens, of two states or more, as one state."""

    def readout(self, state: State, loop: int) -> Array:
        """Logits float32 [B, V] of the newest token in ``state``, which is through ``loop``."""

    def close(self) -> None:
        """Give the memory back."""

    def caveats(self) -> tuple[str, ...]:
        """As :meth:`~edgeformer.runtimes.session.Session.caveats`."""
        return ()

    def settings(self) -> dict[str, Any]:
        """As :meth:`~edgeformer.runtimes.session.Session.settings`."""
        return {}


class Decoder(Generic[State]):
    """One text, or several of the same length, read and written token by token, stopping after any loop.

    Args:
        engine: what computes; it serves one decoder.
    """

    def __init__(self, engine: LoopEngine[State]) -> None:
        self._engine = engine
        self.provider = engine.provider
        self.loops = engine.stops[-1]
        self.length = 0
        # Joined when they go on: copying a long prompt that waits for every token behind it would cost more than one.
        self._waiting: list[list[State]] = [[] for _ in range(len(engine.stops) + 1)]
        self._newest: State | None = None

    def read(self, ids: Sequence[int]) -> None:
        """Take in the next tokens of one text. Raises InputError where it gets longer than the model takes."""
        self.read_rows(np.array([list(ids)], dtype=np.int64))

    def read_rows(self, ids: Array) -> None:
        """The same for the next tokens of every text, int64 [B, n]; no loop is run yet."""
        self._require_room(ids.shape[1])
        self._waiting[0].append(self._engine.embed(ids, self.length, keep=True))
        self._newest = None
        self.length += ids.shape[1]

    def advance(self, loop: int) -> None:
        """Run every token that waits through the loops up to ``loop``; see this module's rule.

        Raises:
            ValueError: the newest token is through this loop already, nothing was read, or this decoder never stops
                there.
        """
        newest: State | None = None
        last = self._stretches(loop)
        for stretch in range(last):
            states = self._waiting[stretch]
            if not states:
                continue
            self._waiting[stretch] = []
            waited = states[0] if len(states) == 1 else self._engine.joined(states)
            state = self._engine.advance(stretch, waited, keep=True)
            self._waiting[stretch + 1].append(state)
            newest = state if stretch == last - 1 else None
        if newest is None:
            raise ValueError(f"no token waits in front of loop {loop}; read one first")
        if loop == self.loops:
            self._waiting[last] = []  # nothing comes after the last loop
        self._newest = newest

    def logits(self, loop: int) -> Array:
        """Logits float32 [V] of the exit after ``loop``, the one that was advanced to last."""
        result: Array = self.row_logits(loop)[0]
        return result

    def row_logits(self, loop: int) -> Array:
        """Logits float32 [B, V], as :meth:`logits`."""
        if self._newest is None:
            raise ValueError("nothing was computed yet: read tokens and advance first")
        return self._engine.readout(self._newest, loop)

    def peek(self, ids: Array, loop: int) -> Array:
        """What the next tokens would give after ``loop``, without reading them: calls can be repeated and timed.

        It costs what reading one token of every text and advancing costs, at the place that follows the text so far.

        Args:
            ids: one token per text, int64 [B, 1].
            loop: where to stop.

        Returns:
            Logits float32 [B, V].

        Raises:
            InputError: the text would get longer than the model takes.
            ValueError: earlier tokens still wait in front of a loop, or this decoder never stops there.
        """
        last = self._stretches(loop)
        if any(self._waiting[:last]):
            raise ValueError(f"tokens wait in front of loop {loop} or an earlier one; advance to it first")
        self._require_room(ids.shape[1])
        state = self._engine.embed(ids, self.length, keep=False)
        for stretch in range(last):
            state = self._engine.advance(stretch, state, keep=False)
        return self._engine.readout(state, loop)

    def caveats(self) -> tuple[str, ...]:
        """As :meth:`~edgeformer.runtimes.session.Session.caveats`."""
        return self._engine.caveats()

    def settings(self) -> dict[str, Any]:
        """As :meth:`~edgeformer.runtimes.session.Session.settings`."""
        return self._engine.settings()

    def close(self) -> None:
        """Give the engine's memory back."""
        self._engine.close()

    def _stretches(self, loop: int) -> int:
        """How many stretches lie in front of the stop after ``loop``."""
        stops = self._engine.stops
        if loop in stops:
            return stops.index(loop) + 1
        if len(stops) == 1:
            raise ValueError(f"this graph runs all {self.loops} loops and cannot stop after loop {loop}")
        raise ValueError(f"there is no stop after loop {loop}: the model has {self.loops} loops")

    def _require_room(self, new: int) -> None:
        end, most = self.length + new, self._engine.max_positions
        if most is not None and end > most:
            raise InputError(f"the text has {end} tokens; the model takes at most {most}")
