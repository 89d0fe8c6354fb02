"""What a server takes on at once: every bound that keeps its memory and its answers' age finite."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of a server.

    Attributes:
        batch: texts of one call of the model; 1: every text by itself.
        queue: texts that wait; more are refused, with the time after which to try again.
        timeout_s: from a whole request to its answer; as long may a head, a body, or the taking of an answer need.
        texts: of one request.
        characters: of one text.
        body_bytes: of one request.
        connections: with a request for predictions; more are refused.
        waiting: connections that have sent no whole head; where there are more, the oldest of them is closed.
    """

    batch: int = 32
    queue: int = 1024
    timeout_s: float = 30.0
    texts: int = 128
    characters: int = 20_000
    body_bytes: int = 1 << 20
    connections: int = 256
    waiting: int = 512

    @property
    def window(self) -> int:
        """Texts among which those of similar length are found for one call."""
        return 2 * self.batch if self.batch > 1 else 1
