"""Row 6: what `profile` would estimate for this very card, beside what the card takes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.number_formats import Variant, timed
from benchmarks.gpu.recipes import recipe_for
from benchmarks.gpu.session import Column, Figures, Row, Session
from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import InputError

MODELS = {"stacked": "baseline_sst2_fast", "wider": "recurrent_wide_sst2_fast", "light": "recurrent_sst2_fast"}
PRECISIONS = {"onnx-fp32": "float32", "onnx-fp16": "float16"}


def measure(session: Session) -> None:
    """Each model is trained for one step, so that there is a bundle: no time depends on its weights."""
    device = _profile(session)
    models = {"light": MODELS["light"]} if session.tiny else MODELS
    shapes = [(1, 8)] if session.tiny else [(batch, seq) for batch in (1, 16) for seq in (16, 64, 128)]
    for title, name in models.items():
        recipe = recipe_for(session, name, () if session.tiny else ["data.rows.train=2000"])
        for artifact, format_ in [*PRECISIONS.items()][: 1 if session.tiny else None]:

            def case(artifact: str = artifact, format_: str = format_, recipe: Any = recipe) -> Figures:
                bundle = _bundle(session, recipe)
                return {"shapes": _rows(session, recipe, (bundle, artifact, format_), device, shapes)}

            session.case(f"{title}, {artifact}", case)
    _conclude(session, device)


def _profile(session: Session) -> DeviceProfile:
    """The shipped profile that this card is. Raises InputError where none is."""
    from edgeformer.artifacts.documents import load_profile, shipped_names
    from edgeformer.measurement.target import find_target

    if session.device != "cuda":
        return load_profile("rtx4050")
    for name in shipped_names("profiles"):
        profile = load_profile(name)
        if profile.kind == "cuda" and find_target(profile).present:
            return profile
    raise InputError(f"no shipped profile is of this card, {session.document['gpu']}")


def _bundle(session: Session, recipe: Any) -> Path:
    from edgeformer.export.export import export
    from edgeformer.export.variants import ExportOptions
    from edgeformer.training.train import TrainOptions, train

    folder = session.work / recipe.name
    if not (folder / "bundle" / "bundle.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        run = train(recipe, TrainOptions(session.work, name=recipe.name, max_steps=1))
        export(run, ExportOptions(fp16=True))
    return folder / "bundle"


def _rows(
    session: Session, recipe: Any, subject: tuple[Path, str, str], device: DeviceProfile, shapes: list[tuple[int, int]]
) -> list[Figures]:
    from edgeformer.bundle import Bundle
    from edgeformer.estimate.estimate import estimate

    folder, name, format_ = subject
    opened = Bundle.open(folder)
    rows = estimate(opened, opened.artifact(name), device, [("steady", *shape) for shape in shapes])
    return [_beside(session, recipe, format_, row) for row in rows]


def _beside(session: Session, recipe: Any, format_: str, row: Any) -> Figures:
    """An estimated row, and the same model at its shape in torch: eager, and where that works as a CUDA graph."""
    latency = row.latency_ms
    results = {
        "batch": row.batch,
        "seq": row.seq,
        "low_ms": latency.low,
        "p50_ms": latency.p50,
        "high_ms": latency.high,
    }
    ways = ("eager", "graph") if session.device == "cuda" else ("eager",)
    for way in ways:
        duration = timed(session, recipe, (row.batch, row.seq), Variant(format_, how=way))
        results[f"{way}_ms"] = duration["device_p50_ms"] or duration["p50_ms"]
    best = min(results[f"{way}_ms"] for way in ways)
    if latency.low is not None and latency.high is not None:
        middle = latency.p50 or math.sqrt(latency.low * latency.high)
        results |= {"measured_over_estimated": best / middle, "held": latency.low <= best <= latency.high}
    return results | {"reason": latency.reason}


def _conclude(session: Session, device: DeviceProfile) -> None:
    cases = [session.figures(name) for name in session.cases]
    results = [row for case in cases if case is not None for row in case["shapes"] if "held" in row]
    if not results:
        return
    ratios = [row["measured_over_estimated"] for row in results]
    session.conclude(
        {
            "profile": device.name,
            # The host has no CUDA-enabled ONNX Runtime: estimates are of its graphs, times of the same model in torch.
            "measured_with": "torch, the faster of eager and CUDA graph",
            "cases": len(results),
            "held": sum(row["held"] for row in results),
            "median_measured_over_estimated": median(ratios),
            "median_log2": median(abs(math.log2(value)) for value in ratios),
            "worst_log2": max(abs(math.log2(value)) for value in ratios),
        }
    )


ROW = Row(
    number=6,
    topic="estimates",
    question="how far are the estimates for this card from what it takes?",
    wanted="the ratio of measured to estimated times, and how often the range holds the measurement",
    measure=measure,
    columns=tuple(
        Column(f"{label}: {what}", f"shapes.{place}.{key}", "{:.3f}")
        for place, label in ((0, "first shape"), (-1, "last shape"))
        for key, what in (("low_ms", "low, ms"), ("high_ms", "high, ms"), ("measured_over_estimated", "off by"))
    ),
)
