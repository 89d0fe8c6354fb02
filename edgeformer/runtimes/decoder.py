"""Decoder: read and generate texts token by token with caches; and sessions of step and decode artifacts.

The host calls the graphs of these artifacts once per loop or per token. A step artifact holds embed, loop and readout
graphs. A decode graph is the whole model in one call, with keys and values of earlier tokens as inputs and outputs.
Any runtime can open the graphs.

**Early exit.** The hidden state of a token that exits after loop e waits in front of loop e + 1. When a later token
enters that loop, all waiting tokens run through it first, in one batch, in order. Every loop therefore sees exactly
what it would see without early exit: the cached result equals the uncached one for any sequence of exits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from typing_extensions import Self

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.runtimes.session import PAST, PRESENT, Array, Graph, Session
from edgeformer.tasks.early_exit import exit_logits, is_confident
from edgeformer.tasks.metric import top_probability

State = TypeVar("State")


class LoopEngine(Protocol[State]):
    """Computes for a :class:`Decoder`, and caches keys, values and convolution inputs of earlier tokens.

    A ``State`` is usually the hidden states of consecutive tokens, [B, n, C]. ``stops`` are the loops after which it
    can stop, in ascending order; ``session`` are opened graphs that compute, which the decoder closes.
    """

    provider: str
    stops: tuple[int, ...]
    max_positions: int | None
    session: Session | None = None

    def fresh(self) -> Self:
        """Return an engine without earlier tokens on the same weights or graphs; this one is not used again."""

    def embed(self, ids: Array, start: int, *, keep: bool) -> State:
        """Embed new tokens int64 [B, n] from position ``start``; ``keep`` False: do not cache them."""

    def advance(self, stretch: int, states: Sequence[State], *, keep: bool) -> State:
        """Run consecutive tokens through the loops before the first stop (``stretch`` 0), from there to the second…"""

    def readout(self, state: State, loop: int) -> Array:
        """Return the logits float32 [B, V] of the newest token in ``state``, which has passed ``loop``."""

    def hidden(self, state: State) -> Array:
        """Return the hidden state [B, C] of the newest token in ``state``, [B, n, C]."""
        return np.asarray(state)[:, -1]


class Decoder(Generic[State]):
    """Reads and generates one text, or several of the same length, token by token, with exits after any loop."""

    def __init__(self, engine: LoopEngine[State]) -> None:
        self._engine = engine
        self.provider = engine.provider
        self.loops = engine.stops[-1]
        self.length = 0
        # The engine joins states when they advance; joining per token would copy a long waiting prompt each time.
        self._waiting: list[list[State]] = [[] for _ in range(len(engine.stops) + 1)]
        self._newest: State | None = None
        self._entered: State | None = None

    def fresh(self) -> Decoder[State]:
        """Return a decoder of another text on the same weights or graphs; this one is not used again."""
        return Decoder(self._engine.fresh())

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

        Raises ValueError if no new token waits in front of it, or if there is no stop after it.
        """
        newest: State | None = None
        last = self._stretches(loop)
        for stretch in range(last):
            states = self._waiting[stretch]
            if not states:
                continue
            self._waiting[stretch] = []
            state = self._engine.advance(stretch, states, keep=True)
            self._waiting[stretch + 1].append(state)
            newest, self._entered = (state, states[-1]) if stretch == last - 1 else (None, None)
        if newest is None:
            raise ValueError(f"no token waits in front of loop {loop}; read one first")
        if loop == self.loops:
            self._waiting[last] = []  # there is no further loop
        self._newest = newest

    def cosine(self) -> float:
        """Return the cosine of the newest token's states before and after the loop of the latest :meth:`advance`."""
        if self._newest is None or self._entered is None:
            raise ValueError("nothing was computed yet: read tokens and advance first")
        before, after = (self._engine.hidden(state)[0].astype(np.float64) for state in (self._entered, self._newest))
        return float(before @ after / (np.linalg.norm(before) * np.linalg.norm(after)))

    def row_logits(self, loop: int) -> Array:
        """Return the logits float32 [B, V] of the exit after ``loop``, the loop of the latest :meth:`advance`."""
        if self._newest is None:
            raise ValueError("nothing was computed yet: read tokens and advance first")
        return self._engine.readout(self._newest, loop)

    def peek(self, ids: Array, loop: int) -> Array:
        """Return the logits [B, V] of the next tokens, int64 [B, 1], after ``loop`` without caching them.

        Raises InputError if the text gets too long, ValueError if earlier tokens wait or ``loop`` is no stop.
        """
        last = self._stretches(loop)
        if any(self._waiting[:last]):
            raise ValueError(f"tokens wait in front of loop {loop} or an earlier one; advance to it first")
        self._check_length(ids.shape[1])
        state = self._engine.embed(ids, self.length, keep=False)
        for stretch in range(last):
            state = self._engine.advance(stretch, [state], keep=False)
        return self._engine.readout(state, loop)

    def caveats(self) -> tuple[str, ...]:
        return () if self._engine.session is None else self._engine.session.caveats()

    def settings(self) -> dict[str, Any]:
        return {} if self._engine.session is None else self._engine.session.settings()

    def close(self) -> None:
        if self._engine.session is not None:
            self._engine.session.close()

    def _stretches(self, loop: int) -> int:
        """Return the number of stretches before the stop after ``loop``."""
        if loop in (stops := self._engine.stops):
            return stops.index(loop) + 1
        raise ValueError(f"there is no stop after loop {loop}, but after {', '.join(map(str, stops))}")

    def _check_length(self, added: int) -> None:
        length, max_positions = self.length + added, self._engine.max_positions
        if max_positions is not None and length > max_positions:
            raise InputError(f"the text has {length} tokens, and the model takes at most {max_positions}; shorten it")


