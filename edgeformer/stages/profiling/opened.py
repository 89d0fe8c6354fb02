"""What is called and timed: an artifact, opened for one phase at one shape."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from edgeformer.backends import OpenOptions, backend_of
from edgeformer.bundle import Bundle
from edgeformer.formats.errors import EdgeformerError
from edgeformer.stages.profiling.inputs import Tokens
from edgeformer.stages.profiling.messages import ChildSpec, Phase

Buffers = Sequence[Mapping[str, Tokens]]
_DEVICE_CALLS = 100


@dataclass(frozen=True)
class Opened:
    """An opened artifact. Use it as a context manager.

    Attributes:
        first: the first call; decoding: reads the text before the token that is timed.
        call: one timed call; its argument counts calls, to rotate inputs.
        close: gives the memory back.
        facts: what to note in the row's conditions.
        device_ms: one call's milliseconds on the card alone; None where nothing times that.
        memory_by_name: bytes on the card that the runtime itself names.
        caveats: what to warn the row's reader of: nodes that another provider computes.
    """

    first: Callable[[], object]
    call: Callable[[int], object]
    close: Callable[[], None]
    facts: Mapping[str, Any] = field(default_factory=dict)
    device_ms: Callable[[int], float | None] = lambda index: None
    memory_by_name: Callable[[], dict[str, int]] = dict
    caveats: tuple[str, ...] = ()

    def __enter__(self) -> Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def median_device_ms(self) -> tuple[float | None, str | None]:
        """Median of some calls of their own on the card, and why there is none (None: nothing times it here)."""
        try:
            if self.device_ms(0) is None:
                return None, None
            timed = [self.device_ms(index) for index in range(_DEVICE_CALLS)]
            return statistics.median(ms for ms in timed if ms is not None), None
        except EdgeformerError as error:
            return None, str(error)


def open_for(spec: ChildSpec, provider: str, phase: Phase, buffers: Buffers) -> Opened:
    """Open the artifact of ``spec``.

    Args:
        spec: file, artifact and threads.
        provider: an ONNX Runtime execution provider.
        phase: whole inputs, or the last token of each with the ones before it read already.
        buffers: inputs of one shape, used in rotation.

    Raises:
        EdgeformerError: it cannot be opened, or cannot be measured in this phase.
    """
    return _whole(spec, provider, buffers) if phase == "steady" else _decoding(spec, provider, buffers)


def _whole(spec: ChildSpec, provider: str, buffers: Buffers) -> Opened:
    files = Bundle.open(Path(spec.bundle)).files(spec.artifact, checked=True)
    session = backend_of(spec.artifact).open(files, OpenOptions(provider, spec.threads))

    def call(index: int) -> object:
        return session.run(buffers[index % len(buffers)])

    placement = session.placement()
    return Opened(
        first=lambda: call(0),
        call=call,
        close=session.close,
        device_ms=lambda index: session.device_ms(buffers[index % len(buffers)]),
        memory_by_name=session.memory_by_name,
        caveats=session.caveats(),
        facts={"nodes_by_provider": placement} if placement is not None else {},
    )


def _decoding(spec: ChildSpec, provider: str, buffers: Buffers) -> Opened:
    """One more token at the end of the same text every time, its output thrown away."""
    files = Bundle.open(Path(spec.bundle)).files(spec.artifact, checked=True)
    decoder = backend_of(spec.artifact).open_decoder(files, None, OpenOptions(provider, spec.threads))
    context = np.ascontiguousarray(buffers[0]["input_ids"][:, :-1])
    tokens = [np.ascontiguousarray(buffer["input_ids"][:, -1:]) for buffer in buffers]

    def call(index: int) -> object:
        return decoder.peek(tokens[index % len(tokens)], decoder.loops)

    def first() -> None:
        if context.size:
            decoder.read_rows(context)
            decoder.advance(decoder.loops)
        else:
            call(0)

    facts = {"context_tokens": context.shape[1], "loops": decoder.loops}
    return Opened(first, call, decoder.close, facts, caveats=decoder.caveats())
