"""Fine-tuning MiniLM on SST-2: samples per second of edgeformer's trainer against Hugging Face's.

Three ways take turns, each in a process of its own, with the same model, batch size, rows, longest text, threads and
their pinning:

- ``edgeformer``: the recipe ``minilm_sst2`` as it is shipped, but cut at 64 tokens as the others are;
- ``padded``: ``Trainer`` as tutorials use it, every text padded to 64 tokens, FP32;
- ``grouped``: ``Trainer`` with batches of similar length, padded to their longest, in bf16 where edgeformer is.

The classifiers differ by what transformers puts in front of the last layer: the first token through a matrix of its
own, where the recipe takes the mean over the tokens; that is one product of a row per text, against six layers.

Samples per second are those of all logging windows but the first, which warms up. Of each round the ratio is taken.
``Trainer`` groups texts among as many as a quarter of the rows, up to 1,600, and begins with the longest: few rows
would group worse than real sets do, and the first window leaves out a little of its dearest work. Padded texts all cost
the same, so a few batches of them do.

--model is MiniLM's folder (config.json, model.safetensors, tokenizer.json). --data is the folder of SST-2's train.tsv.
The exit code is 3 where a bar was not judged.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.frame import run_script
from benchmarks.judging import Limit, Watch, judged, report_bars, unless
from benchmarks.ways import environment
from edgeformer.artifacts.files import write_json
from edgeformer.runtimes import library_versions
from edgeformer.system.host import cpu_name, default_threads

_BATCH, _LENGTH, _WINDOW = 32, 64, 5
_PADDED_STEPS, _SCORED = 30, 64
_WAYS = ("edgeformer", "padded", "grouped")
_BARS = {"padded": 4.0, "grouped": 1.5}


def samples_per_s(windows: Sequence[float]) -> float:
    """Of windows of equally many samples, all but the first: samples over the sum of their times."""
    return statistics.harmonic_mean(windows[1:])


def edgeformer_windows(model: Path, rows: Path, folder: Path) -> tuple[list[float], str]:
    """Samples per second of each window of one epoch, and the precision that the trainer chose."""
    # What is scored is not timed: few rows do.
    scored = first_rows(rows, _SCORED, folder)
    parts, minimum = (f"[{{kind: file, path: {path}, text: sentence, label: label}}]" for path in (rows, scored))
    changes = {
        "data.parts.train": parts, "data.parts.validation": minimum, "data.parts.sst-test": minimum,
        "model.source": model, "data.max_length": _LENGTH,
        "training.epochs": 1, "training.log_every": _WINDOW, "training.batch_size": _BATCH,
    }  # fmt: skip
    command = [sys.executable, "-m", "edgeformer", "train", "minilm_sst2", "--name", "one", "--artifacts", str(folder)]
    command += [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    records = [loads(line) for line in (folder / "one" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    run = loads((folder / "one" / "run.json").read_text(encoding="utf-8"))
    return [record["samples_per_s"] for record in records if record["kind"] == "step"], run["precision"]


def trainer_windows(model: Path, rows: Path, *, grouped: bool, bf16: bool) -> list[float]:
    """Samples per second of each window of one epoch by transformers' Trainer."""
    import torch
    from torch.utils.data import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(model)
    with rows.open(encoding="utf-8", newline="") as file:
        lines = [*csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    padding: dict[str, Any] = {} if grouped else {"padding": "max_length"}
    encoded = tokenizer([line["sentence"] for line in lines], truncation=True, max_length=_LENGTH, **padding)

    class Rows(Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return len(lines)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**{key: encoded[key][index] for key in encoded}, "labels": int(lines[index]["label"])}

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.windows, self.began = list[float](), time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % _WINDOW == 0:
                now = time.perf_counter()
                self.windows.append(_WINDOW * _BATCH / (now - self.began))
                self.began = now

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        training_arguments = TrainingArguments(
            output_dir=folder, num_train_epochs=1, max_steps=-1 if grouped else _PADDED_STEPS,
            per_device_train_batch_size=_BATCH, learning_rate=6e-5,
            weight_decay=0.01, warmup_steps=0.06, lr_scheduler_type="linear", seed=42, save_strategy="no",
            report_to=[], disable_tqdm=True, logging_strategy="no", use_cpu=not torch.cuda.is_available(), bf16=bf16,
            train_sampling_strategy="group_by_length" if grouped else "random",
        )  # fmt: skip
        adapter = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
        collator = DataCollatorWithPadding(tokenizer) if grouped else None
        Trainer(adapter, training_arguments, train_dataset=Rows(), data_collator=collator, callbacks=[clock]).train()
    return clock.windows


def child(way: str, model: Path, data: Path, precision: str) -> None:
    """Child process: train one way and print the result as JSON on the last line."""
    if way == "edgeformer":
        with tempfile.TemporaryDirectory() as folder:
            windows, precision = edgeformer_windows(model, data, Path(folder))
    else:
        grouped = way == "grouped"
        windows = trainer_windows(model, data, grouped=grouped, bf16=grouped and precision == "bf16")
    print(dumps({"samples_per_s": samples_per_s(windows), "precision": precision}))


def first_rows(data: Path, count: int, folder: Path) -> Path:
    """The first rows of a file with a header, as a file."""
    with data.open(encoding="utf-8") as file:
        lines = [line for _, line in zip(range(count + 1), file, strict=False)]
    kept = folder / "rows.tsv"
    kept.write_text("".join(lines), encoding="utf-8")
    return kept


def run_way(way: str, model: Path, rows: Path, precision: str, threads: int) -> dict[str, Any]:
    """One way, in a process with so many threads."""
    command = [sys.executable, "-m", "benchmarks.hugging_face_trainer", "--way", way, "--model", str(model)]
    command += ["--data", str(rows), "--precision", precision]
    variables = {**os.environ, **environment(threads, torch_alone=True)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr}")
    results: dict[str, Any] = loads(done.stdout.splitlines()[-1])
    return results


def main(
    model: Annotated[Path, typer.Option()], data: Annotated[Path, typer.Option()], rows: int = 4800, rounds: int = 3,
    minutes: float = 9.0, threads: int = default_threads(), json: Path | None = None,
    way: Annotated[str, typer.Option(hidden=True)] = "", precision: Annotated[str, typer.Option(hidden=True)] = "fp32",
) -> int:  # fmt: skip
    """Measure; rounds that would end after ``minutes`` are left out. Return 3 where a bar was not judged."""
    if way:
        child(way, model, data, precision)
        return 0
    # Two windows, of which the first warms up; and the recipe keeps a tenth of the rows to select by.
    if rows < 3 * _WINDOW * _BATCH:
        raise typer.BadParameter(f"--rows: at least {3 * _WINDOW * _BATCH}")
    watch, limit = Watch(), Limit(minutes)
    limit.tell(rounds * (1 + rows / 3300))
    rates: dict[str, list[float]] = {name: [] for name in _WAYS}
    with tempfile.TemporaryDirectory() as folder:
        kept = first_rows(data / "train.tsv", rows, Path(folder))
        for number in limit.rounds(rounds):
            for name in _WAYS:
                results = run_way(name, model, kept, precision, threads)
                precision = results["precision"] if name == "edgeformer" else precision
                rates[name].append(results["samples_per_s"])
                print(f"round {number + 1}: {name:10} {results['samples_per_s']:7.1f} samples/s", flush=True)
    report: dict[str, Any] = {
        "host": cpu_name(), "threads": threads, "rows": rows, "precision": precision, "versions": library_versions(),
        "samples_per_s": rates, "ratios": {}, "conditions": watch.conditions(threads),
    }  # fmt: skip
    bars = []
    for name, bar in _BARS.items():
        ratios = sorted(ours / other for ours, other in zip(rates["edgeformer"], rates[name], strict=True))
        report["ratios"][name] = {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1], "bar": bar}
        bars.append(judged(f"edgeformer ({precision}) over Trainer, {name}", ratios, bar, at_least=True))
    report["bars"] = unless(report["conditions"]["disturbed"], bars)
    if json is not None:
        write_json(json, report)
    return report_bars(report["bars"])


if __name__ == "__main__":
    run_script(main)
