"""A finding is filled from the table's rows; a template that names something else is refused before training."""

from __future__ import annotations

import pytest

from benchmarks.studies.finding import finding_of
from benchmarks.studies.results import Cell, StudyRow
from benchmarks.studies.specification import Study
from edgeformer.artifacts.errors import RecipeError
from tests.studies.tiny_study import run, study

TEXT = """
{% if clear('wide', 'small', 'test', 'loss') and of('wide', 'test', 'loss') < of('small', 'test', 'loss') %}
Wide wins, {{ said('wide', 'test', 'loss') }}{% else %}No difference{% endif %}:
{{ '%.1f' | format(of('small', 'test', 'loss') / of('wide', 'test', 'loss')) }} times.
"""


def study_with(text: str) -> Study:
    return Study.model_validate(study("made", {"wide": run("Wide"), "small": run("Small")}, finding=text), strict=False)


def row(name: str, loss: float | None, sd: float | None, n: int = 3) -> StudyRow:
    return StudyRow(run=name, label=name, at="test", cells={"loss": Cell(mean=loss, sd=sd, n=n)}, origin="here")


def test_a_finding_says_what_the_rows_say() -> None:
    results, small = study_with(TEXT), row("small", 2.0, 0.1)
    assert finding_of(results, [row("wide", 1.0, 0.1), small]) == "Wide wins, 1.0000 ± 0.1000: 2.0 times."
    assert finding_of(results, [row("wide", 1.0, 1.9), small]) == "No difference: 2.0 times."
    assert finding_of(results, [row("wide", 1.0, None, 1), small]).startswith("No difference")
    assert finding_of(results, [row("wide", None, None, 0), small]) == "Nothing is said yet: wide, test has no loss."
    # 2.5 standard errors, and only four degrees of freedom: chance gives that once in 15 times.
    assert finding_of(results, [row("wide", 1.8, 0.1), row("small", 2.0, 0.1)]).startswith("No difference")
    assert finding_of(study_with(""), []) == ""
    ranked = study_with("{{ ranked('wide', 'small', 'test', 'loss') | join(', ') }}")
    assert finding_of(ranked, [row("wide", 3.0, None), small]) == "small (2.0000 ± 0.1000), wide (3.0000)"


@pytest.mark.parametrize("text", ["{{ of('wide', 'test', 'lo' ~ 'ss2') }}", "{{ '%d' | format('x') }}", "{{ 1 / 0 }}"])
def test_a_finding_that_cannot_be_filled_says_so(text: str) -> None:
    with pytest.raises(RecipeError, match="made: finding: "):
        finding_of(study_with(text), [row("wide", 1.0, 0.1)])


def test_two_lines_of_a_run_are_compared_seed_by_seed() -> None:
    """Seeds that differ by more than the lines do hide nothing: each is compared with itself."""

    def line(at: str, *values: float) -> StudyRow:
        return row("wide", sum(values) / len(values), 0.1).model_copy(
            update={"at": at, "cells": {"loss": Cell(mean=1.0, n=len(values), values=values)}}
        )

    arguments = study_with("{{ apart('wide', '2', '4', 'loss') }}")
    assert finding_of(arguments, [line("2", 1.0, 2.0, 3.0), line("4", 0.9, 1.91, 2.89)]) == "True"
    assert finding_of(arguments, [line("2", 1.0, 2.0, 3.0), line("4", 1.1, 1.9, 2.9)]) == "False"
    assert finding_of(arguments, [line("2", 1.0), line("4", 0.9)]) == "False"
    assert finding_of(arguments, [line("2", 1.0, 2.0), line("4", 1.0, 2.0)]) == "False"


def test_chance_is_the_error_of_a_difference_of_two_shares() -> None:
    rows = [
        StudyRow(run=name, label=name, at="test", cells={"accuracy": Cell(mean=0.8), "rows": Cell(mean=n)}, origin="")
        for name, n in (("wide", 100.0), ("small", 400.0))
    ]
    text = "{{ '%.4f' | format(chance('wide', 'small', 'test', 'accuracy')) }}"
    assert finding_of(study_with(text), rows) == "0.0447"


def test_times_in_turns_have_no_standard_error_to_differ_by() -> None:
    rows = [
        StudyRow(run=name, label=name, at="test", cells={"speedup": Cell(mean=mean, n=3, low=0.7, high=1.3)}, origin="")
        for name, mean in (("wide", 1.0), ("small", 1.01))
    ]
    assert finding_of(study_with("{{ clear('wide', 'small', 'test', 'speedup') }}"), rows) == "False"
