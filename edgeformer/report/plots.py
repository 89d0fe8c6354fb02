"""Pictures of runs and bundles: training curves, artifact sizes and drift."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import BundleManifest, cautions
from edgeformer.report.canvas import BLUE, GREY, ORANGE, PALETTE, RED, can_draw, drawing, literal
from edgeformer.report.tables import comparable_scores
from edgeformer.run import read_run
from edgeformer.tasks import get_task

_DEPTHS = ("#a9c7e8", "#6f9fd0", "#2f6fb3", "#174a80", "#0b2c4f")  # colours of exits: the deeper, the darker


def draw_bundle(bundle: BundleManifest, path: Path) -> Path | None:
    """Write a PNG with each artifact's size and score, and the drift of loops; return None without matplotlib."""
    if not can_draw():
        return None
    artifacts = [artifact for artifact in bundle.artifacts if artifact.size_bytes]
    looped = [artifact for artifact in artifacts if artifact.drift is not None]
    title = " · ".join((bundle.run, *cautions(bundle)))
    height = max(3.6, 0.36 * len(artifacts) + 1.4)
    metric, (scores, scored_on) = get_task(bundle.task).metric, comparable_scores(bundle)
    labels, sizes = [], [(artifact.size_bytes or 0) / 2**20 for artifact in artifacts]
    for artifact, size in zip(artifacts, sizes, strict=True):
        value = metric.of(scores.get(artifact.id))
        score = f" · {metric.name} {metric.text(value)}" if value is not None else ""
        labels.append(f" {size:.1f} MiB{' · rejected' if artifact.status == 'rejected' else score}")
    colours = [RED if artifact.status == "rejected" else PALETTE[0] for artifact in artifacts]
    # Several graphs may share one weights file; each size includes the graph's share of it.
    shared = ", with its share of the external weights file" if any(a.weights_file for a in artifacts) else ""
    with drawing(path, title, 2 if looped else 1, (12.5 if looped else 7.0, height)) as axes:
        # 1. Size and score
        axis = axes[0]
        bars = axis.barh([literal(artifact.id) for artifact in artifacts], sizes, 0.62, color=colours)
        axis.bar_label(bars, labels, fontsize=8)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.margins(x=0.45)
        axis.set(xlabel=f"size (MiB){shared}", title=f"size, and {scored_on}" if scored_on is not None else "size")
        if not looped:
            return path
        # 2. Drift of the loops
        drift = axes[1]
        tolerances: dict[float, list[str]] = {}
        for index, artifact in enumerate(looped):
            assert artifact.drift is not None
            rows = [row for row in artifact.drift.loops if row.rms_error is not None]
            # Graphs of one precision have nearly the same drift: dashes keep the line below visible.
            same_precision = sum(other.precision == artifact.precision for other in looped[:index])
            drift.plot(
                [row.loop for row in rows], [row.rms_error for row in rows], "o", color=PALETTE[index % len(PALETTE)],
                linestyle=("-", "--", ":", "-.")[same_precision % 4], label=literal(artifact.id), markersize=4,
            )  # fmt: skip
            tolerances.setdefault(artifact.drift.tolerance, []).append(artifact.precision)
        for tolerance, precisions in tolerances.items():
            drift.axhline(tolerance, color=GREY, linestyle="--", linewidth=0.9)
            text = f"tolerance of {', '.join(dict.fromkeys(precisions))}"
            style: Any = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom", "fontsize": 7}
            drift.annotate(text, (0.99, tolerance), color=GREY, **style)
        drift.set_yscale("log")
        drift.xaxis.get_major_locator().set_params(integer=True)
        drift.set(xlabel="loop", ylabel="RMS error of the state / RMS of the state")
        drift.set_title("drift from torch FP32, loop by loop")
        drift.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=3)
    return path


