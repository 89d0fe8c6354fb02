"""Exponents, and what the page and the picture show of them; the peak is of a real graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.cost_against_size import AXES, exponents, figure, peak_bytes, table
from tests.runtimes.tiny_bundle import write_bundle


def test_an_exponent_is_the_slope_of_the_logarithms() -> None:
    sizes = [16, 32, 64, 128]
    assert exponents(sizes, [3 * size**2 for size in sizes]) == {"all": 2.0, "end": 2.0}
    # Half a call's time is there at any size: it hides the slope of small sizes, and not that of large ones.
    with_a_floor = exponents(sizes, [100 + size**2 for size in sizes])
    assert with_a_floor["all"] < 1.9 < with_a_floor["end"] < 2.0


def test_one_size_is_changed_at_a_time() -> None:
    by_name = {axis.name: axis for axis in AXES}
    assert by_name["tokens"].shape(256) == (1, 256) and by_name["batch"].shape(8) == (8, 64)
    assert by_name["loops"].shape(4) == by_name["width"].shape(512) == (1, 128)
    assert by_name["loops"].overrides(4) == ("model.iterations=4",) and by_name["tokens"].overrides(512) == ()
    assert by_name["width"].overrides(128) == ("model.hidden_size=128", "model.ffn_size=512", "model.heads=2")


def test_the_peak_is_that_of_the_call(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    assert 0 < peak_bytes(bundle, (1, 4), 1) < 2**30


def results() -> dict[str, Any]:
    def axis(sizes: tuple[int, ...], **more: float) -> dict[str, Any]:
        rows = [
            {"size": size, "p50_ms": 2.0 * size, "ratio": size / sizes[0], "ratio_low": 0.9, "ratio_high": 1.1,
             "memory_bytes": size * 2**20, **more} for size in sizes
        ]  # fmt: skip
        return {"sizes": rows, "exponents": {"time": {"all": 1.0, "end": 0.9}, "memory": {"all": 1.0, "end": 1.0}}}

    return {"axes": {"tokens": axis((16, 32), operations=8.0), "data": axis((500, 1000))}}


def test_the_page_shows_every_size_and_slope() -> None:
    page = table(results())
    assert "64.00 ms" in page and "2.00× (0.90–1.10)" in page
    assert "1.00 (0.90)" in page and "2.0 s" in page and "1,000 MiB" in page


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure(tmp_path / "cost.png", results())
    assert (tmp_path / "cost.png").stat().st_size > 10_000
