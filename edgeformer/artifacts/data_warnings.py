"""What must stand beside every figure of a run that was trained on made-up text, or that cheats."""

from __future__ import annotations

from typing import Protocol

LEAKS = "LEAKS FUTURE TOKENS – scores are void"
"""A language model that sees the tokens it is asked to predict."""

SYNTHETIC = "SYNTHETIC data"


class Cautioned(Protocol):
    """A manifest or a report."""

    @property
    def synthetic(self) -> bool:
        """Was the model trained on generated text?"""

    @property
    def leaks(self) -> bool:
        """Does it see what it is asked to predict?"""


def cautions(document: Cautioned) -> list[str]:
    """For titles: short, in capitals; empty for an honest run on real text."""
    return [*([SYNTHETIC] if document.synthetic else []), *([LEAKS] if document.leaks else [])]
