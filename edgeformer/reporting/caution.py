"""What must stand beside every figure of a run that was trained on made-up text, or that cheats."""

from __future__ import annotations

from edgeformer.formats.manifest import RunManifest
from edgeformer.formats.report import Report

LEAKS = "LEAKS FUTURE TOKENS – scores are void"
"""A language model that sees the tokens it is asked to predict."""

SYNTHETIC = "SYNTHETIC data"


def cautions(manifest: RunManifest | Report) -> list[str]:
    """For titles: short, in capitals; empty for an honest run on real text."""
    synthetic = manifest.synthetic if isinstance(manifest, Report) else manifest.data.synthetic
    return [*([SYNTHETIC] if synthetic else []), *([LEAKS] if manifest.leaks else [])]


def warnings(manifest: RunManifest) -> str:
    """Markdown for the top of a model card: what a reader must know before any figure."""
    text = ""
    if manifest.leaks:
        text += (
            f"> **{LEAKS}.** This model sees the tokens that it is asked to predict. Its loss and perplexity say "
            "nothing about how well it predicts text.\n\n"
        )
    if manifest.data.synthetic:
        text += (
            "> **Synthetic data.** This model was trained and tested on reviews written by a generator. "
            "Its scores say nothing about real text.\n\n"
        )
    return text


def overlaps(manifest: RunManifest) -> str:
    """Markdown list: how much of the test sets training has seen."""
    if not manifest.data.overlap:
        return "Not counted.\n"
    lines = [
        f"- `{o.test_set}`: of {o.test_rows:,} texts, {o.duplicates:,} are also training texts and {o.contained:,} "
        "more share a whole phrase with one.\n"
        for o in manifest.data.overlap
    ]
    return "".join(lines)
