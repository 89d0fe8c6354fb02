"""What goes to stdout and what to stderr: results to stdout, progress and messages to stderr."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_IN_A_PIPE = 140


def stdout() -> Console:
    """For tables and results. In a pipe there is no terminal to measure, so tables get a fixed width."""
    from rich.console import Console  # --json has no use for it

    width = None if sys.stdout.isatty() else WIDTH_IN_A_PIPE
    return Console(width=width, highlight=False)


def print_json(document: BaseModel | dict[str, Any]) -> None:
    """The one JSON document of ``--json``."""
    content = document.model_dump(mode="json", by_alias=True) if isinstance(document, BaseModel) else document
    print(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))
