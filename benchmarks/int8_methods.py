"""Ways of making a trained classifier INT8: which keeps the accuracy, which is small, which is fast?

FP32; dynamic (what `edgeformer export --int8` writes); static, with ranges of activations calibrated on training rows
(as QDQ and as QOperator graphs, by MinMax, Percentile and Entropy); weight-only (MatMulNBits, 8 bits). All INT8 graphs
have the same INT8 table. Accuracy is measured on the run's whole validation split with ONNX Runtime. For latency all
variants take turns, A B C A B C …, in one process; for each round the ratio to FP32 is taken, and printed with its
spread.

Usage: python benchmarks/int8_methods.py RUN [--calibration 256] [--rounds 9] [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)

from edgeformer.data.encoding import Encoded, Prepared
from edgeformer.data.prepare import prepare
from edgeformer.export import quantize
from edgeformer.export.graphs import write_graph
from edgeformer.models import read_run_recipe
from edgeformer.models.tracing import export_graph, text_spec
from edgeformer.models.weights import load_model
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.system.host import cpu_name, now
from edgeformer.tasks.classification import ClassificationRecipe, score
from edgeformer.tasks.scoring import answer_rows

SHAPES = ((1, 16), (16, 64))
BATCH, LENGTH = 32, 16

STATIC: dict[str, tuple[QuantFormat, CalibrationMethod]] = {
    "static QDQ MinMax": (QuantFormat.QDQ, CalibrationMethod.MinMax),
    "static QDQ Percentile": (QuantFormat.QDQ, CalibrationMethod.Percentile),
    "static QDQ Entropy": (QuantFormat.QDQ, CalibrationMethod.Entropy),
    "static QOperator MinMax": (QuantFormat.QOperator, CalibrationMethod.MinMax),
    "static QOperator Percentile": (QuantFormat.QOperator, CalibrationMethod.Percentile),
}


class TrainingRows(CalibrationDataReader):  # type: ignore[misc]
    """Randomly drawn training rows of at least 16 tokens, cut to 16: the library's histograms want equal shapes, and
    padding would count as text in them."""

    def __init__(self, train: Encoded, count: int) -> None:
        long_enough = np.flatnonzero(train.lengths >= LENGTH)
        chosen = np.random.default_rng(0).choice(long_enough, min(count, len(long_enough)) // BATCH * BATCH, False)
        ids = np.stack([train.row(row)[:LENGTH] for row in chosen.tolist()]).astype(np.int64)
        batches = ids.reshape(-1, BATCH, LENGTH)
        self._batches: Iterator[dict[str, Any]] = iter(
            [{"input_ids": rows, "attention_mask": np.ones_like(rows)} for rows in batches]
        )

    def get_next(self) -> dict[str, Any] | None:
        """The next batch, None after the last one."""
        return next(self._batches, None)


def build(run: Path, folder: Path, data: Prepared[Encoded], longest: int, calibration: int) -> dict[str, Path]:
    """Name → graph of every method; ``longest``: tokens that the graphs may take."""
    traced = export_graph(text_spec(load_model(run), ["input_ids", "attention_mask"], longest))
    paths = {"fp32": folder / "fp32.onnx", "dynamic": folder / "dynamic.onnx"}
    write_graph(traced, paths["fp32"])
    write_graph(quantize.quantize_int8(traced), paths["dynamic"])
    prepared = folder / "prepared.onnx"
    write_graph(quantize.prepare(traced), prepared)
    encoded: Any = data.train
    for name, (form, method) in STATIC.items():
        started = time.perf_counter()
        paths[name] = folder / f"{name.replace(' ', '_')}.onnx"
        static(prepared, paths[name], TrainingRows(encoded, calibration), form, method)
        print(f"{name}: calibrated in {time.perf_counter() - started:.0f} s", flush=True)
    paths["weight-only, 8 bits"] = folder / "weight_only.onnx"
    _weight_only(prepared, paths["weight-only, 8 bits"])
    return {name: clean(path) for name, path in paths.items()}


def static(
    prepared: Path,
    target: Path,
    rows: CalibrationDataReader,
    form: QuantFormat,
    method: CalibrationMethod,
    **options: Any,
) -> None:
    """Products with ranges of activations that were found beforehand.

    Args:
        prepared: the graph, as export prepares it for a quantizer.
        rows: that the ranges are found with.
        options: further ones of the quantizer.
    """
    quantize_static(
        prepared,
        target,
        rows,
        quant_format=form,
        op_types_to_quantize=["MatMul"],
        per_channel=True,
        reduce_range=True,  # as in our dynamic graphs: 8-bit weights overflow on CPUs without VNNI
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=method,
        extra_options={"MatMulConstBOnly": True, **options},
    )


def _weight_only(source: Path, target: Path) -> None:
    # Imported here: the module makes the root logger tell everything that any library does.
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    logging.getLogger().setLevel(logging.WARNING)
    config = DefaultWeightOnlyQuantConfig(block_size=128, is_symmetric=True, accuracy_level=4, bits=8)
    quantizer = MatMulNBitsQuantizer(onnx.load(str(source)), algo_config=config)
    quantizer.process()
    onnx.save(quantizer.model.model, str(target))


def clean(path: Path) -> Path:
    """Without tensors that nothing uses any more, so that sizes compare."""
    model = onnx_ir.load(path)
    onnx_ir.passes.common.RemoveUnusedNodesPass()(model)
    onnx_ir.passes.common.DeduplicateHashedInitializersPass()(model)
    proto = onnx_ir.to_proto(model)
    onnx.save(proto, str(path))
    return path


def quality(paths: dict[str, Path], data: Prepared[Encoded], threads: int) -> dict[str, dict[str, float]]:
    """Accuracy and logit errors on the validation split, and sizes."""
    reference = np.empty(0, dtype=np.float32)
    results: dict[str, dict[str, float]] = {}
    for name, path in paths.items():
        with OnnxSession(path, threads=threads) as session:
            logits = answer_rows(session.run, data.validation, data.pad, BATCH)["logits"]
        reference = logits if name == "fp32" else reference
        error = np.abs(logits - reference)
        results[name] = {
            "accuracy": score(logits, data.validation.labels).accuracy,
            "max_abs_error": float(error.max()),
            "mean_abs_error": float(error.mean()),
            "changed_answers": int((logits.argmax(-1) != reference.argmax(-1)).sum()),
            "bytes": path.stat().st_size,
            "of_fp32": path.stat().st_size / paths["fp32"].stat().st_size,
        }
    return results


def latency(
    paths: dict[str, Path],
    shape: tuple[int, int],
    rounds: int,
    threads: int,
    takes: tuple[str, ...] = ("input_ids", "attention_mask"),
) -> dict[str, dict[str, float]]:
    """Milliseconds per call, and the time over FP32's in the same round; ``takes``: what the graphs take."""
    arrays = {"input_ids": np.full(shape, 7, dtype=np.int64), "attention_mask": np.ones(shape, dtype=np.int64)}
    arrays["input_ids"] += np.arange(shape[1])
    inputs = {name: arrays[name] for name in takes}
    sessions = {name: OnnxSession(path, threads=threads) for name, path in paths.items()}
    calls = {name: (lambda session=session: session.run(inputs)) for name, session in sessions.items()}
    repeats = max(1, round(0.2 / _seconds(calls["fp32"], 3)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            seconds = _seconds(call, repeats)
            if number:  # the first round warms up
                times[name].append(1000 * seconds)
    for session in sessions.values():
        session.close()
    return {
        name: {"ms": statistics.median(times_ms), **_ratios(times_ms, times["fp32"])}
        for name, times_ms in times.items()
    }


def _seconds(call: Callable[[], object], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats


def _ratios(times_ms: list[float], base: list[float]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(times_ms, base, strict=True))
    return {"over_fp32": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--calibration", type=int, default=256, help="training rows for the ranges of activations")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    recipe = read_run_recipe(arguments.run)
    if not isinstance(recipe, ClassificationRecipe):
        raise SystemExit(f"{arguments.run} is no classifier's run")
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(recipe.data, recipe.tokenizer, recipe.model.vocab_size, Path(folder, "cache"))
        paths = build(arguments.run, Path(folder), data, recipe.model.max_positions, arguments.calibration)
        results = quality(paths, data, arguments.threads)
        for rows, length in SHAPES:
            for name, values in latency(paths, (rows, length), arguments.rounds, arguments.threads).items():
                results[name] |= {f"{key} {rows}x{length}": value for key, value in values.items()}
    for name, values in results.items():
        print(name + ": " + ", ".join(f"{key} {value:.6g}" for key, value in values.items()))
    if arguments.json is not None:
        report = {
            "run": arguments.run.name,
            "validation_rows": len(data.validation),
            "calibration_rows": arguments.calibration,
            "rounds": arguments.rounds,
            "host": {
                "cpu": cpu_name(),
                "threads": arguments.threads,
                "onnxruntime": onnxruntime.__version__,
                "python": platform.python_version(),
                "measured": now(),
            },
            "methods": results,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
