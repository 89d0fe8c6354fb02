"""Hostile documents of every kind are read, or refused with exit 2 and a message; never a traceback."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzzing import KINDS, refused_or_read

FEW, MANY = 25, 1_200
"""Examples of each of ten kinds: 250 always, and 12,000 by ``make torture``."""


@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.torture)])
@pytest.mark.parametrize("kind", KINDS)
def test_is_read_or_refused(kind: str, examples: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: list[bool] = []
    chosen = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))

    @settings(chosen, derandomize=examples == FEW)
    @given(content=KINDS[kind][1])
    def check(content: bytes) -> None:
        outcomes.append(refused_or_read(kind, content, tmp_path))

    check()
    if examples == MANY:
        with capsys.disabled():
            print(f"\n{kind}: {len(outcomes):,} documents, {sum(outcomes):,} refused, the others read")
        assert len(outcomes) >= MANY or kind == "any YAML"
