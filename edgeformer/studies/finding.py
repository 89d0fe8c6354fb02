"""A study's finding: a paragraph whose every figure, and every "more" or "less", comes from the rows of its table."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from jinja2 import TemplateError, nodes
from jinja2.sandbox import SandboxedEnvironment

from edgeformer.formats.errors import RecipeError, needs_extra
from edgeformer.formats.study import Study, measure
from edgeformer.formats.study_result import Cell, StudyRow
from edgeformer.reporting.study_tables import ours

_CHANCE = 0.05
"""Two means are called different where Welch's t test gives chance less than this."""


class _Missing(Exception):
    """The table does not have the figure."""


class _Rows:
    """What a finding's template may ask; every question names a run, its line, and a figure."""

    def __init__(self, rows: Sequence[StudyRow]) -> None:
        self._rows = {(row.run, row.at): row for row in rows}

    def of(self, run: str, at: object, figure: str) -> float:
        """The mean over the seeds, or the median over the rounds."""
        mean = self._cell(run, at, figure).mean
        assert mean is not None
        return mean

    def said(self, run: str, at: object, figure: str) -> str:
        """The same as the table shows it, with its spread."""
        self._cell(run, at, figure)
        return ours(self._rows[run, str(at)], figure)

    def clear(self, first: str, second: str, at: object, figure: str) -> bool:
        """Whether two runs differ beyond what their seeds explain (Welch's t test); never where seeds do not say.

        Three seeds have few degrees of freedom: the means must lie 2.8 to 4.3 standard errors apart, not two.
        """
        one, two = (self._cell(run, at, figure) for run in (first, second))
        if one.mean is None or two.mean is None or one.sd is None or two.sd is None:  # one seed, or times in turns
            return False
        if not one.sd and not two.sd:
            return one.mean != two.mean
        with needs_extra("train", "the test of a finding"):
            from scipy.stats import ttest_ind_from_stats

        test = ttest_ind_from_stats(one.mean, one.sd, one.n, two.mean, two.sd, two.n, equal_var=False)
        return bool(test.pvalue < _CHANCE)

    def apart(self, run: str, first: object, second: object, figure: str) -> bool:
        """Whether two lines of a run differ, seed by seed, beyond chance (t test of pairs); never with one seed."""
        one, two = (self._cell(run, at, figure).values for at in (first, second))
        if len(one) != len(two) or len(one) < 2 or one == two:
            return False
        with needs_extra("train", "the test of a finding"):
            from scipy.stats import ttest_rel

        return bool(ttest_rel(one, two).pvalue < _CHANCE)

    def chance(self, first: str, second: str, at: object, share: str) -> float:
        """The standard error of the difference of two shares of a test set's rows, in the share's unit.

        Both answer the same rows, which makes the true error smaller where they tend to be right and wrong together.
        """
        means = [self.of(run, at, share) for run in (first, second)]
        rows = [self.of(run, at, "rows") for run in (first, second)]
        return sqrt(sum(mean * (1 - mean) / n for mean, n in zip(means, rows, strict=True)))

    def ranked(self, *asked: object) -> list[str]:
        """Runs, then the line and the figure: the runs again, the best first, as their rows are labelled."""
        *runs, at, figure = map(str, asked)
        sign = -1 if measure(figure).higher_is_better else 1
        best = sorted(runs, key=lambda run: sign * self.of(run, at, figure))
        return [f"{self._rows[run, at].label} ({self.said(run, at, figure)})" for run in best]

    def _cell(self, run: str, at: object, figure: str) -> Cell:
        row = self._rows.get((run, str(at)))
        cell = row.cells.get(figure) if row is not None else None
        if cell is None or cell.mean is None or (row is not None and row.missing):
            raise _Missing(f"{run}, {at} has no {measure(figure).heading}")
        return cell


_ASKED = {"of": (1, 1), "said": (1, 1), "clear": (2, 1), "apart": (1, 2), "chance": (2, 1), "ranked": (None, 1)}
"""Questions, and how many runs each names, then how many lines, before the figure; None: any number."""


def check_finding(study: Study, place: object) -> None:
    """Refuse a template that asks for runs or figures that there are not, before anything is trained.

    Args:
        study: with the finding.
        place: of its file, for the message.

    Raises:
        RecipeError: what is wrong, and what is allowed.
    """
    try:
        parsed = SandboxedEnvironment().parse(study.finding)
    except TemplateError as error:
        raise RecipeError(f"{place}: finding: {error}") from None
    calls = [node for node in parsed.find_all(nodes.Call) if isinstance(node.node, nodes.Name)]
    for call in calls:
        assert isinstance(call.node, nodes.Name)
        name = call.node.name
        if name not in _ASKED:
            raise RecipeError(f"{place}: finding: no function {name!r}; there are {', '.join(_ASKED)}")
        given = [node.value if isinstance(node, nodes.Const) else None for node in call.args]
        runs, lines = _ASKED[name]
        if len(given) < 2 + lines or (runs is not None and len(given) != runs + lines + 1):
            wanted = f"{runs or 'some'} of the runs, {'the line' if lines == 1 else 'two lines'} and the figure"
            raise RecipeError(f"{place}: finding: {name} takes {wanted}")
        for run in given[: -1 - lines]:
            if run is not None and run not in study.runs:
                raise RecipeError(f"{place}: finding: no run {run!r}; there are {', '.join(study.runs)}")
        try:
            measure(str(given[-1]))
        except KeyError:
            raise RecipeError(f"{place}: finding: no figure {given[-1]!r}") from None


def finding_of(study: Study, rows: Sequence[StudyRow]) -> str:
    """The paragraph that the rows support; while one lacks a figure, which one; empty: the study has none.

    Raises:
        RecipeError: the template cannot be filled.
    """
    asked = _Rows(rows)
    environment = SandboxedEnvironment(autoescape=False)  # Markdown is escaped where it is written
    functions = {name: getattr(asked, name) for name in _ASKED}
    try:
        return " ".join(environment.from_string(study.finding).render(functions).split())
    except _Missing as missing:
        return f"Nothing is said yet: {missing}."
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise RecipeError(f"{study.name}: finding: {error}") from None
