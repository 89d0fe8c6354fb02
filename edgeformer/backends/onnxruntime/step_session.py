"""Run a step bundle with ONNX Runtime: the host calls the loop graph as often as it needs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from edgeformer.backends.onnxruntime.session import OnnxSession
from edgeformer.backends.session import Array, Early, Session
from edgeformer.formats.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.tasks.early_exit import exit_logits

OpenPart = Callable[[Path], OnnxSession]


def open_here(path: Path) -> OnnxSession:
    """A part on the CPU with the default number of threads."""
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
        for loop in answers:
            if not 1 <= loop <= loops:
                raise InputError(f"there is no exit after loop {loop}: the model has {loops} loops")
        self.loops = loops
        self._parts = parts
        names = {loop: self._readout_name(loop) for loop in answers}
        self._opened: dict[str, OnnxSession] = {}
        for name in ("embed", "loop", *sorted(set(names.values()))):
            if name not in parts:
                raise ArtifactError(f"a step bundle without a part {name!r}; export the run again")
            self._opened[name] = open_part(parts[name])
        self.embed, self.loop = self._opened["embed"], self._opened["loop"]
        self._readouts = {loop: self._opened[name] for loop, name in names.items()}
        self.provider = self.loop.provider

    def _readout_name(self, loop: int) -> str:
        """The head of ``loop``: its own, the one that all exits share, or the last loop's."""
        known = (f"readout_exit{loop}", "readout_exit") if loop != self.loops else ()
        return next((name for name in known if name in self._parts), "readout")

    @property
    def is_decoder(self) -> bool:
        """A language model, whose loop graph keeps keys and values; else a classifier."""
        return "past_key" in self.loop.inputs

    def readout(self, state: Array, loop: int) -> Array:
        """Logits of the state after ``loop``, one of those that were announced."""
        return self._readouts[loop].run({"state": state})["logits"]

    def placement(self) -> dict[str, int] | None:
        """Provider → nodes of all graphs together. See :meth:`Session.placement`."""
        found: Counter[str] = Counter()
        for session in self._opened.values():
            found.update(session.placement() or {})
        return dict(found) or None

    def caveats(self) -> tuple[str, ...]:
        """What each graph's session says, with the part's name."""
        return tuple(f"{part}: {note}" for part, session in self._opened.items() for note in session.caveats())

    def close(self) -> None:
        """Free the memory of all graphs."""
        for session in self._opened.values():
            session.close()


class StepSession(Session):
    """A step bundle as if it were one graph, which can also answer at several exits, or let rows leave early.

    Args:
        parts: embed, loop, readout… → file.
        loops: of the whole model.
        open_part: how a file is opened.
        exit_: the last loop that is run; None: the model's last one.
        early: rows leave before that when they are sure (classifiers); the result then has ``loops`` int64 [batch].
        exits: loops that all answer, each as ``logits_exitN``; empty: ``exit_`` alone, as ``logits``.

    Raises:
        ArtifactError: a part is missing from the bundle, or cannot be opened.
        InputError: there is no such loop, or a language model is to leave early: that is decided token by token.
    """

    def __init__(
        self,
        parts: Mapping[str, Path],
        loops: int,
        open_part: OpenPart = open_here,
        exit_: int | None = None,
        early: Early | None = None,
        exits: Collection[int] = (),
    ) -> None:
        self._last = exit_ or max(exits, default=loops)
        asked = [loop for loop in early.thresholds if loop < self._last] if early is not None else []
        opened = StepParts(parts, loops, {*asked, *exits, self._last}, open_part)
        if early is not None and opened.is_decoder:
            raise InputError("rows of a language model cannot leave early: its tokens do, while they are written")
        self._parts: StepParts | None = opened
        self._early, self._asked, self._exits = early, frozenset(asked), frozenset(exits)
        self.provider = opened.provider

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run embed, the loops and a readout, or several. See :meth:`Session.run`."""
        if self._parts is None:
            raise EdgeformerError("the session of a step bundle is closed")
        parts = self._parts
        if self._early is not None:
            return self._leave(parts, inputs, self._early)
        answers: dict[str, Array] = {}
        states = self._read_text(parts, inputs) if parts.is_decoder else self._loop(parts, inputs)
        for loop, state in enumerate(states, start=1):
            if loop in self._exits:
                answers[exit_logits(loop)] = parts.readout(state, loop)
            elif loop == self._last and not self._exits:
                answers["logits"] = parts.readout(state, loop)
        return answers

    def placement(self) -> dict[str, int] | None:
        """See :meth:`StepParts.placement`."""
        return self._parts.placement() if self._parts is not None else None

    def caveats(self) -> tuple[str, ...]:
        """See :meth:`StepParts.caveats`."""
        return self._parts.caveats() if self._parts is not None else ()

    def close(self) -> None:
        """Free the memory of all graphs."""
        if self._parts is not None:
            self._parts.close()
        self._parts = None

    def _loop(self, parts: StepParts, inputs: Mapping[str, Array]) -> Iterator[Array]:
        """A classifier's state after every loop."""
        state = parts.embed.run(inputs)["state"]
        for _ in range(self._last):
            state = parts.loop.run({**inputs, "state": state})["next_state"]
            yield state

    def _read_text(self, parts: StepParts, inputs: Mapping[str, Array]) -> Iterator[Array]:
        """A language model's state after every loop."""
        if "input_ids" not in inputs:
            raise InputError("input 'input_ids' is missing")
        ids = inputs["input_ids"]
        rows = len(ids)
        places = np.repeat(np.arange(ids.shape[-1], dtype=np.int64)[None], rows, axis=0)
        start = {"past_conv": parts.embed.empty("past_conv", rows)}
        state = parts.embed.run({"input_ids": ids, "position_ids": places, **start})["state"]
        nothing = {name: parts.loop.empty(name, rows) for name in ("past_key", "past_value", "past_conv")}
        for loop in range(self._last):
            state = parts.loop.run({"state": state, "loop": np.array([loop], dtype=np.int64), **nothing})["next_state"]
            yield state

    def _leave(self, parts: StepParts, inputs: Mapping[str, Array], early: Early) -> dict[str, Array]:
        state = parts.embed.run(inputs)["state"]
        waiting = np.arange(len(state))
        loops = np.full(len(state), self._last, dtype=np.int64)
        logits: Array | None = None
        for loop in range(1, self._last + 1):
            rows = {name: inputs[name][waiting] for name in parts.loop.inputs if name in inputs}
            state = parts.loop.run({**rows, "state": state})["next_state"]
            if loop != self._last and loop not in self._asked:
                continue
            answer = parts.readout(state, loop)
            logits = np.empty((len(loops), answer.shape[-1]), answer.dtype) if logits is None else logits
            sure = np.ones(len(waiting), dtype=bool)
            if loop != self._last:
                sure = np.asarray(early.confidence(answer)) >= early.thresholds[loop]
            logits[waiting[sure]], loops[waiting[sure]] = answer[sure], loop
            waiting, state = waiting[~sure], state[~sure]
            if not len(waiting):
                break
        assert logits is not None
        return {"logits": logits, "loops": loops}
