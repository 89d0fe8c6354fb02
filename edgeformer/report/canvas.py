"""matplotlib figures without a window, in one style. Drawing needs matplotlib (extra [train])."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
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
"""One colour per artifact. Red is reserved for limits and failures."""

INK, FAINT, PAPER = "#1b1f24", "#e4e6ea", "#ffffff"
"""Text and marks; grids; what is drawn on a bar. A page replaces these and the colours above by its own."""

_TITLE_POINTS, _LINE_HEIGHT, _POINTS_PER_INCH = 11, 1.2, 72
_CHARACTER_WIDTH = 0.64  # of the title's font, as a share of its size
_MAX_NAME = 32  # characters of a name in a picture; longer names would leave too little space for the data

NO_PICTURE = f"matplotlib is not installed: {install_hint('plots')}"  # reason why there is no picture


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return util.find_spec("matplotlib") is not None


def literal(text: str) -> str:
    """Escape text for matplotlib, which reads mathematics between two dollar signs."""
    return visible(text).replace("$", r"\$")


def shorten_name(name: str) -> str:
    """Cut the middle of a long name: an artifact's name ends in its precision and exit."""
    half = _MAX_NAME // 2
    return name if len(name) <= _MAX_NAME else f"{name[: half - 1]}…{name[-half:]}"


@contextmanager
def drawing(path: Path, title: str, panels: int, size: tuple[float, float]) -> Iterator[list[Any]]:
    """Yield axes side by side; write them as PNG if the block ends without an error.

    ``size`` is in inches; the figure grows with the lines of its ``title``, which is not read as markup.
    """
    # Figure instead of pyplot: no display, no global state, nothing to close.
    from matplotlib.figure import Figure

    characters = int(size[0] * _POINTS_PER_INCH / (_TITLE_POINTS * _CHARACTER_WIDTH))
    lines = textwrap.wrap(visible(title), characters, break_on_hyphens=False) or [""]
    height = size[1] + (len(lines) - 1) * _TITLE_POINTS * _LINE_HEIGHT / _POINTS_PER_INCH
    figure = Figure(figsize=(size[0], height), dpi=130, layout="constrained")
    axes = [bare(axis) for axis in figure.subplots(1, panels, squeeze=False)[0]]
    figure.suptitle("\n".join(lines), fontsize=_TITLE_POINTS, x=0.01, ha="left", parse_math=False)
    yield axes
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})  # without matplotlib's version


def bare(axis: Any) -> Any:
    """Remove spines and set a faint grid; return the axes."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    return axis
