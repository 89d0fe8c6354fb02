"""A study's finding: a Jinja template whose figures, and whose "more" or "less", come from the rows of its table."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment
from scipy.stats import ttest_ind_from_stats, ttest_rel

from benchmarks.studies.render import cell_text
from benchmarks.studies.results import Cell, StudyRow
from benchmarks.studies.specification import Study, measure
from edgeformer.artifacts.errors import RecipeError

_ALPHA = 0.05
"""Two means are called different where a t test gives chance less than this."""


class _MissingFigure(Exception):
    """The table does not have the figure."""


class Questions:
    """The functions that a template can call; each names runs, then their row or rows (``at``), then a figure."""

    def __init__(self, rows: Sequence[StudyRow]) -> None:
        self._rows = {(row.run, row.at): row for row in rows}

    def of(self, run: str, place: object, figure: str) -> float:
        """Return the mean over the seeds, or the median over the rounds."""
        mean = self._cell(run, place, figure).mean
        assert mean is not None
        return mean

    def said(self, run: str, place: object, figure: str) -> str:
        """Return the figure as the table shows it, with its spread."""
        self._cell(run, place, figure)
        return cell_text(self._rows[run, str(place)], figure)

    def clear(self, first: str, second: str, place: object, figure: str) -> bool:
        """Return whether two runs differ beyond what their seeds explain (Welch's t test); False without seeds."""
        a, b = (self._cell(run, place, figure) for run in (first, second))
        if a.mean is None or b.mean is None or a.sd is None or b.sd is None:  # one seed, or times in turns
            return False
        if not a.sd and not b.sd:
            return a.mean != b.mean
        return bool(ttest_ind_from_stats(a.mean, a.sd, a.n, b.mean, b.sd, b.n, equal_var=False).pvalue < _ALPHA)

    def apart(self, run: str, first: object, second: object, figure: str) -> bool:
        """Return whether two rows of a run differ, seed by seed, beyond chance (paired t test)."""
        a, b = (self._cell(run, place, figure).values for place in (first, second))
        if len(a) != len(b) or len(a) < 2 or a == b:
            return False
        return bool(ttest_rel(a, b).pvalue < _ALPHA)

    def chance(self, first: str, second: str, place: object, share: str) -> float:
        """Return the standard error of the difference of two shares of a test set's rows, in the share's unit."""
        pairs = [(self.of(run, place, share), self.of(run, place, "rows")) for run in (first, second)]
        return sqrt(sum(mean * (1 - mean) / n for mean, n in pairs))

    def ranked(self, *arguments: object) -> list[str]:
        """Return the labels and figures of several runs, best first."""
        *runs, place, figure = map(str, arguments)
        sign = -1 if measure(figure).higher_is_better else 1
        best = sorted(runs, key=lambda run: sign * self.of(run, place, figure))
        return [f"{self._rows[run, place].label} ({self.said(run, place, figure)})" for run in best]

    def _cell(self, run: str, place: object, figure: str) -> Cell:
        row = self._rows.get((run, str(place)))
        if row is None or row.missing or row.cell(figure).mean is None:
            raise _MissingFigure(f"{run}, {place} has no {measure(figure).heading}")
        return row.cell(figure)


def finding_of(study: Study, rows: Sequence[StudyRow]) -> str:
    """Fill the template from the rows; where one lacks a figure, say which. Raises RecipeError."""
    questions = Questions(rows)
    try:
        template = SandboxedEnvironment(autoescape=False).from_string(study.finding)  # Markdown is escaped on writing
        names = ("of", "said", "clear", "apart", "chance", "ranked")
        return " ".join(template.render({name: getattr(questions, name) for name in names}).split())
    except _MissingFigure as missing:
        return f"Nothing is said yet: {missing}."
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise RecipeError(f"{study.name}: finding: {error}") from None
