"""A decode graph: the whole model in one call, with keys and values of earlier tokens as inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from edgeformer.backends.decoder import Decoder, LoopEngine
from edgeformer.backends.feeding import KEPT
from edgeformer.backends.session import Array, Graph, Session
from edgeformer.formats.errors import InputError


class FullDepthEngine(LoopEngine[dict[str, Array]]):
    """The decode graph: every token takes all loops, in one call.

    A state is what that call takes (``input_ids`` and ``position_ids``), behind it ``logits``: of the last call, where
    the tokens took several.

    Args:
        graph: the opened decode graph; several engines may share it.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.provider = graph.provider
        self.max_positions = graph.max_positions
        names = [name for name in graph.inputs if name.startswith(KEPT)]
        self.stops = (sum(name.endswith(".key") for name in names),)
        # past_key_values.0.key → present.0.key, past_conv.0 → present_conv.0
        self._outputs = {name: name.replace("past_key_values", "present").replace("past", "present") for name in names}
        self._kept: dict[str, Array] | None = None

    def embed(self, ids: Array, start: int, *, keep: bool) -> dict[str, Array]:
        """Nothing is computed yet. See :meth:`LoopEngine.embed`."""
        return placed(ids, start)

    def advance(self, stretch: int, state: dict[str, Array], *, keep: bool) -> dict[str, Array]:
        kept = self._kept
        if kept is None:
            kept = {name: self._graph.empty(name, len(state["input_ids"])) for name in self._outputs}
        for call in calls_of(state, self._graph.most_tokens()):
            found = self._graph.run({**call, **kept})
            kept = {name: found[output] for name, output in self._outputs.items()}
        if keep:
            self._kept = kept
        return {"logits": found["logits"]}

    def joined(self, states: Sequence[dict[str, Array]]) -> dict[str, Array]:
        return {name: np.concatenate([state[name] for state in states], axis=1) for name in states[0]}

    def readout(self, state: dict[str, Array], loop: int) -> Array:
        result: Array = state["logits"][:, -1]
        return result

    def caveats(self) -> tuple[str, ...]:
        return self._graph.caveats()

    def settings(self) -> dict[str, Any]:
        return self._graph.settings()

    def close(self) -> None:
        self._graph.close()


def placed(ids: Array, start: int) -> dict[str, Array]:
    """Tokens int64 [B, n] with their places, the first of them at ``start``."""
    places = np.arange(start, start + ids.shape[-1], dtype=np.int64)
    return {"input_ids": ids, "position_ids": np.tile(places, (len(ids), 1))}


def calls_of(state: Mapping[str, Array], most: int | None) -> Iterator[dict[str, Array]]:
    """A state's arrays [B, n, …] as the calls that take them in order, of ``most`` tokens each; None: in one."""
    tokens = next(array.shape[1] for array in state.values())
    if most is None or tokens <= most:
        yield {**state}
        return
    for start in range(0, tokens, most):
        yield {name: array[:, start : start + most] for name, array in state.items()}


def decode_windows(session: Graph, ids: Array, first: int) -> Array:
    """Logits of a decode graph with the right token fed in at every place.

    Args:
        session: the opened decode graph.
        ids: texts of the same length, int64 [B, n].
        first: tokens that are read in one call, 1 … n; the rest follow one by one.

    Returns:
        Logits after the token at place first − 1 and after each later one, float32 [B, n − first + 1, V].
    """
    decoder = Decoder(FullDepthEngine(session))
    found = []
    for piece in np.split(ids, range(first, ids.shape[1]), axis=1):
        decoder.read_rows(piece)
        decoder.advance(decoder.loops)
        found.append(decoder.row_logits(decoder.loops))
    return np.stack(found, axis=1)


class DecodeSession(Session):
    """The decode graph as if it were the full graph: it reads its input token by token."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.provider = graph.provider

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """As many calls as the input has places. See :meth:`Session.run`."""
        if "input_ids" not in inputs or inputs["input_ids"].ndim != 2 or not inputs["input_ids"].size:
            raise InputError("input 'input_ids' must be int64[batch, sequence] and not empty")
        return {"logits": decode_windows(self._graph, inputs["input_ids"], 1)}

    def placement(self) -> dict[str, int] | None:
        return self._graph.placement()

    def settings(self) -> dict[str, object]:
        return self._graph.settings()

    def caveats(self) -> tuple[str, ...]:
        return self._graph.caveats()

    def close(self) -> None:
        self._graph.close()