def present_name(past: str) -> str:
    """Return the output that becomes an input: past_key → present_key, past_key_values.0.key → present.0.key."""
    return past.replace("past_key_values", PRESENT).replace(PAST, PRESENT)


class CachedGraph:
    """Calls a graph for consecutive tokens and passes each call's ``present…`` outputs to the next call."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._caches: dict[str, Array] | None = None
        self.outputs = {name: present_name(name) for name in graph.inputs if name.startswith(PAST)}

    def run(self, tokens: Mapping[str, Array], *, keep: bool, **others: Array) -> Iterator[dict[str, Array]]:
        """Run tokens [B, n, …] and yield the outputs of every call: several, if the graph takes fewer tokens at once.

        The tokens are cached at the end; ``others`` are the same in every call.
        """
        rows, length = next(iter(tokens.values())).shape[:2]
        caches = self._caches or {name: self._graph.empty(name, rows) for name in self.outputs}
        inputs = self._graph.inputs.items()
        limits = (axes[1] for name, (_, axes) in inputs if len(axes) > 1 and not name.startswith(PAST))
        call_length = min((axis[-1] for axis in limits if isinstance(axis, range)), default=max(1, length))
        for start in range(0, max(1, length), call_length):
            call = {name: array[:, start : start + call_length] for name, array in tokens.items()}
            outputs = self._graph.run({**call, **others, **caches})
            caches = {name: outputs[output] for name, output in self.outputs.items()}
            yield outputs
        if keep:
            self._caches = caches


class GraphSession(Session):
    """Several opened graphs, by part, that run as one artifact; ``main`` has the provider and the settings of all."""

    def __init__(self, graphs: Mapping[str, Graph], main: str = "") -> None:
        self.graphs = graphs
        self._main = graphs[main]
        self.provider = self._main.provider

    def caveats(self) -> tuple[str, ...]:
        notes = [(part, note) for part, graph in self.graphs.items() for note in graph.caveats()]
        return tuple(f"{part}: {note}" if part else note for part, note in notes)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the main graph, and nodes per provider of all graphs."""
        node_counts = Counter[str]()
        for graph in self.graphs.values():
            node_counts.update(graph.settings().get("nodes_by_provider", {}))
        return {**self._main.settings(), **({"nodes_by_provider": dict(node_counts)} if node_counts else {})}

    def close(self) -> None:
        for graph in self.graphs.values():
            graph.close()


