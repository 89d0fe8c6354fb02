"""Run step and decode artifacts: the host calls their graphs once per loop or per token.

A step bundle holds embed, loop and readout graphs. A decode graph is the whole model in one call, with keys and values
of earlier tokens as inputs and outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.runtimes.decoder import Decoder, LoopEngine
from edgeformer.runtimes.session import KEPT, Array, Graph, Session
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.tasks.metric import top_probability

OpenPart = Callable[[Path], Graph]
_CACHES = ("past_key", "past_value", "past_conv")


def open_on_cpu(path: Path) -> Graph:
    """Open a part with ONNX Runtime on the CPU and the default number of threads."""
    from edgeformer.runtimes.onnxruntime.session import OnnxSession

    return OnnxSession(path, in_turns=True)


class StepParts:
    """The opened graphs of a step bundle.

    Args:
        parts: embed, loop, readout… → file.
        loops: number of loops of the model.
        answers: loops after which logits may be requested; only their readouts are opened.
        open_part: opens a graph file.

    Raises:
        ArtifactError: a part is missing from the bundle, or cannot be opened.
        InputError: there is no such loop.
    """

    def __init__(
        self, parts: Mapping[str, Path], loops: int, answers: Collection[int], open_part: OpenPart = open_on_cpu
    ) -> None:
        names: dict[int, str] = {}
        for loop in answers:
            if not 1 <= loop <= loops:
                raise InputError(f"there is no exit after loop {loop}: the model has {loops} loops")
            # The loop's exit head, the head that all exits share, or the last loop's head.
            candidates = (f"readout_exit{loop}", "readout_exit") if loop != loops else ()
            names[loop] = next((name for name in candidates if name in parts), "readout")
        self.loops = loops
        self._opened: dict[str, Graph] = {}
        for name in ("embed", "loop", *sorted(set(names.values()))):
            if name not in parts:
                raise ArtifactError(f"a step bundle without a part {name!r}; export the run again")
            self._opened[name] = open_part(parts[name])
        self.embed, self.loop = self._opened["embed"], self._opened["loop"]
        self._readouts = {loop: self._opened[name] for loop, name in names.items()}
        self.provider = self.loop.provider

    @property
    def is_decoder(self) -> bool:
        """Whether it is a language model, whose loop graph has caches; otherwise it is a classifier."""
        return "past_key" in self.loop.inputs

    def readout(self, state: Array, loop: int, inputs: Mapping[str, Array] = MappingProxyType({})) -> Array:
        """Return the logits of the state after ``loop``, one of ``answers``.

        Args:
            inputs: the model's inputs; a readout that pools over the text needs the mask.
        """
        return self._readouts[loop].run({**inputs, "state": state})["logits"]

    def placement(self) -> dict[str, int] | None:
        """Provider → number of nodes, summed over the graphs. See :meth:`Session.placement`."""
        node_counts: Counter[str] = Counter()
        for session in self._opened.values():
            node_counts.update(session.placement() or {})
        return dict(node_counts) or None

    def caveats(self) -> tuple[str, ...]:
        """Return the caveats of each graph's session, prefixed with the part's name."""
        return tuple(f"{part}: {note}" for part, session in self._opened.items() for note in session.caveats())

    def settings(self) -> dict[str, object]:
        """Return the settings of the loop graph, which all graphs share. See :meth:`Session.settings`."""
        return self.loop.settings()

    def close(self) -> None:
        """Free the memory of all graphs."""
        for session in self._opened.values():
            session.close()


class StepEngine(LoopEngine[Array]):
    """Loop engine on the step graphs; stops after every loop. A state holds hidden states of tokens, [B, n, C].

    Args:
        parts: the opened graphs; several engines may share them.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self.provider = parts.provider
        self.stops = tuple(range(1, parts.loops + 1))
        self.max_positions = parts.embed.max_positions
        self._embedding: Array | None = None
        self._kept: list[dict[str, Array] | None] = [None] * parts.loops

    def embed(self, ids: Array, start: int, *, keep: bool) -> Array:
        graph, kept, states = self._parts.embed, self._embedding, []
        if kept is None:
            kept = graph.empty("past_conv", len(ids))
        for call in calls_of(placed(ids, start), graph.most_tokens()):
            outputs = graph.run({**call, "past_conv": kept})
            kept = outputs["present_conv"]
            states.append(outputs["state"])
        if keep:
            self._embedding = kept
        return np.concatenate(states, axis=1)

    def advance(self, stretch: int, state: Array, *, keep: bool) -> Array:
        graph, kept, states = self._parts.loop, self._kept[stretch], []
        if kept is None:
            kept = {name: graph.empty(name, len(state)) for name in _CACHES}
        for call in calls_of({"state": state}, graph.most_tokens()):
            outputs = graph.run({**call, "loop": _loop_index(stretch), **kept})
            kept = {name: outputs[name.replace("past", "present")] for name in _CACHES}
            states.append(outputs["next_state"])
        if keep:
            self._kept[stretch] = kept
        return np.concatenate(states, axis=1)

    def joined(self, states: Sequence[Array]) -> Array:
        return np.concatenate(states, axis=1)

    def readout(self, state: Array, loop: int) -> Array:
        result: Array = self._parts.readout(state[:, -1:], loop)[:, -1]
        return result

    def caveats(self) -> tuple[str, ...]:
        return self._parts.caveats()

    def settings(self) -> dict[str, Any]:
        return self._parts.settings()

    def close(self) -> None:
        self._parts.close()


