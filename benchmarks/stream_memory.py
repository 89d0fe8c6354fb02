"""What training a streamed set takes: resident memory against the size of the file and of the batch.

For every size a JSONL file of made-up text is written (rows of about 1 KB, each a draw of sentences), and a small model
is trained on it for some steps by `edgeformer train`, in a process of its own whose peak resident set is reported. The
first batch size of a file finds no tokens in the cache and makes them; the next ones find them. Everything lies below
--folder (free space needed: four times the largest file) and is deleted afterwards.

    python benchmarks/stream_memory.py [--gigabytes 0.25,1,2] [--batches 8,128] [--task classification] [--in-memory]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_SENTENCES, _PER_ROW, _VOCABULARY = 20_000, 13, 2000
_FREE_PER_BYTE = 4
"""The file itself, its tokens with their places, and the same again while they are written."""

RECIPES = {
    "language-modeling": (
        "crt_mini",
        ["data.mode=packed", "data.sequence_length=256", "model.max_positions=256", "data.first_n=null",
         "model.hidden_size=32", "model.embedding_size=16", "model.ffn_size=64",
         "model.loops=4", "model.exits=[2]"],
    ),
    "classification": (
        "quickstart",
        ["data.split=given", "data.max_length=256",
         "model.hidden_size=32", "model.ffn_size=64"],
    ),
}  # fmt: skip


def sentences() -> list[str]:
    """Sentences of the built-in generator, which is not real text."""
    from edgeformer.data.synthetic import synthetic_reviews

    return [str(row.text) for row in synthetic_reviews(_SENTENCES, 0)]


def write_rows(path: Path, size_bytes: int, vocabulary: list[str], seed: int) -> int:
    """A JSONL file of at least ``size_bytes``; returns its rows."""
    generator = random.Random(seed)
    written = rows = 0
    with path.open("wb") as file:
        while written < size_bytes:
            text = " ".join(generator.choices(vocabulary, k=_PER_ROW))
            written += file.write(json.dumps({"text": text, "label": rows % 2}).encode() + b"\n")
            rows += 1
    return rows


def make_tokenizer(path: Path, task: str, vocabulary: list[str]) -> int:
    """A tokenizer as a file; returns its size, which is less than asked for where the text has fewer pieces."""
    from edgeformer.data.tokenization import train_language_tokenizer, train_tokenizer

    if task == "language-modeling":
        built = train_language_tokenizer(_VOCABULARY, vocabulary)
    else:
        built = train_tokenizer("bpe", _VOCABULARY, vocabulary, ())
    built.save(str(path))
    return int(built.get_vocab_size())


def trained(command: list[str]) -> tuple[int, float]:
    """Peak resident bytes and seconds of a process."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    stderr = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: {stderr}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), time.perf_counter() - started


def measure(folder: Path, gigabytes: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the table for one file."""
    existing, task = sentences(), arguments.task
    train, other, tokenizer = folder / "train.jsonl", folder / "other.jsonl", folder / "tokenizer.json"
    count = write_rows(train, round(gigabytes * 1e9), existing, seed=1)
    write_rows(other, 200_000, existing, seed=2)
    vocabulary = make_tokenizer(tokenizer, task, existing)
    kinds = {"train": train, "validation": other, "test": other}
    parts = ", ".join(f"{part}: [{{kind: file, path: {path}}}]" for part, path in kinds.items())
    recipe, settings = RECIPES[task]
    settings = [*settings, f"data.parts={{{parts}}}", f"tokenizer={{kind: file, path: {tokenizer}}}"]
    settings += [f"model.vocab_size={vocabulary}"]
    settings += [f"data.stream={str(not arguments.in_memory).lower()}", "training.precision=fp32"]
    results: list[dict[str, Any]] = []
    for batch in map(int, arguments.batches.split(",")):
        command = [sys.executable, "-m", "edgeformer", "train", recipe, "--name", f"batch-{batch}", "--json"]
        command += ["--accelerator", "cpu", "--max-steps", str(arguments.steps), "--artifacts", str(folder / "made")]
        for value in [*settings, f"training.batch_size={batch}"]:
            command += ["--set", value]
        peak, seconds = trained(command)
        row = {"task": task, "stream": not arguments.in_memory, "file_bytes": train.stat().st_size, "rows": count}
        row |= {"batch": batch, "tokens": "found" if results else "made", "steps": arguments.steps}
        row |= {"peak_bytes": peak, "seconds": round(seconds, 1)}
        results.append(row)
        file = f"{row['file_bytes'] / 1e9:.2f} GB, {count:,} rows"
        print(f"{file}, batch {batch}, tokens {row['tokens']}: {peak / 2**30:.2f} GiB, {seconds:,.0f} s", flush=True)
    return results


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", default="0.25,1,2", help="sizes of the files, 10^9 bytes each")
    parser.add_argument("--batches", default="8,128", help="rows per step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--task", choices=sorted(RECIPES), default="language-modeling")
    parser.add_argument("--in-memory", action="store_true", help="without data.stream, for comparison")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where everything lies")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for gigabytes in map(float, arguments.gigabytes.split(",")):
        free = shutil.disk_usage(arguments.folder).free
        if free < _FREE_PER_BYTE * gigabytes * 1e9:
            raise SystemExit(f"{arguments.folder}: {free / 1e9:.1f} GB are free, too few for {gigabytes} GB of data")
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            rows += measure(Path(folder), gigabytes, arguments)
    if arguments.json:
        host = {"system": platform.platform(), "processor": platform.machine(), "threads": os.cpu_count()}
        arguments.json.write_text(json.dumps({"host": host, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
