"""Prediction: what a model answers to one text, or to a pair of texts."""

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


def said(text: Text) -> dict[str, object]:
    """The text, or both texts of a pair, as keys of JSON."""
    return {"text": text} if isinstance(text, str) else {"text": text[0], "pair": text[1]}
