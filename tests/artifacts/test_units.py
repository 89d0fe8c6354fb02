"""Quantities with a unit."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from pydantic import TypeAdapter, ValidationError

from edgeformer.artifacts.units import (
    Bytes,
    Milliseconds,
    format_bytes,
    format_duration,
    format_milliseconds,
    parse_bytes,
    parse_millijoules,
    parse_milliseconds,
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "7b", 7),
        (parse_bytes, "3KB", 3000),
        (parse_bytes, "1 MB", 10**6),
        (parse_bytes, "2GB", 2 * 10**9),
        (parse_bytes, "3KiB", 3072),
        (parse_bytes, "20MiB", 20 * 2**20),
        (parse_bytes, "5.4 GiB", round(5.4 * 2**30)),
        (parse_milliseconds, "5ms", 5.0),
        (parse_milliseconds, "1.5 s", 1500.0),
        (parse_milliseconds, "250us", 0.25),
        (parse_milliseconds, "2 min", 120_000.0),
        (parse_millijoules, "10mJ", 10.0),
        (parse_millijoules, "0.5 J", 500.0),
        (parse_millijoules, "250uj", 0.25),
    ],
)
def test_a_quantity(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["20", "MiB", "20 miles", "-1MiB", "", "10W", "10mAh", "mJ"])
@pytest.mark.parametrize("parse", [parse_bytes, parse_millijoules])
def test_what_is_no_quantity(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(ValueError, match="write a number and a unit"):
        parse(text)


@pytest.mark.parametrize("parse", [parse_bytes, parse_milliseconds, parse_millijoules])
def test_who_writes_no_quantity_reads_every_unit_and_an_example_that_is_one(parse: Callable[[str], float]) -> None:
    with pytest.raises(ValueError, match="is not a quantity") as raised:
        parse("1 fathom")
    units, example = re.fullmatch(r".*\((.+)\), e\.g\. (.+)", str(raised.value)).groups()  # type: ignore[union-attr]
    for unit in units.split(", "):
        assert parse(f"1 {unit}") > 0
    assert parse(example) > 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 2**10, "1023.0 KiB"),
        (2**20, "1.0 MiB"),
        (20 * 2**20, "20.0 MiB"),
        (2**30 - 2**20, "1023.0 MiB"),
        (2**30, "1.00 GiB"),
        (5.432 * 2**30, "5.43 GiB"),
        (-3 * 2**20, "-3.0 MiB"),
    ],
)
def test_a_size_in_the_largest_unit_that_it_fills(value: float | None, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.012345, "0.0123"),
        (12.345, "12.3"),
        (123.4, "123"),
        (100.0, "100"),
        (999.4, "999"),
        (999.5, "1000"),
        (999.7, "1000"),
        (1000.0, "1000"),
        (1000.4, "1000"),
        (12345.6, "12346"),
    ],
)
def test_three_digits_of_a_time_and_never_an_exponent_of_a_long_one(value: float | None, text: str) -> None:
    assert format_milliseconds(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (42.4, "42 s"),
        (60, "1 min 00 s"),
        (60.7, "1 min 01 s"),
        (725, "12 min 05 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (3659, "1 h 00 min"),
        (3660, "1 h 01 min"),
        (2 * 3600 + 61 * 60, "3 h 01 min"),
    ],
)
def test_a_duration_as_people_say_it(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_field_takes_a_number_or_a_quantity() -> None:
    sizes, times = TypeAdapter(Bytes), TypeAdapter(Milliseconds)
    assert (sizes.validate_python("2 KiB"), sizes.validate_python(2048)) == (2048, 2048)
    assert (times.validate_python("1.5s"), times.validate_python(1500.0)) == (1500.0, 1500.0)
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        sizes.validate_python(-1)
