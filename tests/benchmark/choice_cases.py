"""Artifacts, their scores and their rows, by hand, for what a choice picks of them."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.report import Choice, Energy, Latency, Memory, Row
from edgeformer.artifacts.scores import ExitScore
from edgeformer.benchmark.choice import ChoiceOptions, check_options, choose
from edgeformer.benchmark.limits import Limit, Quantity, Requirements
from edgeformer.benchmark.profile import rows_of_kind
from edgeformer.tasks.classification import ClassificationScore
from edgeformer.tasks.language_modeling import LanguageScore

CPU = "CPUExecutionProvider"


def requirements(phase: Literal["steady", "decode"] = "steady", **limits: float) -> Requirements:
    """Limits at the shape of the budget; quantities by name."""
    quantities: list[Quantity] = ["size", "latency", "memory", "energy"]
    shapes = {name: None if name == "size" else (1, 128) for name in quantities if name in limits}
    return Requirements(tuple(Limit(name, limits[name], shapes[name], "profile") for name in shapes), (1, 128), phase)


def accuracy(value: float) -> ClassificationScore:
    return ClassificationScore(n=1000, accuracy=value, precision=value, recall=value, f1=value, loss=0.3)


def perplexity(value: float) -> LanguageScore:
    return LanguageScore(n=1000, loss=3.0, perplexity=value, exits={"8": ExitScore(loss=3.0, perplexity=value)})


def artifact(name: str, size: int = 500, **changes: Any) -> ArtifactManifest:
    entry = ArtifactManifest(
        id=name, file=f"onnx/{name}.onnx", format="onnx", precision="fp32", status="built", size_bytes=size,
        validation=accuracy(0.9),
    )  # fmt: skip
    return entry.model_copy(update=changes)


def bundle(*artifacts: ArtifactManifest, **changes: Any) -> BundleManifest:
    parts = {"train": [{"kind": "synthetic-reviews", "rows": 10}]}
    data = {"parts": parts, "split": "random-split", "labels": ["negative", "positive"]}
    facts: dict[str, Any] = {"run": "tiny", "task": "classification", "created": "2026-11-21T00:00:00.000+00:00"}
    facts |= {"max_length": 128, "max_positions": 512, "pad_id": 0, "parameters": 100, "synthetic": False}
    facts |= {"data": DataConfig.model_validate(data, strict=False), "data_fingerprints": {}, "files": {}}
    return BundleManifest(**facts, artifacts=artifacts, code_version="1").model_copy(update=changes)


def row(name: str, p50: float = 4.0, size: int = 500, peak: int = 1000, **changes: Any) -> Row:
    measured = Row(
        artifact=name, precision="fp32", provider=CPU, where="host", phase="steady", batch=1, seq=128,
        latency_ms=Latency(status="measured", p50=p50, n=100, stable=True),
        memory_bytes=Memory(status="measured", peak=peak), size_bytes=size,
        energy_mj=Energy(status="unavailable", reason="no counter"), threads=2,
    )  # fmt: skip
    return measured.model_copy(update=changes)


def estimate(name: str, low: float, high: float, size: int = 500) -> Row:
    return row(
        name, size=size, where="device", provider="CUDAExecutionProvider", threads=None,
        latency_ms=Latency(status="estimated", low=low, high=high, p50=(low * high) ** 0.5),
        memory_bytes=Memory(status="estimated", low=1000, high=2000),
    )  # fmt: skip


def run(manifest, rows, limits=None, options=None, kind="cpu", on_target=True, records=MappingProxyType({})) -> Choice:
    device_rows = rows_of_kind(rows, kind) if on_target else [row for row in rows if row.where == "device"]
    options, limits = options or ChoiceOptions(), limits or requirements()
    check_options(options, manifest)
    scores = (Limit("score", options.min_score),) if options.min_score is not None else ()
    limits = replace(limits, limits=(*limits.limits, *scores))
    return choose(manifest, rows, device_rows, limits, options.minimize, records)


def picked(result: Choice) -> tuple[str, int | None] | None:
    if result.pick is None:
        return None
    return result.candidates[result.pick].artifact, result.candidates[result.pick].threads
