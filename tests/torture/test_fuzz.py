"""Thousands of hostile documents of every kind: read, or refused with exit 2 and a message; never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzzing import KINDS, refused_or_read

EXAMPLES = 1_200
"""Of each of ten kinds: 12,000 in all."""


@pytest.mark.torture
@pytest.mark.parametrize("kind", KINDS)
def test_is_read_or_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: list[bool] = []

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(content=KINDS[kind][1])
    def check(content: bytes) -> None:
        outcomes.append(refused_or_read(kind, content, tmp_path))

    check()
    with capsys.disabled():
        print(f"\n{kind}: {len(outcomes):,} documents, {sum(outcomes):,} refused, the others read")
    assert len(outcomes) >= EXAMPLES or kind == "any YAML"
