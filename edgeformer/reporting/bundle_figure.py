"""bundle.png: what each artifact weighs and scores, and how its error grows from loop to loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.reporting.canvas import GREY, PALETTE, RED, drawing
from edgeformer.tasks.language_modeling.scoring import LanguageScore

_MIB = 2**20


def draw_bundle(bundle: BundleManifest, path: Path) -> Path:
    """Write the picture to ``path``; the drift panel is there for looped models only."""
    shown = [artifact for artifact in bundle.artifacts if artifact.size_bytes]
    drifting = [artifact for artifact in shown if artifact.drift is not None]
    notes = [*(["SYNTHETIC data"] if bundle.synthetic else []), *(["leaks future tokens"] if bundle.leaks else [])]
    title = " · ".join((bundle.run, *notes))
    height = max(3.6, 0.36 * len(shown) + 1.4)
    with drawing(path, title, 2 if drifting else 1, (12.5 if drifting else 7.0, height)) as axes:
        _draw_sizes(axes[0], shown)
        if drifting:
            _draw_drift(axes[1], drifting)
    return path


def _draw_sizes(axis: Any, artifacts: list[ArtifactManifest]) -> None:
    names = [artifact.id for artifact in artifacts]
    sizes = [(artifact.size_bytes or 0) / _MIB for artifact in artifacts]
    colours = [RED if artifact.status == "rejected" else PALETTE[0] for artifact in artifacts]
    bars = axis.barh(names, sizes, 0.62, color=colours)
    split = any(artifact.validation is not None for artifact in artifacts)
    axis.bar_label(bars, [f" {_label(artifact, split)}" for artifact in artifacts], fontsize=8)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.45)
    scored = "validation score" if split else "score on the golden inputs"
    axis.set(xlabel="MiB, with its share of weights beside it", title=f"size and {scored}")


def _label(artifact: ArtifactManifest, split: bool) -> str:
    """Only scores of the same rows stand beside each other: ``split`` says whether those are the validation split's."""
    size = f"{(artifact.size_bytes or 0) / _MIB:.1f} MiB"
    score = artifact.validation if split else artifact.score
    if artifact.status == "rejected":
        return f"{size} · rejected"
    if score is None:
        return size
    figure = f"perplexity {score.perplexity:.1f}" if isinstance(score, LanguageScore) else f"{score.accuracy:.4f}"  # type: ignore[attr-defined]
    return f"{size} · {figure}"


def _draw_drift(axis: Any, artifacts: list[ArtifactManifest]) -> None:
    tolerances: dict[float, list[str]] = {}
    for artifact, colour in zip(artifacts, PALETTE * len(artifacts), strict=False):
        assert artifact.drift is not None
        rows = [row for row in artifact.drift.loops if row.rms_error is not None]
        axis.plot(
            [row.loop for row in rows],
            [row.rms_error for row in rows],
            "o-",
            color=colour,
            label=artifact.id,
            markersize=4,
        )
        tolerances.setdefault(artifact.drift.tolerance, []).append(artifact.precision)
    for tolerance, precisions in tolerances.items():
        axis.axhline(tolerance, color=GREY, linestyle="--", linewidth=0.9)
        text = f"tolerance of {', '.join(dict.fromkeys(precisions))}"
        place: Any = ("axes fraction", "data")
        axis.annotate(text, (0.99, tolerance), xycoords=place, ha="right", va="bottom", fontsize=7, color=GREY)
    axis.set_yscale("log")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(
        xlabel="loop", ylabel="RMS error of the state / RMS of the state", title="drift from torch FP32, loop by loop"
    )
    axis.legend(frameon=False, fontsize=8, loc="best")
