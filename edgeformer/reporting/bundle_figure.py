"""bundle.png: what each artifact weighs and scores, and how its error grows from loop to loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeformer.formats.caution import cautions
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.reporting.canvas import GREY, PALETTE, RED, can_draw, drawing
from edgeformer.reporting.panels import plain
from edgeformer.reporting.tables import comparable_scores
from edgeformer.tasks import task_named

_MIB = 2**20


def draw_bundle(bundle: BundleManifest, path: Path) -> Path | None:
    """Write the picture; the drift panel is there for looped models only.

    Args:
        bundle: whose artifacts are shown.
        path: of the PNG.

    Returns:
        ``path``; None where matplotlib is not installed.
    """
    if not can_draw():
        return None
    shown = [artifact for artifact in bundle.artifacts if artifact.size_bytes]
    drifting = [artifact for artifact in shown if artifact.drift is not None]
    title = " · ".join((bundle.run, *cautions(bundle)))
    height = max(3.6, 0.36 * len(shown) + 1.4)
    with drawing(path, title, 2 if drifting else 1, (12.5 if drifting else 7.0, height)) as axes:
        _draw_sizes(axes[0], shown, bundle)
        if drifting:
            _draw_drift(axes[1], drifting)
    return path


def _draw_sizes(axis: Any, artifacts: list[ArtifactManifest], bundle: BundleManifest) -> None:
    metric, (scores, scored_on) = task_named(bundle.task).metric, comparable_scores(bundle)
    labels, sizes = [], [(artifact.size_bytes or 0) / _MIB for artifact in artifacts]
    for artifact, size in zip(artifacts, sizes, strict=True):
        value = metric.of(scores.get(artifact.id))
        score = f" · {metric.name} {metric.text(value)}" if value is not None else ""
        labels.append(f" {size:.1f} MiB{' · rejected' if artifact.status == 'rejected' else score}")
    colours = [RED if artifact.status == "rejected" else PALETTE[0] for artifact in artifacts]
    bars = axis.barh([plain(artifact.id) for artifact in artifacts], sizes, 0.62, color=colours)
    axis.bar_label(bars, labels, fontsize=8)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.45)
    title = f"size, and {scored_on}" if scored_on is not None else "size"
    # Weights that several graphs share lie beside them, each graph's part of it counted in.
    beside = any(artifact.weights_file for artifact in artifacts)
    axis.set(xlabel=f"size (MiB){', with its share of the weights file beside it' if beside else ''}", title=title)


def _draw_drift(axis: Any, artifacts: list[ArtifactManifest]) -> None:
    tolerances: dict[float, list[str]] = {}
    for artifact, colour in zip(artifacts, PALETTE * len(artifacts), strict=False):
        assert artifact.drift is not None
        rows = [row for row in artifact.drift.loops if row.rms_error is not None]
        loops, errors = [row.loop for row in rows], [row.rms_error for row in rows]
        # Graphs of one precision have nearly the same drift: dashes let the line below be seen.
        same = [other for other in artifacts[: artifacts.index(artifact)] if other.precision == artifact.precision]
        dashes = ("-", "--", ":", "-.")[len(same) % 4]
        axis.plot(loops, errors, "o", linestyle=dashes, color=colour, label=plain(artifact.id), markersize=4)
        tolerances.setdefault(artifact.drift.tolerance, []).append(artifact.precision)
    for tolerance, precisions in tolerances.items():
        axis.axhline(tolerance, color=GREY, linestyle="--", linewidth=0.9)
        text = f"tolerance of {', '.join(dict.fromkeys(precisions))}"
        place: Any = ("axes fraction", "data")
        axis.annotate(text, (0.99, tolerance), xycoords=place, ha="right", va="bottom", fontsize=7, color=GREY)
    axis.set_yscale("log")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="loop", ylabel="RMS error of the state / RMS of the state")
    axis.set_title("drift from torch FP32, loop by loop")
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=3)
