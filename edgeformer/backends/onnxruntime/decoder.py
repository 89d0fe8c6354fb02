"""Token-by-token decoding with ONNX Runtime: with the step graphs up to any exit, or with the decode graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from edgeformer.backends.onnxruntime.session import KEPT, OnnxSession
from edgeformer.backends.onnxruntime.step_session import StepParts
from edgeformer.backends.session import Array, Session
from edgeformer.formats.errors import InputError

_KEPT = ("past_key", "past_value", "past_conv")


class OnnxDecoder(ABC):
    """One text, or several of the same length, read and written token by token, through at most ``loops`` loops.

    Args:
        first: the graph that reads the tokens; it knows the longest text, where that is known.
    """

    loops: int

    def __init__(self, first: OnnxSession) -> None:
        self.provider = first.provider
        self.length = 0
        self._max_positions = first.max_positions

    def read(self, ids: Sequence[int]) -> None:
        """Take in the next tokens of one text. Raises InputError where it gets longer than the model takes."""
        self.read_rows(np.array([list(ids)], dtype=np.int64))

    def read_rows(self, ids: Array) -> None:
        """The same for the next tokens of every text, int64 [B, n]."""
        self._take(self._placed(ids))
        self.length += ids.shape[1]

    def _placed(self, ids: Array) -> dict[str, Array]:
        """The next tokens int64 [B, n] with their places."""
        rows, new = ids.shape
        end = self.length + new
        if self._max_positions is not None and end > self._max_positions:
            raise InputError(f"the text has {end} tokens; the model takes at most {self._max_positions}")
        places = np.repeat(np.arange(self.length, end, dtype=np.int64)[None], rows, axis=0)
        return {"input_ids": ids, "position_ids": places}

    def logits(self, loop: int) -> Array:
        """Logits float32 [V] of the exit after ``loop``, the one that was advanced to last."""
        result: Array = self.row_logits(loop)[0]
        return result

    @abstractmethod
    def advance(self, loop: int) -> None:
        """Compute the newest token up to ``loop``.

        Raises:
            ValueError: it is through this loop already, nothing was read, or this decoder never stops there.
        """

    @abstractmethod
    def row_logits(self, loop: int) -> Array:
        """Logits float32 [B, V], as :meth:`logits`."""

    @abstractmethod
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

    @abstractmethod
    def close(self) -> None:
        """Free the memory of all graphs."""

    @abstractmethod
    def _take(self, text: Mapping[str, Array]) -> None:
        """Take in ``input_ids`` and ``position_ids`` int64 [B, n]."""


class StepDecoder(OnnxDecoder):
    """With the step graphs. Tokens that leave early wait, and catch up as in :mod:`edgeformer.families.crt.cache`.

    Args:
        parts: the opened graphs; several decoders may share them, one after the other or in turns.
    """

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts.embed)
        self._parts = parts
        self.loops = parts.loops
        self._embedding: Array | None = None
        self._kept: list[dict[str, Array] | None] = [None] * parts.loops
        self._waiting: list[Array | None] = [None] * (parts.loops + 1)
        self._newest: Array | None = None

    def advance(self, loop: int) -> None:
        """Run every token that waits through the loops up to ``loop``."""
        newest: Array | None = None
        for number in range(loop):
            state = self._waiting[number]
            if state is None:
                continue
            self._waiting[number] = None
            state = self._run(number, state)
            self._wait(number + 1, state)
            newest = state[:, -1:] if number == loop - 1 else None
        if newest is None:
            raise ValueError(f"no token waits in front of loop {loop}; read one first")
        if loop == self._parts.loops:
            self._waiting[loop] = None  # nothing comes after the last loop
        self._newest = newest

    def row_logits(self, loop: int) -> Array:
        """Logits float32 [B, V] of the newest token."""
        if self._newest is None:
            raise ValueError("nothing was computed yet: read tokens and advance first")
        result: Array = self._parts.readout(self._newest, loop)[:, -1]
        return result

    def peek(self, ids: Array, loop: int) -> Array:
        """Run one token per text through the loops up to ``loop`` and forget it. See :meth:`OnnxDecoder.peek`."""
        if any(state is not None for state in self._waiting[:loop]):
            raise ValueError(f"tokens wait in front of a loop before {loop}; advance to it first")
        state = self._embed(self._placed(ids))["state"]
        for number in range(loop):
            state = self._call(number, state)["next_state"]
        result: Array = self._parts.readout(state, loop)[:, -1]
        return result

    def close(self) -> None:
        """Free the memory of all graphs."""
        self._parts.close()

    def _take(self, text: Mapping[str, Array]) -> None:
        found = self._embed(text)
        self._embedding, self._newest = found["present_conv"], None
        self._wait(0, found["state"])

    def _embed(self, text: Mapping[str, Array]) -> dict[str, Array]:
        embed, kept = self._parts.embed, self._embedding
        if kept is None:
            kept = embed.empty("past_conv", len(text["input_ids"]))
        return embed.run({**text, "past_conv": kept})

    def _wait(self, number: int, state: Array) -> None:
        before = self._waiting[number]
        self._waiting[number] = state if before is None else np.concatenate((before, state), axis=1)

    def _call(self, number: int, state: Array) -> dict[str, Array]:
        graph, kept = self._parts.loop, self._kept[number]
        if kept is None:
            kept = {name: graph.empty(name, len(state)) for name in _KEPT}
        return graph.run({"state": state, "loop": np.array([number], dtype=np.int64), **kept})

    def _run(self, number: int, state: Array) -> Array:
        found = self._call(number, state)
        self._kept[number] = {name: found[name.replace("past", "present")] for name in _KEPT}
        return found["next_state"]


class FullDepthDecoder(OnnxDecoder):
    """With the decode graph: every token takes all loops, in one call.

    Args:
        graph: the opened decode graph; several decoders may share it.
    """

    def __init__(self, graph: OnnxSession) -> None:
        super().__init__(graph)
        self._graph = graph
        names = [name for name in graph.inputs if name.startswith(KEPT)]
        self.loops = sum(name.endswith(".key") for name in names)
        # past_key_values.0.key → present.0.key, past_conv.0 → present_conv.0
        self._outputs = {name: name.replace("past_key_values", "present").replace("past", "present") for name in names}
        self._kept: dict[str, Array] | None = None
        self._pending: dict[str, Array] | None = None
        self._newest: Array | None = None

    def advance(self, loop: int) -> None:
        """Compute the newest token up to the last loop."""
        self._require_last(loop)
        if self._pending is None:
            raise ValueError(f"no token waits in front of loop {loop}; read one first")
        found = self._call(self._pending)
        self._kept = {name: found[output] for name, output in self._outputs.items()}
        self._newest, self._pending = found["logits"][:, -1], None

    def row_logits(self, loop: int) -> Array:
        """Logits float32 [B, V] of the newest token."""
        if self._newest is None:
            raise ValueError("nothing was computed yet: read tokens and advance first")
        return self._newest

    def peek(self, ids: Array, loop: int) -> Array:
        """One call that leaves the caches as they are. See :meth:`OnnxDecoder.peek`."""
        self._require_last(loop)
        if self._pending is not None:
            raise ValueError(f"tokens wait in front of loop {loop}; advance to it first")
        result: Array = self._call(self._placed(ids))["logits"][:, -1]
        return result

    def close(self) -> None:
        """Free the graph's memory."""
        self._graph.close()

    def _require_last(self, loop: int) -> None:
        if loop != self.loops:
            raise ValueError(f"the decode graph runs all {self.loops} loops and cannot stop after loop {loop}")

    def _call(self, text: Mapping[str, Array]) -> dict[str, Array]:
        kept = self._kept
        if kept is None:
            kept = {name: self._graph.empty(name, len(text["input_ids"])) for name in self._outputs}
        return self._graph.run({**text, **kept})

    def _take(self, text: Mapping[str, Array]) -> None:
        before = self._pending
        self._pending = {
            name: array if before is None else np.concatenate((before[name], array), axis=1)
            for name, array in text.items()
        }
        self._newest = None


