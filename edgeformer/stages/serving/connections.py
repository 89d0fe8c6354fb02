"""Connections that nobody uses: a time limit for heads, which uvicorn has none for. Imports uvicorn."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from edgeformer.stages.serving.limits import Limits

_Protocol: Any = object if TYPE_CHECKING else AutoHTTPProtocol  # which of them is uvicorn's choice


def protocol_within(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol with limits for what comes before a request, and after its answer.

    A connection without a request must send a whole head in ``limits.timeout_s``, and its client must take an answer in
    the same time, or it is closed. Where more than ``limits.waiting`` have sent no head, so is the one that was silent
    for longest: a process has a limited number of connections, and there must be one for who asks how the server is.
    """

    class Protocol(_Protocol):  # type: ignore[misc]
        _waiting: ClassVar[dict[Protocol, asyncio.TimerHandle]] = {}  # in the order in which they began to wait
        _taking: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._wait()
            if len(self._waiting) > limits.waiting:
                self._waiting.pop(oldest := next(iter(self._waiting))).cancel()
                oldest.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._came()
            else:  # no head, or half a one
                self._wait()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._taking = _later(limits.timeout_s, self.transport)

        def resume_writing(self) -> None:
            super().resume_writing()
            _cancel(self._taking)

        def connection_lost(self, exc: Exception | None) -> None:
            self._came()
            _cancel(self._taking)
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self not in self._waiting:
                self._waiting[self] = _later(limits.timeout_s, self.transport)

        def _came(self) -> None:
            _cancel(self._waiting.pop(self, None))

    return Protocol


def _later(seconds: float, transport: asyncio.Transport) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
