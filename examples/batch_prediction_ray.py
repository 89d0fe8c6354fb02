"""Predict the column text of a CSV with Ray Data: the way to several machines.

Each actor opens the bundle once and answers batch after batch. On a cluster, put the bundle where every machine can
read it.
"""

import argparse
from pathlib import Path
from typing import Any

import ray

import edgeformer

Batch = dict[str, Any]


class Predictor:
    """An actor with its own copy of the opened bundle."""

    def __init__(self, folder: str) -> None:
        self.bundle = edgeformer.open(folder)

    def __call__(self, batch: Batch) -> Batch:
        predictions = self.bundle.predict([str(text) for text in batch["text"]])
        batch["label"] = [getattr(prediction, "label", None) for prediction in predictions]
        batch["probability"] = [getattr(prediction, "probability", None) for prediction in predictions]
        return batch


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, help="folder of Parquet files")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()

    # One processor for each actor, and one for reading and writing.
    ray.init(num_cpus=arguments.workers + 1, include_dashboard=False)
    rows = ray.data.read_csv(str(arguments.data.resolve()))
    answers = rows.map_batches(
        Predictor, fn_constructor_args=[str(arguments.bundle.resolve())], batch_size=256, concurrency=arguments.workers
    )
    answers.write_parquet(str(arguments.out.resolve()))
    print(f"{rows.count()} rows → {arguments.out}")
