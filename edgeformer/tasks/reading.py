"""How a trained model reads text, and what is known of the text that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer


@dataclass(frozen=True)
class TextReader:
    """How a trained model reads text: its tokenizer, the token that fills up rows, and how many tokens it knows."""

    tokenizer: Tokenizer
    pad: int
    vocabulary: int


@dataclass(frozen=True)
class Origin:
    """What is known of a trained model's data.

    Attributes:
        cache: where encoded sets are kept; None: nowhere.
        trained_on: set → fingerprint, as training recorded it; other data cut by the same protocol is refused.
        as_trained: cut the text as training did. Exported graphs read every document by itself.
    """

    cache: Path | None = None
    trained_on: Mapping[str, str] = field(default_factory=dict)
    as_trained: bool = False
