"""Quantities with a unit."""

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
    format_time,
    parse_bytes,
    parse_millijoules,
    parse_milliseconds,
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "3KB", 3000), (parse_bytes, "3KiB", 3072), (parse_bytes, "20MiB", 20 * 2**20),
        (parse_bytes, "5.4 GiB", round(5.4 * 2**30)), (parse_milliseconds, "5ms", 5.0),
        (parse_milliseconds, "1.5 s", 1500.0), (parse_milliseconds, "250us", 0.25),
        (parse_milliseconds, "2 min", 120_000.0), (parse_milliseconds, "8m", 480_000.0),
        (parse_millijoules, "10mJ", 10.0),
        (parse_millijoules, "0.5 J", 500.0), (parse_millijoules, "250uj", 0.25),
    ],
)  # fmt: skip
def test_a_quantity(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["20", "MiB", "20 miles", "-1MiB", ""])
@pytest.mark.parametrize("parse", [parse_bytes, parse_milliseconds, parse_millijoules])
def test_what_is_no_quantity(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity; write a number and a unit") as raised:
        parse(text)
    units, example = re.fullmatch(r".*\((.+)\), e\.g\. (.+)", str(raised.value)).groups()  # type: ignore[union-attr]
    assert all(parse(f"1 {unit}") > 0 for unit in units.split(", ")) and parse(example) > 0


@pytest.mark.parametrize(
    ("format_", "value", "text"),
    [
        (format_bytes, None, "–"), (format_bytes, 1023, "1023 B"), (format_bytes, 1536, "1.5 KiB"),
        (format_bytes, 2**20 - 2**10, "1023.0 KiB"), (format_bytes, 2**20, "1.0 MiB"),
        (format_bytes, 5.432 * 2**30, "5.43 GiB"), (format_bytes, -3 * 2**20, "-3.0 MiB"),
        (format_milliseconds, None, "–"), (format_milliseconds, 0.012345, "0.0123"),
        (format_milliseconds, 100.0, "100"), (format_milliseconds, 999.4, "999"),
        (format_milliseconds, 999.5, "1000"), (format_milliseconds, 12345.6, "12346"),
        (format_duration, 42.4, "42 s"), (format_duration, 60.7, "1 min 01 s"), (format_duration, 3599, "59 min 59 s"),
        (format_duration, 3659, "1 h 00 min"), (format_duration, 2 * 3600 + 61 * 60, "3 h 01 min"),
        (format_time, "2026-11-28T14:03:38.833+00:00", "2026-11-28 14:03 UTC"),
    ],
)  # fmt: skip
def test_text_of_a_quantity(format_: Callable[[float | None], str], value: float | None, text: str) -> None:
    assert format_(value) == text


def test_a_field_takes_a_number_or_a_quantity() -> None:
    sizes, times = TypeAdapter(Bytes), TypeAdapter(Milliseconds)
    assert (sizes.validate_python("2 KiB"), sizes.validate_python(2048)) == (2048, 2048)
    assert (times.validate_python("1.5s"), times.validate_python(1500.0)) == (1500.0, 1500.0)
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        sizes.validate_python(-1)
