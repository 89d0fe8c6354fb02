"""Scalars are read as YAML 1.2 does, where PyYAML's YAML 1.1 surprises."""

from __future__ import annotations

import pytest

from edgeformer.artifacts.documents import parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-5", 3e-5),
        ("3.0e-5", 3e-5),
        ("1e3", 1000.0),
        ("-.5", -0.5),
        ("7", 7),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("2026-11-21", "2026-11-21"),
        ("null", None),
        ("e5", "e5"),
        ("010", 10),
        ("0o10", 8),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
    ],
)
def test_scalar(text: str, value: object) -> None:
    parsed, _ = parse_yaml(text)
    assert parsed == value
    assert type(parsed) is type(value)