class StepSession(GraphSession):
    """Run a step artifact like one graph, optionally with several exits or with early exit per row.

    Args:
        parts: embed, loop, readout… → file; only the readouts of requested exits are opened.
        open_part: opens a graph file; None: with ONNX Runtime on the CPU.
        early: loop → threshold. Rows leave at the first confident exit; the result has ``loops``, int64 [batch].
        exits: answer after each of these loops, without early exit; the largest is the last loop that is run.

    Raises ArtifactError for a missing part, InputError for an unknown loop or ``early`` with a language model.
    """

    def __init__(
        self, parts: Mapping[str, Path], loops: int | None, open_part: Callable[[Path], Graph] | None = None,
        early: Mapping[int, float] | None = None, exits: Collection[int] = (),
    ) -> None:  # fmt: skip
        if loops is None:
            raise ArtifactError(
                "bundle.json does not record the number of loops of this step artifact; export the run again"
            )
        if open_part is None:
            from edgeformer.runtimes.onnxruntime.session import OnnxSession

            open_part = partial(OnnxSession, in_turns=True)
        self._last = max(exits, default=loops)
        self._early, self._exits = early, frozenset(exits)
        self._readouts: dict[int, str] = {}
        for loop in {*(loop for loop in early or () if loop < self._last), *exits, self._last}:
            if not 1 <= loop <= loops:
                raise InputError(f"the model has no exit after loop {loop}, because it has {loops} loops")
            # The loop's exit head, the head that all exits share, or the last loop's head.
            candidates = (f"readout_exit{loop}", "readout_exit") if loop != loops else ()
            self._readouts[loop] = next((name for name in candidates if name in parts), "readout")
        graphs: dict[str, Graph] = {}
        for name in ("embed", "loop", *sorted(set(self._readouts.values()))):
            if name not in parts:
                raise ArtifactError(f"the step artifact lacks its part {name!r}; export the run again")
            graphs[name] = open_part(parts[name])
        super().__init__(graphs, "loop")
        self.loops, self.embed, self.loop = loops, graphs["embed"], graphs["loop"]
        self.is_decoder = any(
            name.startswith(PAST) for name in self.loop.inputs
        )  # a language model; otherwise a classifier
        if early is not None and self.is_decoder:
            raise InputError("a language model exits early per token, not per row; use generate --confidence")

    def readout(self, state: Array, loop: int, inputs: Mapping[str, Array] = MappingProxyType({})) -> Array:
        """Return the logits of the state after ``loop``; a readout that pools over the text needs the mask."""
        return self.graphs[self._readouts[loop]].run({**inputs, "state": state})["logits"]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if self.is_decoder and "input_ids" not in inputs:
            raise InputError("input 'input_ids' is missing")
        engine = StepEngine(self) if self.is_decoder else None  # a language model reads the text in one call
        state = self.embed.run(inputs)["state"] if engine is None else engine.embed(inputs["input_ids"], 0, keep=False)
        thresholds = self._early or {}
        outputs: dict[str, Array] = {}
        active, loops = np.arange(len(state)), np.full(len(state), self._last, dtype=np.int64)
        for loop in range(1, self._last + 1):
            if engine is not None:
                state = engine.advance(loop - 1, [state], keep=False)
            else:
                number = np.array([loop - 1], dtype=np.int64)
                state = self.loop.run({**inputs, "state": state, "loop": number})["next_state"]
            if loop in self._exits:
                outputs[exit_logits(loop)] = self.readout(state, loop, inputs)
            if self._exits or (loop != self._last and loop not in thresholds):
                continue
            answer = self.readout(state, loop, inputs)
            if self._early is None:
                return {"logits": answer}
            if not outputs:
                outputs = {"logits": np.empty((len(loops), answer.shape[-1]), answer.dtype), "loops": loops}
            answered = np.ones(len(active), dtype=bool)
            if loop != self._last:
                answered = is_confident(top_probability(answer), thresholds[loop])
            outputs["logits"][active[answered]], loops[active[answered]] = answer[answered], loop
            active, state = active[~answered], state[~answered]
            inputs = {name: array[~answered] for name, array in inputs.items()}
            if not len(active):
                break
        return outputs


