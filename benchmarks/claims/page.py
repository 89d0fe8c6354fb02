"""docs/results/claims.md from docs/claims.yaml: verdicts per text, and every claim with its verdict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import get_args

from tabulate import tabulate

from benchmarks.claims.history import History, Origin
from benchmarks.claims.schema import Claim, Claims, Number, Published, Verdict
from benchmarks.claims.verdicts import figure

VERDICTS: tuple[str, ...] = get_args(Verdict)
MEANINGS = {
    "reproduced": "the measured figure supports the claim by its rule",
    "not reproduced": "the measured figure, or the text's own arithmetic, contradicts the claim or shows only noise",
    "not testable as published": "the text omits a detail, quotes another source, or reports only noise",
    "not tested yet": "the study has no committed result, or not all of its seeds",
}
INTRODUCTION = """\
# Claims of the papers

Each quantitative claim of five texts has a verdict. The rule of a verdict is in `docs/claims.yaml`, with the source of
each figure. [The papers' tables](papers.md) shows the studies.
"""
AGES = """## Rules and figures

Not every rule was written before its measurement. *why* ends with the commits in which rule and figure took their
present form. Of the {all} claims that a rule decides by a figure, the rule is older than the figure in {older}, of the
same commit in {same}, and younger in {younger}, which are marked **younger rule**: there the figure was known when the
rule was written. An earlier figure was known then in {known_older} of the {older} and in {known_same} of the {same}.

Commit {commit} of {date} was the first in which every claim had a verdict. Of its {claims} claims that still exist,
{rules} have another rule since ({reworded} of them in other words only), {sources} another source of the figure, and
{verdicts} another verdict; in {rules_and_verdicts}, rule and verdict changed together.
"""
COUNTED = """
*all* counts a claim once that several versions repeat, and a sentence once; other readings and parts of a sentence are
listed [apart](#other-readings-of-the-same-sentences). A row of a table counts once for parameters, size, scores and
time. A difference is noise if it is below two standard errors of the test set, or if the 95% interval over our seeds
(Student's t) has both signs. Training settings are no claims: the recipes `*_sst2` and `crt_deep_published` list them.
"""

CHECKED = {
    "not reproduced": "Figures of the texts that contradict each other, or the released code",
    "reproduced": "Figures that agree",
}
"""Verdict on a check → what its table holds."""


def page(claims: Claims, history: History) -> str:
    """The whole document. Every claim must have its result."""
    titles = "\n".join(f"- *{key}*: {text.title}" for key, text in claims.texts.items())
    counted = {name: claim for name, claim in claims.claims.items() if claim.is_counted}
    origins = history.origins(claims)
    commits = {name: rule_and_figure(claim, origins[name], history) for name, claim in claims.claims.items()}

    def lines(title: str, verdict: str, names: Iterable[str], against: str = "ours") -> list[str]:
        matches = [name for name in names if getattr(claims.claims[name].result, "verdict", None) == verdict]
        rows = [cells(claims.claims[name], commits[name]) for name in matches]
        return [f"{title}\n", table(rows, against), ""] if rows else []

    parts = [INTRODUCTION, titles, "", counts(claims), COUNTED, ages(counted, origins, history)]
    for paper in dict.fromkeys(text.paper for text in claims.texts.values()):
        names = [n for n, claim in counted.items() if any(claims.texts[key].paper == paper for key in claim.where)]
        for verdict in VERDICTS:
            parts += lines(f"## Paper {paper}: {verdict}", verdict, names)
    readings = [name for name, claim in claims.claims.items() if claim.reading_of]
    parts.append("## Other readings of the same sentences\n")
    for verdict in VERDICTS:
        parts += lines(f"{verdict.capitalize()}:", verdict, readings)
    parts.append("## The texts against themselves\n")
    checks = [name for name, claim in claims.claims.items() if claim.check]
    for verdict, title in CHECKED.items():
        parts += lines(f"{title}:", verdict, checks, "checked against")
    return "\n".join(parts) + "\n"


def ages(counted: Mapping[str, Claim], origins: Mapping[str, Origin], history: History) -> str:
    """Return the section that counts rules by their age, compared with the figures that they judge."""
    decided = {name: origins[name] for name, claim in counted.items() if is_decided(claim)}
    number: Counter[str | None] = Counter(origin.age for origin in decided.values())
    known_before = Counter(
        origin.age for origin in decided.values() if origin.first is not None and origin.first < origin.rule.place
    )
    numbers = {age: number[age] for age in ("older", "same", "younger")}
    numbers |= {f"known_{age}": known_before[age] for age in ("older", "same")}
    return AGES.format(all=len(decided), **numbers, **history.changes.model_dump())


def is_decided(claim: Claim) -> bool:
    """Return whether a rule compares a figure of ours with the published one."""
    return claim.result is not None and bool(claim.result.ours) and claim.rule.kind != "untestable"


def rule_and_figure(claim: Claim, origin: Origin, history: History) -> str:
    """Return the commits of a claim's rule and figure; empty: no rule decides it by a figure."""
    if not is_decided(claim) or origin.figure is None:
        return ""
    mark = "**younger rule**: " if origin.age == "younger" else ""
    return f"{mark}rule {history.commit(origin.rule)}, figure {history.commit(origin.figure)}"


def counts(claims: Claims) -> str:
    """Markdown: verdicts × texts."""
    claimed = [claim for claim in claims.claims.values() if claim.is_counted]
    columns = [tally([claim for claim in claimed if key in claim.where]) for key in claims.texts]
    columns.append(tally(claimed))
    labels = [("claims", ""), *((verdict, MEANINGS[verdict]) for verdict in VERDICTS)]
    rows = [[*label, *numbers] for label, numbers in zip(labels, zip(*columns, strict=True), strict=True)]
    return tabulate(rows, ["verdict", "meaning", *claims.texts, "all"], tablefmt="github")


def tally(claims: list[Claim]) -> list[int]:
    """How many there are, and how many of each verdict."""
    verdict_counts: Counter[str] = Counter(claim.result.verdict for claim in claims if claim.result is not None)
    return [len(claims), *(verdict_counts[verdict] for verdict in VERDICTS)]


def table(claims: list[list[str]], against: str) -> str:
    """Markdown: one line per claim; not padded, because the last column is long. ``against``: what it is judged by."""
    header = ["where", "claim", "published", against, "unit", "why"]
    rows = [header, ["---"] * len(header), *claims]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells(claim: Claim, commits: str) -> list[str]:
    """One claim's line."""
    result = claim.result
    if result is None:
        raise ValueError("a claim without a result")
    places: dict[str, list[str]] = {}
    for text, place in claim.where.items():
        places.setdefault(place, []).append(text)
    where = "; ".join(f"{place} ({', '.join(texts)})" for place, texts in places.items())
    published = listed({name: written(value) for name, value in claim.published.items()})
    ours = listed({name: short(value) for name, value in result.ours.items()})
    why = "; ".join(part for part in (result.why, claim.note, commits) if part)
    return [cell.replace("|", "\\|") for cell in (where, f"“{claim.text}”", published, ours, claim.unit, why)]


def listed(figures: dict[str, str]) -> str:
    """Each with its name, parts of a list (``exits.0``) together; a single one is called ``value`` and needs none."""
    values: dict[str, list[str]] = {}
    for name, displayed in figures.items():
        values.setdefault(re.sub(r"^(\w+)\.\d+$", r"\1", name), []).append(displayed)
    texts = [" ".join(parts) if name == "value" else f"{name} {' '.join(parts)}" for name, parts in values.items()]
    return ", ".join(texts) or "–"


def written(published: Published) -> str:
    """Return the value as published."""
    return "–".join(map(figure, published)) if isinstance(published, list) else figure(published)


def short(ours: Number) -> str:
    """Four digits of ours; counts whole."""
    return figure(ours if isinstance(ours, int) or abs(ours) >= 1000 else float(f"{ours:.4g}"))
