"""The bar of training on a terminal: narrow ones show every figure too."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from edgeformer.cli.progress import Bars


@pytest.mark.parametrize("width", [80, 140])
def test_no_figure_is_cut(width: int) -> None:
    bars = Bars()
    bars._console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    bars.start("Epoch 10/10", 67_349, "samples")
    bars.advance(32_000, loss=0.69312, samples_per_s=1234.5, lr=0.001)
    assert bars._bars is not None
    bars._bars.refresh()
    bars.finish()
    assert isinstance(bars._console.file, io.StringIO)
    shown = bars._console.file.getvalue()
    for part in ("Epoch 10/10", "32000/67349 samples", "loss 0.6931", "samples/s 1,23", "1.0e-03"):
        assert part in shown and "…" not in shown
