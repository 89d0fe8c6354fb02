"""Programs that stand in our documents, as files that can be run."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<program>(?:#|//) (?P<name>[\w.]+) .*?)^```$", re.MULTILINE | re.DOTALL)


def programs(document: Path) -> dict[str, str]:
    """Name → text of every fenced program whose first line is a comment with its name."""
    return {found["name"]: found["program"] for found in _BLOCK.finditer(document.read_text(encoding="utf-8"))}
