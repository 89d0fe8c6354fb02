"""Prediction: what a model answers to one text, or to a pair of texts; Unanswered: why there is no answer to one."""

from __future__ import annotations

from dataclasses import dataclass

from edgeformer.data.rows import Text


@dataclass(frozen=True)
class Prediction:
    """What every task's answers have.

    Attributes:
        text: as it was given; of a pair both.
        truncated: the model read its beginning only.
    """

    text: Text
    truncated: bool

    def as_dict(self) -> dict[str, object]:
        """For JSON output; the second text of a pair is ``pair``."""
        return {**said(self.text), "truncated": self.truncated}


@dataclass(frozen=True)
class Unanswered:
    """A text, or a pair, that a model was not asked about, or has no answer to.

    Attributes:
        text: as it was given; of a pair both.
        error: why, for a person.
    """

    text: Text
    error: str

    def as_dict(self) -> dict[str, object]:
        """For JSON output."""
        return {**said(self.text), "error": self.error}


Answer = Prediction | Unanswered
"""What every text gets."""


def said(text: Text) -> dict[str, object]:
    """The text, or both texts of a pair, as keys of JSON."""
    return {"text": text} if isinstance(text, str) else {"text": text[0], "pair": text[1]}
