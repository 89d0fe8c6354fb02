"""A step bundle: graphs that the host calls as often as an answer, or the next token, needs them."""

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
_KEPT = ("past_key", "past_value", "past_conv")


def open_here(path: Path) -> Graph:
    """A part on the CPU with the default number of threads."""
    from edgeformer.runtimes.onnxruntime.session import OnnxSession  # other runtimes open their own

    return OnnxSession(path, in_turns=True)


class StepParts:
    """The opened graphs of a step bundle.

    Args:
        parts: embed, loop, readout… → file.
        loops: of the whole model.
        answers: loops after which somebody may ask for logits; only their readouts are opened.
        open_part: how a file is opened.

    Raises:
        ArtifactError: a part is missing from the bundle, or cannot be opened.
        InputError: there is no such loop.
    """

    def __init__(
        self, parts: Mapping[str, Path], loops: int, answers: Collection[int], open_part: OpenPart = open_here
    ) -> None:
        names: dict[int, str] = {}
        for loop in answers:
            if not 1 <= loop <= loops:
                raise InputError(f"there is no exit after loop {loop}: the model has {loops} loops")
            # A loop's own head, the one that all exits share, or the last loop's.
            known = (f"readout_exit{loop}", "readout_exit") if loop != loops else ()
            names[loop] = next((name for name in known if name in parts), "readout")
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
        """A language model, whose loop graph keeps keys and values; else a classifier."""
        return "past_key" in self.loop.inputs

    def readout(self, state: Array, loop: int, inputs: Mapping[str, Array] = MappingProxyType({})) -> Array:
        """Logits of the state after ``loop``, one of those that were announced.

        Args:
            inputs: the model's own, of which a readout that pools over the text needs the mask.
        """
        return self._readouts[loop].run({**inputs, "state": state})["logits"]

    def placement(self) -> dict[str, int] | None:
        """Provider → nodes of all graphs together. See :meth:`Session.placement`."""
        found: Counter[str] = Counter()
        for session in self._opened.values():
            found.update(session.placement() or {})
        return dict(found) or None

    def caveats(self) -> tuple[str, ...]:
        """What each graph's session says, with the part's name."""
        return tuple(f"{part}: {note}" for part, session in self._opened.items() for note in session.caveats())

    def settings(self) -> dict[str, object]:
        """The loop's, which all graphs share. See :meth:`Session.settings`."""
        return self.loop.settings()

    def close(self) -> None:
        """Free the memory of all graphs."""
        for session in self._opened.values():
            session.close()


class StepEngine(LoopEngine[Array]):
    """The step graphs: stops after every loop. A state is the hidden states of some tokens, [B, n, C].

    Args:
        parts: the opened graphs; several engines may share them, one after the other or in turns.
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
            found = graph.run({**call, "past_conv": kept})
            kept = found["present_conv"]
            states.append(found["state"])
        if keep:
            self._embedding = kept
        return np.concatenate(states, axis=1)

    def advance(self, stretch: int, state: Array, *, keep: bool) -> Array:
        graph, kept, states = self._parts.loop, self._kept[stretch], []
        if kept is None:
            kept = {name: graph.empty(name, len(state)) for name in _KEPT}
        for call in calls_of({"state": state}, graph.most_tokens()):
            found = graph.run({**call, "loop": _told(stretch), **kept})
            kept = {name: found[name.replace("past", "present")] for name in _KEPT}
            states.append(found["next_state"])
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
    """A step bundle as if it were one graph, which can also answer at several exits, or let rows leave early.

    Args:
        parts: embed, loop, readout… → file.
        loops: of the whole model.
        open_part: how a file is opened.
        early: as :class:`~edgeformer.runtimes.runtime.OpenOptions` has it; the result then has ``loops`` int64 [batch].
        exits: loops that all answer, each as ``logits_exitN``, the last of which is the last that is run; empty: the
            model's last one, as ``logits``.

    Raises:
        ArtifactError: a part is missing from the bundle, or cannot be opened.
        InputError: there is no such loop, or a language model is to leave early: that is decided token by token.
    """

    def __init__(
        self,
        parts: Mapping[str, Path],
        loops: int,
        open_part: OpenPart = open_here,
        early: Mapping[int, float] | None = None,
        exits: Collection[int] = (),
    ) -> None:
        self._last = max(exits, default=loops)
        asked = [loop for loop in early or () if loop < self._last]
        super().__init__(parts, loops, {*asked, *exits, self._last}, open_part)
        if early is not None and self.is_decoder:
            raise InputError("rows of a language model cannot leave early: its tokens do, while they are written")
        self._early, self._asked, self._exits = early, frozenset(asked), frozenset(exits)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run embed, the loops and a readout, or several. See :meth:`Session.run`."""
        if self._early is not None:
            return self._leave(inputs, self._early)
        answers: dict[str, Array] = {}
        for loop, state in enumerate(self._states(inputs), start=1):
            if loop in self._exits:
                answers[exit_logits(loop)] = self.readout(state, loop, inputs)
            elif loop == self._last and not self._exits:
                answers["logits"] = self.readout(state, loop, inputs)
        return answers

    def _states(self, inputs: Mapping[str, Array]) -> Iterator[Array]:
        """The state after every loop; a language model reads the whole text at once."""
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
            state = self.loop.run({**inputs, "state": state, "loop": _told(number)})["next_state"]
            yield state

    def _leave(self, inputs: Mapping[str, Array], thresholds: Mapping[int, float]) -> dict[str, Array]:
        state = self.embed.run(inputs)["state"]
        waiting = np.arange(len(state))
        loops = np.full(len(state), self._last, dtype=np.int64)
        logits: Array | None = None
        for loop in range(1, self._last + 1):
            rows = {name: array[waiting] for name, array in inputs.items()}
            state = self.loop.run({**rows, "state": state, "loop": _told(loop - 1)})["next_state"]
            if loop != self._last and loop not in self._asked:
                continue
            answer = self.readout(state, loop, rows)
            logits = np.empty((len(loops), answer.shape[-1]), answer.dtype) if logits is None else logits
            sure = np.ones(len(waiting), dtype=bool)
            if loop != self._last:
                sure = top_probability(answer) >= thresholds[loop]
            logits[waiting[sure]], loops[waiting[sure]] = answer[sure], loop
            waiting, state = waiting[~sure], state[~sure]
            if not len(waiting):
                break
        assert logits is not None
        return {"logits": logits, "loops": loops}


def _told(number: int) -> Array:
    """The number of a loop, from 0, for graphs in which loops differ."""
    return np.array([number], dtype=np.int64)


# A decode graph: the whole model in one call, with keys and values of earlier tokens as inputs and outputs.


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
