"""The waiting rule: whatever leaves where, every loop sees every token once, in order, and none before its turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.runtimes.decoder import Decoder, LoopEngine
from edgeformer.runtimes.session import Array

Tokens = tuple[int, ...]


class Recorder(LoopEngine[Tokens]):
    """A state is the tokens themselves; it keeps what went through each stretch, and how often it was called."""

    provider = "recorder"

    def __init__(self, stops: tuple[int, ...] = (1, 2, 3, 4), max_positions: int | None = None) -> None:
        self.stops, self.max_positions = stops, max_positions
        self.read: list[int] = []
        self.through: list[list[int]] = [[] for _ in stops]
        self.calls = [0 for _ in stops]
        self.joins: list[int] = []

    def embed(self, ids: Array, start: int, *, keep: bool) -> Tokens:
        assert start == len(self.read), "places follow one another"
        tokens = tuple(ids[0].tolist())
        if keep:
            self.read += tokens
        return tokens

    def advance(self, stretch: int, states: Sequence[Tokens], *, keep: bool) -> Tokens:
        if len(states) > 1:
            self.joins.append(len(states))
        state = tuple(chain.from_iterable(states))
        previous = self.read if stretch == 0 else self.through[stretch - 1]
        first = len(self.through[stretch])
        if keep:
            assert tuple(previous[first : first + len(state)]) == state, "every token runs exactly once"
            self.through[stretch] += state
            self.calls[stretch] += 1
        return state

    def readout(self, state: Tokens, loop: int) -> Array:
        return np.array([[state[-1], loop]], dtype=np.float32)


@pytest.mark.parametrize("seed", range(50))
def test_any_exits_in_any_order(seed: int) -> None:
    choose, engine = random.Random(seed), Recorder()
    decoder = Decoder(engine)
    text: list[int] = []
    for _ in range(40):
        new = [choose.randrange(100) for _ in range(choose.choice((1, 1, 1, 3)))]
        decoder.read(new)
        text += new
        if choose.random() < 0.2:
            continue  # read more before anything is computed
        for loop in sorted(choose.sample(engine.stops, choose.choice((1, 1, 2)))):
            decoder.advance(loop)
            assert decoder.logits(loop).tolist() == [text[-1], loop]
            assert engine.through[loop - 1] == text, "all that waited went through before the newest"
    assert engine.read == text and decoder.length == len(text)


def test_what_waits_goes_through_in_one_call_and_peeking_changes_nothing() -> None:
    engine = Recorder()
    decoder = Decoder(engine)
    for token in range(5):
        decoder.read([token])
        decoder.advance(1)
    assert (engine.calls, engine.through[1]) == ([5, 0, 0, 0], [])
    for loop in (2, 4):
        with pytest.raises(ValueError, match=f"tokens wait in front of loop {loop}"):
            decoder.peek(np.array([[8]]), loop)
    decoder.read([5])
    decoder.advance(4)
    assert (engine.calls, engine.through[3]) == ([6, 1, 1, 1], [0, 1, 2, 3, 4, 5])
    assert engine.joins == [6], "nothing is copied while it waits, however long that is"
    assert decoder.peek(np.array([[8]]), 2).tolist() == [[8, 2]]
    assert (engine.calls, engine.read, decoder.length) == ([6, 1, 1, 1], [0, 1, 2, 3, 4, 5], 6)


def test_misuse() -> None:
    engine = Recorder(max_positions=3)
    decoder = Decoder(engine)
    with pytest.raises(ValueError, match="read one first"):
        decoder.advance(1)
    with pytest.raises(ValueError, match="nothing was computed yet"):
        decoder.logits(1)
    with pytest.raises(ValueError, match="no stop after loop 9, but after 1, 2, 3, 4"):
        decoder.advance(9)
    decoder.read([1, 2])
    with pytest.raises(InputError, match="4 tokens, and the model takes at most 3"):
        decoder.read([3, 4])
    assert engine.read == [1, 2]
    decoder.advance(4)
    with pytest.raises(ValueError, match="no token waits in front of loop 4"):
        decoder.advance(4)
    decoder.close()
    assert decoder.provider == "recorder" and decoder.caveats() == ()
