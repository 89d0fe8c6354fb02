"""A matplotlib figure without a window, in the house style. Drawing needs matplotlib (extra [train])."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.units import visible

BLUE, ORANGE, GREY, RED = "#2f6fb3", "#d9822b", "#8a8f98", "#c23b3b"
PALETTE = (
    BLUE, ORANGE, "#3f9a6b", "#8b5fb0", GREY, "#b5894a", "#4ba3b8", "#d46a9f", "#5b6770", "#a3b534", "#7a4b2a",
    "#1c6b62",
)  # fmt: skip
"""One colour per artifact; no red, which is for limits and for what fails."""

INK, FAINT, PAPER = "#1b1f24", "#e4e6ea", "#ffffff"
"""Text and marks; grids; what lies on a bar. A page replaces these and the colours above by its own."""

_TITLE_POINTS, _LINE, _POINTS_PER_INCH = 11, 1.2, 72
"""Size of a title, and the height of a line of it as a multiple of that."""
_MARGIN = 0.01
"""Left and right of the title, as a share of the width."""

NO_PICTURE = f"matplotlib is not installed: {install_hint('plots')}"
"""Why there is none."""


def can_draw() -> bool:
    """Is matplotlib installed?"""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        return False
    return True


@contextmanager
def drawing(path: Path, title: str, panels: int, size: tuple[float, float]) -> Iterator[list[Any]]:
    """Yield axes side by side; they are written when the block ends without an error.

    Args:
        path: of the PNG.
        title: above all of them, as it is: no markup. One that is too long for the width takes further lines, by which
            the figure grows.
        panels: how many axes.
        size: width and height in inches.
    """
    # Figure instead of pyplot: no display, no global state, nothing to close.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=130, layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis in axes:
        bare(axis)
    _entitle(figure, visible(title))
    yield axes
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})  # else it names matplotlib's version


def _entitle(figure: Any, title: str) -> None:
    """Write the title in as many lines as the figure's width asks for, and make the figure higher by all but one."""
    written = figure.suptitle("", fontsize=_TITLE_POINTS, x=_MARGIN, ha="left", parse_math=False)
    room = figure.bbox.width * (1 - 2 * _MARGIN)

    def fits(line: str) -> bool:
        written.set_text(line)
        return bool(written.get_window_extent().width <= room)

    lines = _lines(title, fits)
    written.set_text("\n".join(lines))
    figure.set_figheight(figure.get_figheight() + (len(lines) - 1) * _TITLE_POINTS * _LINE / _POINTS_PER_INCH)


def _lines(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Break between words; within one that is too long for a line of its own, as names of runs can be."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if fits(joined):
            lines[-1] = joined
            continue
        rest = word
        while not fits(rest) and len(rest) > 1:
            most = next(length for length in range(len(rest) - 1, 0, -1) if length == 1 or fits(rest[:length]))
            lines.append(rest[:most])
            rest = rest[most:]
        lines.append(rest)
    return [line for line in lines if line]


def bare(axis: Any) -> Any:
    """The same axes without what draws the eye away from the data."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    return axis
