"""Score a linear bigram classifier on the three domains of study table12: can its rows be distinguished?

TF-IDF of words and word pairs that occur at least twice in the training set, then logistic regression. Where it stays
far below the published accuracy, the rows cannot be separated as the paper's could. Each text is cut to its first 128
WordPiece tokens, which is what the models read. Three sets of data, all cut as the recipes of the study cut theirs
(stratified, equal thirds, split_seed 42):

    study           the study's own files: IMDB, Yelp, Amazon (books, DVDs, electronics, kitchenware)
    without DVDs    the same without Amazon's DVD reviews, which are film reviews, too
    SST-2 as movies SST-2's training rows in place of IMDB

Usage: python -m benchmarks.domain_baseline --data DIR [--json FILE]

DIR has the folders amazon, imdb, sst2 and yelp, as for `python -m benchmarks.studies --data DIR`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import sklearn
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from tokenizers import Tokenizer

from benchmarks.studies.jobs import load_local_data, with_local_data
from edgeformer.artifacts.data_config import DataConfig
from edgeformer.data.cleaning import clean
from edgeformer.data.data_warnings import load_with_findings
from edgeformer.data.splits import split
from edgeformer.models import load_recipe
from edgeformer.system.host import cpu_name, now

RECIPE = "recurrent_domains_fast"
AMAZON, DVD = "amazon/mdsd_8000.jsonl.xz", "dvd"
SHOPPING = "online shopping"


def replace_sources(data: DataConfig, label: str, changes: list[dict[str, Any]]) -> DataConfig:
    """Return ``data`` with other sources for one label; each change updates the keys of that label's first source."""
    content = data.model_dump(mode="json")
    sources = content["parts"]["train"]
    labelled = next(source for source in sources if source["label_value"] == label)
    kept = [source for source in sources if source["label_value"] != label]
    content["parts"]["train"] = [*kept, *({**labelled, **change} for change in changes)]
    return DataConfig.model_validate(content, strict=False)


def write_without_dvds(folder: Path, destination: Path) -> Counter[str]:
    """Copy Amazon's reviews except those of DVDs; return the rows per product group of the whole file."""
    groups: Counter[str] = Counter()
    with lzma.open(folder / AMAZON, "rt", encoding="utf-8") as source, destination.open("w", encoding="utf-8") as kept:
        for line in source:
            group = json.loads(line)["domain"]
            groups[group] += 1
            if group != DVD:
                kept.write(line)
    return groups


def truncate(text: str, tokenizer: Tokenizer) -> str:
    """Return the part of ``text`` that the tokens of the truncating ``tokenizer`` cover."""
    return text[: max(end for _, end in tokenizer.encode(text).offsets)]


def score(data: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Fit on the training set, score on the test set. ``tokenizer`` truncates."""
    parts, _ = load_with_findings(data)
    sets = split(data, parts)
    texts = {name: [truncate(clean(str(text)), tokenizer) for text in sets[name].texts] for name in ("train", "test")}
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2)
    classifier = LogisticRegression(max_iter=1000)
    classifier.fit(vectorizer.fit_transform(texts["train"]), sets["train"].labels)
    accuracy = classifier.score(vectorizer.transform(texts["test"]), sets["test"].labels)
    rows = {name: len(texts[name]) for name in texts}
    return {"rows": rows, "features": len(vectorizer.vocabulary_), "accuracy": round(float(accuracy), 4)}


def main() -> None:
    """Score all three sets of data, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    recipe: Any = with_local_data(load_recipe(RECIPE), [arguments.data], load_local_data())
    data: DataConfig = recipe.data
    tokenizer = Tokenizer.from_file(recipe.tokenizer.path)
    tokenizer.enable_truncation(data.max_length)
    with tempfile.TemporaryDirectory() as temporary:
        no_dvds = Path(temporary) / "amazon.jsonl"
        groups = write_without_dvds(arguments.data, no_dvds)
        movies = {"path": str(arguments.data.resolve() / "sst2" / "train.tsv"), "text": "sentence"}
        variants = {
            "study": data,
            "without DVDs": replace_sources(data, SHOPPING, [{"path": str(no_dvds)}]),
            "SST-2 as movies": replace_sources(data, "movie", [movies]),
        }
        results = {name: score(variant, tokenizer) for name, variant in variants.items()}
    report = {
        "recipe": RECIPE,
        "model": "TF-IDF of 1- and 2-grams seen at least twice, logistic regression",
        "max_length": data.max_length,
        "host": {"cpu": cpu_name(), "measured": now()},
        "versions": {"scikit-learn": sklearn.__version__},
        "amazon_rows": dict(sorted(groups.items())),
        "dvd_share": groups[DVD] / groups.total(),
        "results": results,
    }
    text = json.dumps(report, indent=2) + "\n"
    if arguments.json is not None:
        arguments.json.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
