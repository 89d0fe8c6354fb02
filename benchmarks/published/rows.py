"""The published rows in one form: milliseconds of a call of a model whose operators are known."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from benchmarks.published.listing import list_operators
from benchmarks.published.networks import FOLDER, list_network
from benchmarks.published.transformers import Architecture, Transformer, parse_architecture
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode

_RUNTIMES = {
    "tensorrt": r"^TensorRT(?! Edge-LLM|-LLM)|\bTensorRT EP", "onnxruntime": r"^ONNX Runtime", "openvino": r"^OpenVINO",
    "ruy": r"ruy|^TFLite 2\.5\.0$", "litert": r"^(TFLite|TensorFlow Lite|LiteRT|XNNPACK)", "executorch": r"^ExecuTorch",
    "llamacpp": r"llama\.cpp|^ollama", "torch.compile": r"torch\.compile|Inductor", "torch": r"PyTorch|TorchScript",
    "tensorflow": r"^(TensorFlow|TF )", "fastertransformer": r"^(FasterTransformer|ByteTransformer|DeepSpeed)",
    "ncnn": r"^(ncnn|NCNN)",
}  # fmt: skip
"""Family of runtimes → pattern of the column ``runtime``; the others are a family each. Ruy: LiteRT before XNNPACK."""
_PRECISIONS = {
    "tf32": r"TF32", "int4": r"^(INT4|Q4|4-bit)|IQ4", "int8": r"^(INT8|Q8)", "fp16": r"^(FP16|BF16|mixed FP16)",
    "fp32": r"^FP32",
}  # fmt: skip
_NO_CALL = re.compile(
    r"training|offline|multi-stream|saturated|end to end|whole batch|total output|nvidia-smi|peak memory|clips|RTF"
    r"|first token"
)
"""Statistics that are not the time of one call."""
_NO_INPUT = re.compile(
    r"removed|skipped|real lengths|not stated|accumulation|memory|clip|wav|speech|image prompt|merged"
)
_DOUBTFUL = re.compile(r"throttled|low clock|outlier, |suspicious|conflicts|10x slower here")
_DECODED = 64
"""Earlier tokens where a row states no length of the context."""


@dataclass(frozen=True)
class Measurement:
    """A row. ``phase``: a whole call, the tokens of a prompt, or one further token behind ``past`` others."""

    profile: str
    device: str
    runtime: str
    precision: str
    model: str
    phase: Literal["call", "prefill", "decode"]
    batch: int
    size: int  # tokens of a text, or pixels of an image's side
    past: int
    threads: int | None
    ms: float
    source: str
    confidence: str


def load() -> tuple[list[Measurement], dict[str, int]]:
    """Return the usable rows, and how many were left out for each reason."""
    tables = {
        name: list(csv.DictReader((FOLDER / f"{name}.csv").read_text(encoding="utf-8").splitlines()))
        for name in ("models", "sources", "measurements")
    }
    rows, left_out = dict[Measurement, None](), Counter[str]()
    for row in tables["measurements"]:
        model = tables["models"][int(row["model"])]
        source = tables["sources"][int(row["source"])]["source"]
        result = _measurement(row, f"{model['model']}|{model['architecture']}", source)
        if isinstance(result, str):
            left_out[result] += 1
        elif result in rows:
            left_out["the same row again"] += 1
        else:
            rows[result] = None
    return [*rows], left_out


def _measurement(row: dict[str, str], model: str, source: str) -> Measurement | str:
    """Return a row in one form, or why it is left out."""
    unit, statistic, size_text = row["unit"], row["statistic"], row["input"]
    if _DOUBTFUL.search(row["note"]):
        return "its source doubts it"
    if _NO_CALL.search(f"{statistic} {model} {row['runtime']}") or unit not in _TO_MS:
        return "not the time of one call"
    if _NO_INPUT.search(size_text):
        return "its input is not known exactly"
    runtime = next((name for name, text in _RUNTIMES.items() if re.search(text, row["runtime"])), row["runtime"])
    precision = next((name for name, text in _PRECISIONS.items() if re.search(text, row["precision"])), None)
    if precision is None:
        return "an unknown precision"
    batch, value = int(row["batch"] or 1), float(row["value"])
    phase: Literal["call", "prefill", "decode"] = "call"
    size, past = _size(size_text), 0
    if unit in ("tokens/s", "ms/token"):
        is_prompt = re.search(r"prompt|prefill|pp", statistic) is not None
        length = _number(size_text) or _number(statistic)
        if batch != 1 or (is_prompt and length is None):
            return "its input is not known exactly"
        phase, size, past = ("prefill", length or 0, 0) if is_prompt else ("decode", 1, (length or 2 * _DECODED) // 2)
    if size is None:
        return "its input is not known exactly"
    ms = _TO_MS[unit](value, batch) * (size if phase == "prefill" else 1)
    if value <= 0:
        return "no positive time"
    threads = int(row["threads"]) if row["threads"].isdigit() else None
    return Measurement(
        row["profile"], row["device"], runtime, precision, model, phase, batch, size, past, threads, ms, source,
        row["confidence"],
    )  # fmt: skip


_TO_MS = {
    "ms": lambda value, batch: value, "s": lambda value, batch: 1000 * value,
    "images/s": lambda value, batch: 1000 * batch / value, "samples/s": lambda value, batch: 1000 * batch / value,
    "sequences/s": lambda value, batch: 1000 * batch / value, "texts/s": lambda value, batch: 1000 * batch / value,
    "inferences/s": lambda value, batch: 1000 * batch / value, "tokens/s": lambda value, batch: 1000 / value,
    "ms/token": lambda value, batch: value, "ms/example": lambda value, batch: value * batch,
}  # fmt: skip


def _size(size_text: str) -> int | None:
    """Return the tokens of ``sequence 128``, or the larger side of ``224x224x3``."""
    if match := re.search(r"sequence (\d+)", size_text):
        return int(match[1])
    if match := re.match(r"(\d+)x(\d+)", size_text):
        return max(int(match[1]), int(match[2]))
    return 3000 if "window" in size_text else None


def _number(text: str) -> int | None:
    """Return the first number of ``tg128`` or ``prompt 512 tokens``."""
    match = re.search(r"(?:pp|tg|prompt |prefill )(\d[\d,]*)", text)
    return int(match[1].replace(",", "")) if match else None


@cache
def operators(model: str, batch: int, size: int, past: int) -> tuple[ExecutedNode, ...] | None:
    """Return the nodes of one call of a model; None: they are not known."""
    name, _, description = model.partition("|")
    architecture = parse_architecture(description)
    if architecture is None:
        return list_network(name, batch, size)
    with torch.device("meta"):
        module = Transformer(architecture, past).eval()
        return tuple(list_operators(module, _input(architecture, batch, size)))


def _input(architecture: Architecture, batch: int, size: int) -> torch.Tensor:
    """Return an input on the meta device."""
    if architecture.patch:
        return torch.zeros(batch, 3, size, size)
    if architecture.mel:
        return torch.zeros(batch, 80, size)
    return torch.zeros(batch, size, dtype=torch.long)


def rebuilt() -> Iterator[tuple[Measurement, tuple[ExecutedNode, ...]]]:
    """Yield the usable rows whose model is rebuilt, with the nodes of their call."""
    for row in load()[0]:
        nodes = operators(row.model, row.batch, row.size, row.past)
        if nodes is not None:
            yield row, nodes
