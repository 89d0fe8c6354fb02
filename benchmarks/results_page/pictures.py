"""Pictures of docs/, drawn again only where what they show has changed: another matplotlib changes every byte."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.results_page.tables import ROOT, printed
from edgeformer.artifacts.errors import MissingDependencyError
from edgeformer.artifacts.files import write_text
from edgeformer.report import canvas

DRAWN = "drawn.json"
"""Beside pictures: a digest of what they show, and their names."""
PICTURES = ROOT / "docs" / "pictures"


def drawn(folder: Path, parts: Sequence[str], draw: Callable[[Path], list[str]]) -> list[str]:
    """Names of the pictures in a folder, after drawing them where they are not those of ``shown``.

    Args:
        folder: where they lie, and nothing else.
        shown: all that decides how they look: figures, and the code that draws.
        draw: given the folder, draws into it and returns the names.

    Raises:
        MissingDependencyError: they must be drawn, and matplotlib is not installed.
    """
    digest, record = hashlib.sha256("\n".join(parts).encode()).hexdigest(), folder / DRAWN
    if record.is_file():
        picture_record = json.loads(record.read_text(encoding="utf-8"))
        if picture_record["of"] == digest and all((folder / name).is_file() for name in picture_record["pictures"]):
            return [*picture_record["pictures"]]
    if not canvas.can_draw():
        raise MissingDependencyError(f"{folder}: {canvas.NO_PICTURE}")
    folder.mkdir(parents=True, exist_ok=True)
    names = draw(folder)
    write_text(record, json.dumps({"of": digest, "pictures": names}, indent=2) + "\n")
    return names


def picture(name: str, text: str, command: str) -> str:
    """Markdown of a picture that ``python benchmarks/SCRIPT figure FILE …`` draws, with the command above it.

    Args:
        name: of its folder in docs/pictures.
        text: alternative text.
        command: with ``FILE`` where the picture's path is put, and files of benchmarks/results behind it.
    """
    _, script, *arguments = shlex.split(command)
    inputs = [script, *(word for word in arguments if word.startswith("benchmarks/"))]
    parts = [command, *((ROOT / path).read_text(encoding="utf-8") for path in inputs)]

    def draw(folder: Path) -> list[str]:
        printed(command.replace("FILE", shlex.quote(str(folder / f"{name}.png"))))
        return [f"{name}.png"]

    (file,) = drawn(PICTURES / name, parts, draw)
    return f"    {command.replace('FILE', f'{name}.png')}\n\n![{text}]({PICTURES.name}/{name}/{file})"
