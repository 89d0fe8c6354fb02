"""docs/results/claims.md from docs/claims.yaml: verdicts per text, and every claim with its verdict."""

from __future__ import annotations

import re
from collections import Counter
from typing import get_args

from tabulate import tabulate

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
each figure. Rules were written before the measurement; later changes are in the history of that file.
[The papers' tables](papers.md) shows the studies.
"""
COUNTED = """
*all* counts a claim once that several versions repeat, and a sentence with two readings once for each. A difference is
noise if it is below two standard errors of the test set, or if the 95% interval over our seeds (Student's t) has both
signs. Training settings are no claims: the recipes `*_sst2` and `crt_deep_published` list them.
"""

CHECKED = {
    "not reproduced": "Figures of the texts that contradict each other, or the released code",
    "reproduced": "Figures that agree",
}
"""Verdict on a check → what its table holds."""


def page(claims: Claims) -> str:
    """The whole document. Every claim must have its result."""
    titles = "\n".join(f"- *{key}*: {text.title}" for key, text in claims.texts.items())
    parts = [INTRODUCTION, titles, "", counts(claims), COUNTED]
    papers = dict.fromkeys(text.paper for text in claims.texts.values())
    for paper in papers:
        of_paper = [c for c in claims.claims.values() if any(claims.texts[key].paper == paper for key in c.where)]
        for verdict in VERDICTS:
            matches = [c for c in of_paper if not c.check and c.result is not None and c.result.verdict == verdict]
            if matches:
                parts += [f"## Paper {paper}: {verdict}\n", table(matches), ""]
    parts.append("## The texts against themselves\n")
    for verdict, title in CHECKED.items():
        checks = [c for c in claims.claims.values() if c.check and c.result is not None and c.result.verdict == verdict]
        parts += [f"{title}:\n", table(checks, "checked against"), ""]
    return "\n".join(parts) + "\n"


def counts(claims: Claims) -> str:
    """Markdown: verdicts × texts."""
    claimed = [claim for claim in claims.claims.values() if not claim.check]
    columns = [tally([claim for claim in claimed if key in claim.where]) for key in claims.texts]
    columns.append(tally(claimed))
    labels = [("claims", ""), *((verdict, MEANINGS[verdict]) for verdict in VERDICTS)]
    rows = [[*label, *numbers] for label, numbers in zip(labels, zip(*columns, strict=True), strict=True)]
    return tabulate(rows, ["verdict", "meaning", *claims.texts, "all"], tablefmt="github")


def tally(claims: list[Claim]) -> list[int]:
    """How many there are, and how many of each verdict."""
    verdict_counts: Counter[str] = Counter(claim.result.verdict for claim in claims if claim.result is not None)
    return [len(claims), *(verdict_counts[verdict] for verdict in VERDICTS)]


def table(claims: list[Claim], against: str = "ours") -> str:
    """Markdown: one line per claim; not padded, because the last column is long. ``against``: what it is judged by."""
    header = ["where", "claim", "published", against, "unit", "why"]
    rows = [header, ["---"] * len(header), *map(cells, claims)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells(claim: Claim) -> list[str]:
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
    why = "; ".join(part for part in (result.why, claim.note) if part)
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
