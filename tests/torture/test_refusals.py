"""Hostile files of every kind are refused early, with a clear message, and nothing in them runs."""

from __future__ import annotations

import pytest

from tests.torture.refusals import refusals, table


@pytest.mark.torture
def test_hostile_files_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    results = refusals()
    with capsys.disabled():
        print(f"\n{table(results)}")
    assert [row for row in results if not row.holds] == []
