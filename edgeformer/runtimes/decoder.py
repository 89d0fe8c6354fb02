"""Decoder: read and generate texts token by token with caches, independent of the runtime.

**Early exit.** A token that exits after loop e has no state in the loops behind e. Its hidden state waits in front of
loop e + 1. When a subsequent token enters that loop, all waiting tokens run through it first, in one batch, in order.
Every loop therefore sees exactly what it would see without early exit: the cached result equals the uncached one for
any sequence of exits, and early exit costs only the quality of the exit heads. The work of an exited token is
postponed, and saved if the text ends first; in a batch, the weights are read once for all waiting tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from edgeformer.artifacts.errors import InputError
from edgeformer.runtimes.session import Array

State = TypeVar("State")


class LoopEngine(Protocol[State]):
    """Computes for a :class:`Decoder`, and caches keys, values and convolution inputs of earlier tokens.

    A ``State`` is defined by the engine: usually the hidden states of consecutive tokens, [B, n, C].
    """

    provider: str
    """Name of the provider: ``CPUExecutionProvider``, ``torch-cpu``…"""

    stops: tuple[int, ...]
    """Loops after which it can stop, in ascending order; the last entry is the model's last loop."""

    max_positions: int | None
    """Tokens of the longest text; None: not known."""

    def embed(self, ids: Array, start: int, *, keep: bool) -> State:
        """Embed new tokens int64 [B, n] from position ``start``; ``keep`` False: do not cache them."""

    def advance(self, stretch: int, state: State, *, keep: bool) -> State:
        """Run tokens through the loops between two stops.

        Args:
            stretch: 0 for the loops up to the first stop, 1 for those from there to the second…
            state: tokens that directly follow those already run through this stretch.
            keep: False: do not cache them.
        """

    def joined(self, states: Sequence[State]) -> State:
        """Join the states of consecutive tokens, two or more, into one."""

    def readout(self, state: State, loop: int) -> Array:
        """Return the logits float32 [B, V] of the newest token in ``state``, which has passed ``loop``."""

    def close(self) -> None:
        """Free the memory."""

    def caveats(self) -> tuple[str, ...]:
        """As :meth:`~edgeformer.runtimes.session.Session.caveats`."""
        return ()

    def settings(self) -> dict[str, Any]:
        """As :meth:`~edgeformer.runtimes.session.Session.settings`."""
        return {}


class Decoder(Generic[State]):
    """Reads and generates one text, or several of the same length, token by token, with exits after any loop.

    Args:
        engine: computes for this decoder only.
    """

    def __init__(self, engine: LoopEngine[State]) -> None:
        self._engine = engine
        self.provider = engine.provider
        self.loops = engine.stops[-1]
        self.length = 0
        # States are joined only when they advance; joining per token would copy a long waiting prompt each time.
        self._waiting: list[list[State]] = [[] for _ in range(len(engine.stops) + 1)]
        self._newest: State | None = None

    def read(self, ids: Sequence[int]) -> None:
        """Read the next tokens of one text. Raises InputError if it gets longer than the model takes."""
        self.read_rows(np.array([list(ids)], dtype=np.int64))

    def read_rows(self, ids: Array) -> None:
        """Read the next tokens of every text, int64 [B, n], without running a loop."""
        self._check_length(ids.shape[1])
        self._waiting[0].append(self._engine.embed(ids, self.length, keep=True))
        self._newest = None
        self.length += ids.shape[1]

    def advance(self, loop: int) -> None:
        """Run every waiting token through the loops up to ``loop``; see the module's docstring.

        Raises:
            ValueError: the newest token has already passed this loop, nothing was read, or there is no stop after it.
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
            self._waiting[last] = []  # there is no further loop
        self._newest = newest

    def logits(self, loop: int) -> Array:
        """Return the logits float32 [V] of the exit after ``loop``, the loop of the latest :meth:`advance`."""
        result: Array = self.row_logits(loop)[0]
        return result

    def row_logits(self, loop: int) -> Array:
        """Return the logits float32 [B, V], as :meth:`logits`."""
        if self._newest is None:
            raise ValueError("nothing was computed yet: read tokens and advance first")
        return self._engine.readout(self._newest, loop)

    def peek(self, ids: Array, loop: int) -> Array:
        """Compute the next tokens' logits after ``loop`` without reading them, so that calls can be repeated and timed.

        The cost equals reading one token of every text at the current position and advancing.

        Args:
            ids: one token per text, int64 [B, 1].
            loop: loop after which to stop.

        Returns:
            Logits float32 [B, V].

        Raises:
            InputError: the text would get longer than the model takes.
            ValueError: earlier tokens still wait in front of a loop, or there is no stop after ``loop``.
        """
        last = self._stretches(loop)
        if any(self._waiting[:last]):
            raise ValueError(f"tokens wait in front of loop {loop} or an earlier one; advance to it first")
        self._check_length(ids.shape[1])
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
        """Free the engine's memory."""
        self._engine.close()

    def _stretches(self, loop: int) -> int:
        """Return the number of stretches before the stop after ``loop``."""
        stops = self._engine.stops
        if loop in stops:
            return stops.index(loop) + 1
        if len(stops) == 1:
            raise ValueError(f"this graph runs all {self.loops} loops and cannot stop after loop {loop}")
        raise ValueError(f"there is no stop after loop {loop}: the model has {self.loops} loops")

    def _check_length(self, added: int) -> None:
        length, max_positions = self.length + added, self._engine.max_positions
        if max_positions is not None and length > max_positions:
            raise InputError(f"the text has {length} tokens; the model takes at most {max_positions}")