class StepEngine(LoopEngine[Array]):
    """Loop engine on step graphs, which several engines may share; stops after every loop. A state is [B, n, C]."""

    def __init__(self, steps: StepSession) -> None:
        self.session = self._steps = steps
        self.provider, self.max_positions = steps.provider, steps.embed.max_positions
        self.stops = tuple(range(1, steps.loops + 1))
        self._embed = CachedGraph(steps.embed)
        self._loops = [CachedGraph(steps.loop) for _ in self.stops]

    def fresh(self) -> Self:
        return type(self)(self._steps)

    def embed(self, ids: Array, start: int, *, keep: bool) -> Array:
        calls = self._embed.run(with_positions(ids, start), keep=keep)
        return _concatenate([outputs["state"] for outputs in calls])

    def advance(self, stretch: int, states: Sequence[Array], *, keep: bool) -> Array:
        number = np.array([stretch], dtype=np.int64)
        calls = self._loops[stretch].run({"state": _concatenate(states)}, keep=keep, loop=number)
        return _concatenate([outputs["next_state"] for outputs in calls])

    def readout(self, state: Array, loop: int) -> Array:
        return self._steps.readout(state[:, -1:], loop)[:, -1]


def _concatenate(arrays: Sequence[Array]) -> Array:
    """Join arrays of consecutive tokens [B, n, …]."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)


class FullDepthEngine(LoopEngine[dict[str, Array]]):
    """Loop engine on a decode graph: every token runs through all loops in one call. Engines may share the graph.

    A state holds ``input_ids`` and ``position_ids`` before the call, and the last ``logits`` after it.
    """

    def __init__(self, graph: Graph, loops: int) -> None:
        self.session = self._graph = graph
        self.provider, self.max_positions = graph.provider, graph.max_positions
        self._cached = CachedGraph(graph)
        self.stops = (loops,)

    def fresh(self) -> Self:
        return type(self)(self._graph, *self.stops)

    def embed(self, ids: Array, start: int, *, keep: bool) -> dict[str, Array]:
        return with_positions(ids, start)

    def advance(self, stretch: int, states: Sequence[dict[str, Array]], *, keep: bool) -> dict[str, Array]:
        tokens = {name: _concatenate([state[name] for state in states]) for name in states[0]}
        logits = np.empty(0, np.float32)
        for outputs in self._cached.run(tokens, keep=keep):
            logits = outputs["logits"]
        return {"logits": logits}

    def readout(self, state: dict[str, Array], loop: int) -> Array:
        return np.asarray(state["logits"][:, -1])


def with_positions(ids: Array, start: int) -> dict[str, Array]:
    """Return token ids int64 [B, n] and their positions, which begin at ``start``."""
    positions = np.arange(start, start + ids.shape[-1], dtype=np.int64)
    return {"input_ids": ids, "position_ids": np.tile(positions, (len(ids), 1))}


def decode_windows(graph: Graph, ids: Array, first: int) -> Array:
    """Return a decode graph's logits for texts int64 [B, n], float32 [B, n − first + 1, V].

    ``first`` tokens (1 … n) are read in the first call, the others one by one.
    """
    decoder = Decoder(FullDepthEngine(graph, loops=1))
    logits = []
    for piece in np.split(ids, range(first, ids.shape[1]), axis=1):
        decoder.read_rows(piece)
        decoder.advance(decoder.loops)
        logits.append(decoder.row_logits(decoder.loops))
    return np.stack(logits, axis=1)


class DecodeSession(GraphSession):
    """Run a decode graph like the full graph: it reads its input token by token."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if "input_ids" not in inputs or inputs["input_ids"].ndim != 2 or not inputs["input_ids"].size:
            raise InputError("input 'input_ids' must be int64[batch, sequence] with at least one token")
        return {"logits": decode_windows(self._main, inputs["input_ids"], 1)}
