"""Quantities with a unit."""

from __future__ import annotations

import pytest

from edgeformer.formats.units import (
    format_bytes,
    format_duration,
    format_milliseconds,
    parse_bytes,
    parse_millijoules,
    parse_milliseconds,
)


@pytest.mark.parametrize(
    ("text", "value"), [("20MiB", 20 * 2**20), ("5.4 GiB", round(5.4 * 2**30)), ("1 MB", 10**6), ("7b", 7)]
)
def test_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(("text", "value"), [("5ms", 5.0), ("1.5 s", 1500.0), ("250us", 0.25)])
def test_milliseconds(text: str, value: float) -> None:
    assert parse_milliseconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["20", "MiB", "20 miles", "-1MiB", ""])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="write a number and a unit"):
        parse_bytes(text)


def test_formatting() -> None:
    assert format_bytes(20 * 2**20) == "20.0 MiB"
    assert format_bytes(None) == "–"
    assert format_milliseconds(0.012345) == "0.0123"
    assert format_milliseconds(12.345) == "12.3"
    assert format_milliseconds(123.4) == "123"
    assert format_duration(725) == "12 min 05 s"


@pytest.mark.parametrize(("text", "value"), [("10mJ", 10.0), ("0.5 J", 500.0), ("250uj", 0.25)])
def test_millijoules(text: str, value: float) -> None:
    assert parse_millijoules(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["10", "10W", "10mAh", "mJ"])
def test_what_is_no_energy(text: str) -> None:
    with pytest.raises(ValueError, match="write a number and a unit"):
        parse_millijoules(text)
