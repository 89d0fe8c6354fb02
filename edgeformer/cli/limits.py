"""Limits of the command line: numbers with their units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from edgeformer.formats.errors import InputError

N = TypeVar("N", int, float)


def limits_asked(latency: str | None, vram: str | None, size: str | None, energy: str | None) -> dict[str, Any]:
    """The limits of the command line, as ProfileOptions takes them. Raises InputError."""
    from edgeformer.formats.units import parse_bytes, parse_millijoules, parse_milliseconds

    return {
        "max_latency_ms": _quantity(latency, "--max-latency", parse_milliseconds),
        "max_size_bytes": _quantity(size, "--max-size", parse_bytes),
        "max_memory_bytes": _quantity(vram, "--max-vram", parse_bytes),
        "max_energy_mj": _quantity(energy, "--max-energy", parse_millijoules),
    }


def limit_flags(limits: dict[str, Any]) -> dict[str, Any]:
    """Names of limits as their flags have them → what was given."""
    flags = {"max_latency_ms": "max-latency", "max_size_bytes": "max-size", "max_memory_bytes": "max-vram"}
    return {flags.get(name, "max-energy"): limit for name, limit in limits.items()}


def _quantity(text: str | None, option: str, parse: Callable[[str], N]) -> N | None:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None
