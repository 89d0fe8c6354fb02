"""docs/results/claims.md from docs/claims.yaml: verdicts per text, and every claim with its verdict."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from tabulate import tabulate

from benchmarks.claims.schema import Claim, Claims, Number, Published, Verdict
from benchmarks.claims.verdicts import figure

VERDICTS: tuple[str, ...] = get_args(Verdict)
INTRODUCTION = """\
# Claims of the papers

Each quantitative claim of the five texts has a verdict. The rule of a verdict was written before the measurement and
is in `docs/claims.yaml`, with the source of each figure. `make results` writes this page. [The papers'
tables](papers.md) shows the studies.

| verdict | meaning |
|---|---|
| reproduced | the measured figure supports the claim by its rule |
| not reproduced | the measured figure, or the text's own arithmetic, contradicts the claim or shows only noise |
| not testable as published | the text omits a detail, quotes another source, or reports a difference within its noise |
| not testable here | the available data or machine cannot decide the claim; the last column names the remedy |
| not tested yet | the study has no committed result, or not all of its seeds |

A difference is within the noise of a text if it is below two standard errors of its test set. A claim that several
versions repeat appears under each version and counts once in the row *all five*. The last row counts contradictions
between two figures of the texts. Training settings are no claims: the recipes `*_sst2` and `crt_deep_published` list
them.
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
