"""A few hostile documents of every kind; ``make torture`` tries thousands."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing import KINDS, refused_or_read


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_is_read_or_refused(kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder: Path = tmp_path_factory.getbasetemp() / "fuzzed"  # apart: others would find its bundle.json above them
    folder.mkdir(exist_ok=True)
    refused_or_read(kind, data.draw(KINDS[kind][1]), folder)