def draw_learning_curve(run: Path) -> Path | None:
    """Write ``plots/learning_curve.png`` and return its path; None without matplotlib, and for a fit without epochs.

    A model with exits gets four panels as in paper B: loss, metric of each exit, shares of early exit, metric over
    loops; the last three are of the validation set. Raises ArtifactError if metrics.jsonl is damaged or missing.
    """
    if not can_draw():
        return None
    # 1. Read the metrics of steps and epochs.
    manifest, log = read_run(run), run / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{log}: no metrics to draw ({error}); only runs trained here have them") from None
    keys = {key for record in records for key in record}
    if records and "train_loss" not in keys:
        return None
    steps, epochs = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for record in records:
        for key in keys - {"kind"}:
            (steps if record["kind"] == "step" else epochs)[key].append(record.get(key, float("nan")))
    # 2. Draw the losses.
    score, metric = manifest.validation, get_task(manifest.task).metric
    parts = (f"{manifest.parameters:,} parameters", f"split {manifest.data.split}", *cautions(manifest))
    title = " · ".join((manifest.run, *parts))
    has_exits = (score is not None and bool(score.by_exit)) or "loss_final" in keys
    path = run / "plots" / "learning_curve.png"
    with drawing(path, title, 4 if has_exits else 3, (17.5 if has_exits else 12.5, 4.1)) as (losses, *panels):
        if steps["epoch"]:
            running = steps["loss_final" if has_exits else "loss"]
            losses.plot(steps["epoch"], running, color=GREY, lw=1, label="training (running)")
        losses.plot(epochs["epoch"], epochs["train_loss"], "o-", color=BLUE, label="training (epoch)")
        losses.plot(epochs["epoch"], epochs["val_loss"], "o-", color=ORANGE, label="validation")
        losses.set(xlabel="epoch", ylabel="loss (nats)")
        for panel in (losses, *([] if has_exits else panels)):
            panel.xaxis.get_major_locator().set_params(integer=True)
        losses.legend(frameon=False, fontsize=8)
        if has_exits:
            losses.figure.get_layout_engine().set(wspace=0.04)
            if score is None:
                return path
            # 3. Draw the metric of each exit, where tokens leave, and the metric over the mean loops.
            (exits, shares, trade), early, name = panels, score.leaving_early, metric.name
            loops, values = list(score.by_exit), [float(getattr(exit_, name)) for exit_ in score.by_exit.values()]
            bars = exits.bar([*map(str, loops)], values, color=_shades(len(loops)), width=0.65)
            exits.bar_label(bars, [f"{value:,.4g}" for value in values], fontsize=8, padding=2)
            exits.set(title=f"{name} of each exit", xlabel="exit after loop", ylabel=f"{name} per token")
            exits.margins(y=0.12)
            shares.set(title="where tokens leave", xlabel="loop", ylabel="share of tokens", ylim=(0, 1.12))
            trade.plot(loops, values, "o-", color=BLUE, label="every token leaves at one exit")
            if early is not None:
                left_after = {str(loop): early.share[str(loop)] for loop in sorted(map(int, early.share))}
                labels = [
                    f"{loop}\n{f'τ {early.thresholds[loop]:.2f}' if loop in early.thresholds else 'the rest'}"
                    for loop in left_after
                ]
                bars = shares.bar(labels, left_after.values(), color=_shades(len(labels)), width=0.65)
                shares.bar_label(bars, [f"{share:.1%}" for share in left_after.values()], fontsize=8, padding=2)
                early_value = float(getattr(early, name))
                label = f"by confidence: {early_value:,.4g} at {early.mean_loops:.2f} loops"
                trade.plot(early.mean_loops, early_value, "*", color=RED, markersize=13, label=label, zorder=3)
            trade.set(title="quality against loops", xlabel="loops computed per token (not time)")
            trade.set(ylabel=f"{name} per token", xlim=(0, max(loops) * 1.06), xticks=loops)
            trade.margins(y=0.18)
            trade.legend(frameon=False, fontsize=8)
            return path
        # 4. Draw the metric, the kept weights and the learning rate.
        scores, rates = panels
        values = epochs[f"val_{metric.name}"]
        scores.plot(epochs["epoch"], values, "o-", color=ORANGE, label="validation")
        # The kept weights. A stop in mid-epoch keeps the last ones, at a fraction of an epoch.
        kept = next((index for index, epoch in reversed([*enumerate(epochs["epoch"])]) if epoch != round(epoch)), None)
        if manifest.best_epoch is not None:
            kept = next((i for i, epoch in enumerate(epochs["epoch"]) if round(epoch) == manifest.best_epoch), None)
        if kept is not None:
            label = f"kept: {metric.text(values[kept])}"
            scores.plot(epochs["epoch"][kept], values[kept], "*", color=BLUE, markersize=14, label=label)
        for name, test in manifest.tests.items():
            if (value := metric.of(test)) is not None:
                scores.axhline(value, color=GREY, linestyle=":", linewidth=1)
                style: Any = {"xycoords": ("axes fraction", "data"), "va": "bottom", "fontsize": 8, "color": GREY}
                scores.annotate(f"test {name}: {metric.text(value)}", (0.02, value), **style)
        scores.set(xlabel="epoch", ylabel=metric.name)
        scores.legend(frameon=False, fontsize=8, loc="center right")
        rates.plot(steps["epoch"], steps["lr"], color=BLUE)
        rates.set(xlabel="epoch", ylabel="learning rate", ylim=(0, None))
    return path


def _shades(count: int) -> list[str]:
    """Return ``count`` shades from light to dark."""
    return [_DEPTHS[round(number * (len(_DEPTHS) - 1) / max(count - 1, 1))] for number in range(count)]
