"""docs/claims.md from docs/claims.yaml: how many of each text hold, and every claim with its verdict."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from tabulate import tabulate

from benchmarks.claims.schema import Claim, Claims, Number, Published, Verdict
from benchmarks.claims.verdicts import figure

VERDICTS: tuple[str, ...] = get_args(Verdict)
INTRODUCTION = """\
# What the papers claim, and what holds

Every quantitative claim of the five texts, with a verdict by a rule that was written down first. Written by
`make results` from docs/claims.yaml, which has the rules and where our figures come from; nothing here is typed.

- **reproduced**: our figure supports the claim by its rule
- **not reproduced**: our figure, or the text's own arithmetic, contradicts it or shows no difference beyond the noise
- **not testable as published**: the text leaves out what would decide it, quotes others, or finds a difference within
  two standard errors of its own test set
- **not testable here**: our data or our machine cannot decide it; the last column says what would have to change
- **not tested yet**: the study that decides it has no committed result, or not with all of its seeds

A claim that several versions repeat stands under each of them, and counts once in the row of all five. The last row
counts what no text says: two of its own figures, compared.
Settings of the training are no claims: the recipes `*_sst2` and `crt_deep_published` have them.
"""


def page(claims: Claims) -> str:
    """The whole document. Every claim must have its result."""
    parts = [INTRODUCTION, counts(claims)]
    for key, text in claims.texts.items():
        of_text = {name: claim for name, claim in claims.claims.items() if key in claim.where}
        parts += [f"\n## {text.title}\n", table(of_text, key)]
    return "\n".join(parts) + "\n"


def counts(claims: Claims) -> str:
    """Markdown: texts × verdicts."""
    unchecked = [claim for claim in claims.claims.values() if not claim.check]
    rows = [
        [text.title, *tally([claim for claim in unchecked if key in claim.where])] for key, text in claims.texts.items()
    ]
    rows.append(["all five, each claim once", *tally(unchecked)])
    rows.append(["the texts against themselves", *tally([c for c in claims.claims.values() if c.check])])
    return tabulate(rows, ["text", "claims", *VERDICTS], tablefmt="github")


def tally(claims: list[Claim]) -> list[int]:
    """How many there are, and how many of each verdict."""
    verdict_counts: Counter[str] = Counter(claim.result.verdict for claim in claims if claim.result is not None)
    return [len(claims), *(verdict_counts[verdict] for verdict in VERDICTS)]


def table(claims: dict[str, Claim], text: str) -> str:
    """Markdown: one line per claim of a text; not padded, because the last column is long."""
    header = ["where", "claim", "published", "ours", "unit", "verdict", "why"]
    rows = [header, ["---"] * len(header), *(cells(claim, text) for claim in claims.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells(claim: Claim, text: str) -> list[str]:
    """One claim's line."""
    result = claim.result
    if result is None:
        raise ValueError("a claim without a result")
    published = listed({name: written(value) for name, value in claim.published.items()})
    ours = listed({name: short(value) for name, value in result.ours.items()})
    why = "; ".join(part for part in (result.why, claim.note) if part)
    row = [claim.where[text], f"“{claim.text}”", published, ours, claim.unit, result.verdict, why]
    return [cell.replace("|", "\\|") for cell in row]


def listed(figures: dict[str, str]) -> str:
    """Each with its name; a single one is called ``value`` and needs none."""
    return (
        ", ".join(displayed if name == "value" else f"{name} {displayed}" for name, displayed in figures.items()) or "–"
    )


def written(published: Published) -> str:
    """Return the value as published."""
    return "–".join(map(figure, published)) if isinstance(published, list) else figure(published)


def short(ours: Number) -> str:
    """Four digits of ours; counts whole."""
    return figure(ours if isinstance(ours, int) or abs(ours) >= 1000 else float(f"{ours:.4g}"))
