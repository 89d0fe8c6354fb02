"""Sentences of other reviews, one per line, as further text that a fold learns from its teacher on.

No labels are needed: the teacher answers the file, and its answers are the labels.

    python benchmarks/further_text.py --data DIR --out sentences.txt
    edgeformer predict minilm_sst2-001 --file sentences.txt --output further.csv

--data: a folder with imdb/train.jsonl.xz, amazon/mdsd_8000.jsonl.xz and yelp/yelp_kaggle10k.jsonl.xz, a review per line
with its words under "text". Markup is taken out, letters are lower-cased as in SST-2, sentences of 5 to 40 words are
drawn by a seed, each once: 18,000 of films, 3,000 each of the others.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path

SOURCES = {
    "imdb/train.jsonl.xz": 18_000,
    "amazon/mdsd_8000.jsonl.xz": 3_000,
    "yelp/yelp_kaggle10k.jsonl.xz": 3_000,
}
LEAST, MOST = 5, 40


def sentences(file: Path) -> Iterator[str]:
    """Every sentence of a file's reviews, cut where a mark ends it."""
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", json.loads(line)["text"]))
            for sentence in re.split(r"(?<=[.!?])\s+", text):
                words = sentence.strip().lower()
                if LEAST <= len(words.split()) <= MOST:
                    yield words


def drawn(data: Path, seed: int = 0) -> list[str]:
    """The sentences, in a random order."""
    draw, visited, results = random.Random(seed), set[str](), list[str]()
    for name, count in SOURCES.items():
        kept_rows = []
        for sentence in sentences(data / name):
            if sentence not in visited:
                visited.add(sentence)
                kept_rows.append(sentence)
        draw.shuffle(kept_rows)
        results += kept_rows[:count]
    draw.shuffle(results)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = drawn(arguments.data)
    arguments.out.write_text("\n".join(results) + "\n", encoding="utf-8")
    print(f"{len(results):,} sentences in {arguments.out}")


if __name__ == "__main__":
    main()
