"""The counts in docs/protocols.md: of steps, which are derived, and of texts that leak, which were measured."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgeformer.models import load_recipe
from tests.docs.document import ROOT

TEXT = " ".join((ROOT / "docs" / "protocols.md").read_text(encoding="utf-8").split())


def figures(pattern: str) -> list[float]:
    results = re.search(pattern, TEXT)
    assert results is not None, pattern
    return [float(figure.replace(",", "")) for figure in results.groups()]


def test_published_steps() -> None:
    paragraphs, rows, micro, epochs, steps = figures(
        r"([\d,]+) padded paragraphs / \((\d+) × (\d+)\) × (\d+) epochs = ([\d,]+)"
    )
    assert steps == paragraphs / (rows * micro) * epochs


@pytest.mark.data
def test_steps_of_packed_rows(data_folder: Path) -> None:
    """As many rows as 50,000 paragraphs of WikiText-2's length fill, 16 of them a step, and ten epochs."""
    (mean,) = figures(r"WikiText-2 has ([\d.]+) GPT-2 tokens in a paragraph of more than 50 characters")
    paragraphs, rows, an_epoch, steps = figures(
        r"([\d,]+) such paragraphs fill ([\d,]+) rows, which are ([\d,]+) steps an epoch and ([\d,]+) in all"
    )
    tokenizer = Tokenizer.from_file(str(data_folder / "tokenizers" / "gpt2" / "tokenizer.json"))
    with lzma.open(data_folder / "wikitext-2" / "train.txt.xz", "rt", encoding="utf-8") as lines:
        texts = [text for text in (line.strip() for line in lines) if len(text) > 50]
    lengths = np.array([len(encoding.ids) for encoding in tokenizer.encode_batch(texts)])
    assert lengths.mean() == pytest.approx(mean, abs=0.05)
    assert round((lengths.mean() + 1) * paragraphs / 1024) == rows == load_recipe("crt_deep_rtx4050").data.expected_rows
    assert (an_epoch, steps) == (-(-rows // 16), -(-rows // 16) * 10)
    assert np.minimum(lengths + 1, 384).mean() < 0.5 * 384, "most positions of a published row are padding"


def test_texts_that_leak() -> None:
    results = ROOT / "benchmarks" / "results" / "cpu-2core" / "2026-11-21-sst2.json"
    counted = json.loads(results.read_text(encoding="utf-8"))[0]["overlap"]
    (overlap,) = (row for row in counted if row["test_set"] == "random-split")
    matches = figures(r"(\d+) of the ([\d,]+) test texts are also training texts, and ([\d,]+) more contain")
    assert matches == [overlap["duplicates"], overlap["test_rows"], overlap["contained"]]