def decode_windows(session: OnnxSession, ids: Array, first: int) -> Array:
    """Logits of a decode graph with the right token fed in at every place.

    Args:
        ids: texts of the same length, int64 [B, n].
        first: tokens that are read in one call, 1 … n; the rest follow one by one.

    Returns:
        Logits after the token at place first − 1 and after each later one, float32 [B, n − first + 1, V].
    """
    decoder = FullDepthDecoder(session)
    found = []
    for piece in np.split(ids, range(first, ids.shape[1]), axis=1):
        decoder.read_rows(piece)
        decoder.advance(decoder.loops)
        found.append(decoder.row_logits(decoder.loops))
    return np.stack(found, axis=1)


class DecodeSession(Session):
    """The decode graph as if it were the full graph: it reads its input token by token."""

    def __init__(self, graph: OnnxSession) -> None:
        self._graph = graph
        self.provider = graph.provider

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """As many calls as the input has places. See :meth:`Session.run`."""
        if "input_ids" not in inputs or inputs["input_ids"].ndim != 2 or not inputs["input_ids"].size:
            raise InputError("input 'input_ids' must be int64[batch, sequence] and not empty")
        return {"logits": decode_windows(self._graph, inputs["input_ids"], 1)}

    def close(self) -> None:
        """Free the graph's memory."""
        self._graph.close()
