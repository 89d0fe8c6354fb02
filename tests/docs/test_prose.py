"""README, documents, messages and help are written in plain technical English."""

import re

import pytest

from tests.docs.document import DOCUMENTS, ROOT

VAGUE = re.compile(
    r"\b(told|tells|nobody|somebody|asked of|is asked|what is there|is there again|by itself|so far as|"
    r"stands? (?:in|there|beside)|all the same|as it was|as they were|what was before|another one|beside it|the house|"
    r"this room|rooms?)\b",
    re.IGNORECASE,
)
"""Phrases that hide subject or object."""


@pytest.mark.parametrize("place", ["documents", "code"])
def test_few_phrases_are_vague(place: str) -> None:
    lines, phrases = 0, []
    for file in DOCUMENTS if place == "documents" else (ROOT / "edgeformer").rglob("*.py"):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            lines += 1
            phrases += [f"{file.relative_to(ROOT)}:{number}: {match[0]}" for match in VAGUE.finditer(line)]
    assert lines > 3000 and len(phrases) <= lines * 0.5 / 1000, phrases


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130
