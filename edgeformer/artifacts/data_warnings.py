"""Warnings that accompany every figure of a run trained on synthetic text, or of a model that leaks."""

from __future__ import annotations

from typing import Protocol

LEAKS = "LEAKS FUTURE TOKENS – scores are void"
"""Warning for a language model whose outputs depend on the tokens that it predicts."""

SYNTHETIC = "SYNTHETIC data"


class Cautioned(Protocol):
    """A manifest or a report."""

    @property
    def synthetic(self) -> bool:
        """Was the model trained on generated text?"""

    @property
    def leaks(self) -> bool:
        """Return whether the model sees future tokens."""


def cautions(document: Cautioned) -> list[str]:
    """For titles: short, in capitals; empty for an honest run on real text."""
    return [*([SYNTHETIC] if document.synthetic else []), *([LEAKS] if document.leaks else [])]
