"""Count words and BERT tokens per row of SST-2, of its shortest and longest 30%, and of Yelp's reviews.

GLUE's train and validation rows pooled, counted after cleaning; the shortest and longest rows are cut by words, ties in
file order, as the papers' cuts are read. Tokens are those of bert-base-uncased without [CLS] and [SEP]. ``distinct``
says how many different words a subset has: of all its words, and of equally many words of either subset, drawn at
random, because more text has more different words. Nothing is trained.

    python benchmarks/word_counts.py path/to/sst2 path/to/yelp path/to/tokenizer.json --json FILE
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgeformer.data.cleaning import clean

PART = 0.3
RANGES = {"0-50": (0, 50), "1-2": (1, 2), "20-50": (20, 50)}
"""Lengths that paper A names."""
SEED = 42


def sst2_texts(folder: Path) -> list[str]:
    """Return every pooled row, cleaned, in the order of the files."""
    texts = []
    for name in ("train.tsv", "dev.tsv"):
        with (folder / name).open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            next(rows)
            texts += [clean(text) for _, text in rows]
    return texts


def yelp_texts(folder: Path) -> list[str]:
    """Return every review, cleaned."""
    texts = []
    for path in sorted(folder.glob("*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            texts += [clean(json.loads(line)["text"]) for line in file]
    return texts


def summary(counts: list[int]) -> dict[str, Any]:
    """Return least, median, most, and the shares of the rows in the ranges that paper A names."""
    shares = {name: sum(low <= n <= high for n in counts) / len(counts) for name, (low, high) in RANGES.items()}
    return {"rows": len(counts), "least": min(counts), "median": median(counts), "most": max(counts), "shares": shares}


def lengths(texts: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the summary of words per row, and under ``tokens`` that of tokens per row."""
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return {
        **summary([len(text.split()) for text in texts]),
        "tokens": summary([len(row.ids) for row in encoded]),
    }


def distinct_words(subsets: dict[str, list[str]]) -> dict[str, Any]:
    """Return subset → words, distinct words, and distinct words of as many words as the smallest subset has."""
    words = {name: [word for text in texts for word in text.split()] for name, texts in subsets.items()}
    fewest = min(map(len, words.values()))
    draw = np.random.default_rng(SEED)
    return {
        name: {
            "words": len(tally),
            "distinct": len(set(tally)),
            "of_equally_many": {
                "words": fewest,
                "distinct": len({tally[index] for index in draw.permutation(len(tally))[:fewest]}),
            },
        }
        for name, tally in words.items()
    }


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sst2", type=Path)
    parser.add_argument("yelp", type=Path)
    parser.add_argument("tokenizer", type=Path, help="tokenizer.json of bert-base-uncased")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    texts = sst2_texts(arguments.sst2)
    ordered, part = sorted(texts, key=lambda text: len(text.split())), round(PART * len(texts))  # stable
    subsets = {"shortest": ordered[:part], "longest": ordered[-part:]}
    report = {
        "sst2": lengths(texts, tokenizer),
        **{name: lengths(rows, tokenizer) for name, rows in subsets.items()},
        "yelp": lengths(yelp_texts(arguments.yelp), tokenizer),
        "distinct_words": distinct_words(subsets),
    }
    text = json.dumps(report, indent=2) + "\n"
    if arguments.json is not None:
        arguments.json.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