class StepSession(StepParts, Session):
    """Run a step bundle like one graph, optionally with several exits or with early exit per row.

    Args:
        parts: embed, loop, readout… → file.
        loops: number of loops of the model.
        open_part: opens a graph file.
        early: as in :class:`~edgeformer.runtimes.runtime.OpenOptions`; the result then has ``loops`` int64 [batch].
        exits: loops that return logits, each as ``logits_exitN``; the largest is the last loop that is run. Empty: the
            model's last loop, as ``logits``.

    Raises:
        ArtifactError: a part is missing from the bundle, or cannot be opened.
        InputError: there is no such loop, or ``early`` is set for a language model, which exits per token instead.
    """

    def __init__(
        self,
        parts: Mapping[str, Path],
        loops: int,
        open_part: OpenPart = open_on_cpu,
        early: Mapping[int, float] | None = None,
        exits: Collection[int] = (),
    ) -> None:
        self._last = max(exits, default=loops)
        threshold_loops = [loop for loop in early or () if loop < self._last]
        super().__init__(parts, loops, {*threshold_loops, *exits, self._last}, open_part)
        if early is not None and self.is_decoder:
            raise InputError("rows of a language model cannot leave early: its tokens do, while they are written")
        self._early, self._threshold_loops, self._exits = early, frozenset(threshold_loops), frozenset(exits)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run embed, the loops and the readouts. See :meth:`Session.run`."""
        if self._early is not None:
            return self._run_with_early_exit(inputs, self._early)
        answers: dict[str, Array] = {}
        for loop, state in enumerate(self._states(inputs), start=1):
            if loop in self._exits:
                answers[exit_logits(loop)] = self.readout(state, loop, inputs)
            elif loop == self._last and not self._exits:
                answers["logits"] = self.readout(state, loop, inputs)
        return answers

    def _states(self, inputs: Mapping[str, Array]) -> Iterator[Array]:
        """Yield the state after every loop; a language model reads the text in one call."""
        if self.is_decoder:
            if "input_ids" not in inputs:
                raise InputError("input 'input_ids' is missing")
            engine = StepEngine(self)
            state = engine.embed(inputs["input_ids"], 0, keep=False)
            for stretch in range(self._last):
                state = engine.advance(stretch, state, keep=False)
                yield state
            return
        state = self.embed.run(inputs)["state"]
        for number in range(self._last):
            state = self.loop.run({**inputs, "state": state, "loop": _loop_index(number)})["next_state"]
            yield state

    def _run_with_early_exit(self, inputs: Mapping[str, Array], thresholds: Mapping[int, float]) -> dict[str, Array]:
        state = self.embed.run(inputs)["state"]
        active = np.arange(len(state))
        loops = np.full(len(state), self._last, dtype=np.int64)
        logits: Array | None = None
        for loop in range(1, self._last + 1):
            rows = {name: array[active] for name, array in inputs.items()}
            state = self.loop.run({**rows, "state": state, "loop": _loop_index(loop - 1)})["next_state"]
            if loop != self._last and loop not in self._threshold_loops:
                continue
            answer = self.readout(state, loop, rows)
            logits = np.empty((len(loops), answer.shape[-1]), answer.dtype) if logits is None else logits
            answered = np.ones(len(active), dtype=bool)
            if loop != self._last:
                answered = top_probability(answer) >= thresholds[loop]
            logits[active[answered]], loops[active[answered]] = answer[answered], loop
            active, state = active[~answered], state[~answered]
            if not len(active):
                break
        assert logits is not None
        return {"logits": logits, "loops": loops}


def _loop_index(number: int) -> Array:
    """Return the loop input (loop index from 0) of graphs whose loops differ."""
    return np.array([number], dtype=np.int64)


class FullDepthEngine(LoopEngine[dict[str, Array]]):
    """Loop engine on the decode graph: every token runs through all loops in one call.

    A state holds ``input_ids`` and ``position_ids`` before the call and ``logits`` after it; if the tokens need several
    calls, those of the last one.

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
        """Return the call's inputs without computing anything. See :meth:`LoopEngine.embed`."""
        return placed(ids, start)

    def advance(self, stretch: int, state: dict[str, Array], *, keep: bool) -> dict[str, Array]:
        kept = self._kept
        if kept is None:
            kept = {name: self._graph.empty(name, len(state["input_ids"])) for name in self._outputs}
        for call in calls_of(state, self._graph.most_tokens()):
            outputs = self._graph.run({**call, **kept})
            kept = {name: outputs[output] for name, output in self._outputs.items()}
        if keep:
            self._kept = kept
        return {"logits": outputs["logits"]}

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
    """Return token ids int64 [B, n] and their positions, which begin at ``start``."""
    positions = np.arange(start, start + ids.shape[-1], dtype=np.int64)
    return {"input_ids": ids, "position_ids": np.tile(positions, (len(ids), 1))}


