"""How many words the rows of SST-2 have, its shortest and longest 30 %, and Yelp's longest reviews; nothing is trained.

GLUE's train and validation rows pooled, words counted after cleaning, ties in file order, as the papers' cuts are read.

    python benchmarks/word_counts.py path/to/sst2 path/to/yelp --json FILE
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
from pathlib import Path
from statistics import median
from typing import Any

from edgeformer.data.cleaning import clean

PART = 0.3


def words_of_sst2(folder: Path) -> list[int]:
    """Of every pooled row, in the order of the files."""
    counts = []
    for name in ("train.tsv", "dev.tsv"):
        with (folder / name).open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            next(rows)
            counts += [len(clean(text).split()) for _, text in rows]
    return counts


def words_of_yelp(folder: Path) -> list[int]:
    """Of every review."""
    counts = []
    for path in sorted(folder.glob("*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            counts += [len(clean(json.loads(line)["text"]).split()) for line in file]
    return counts


def summary(counts: list[int]) -> dict[str, Any]:
    """Least, most, median, and shares of the rows in the ranges that paper A names."""
    ranges = {"0-50": (0, 50), "1-2": (1, 2), "20-50": (20, 50)}
    shares = {name: sum(low <= n <= high for n in counts) / len(counts) for name, (low, high) in ranges.items()}
    return {"rows": len(counts), "least": min(counts), "median": median(counts), "most": max(counts), "shares": shares}


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sst2", type=Path)
    parser.add_argument("yelp", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    counts = words_of_sst2(arguments.sst2)
    ordered, part = sorted(counts), round(PART * len(counts))  # sorting is stable: ties stay in file order
    found = {
        "sst2": summary(counts),
        "shortest": summary(ordered[:part]),
        "longest": summary(ordered[-part:]),
        "yelp": summary(words_of_yelp(arguments.yelp)),
    }
    text = json.dumps(found, indent=2) + "\n"
    if arguments.json is not None:
        arguments.json.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