def calls_of(state: Mapping[str, Array], max_tokens: int | None) -> Iterator[dict[str, Array]]:
    """Split a state's arrays [B, n, …] into calls of at most ``max_tokens`` tokens; None: one call."""
    tokens = next(array.shape[1] for array in state.values())
    if max_tokens is None or tokens <= max_tokens:
        yield {**state}
        return
    for start in range(0, tokens, max_tokens):
        yield {name: array[:, start : start + max_tokens] for name, array in state.items()}


def decode_windows(session: Graph, ids: Array, first: int) -> Array:
    """Return the logits of a decode graph under teacher forcing.

    Args:
        session: the opened decode graph.
        ids: texts of the same length, int64 [B, n].
        first: tokens read in the first call, 1 … n; the rest follow one by one.

    Returns:
        Logits after the token at position first − 1 and each subsequent one, float32 [B, n − first + 1, V].
    """
    decoder = Decoder(FullDepthEngine(session))
    logits = []
    for piece in np.split(ids, range(first, ids.shape[1]), axis=1):
        decoder.read_rows(piece)
        decoder.advance(decoder.loops)
        logits.append(decoder.row_logits(decoder.loops))
    return np.stack(logits, axis=1)


class DecodeSession(Session):
    """Run a decode graph like the full graph: it reads its input token by token."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.provider = graph.provider

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Call the graph once per token. See :meth:`Session.run`."""
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
