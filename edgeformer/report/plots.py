"""Pictures of runs and bundles: training curves, early exit, text lengths, artifact sizes and drift."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, RunManifest, cautions
from edgeformer.artifacts.scores import EarlyExitRow, EvaluationRow
from edgeformer.report.canvas import (
    BLUE,
    GREY,
    ORANGE,
    PALETTE,
    RED,
    can_draw,
    drawing,
    literal,
    shorten_name,
)  # fmt: skip
from edgeformer.report.tables import comparable_scores
from edgeformer.run import read_run
from edgeformer.tasks import get_task

_DEPTHS = ("#a9c7e8", "#6f9fd0", "#2f6fb3", "#174a80", "#0b2c4f")
"""Colours of exits: the deeper, the darker."""
_EXIT_LOSS = "val_loss_exit"
"""Prefix of the keys in metrics.jsonl that hold the validation loss of an exit."""
_MAX_SETS = 5
_MAX_LABELS = 4
"""Labels whose shares are written above a panel of text lengths."""
_TITLE_WIDTH = 44
"""Characters of a line above a panel of text lengths."""
Records = Sequence[dict[str, Any]]


def _column(records: Records, key: str) -> list[float]:
    return [record.get(key, float("nan")) for record in records]


def draw_bundle(bundle: BundleManifest, path: Path) -> Path | None:
    """Write a PNG with size and score of each artifact and, for looped models, the drift from loop to loop.

    Returns:
        ``path``; None if matplotlib is not installed.
    """
    if not can_draw():
        return None
    artifacts = [artifact for artifact in bundle.artifacts if artifact.size_bytes]
    looped = [artifact for artifact in artifacts if artifact.drift is not None]
    title = " · ".join((bundle.run, *cautions(bundle)))
    height = max(3.6, 0.36 * len(artifacts) + 1.4)
    with drawing(path, title, 2 if looped else 1, (12.5 if looped else 7.0, height)) as axes:
        _draw_sizes(axes[0], artifacts, bundle)
        if looped:
            _draw_drift(axes[1], looped)
    return path


def _draw_sizes(axis: Any, artifacts: Sequence[ArtifactManifest], bundle: BundleManifest) -> None:
    metric, (scores, scored_on) = get_task(bundle.task).metric, comparable_scores(bundle)
    labels, sizes = [], [(artifact.size_bytes or 0) / 2**20 for artifact in artifacts]
    for artifact, size in zip(artifacts, sizes, strict=True):
        value = metric.of(scores.get(artifact.id))
        score = f" · {metric.name} {metric.text(value)}" if value is not None else ""
        labels.append(f" {size:.1f} MiB{' · rejected' if artifact.status == 'rejected' else score}")
    colours = [RED if artifact.status == "rejected" else PALETTE[0] for artifact in artifacts]
    bars = axis.barh([literal(artifact.id) for artifact in artifacts], sizes, 0.62, color=colours)
    axis.bar_label(bars, labels, fontsize=8)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.margins(x=0.45)
    # Several graphs may share one weights file; each size includes the graph's share of it.
    shared = ", with its share of the external weights file" if any(a.weights_file for a in artifacts) else ""
    axis.set(xlabel=f"size (MiB){shared}", title=f"size, and {scored_on}" if scored_on is not None else "size")


def _draw_drift(axis: Any, artifacts: Sequence[ArtifactManifest]) -> None:
    tolerances: dict[float, list[str]] = {}
    for index, artifact in enumerate(artifacts):
        assert artifact.drift is not None
        rows = [row for row in artifact.drift.loops if row.rms_error is not None]
        # Graphs of one precision have nearly the same drift: dashes keep the line below visible.
        same_precision = sum(other.precision == artifact.precision for other in artifacts[:index])
        axis.plot(
            [row.loop for row in rows], [row.rms_error for row in rows], "o", color=PALETTE[index % len(PALETTE)],
            linestyle=("-", "--", ":", "-.")[same_precision % 4], label=literal(artifact.id), markersize=4,
        )  # fmt: skip
        tolerances.setdefault(artifact.drift.tolerance, []).append(artifact.precision)
    for tolerance, precisions in tolerances.items():
        axis.axhline(tolerance, color=GREY, linestyle="--", linewidth=0.9)
        text = f"tolerance of {', '.join(dict.fromkeys(precisions))}"
        style: Any = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom", "fontsize": 7}
        axis.annotate(text, (0.99, tolerance), color=GREY, **style)
    axis.set_yscale("log")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="loop", ylabel="RMS error of the state / RMS of the state")
    axis.set_title("drift from torch FP32, loop by loop")
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=3)


def draw_learning_curve(run: Path) -> Path | None:
    """Write ``plots/learning_curve.png`` and, for a model with exits, ``loss_per_exit.png``.

    Returns:
        Path of the learning curve; None if matplotlib is not installed.

    Raises:
        ArtifactError: metrics.jsonl is damaged or, for an imported run, missing.
    """
    if not can_draw():
        return None
    manifest, log = read_run(run), run / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{log}: no metrics to draw ({error}); only runs trained here have them") from None
    steps = [record for record in records if record["kind"] == "step"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    # The record of the kept weights. A stop in mid-epoch keeps the last ones, at a fraction of an epoch.
    if manifest.best_epoch is None:
        kept = next((r for r in reversed(epochs) if r["epoch"] != round(r["epoch"])), None)
    else:
        kept = next((r for r in epochs if round(r["epoch"]) == manifest.best_epoch), None)
    split = f"split {manifest.data.split}"
    title = " · ".join((manifest.run, f"{manifest.parameters:,} parameters", split, *cautions(manifest)))
    path, score = run / "plots" / "learning_curve.png", manifest.validation
    if (score is not None and score.by_exit) or any("loss_final" in record for record in steps):
        _draw_exits(path, title, manifest, steps, epochs, kept)
        _draw_loss_per_exit(run / "plots" / "loss_per_exit.png", title, steps, epochs)
    else:
        _draw_curves(path, title, manifest, steps, epochs, kept)
    return path


def _draw_curves(
    path: Path, title: str, manifest: RunManifest, steps: Records, epochs: Records, kept: dict[str, Any] | None
) -> None:
    """Draw loss, the task's metric and the learning rate over epochs."""
    metric = get_task(manifest.task).metric
    key, epoch = f"val_{metric.name}", _column(epochs, "epoch")
    with drawing(path, title, 3, (12.5, 3.9)) as (losses, scores, rates):
        if steps:
            losses.plot(_column(steps, "epoch"), _column(steps, "loss"), color=GREY, lw=1, label="training (running)")
        losses.plot(epoch, _column(epochs, "train_loss"), "o-", color=BLUE, label="training (epoch)")
        losses.plot(epoch, _column(epochs, "val_loss"), "o-", color=ORANGE, label="validation")
        losses.set(xlabel="epoch", ylabel="loss (nats)", ylim=(0, None))
        losses.legend(frameon=False)
        scores.plot(epoch, _column(epochs, key), "o-", color=ORANGE, label="validation")
        if kept:
            label = f"kept: {metric.text(kept[key])}"
            scores.plot(kept["epoch"], kept[key], "*", color=BLUE, markersize=14, label=label)
        for name, score in manifest.tests.items():
            value = metric.of(score)
            if value is not None:
                scores.axhline(value, color=GREY, linestyle=":", linewidth=1)
                style: Any = {"xycoords": ("axes fraction", "data"), "va": "bottom", "fontsize": 8, "color": GREY}
                scores.annotate(f"test {name}: {metric.text(value)}", (0.02, value), **style)
        scores.set(xlabel="epoch", ylabel=metric.name)
        scores.legend(frameon=False, loc="center right")
        rates.plot(_column(steps, "epoch"), _column(steps, "lr"), color=BLUE)
        rates.set(xlabel="epoch", ylabel="learning rate", ylim=(0, None))


def _draw_exits(
    path: Path, title: str, manifest: RunManifest, steps: Records, epochs: Records, kept: dict[str, Any] | None
) -> None:
    """Draw four panels as in paper B: loss, metric of each exit, shares of early exit, metric over loops.

    Panels (b) to (d) show the kept weights on the validation set and are empty without a validation score.
    """
    with drawing(path, title, 4, (17.5, 4.1)) as (losses, exits, shares, trade):
        losses.figure.get_layout_engine().set(wspace=0.04)
        if steps:
            final = _column(steps, "loss_final")
            losses.plot(_column(steps, "epoch"), final, color=GREY, linewidth=1, label="training, last loop")
        epoch = _column(epochs, "epoch")
        losses.plot(epoch, _column(epochs, "train_loss"), "o-", color=BLUE, label="training, weighted over exits")
        losses.plot(epoch, _column(epochs, "val_loss"), "o-", color=ORANGE, label="validation, last loop")
        if kept:
            label = f"kept: {kept['val_loss']:.4f}"
            losses.plot(kept["epoch"], kept["val_loss"], "*", color=RED, markersize=13, label=label, zorder=3)
        losses.set(title="(a) loss", xlabel="epoch", ylabel="nats per token")
        losses.xaxis.get_major_locator().set_params(integer=True)
        losses.legend(frameon=False, fontsize=8)
        score = manifest.validation
        if score is None:
            return

        name, early = get_task(manifest.task).metric.name, score.leaving_early
        loops, values = list(score.by_exit), [float(getattr(exit_, name)) for exit_ in score.by_exit.values()]
        bars = exits.bar([*map(str, loops)], values, color=_shades(len(loops)), width=0.65)
        exits.bar_label(bars, [_short(value) for value in values], fontsize=8, padding=2)
        exits.set(title=f"(b) {name} of each exit", xlabel="exit after loop", ylabel=f"{name} per token")
        exits.margins(y=0.12)

        shares.set(title="(c) where tokens leave", xlabel="loop", ylabel="share of tokens", ylim=(0, 1.12))
        trade.plot(loops, values, "o-", color=BLUE, label="every token leaves at one exit")
        if early is not None:
            left_after = {str(loop): early.share[str(loop)] for loop in sorted(map(int, early.share))}
            limits = [
                f"τ {early.thresholds[loop]:.2f}" if loop in early.thresholds else "the rest" for loop in left_after
            ]
            labels = [f"{loop}\n{limit}" for loop, limit in zip(left_after, limits, strict=True)]
            bars = shares.bar(labels, left_after.values(), color=_shades(len(labels)), width=0.65)
            shares.bar_label(bars, [f"{share:.1%}" for share in left_after.values()], fontsize=8, padding=2)
            value = float(getattr(early, name))
            label = f"by confidence: {_short(value)} at {early.mean_loops:.2f} loops"
            trade.plot(early.mean_loops, value, "*", color=RED, markersize=13, label=label, zorder=3)
        trade.set(title="(d) quality against loops", xlabel="loops computed per token (not time)")
        trade.set(ylabel=f"{name} per token", xlim=(0, max(loops) * 1.06), xticks=loops)
        trade.margins(y=0.18)
        trade.legend(frameon=False, fontsize=8)


def _draw_loss_per_exit(path: Path, title: str, steps: Records, epochs: Records) -> None:
    """Draw the training and validation loss of every exit over epochs."""
    keys = [key for key in (epochs[-1] if epochs else {}) if key.startswith(_EXIT_LOSS)]
    loops = sorted(int(key.removeprefix(_EXIT_LOSS)) for key in keys)
    with drawing(path, title, 2, (11.5, 4.3)) as (training, validation):
        for number, (loop, shade) in enumerate(zip(loops, _shades(len(loops)), strict=True)):
            key = "loss_final" if loop == loops[-1] else f"loss_exit{loop}"
            # Exits often agree to a pixel: lines drawn first are wider and stay visible.
            width = 0.6 + 0.6 * (len(loops) - number)
            style: dict[str, Any] = {"color": shade, "label": f"loop {loop}", "linewidth": width}
            training.plot(_column(steps, "epoch"), _column(steps, key), **style)
            losses = _column(epochs, f"{_EXIT_LOSS}{loop}")
            validation.plot(_column(epochs, "epoch"), losses, "o-", markersize=5, **style)
        for axis, name in ((training, "training"), (validation, "validation")):
            axis.set(title=f"{name} loss of each exit", xlabel="epoch", ylabel="nats per token")
            axis.xaxis.get_major_locator().set_params(integer=True)
            if loops:
                axis.legend(frameon=False, fontsize=8)


def _shades(count: int) -> list[str]:
    """Return ``count`` shades from light to dark."""
    if count == 1:
        return [_DEPTHS[2]]
    return [_DEPTHS[round(number * (len(_DEPTHS) - 1) / (count - 1))] for number in range(count)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def draw_early_exit(run: Path, rows: Sequence[EvaluationRow], early_exit: Sequence[EarlyExitRow]) -> Path | None:
    """Write ``plots/early_exit.png``: the loss and the task's metric over the mean number of loops.

    Args:
        run: the run's folder.
        rows: scores of single exits.
        early_exit: of the same artifacts and set; not empty.

    Returns:
        Path of the picture; None if matplotlib is not installed.
    """
    if not can_draw():
        return None
    metric = "accuracy" if early_exit[0].accuracy is not None else "perplexity"
    path, leaks = run / "plots" / "early_exit.png", " · LEAKS FUTURE TOKENS" if early_exit[0].leaks else ""
    title = f"{read_run(run).run} · early exit on {early_exit[0].split} ({early_exit[0].n:,}){leaks}"
    with drawing(path, title, 2, (10.5, 4.2)) as axes:
        for index, artifact in enumerate(dict.fromkeys(row.artifact for row in early_exit)):
            of_artifact = [row for row in early_exit if row.artifact == artifact]
            cosine = [row for row in of_artifact if row.rule == "cosine"]
            paper = [row for row in of_artifact if row.threshold is None]
            swept = [row for row in of_artifact if row.threshold is not None and row.rule == "confidence"]
            last = max(map(int, (swept or paper)[0].share))
            exits = sorted((row for row in rows if row.artifact == artifact), key=lambda row: row.exit or last)
            curves: list[tuple[Sequence[Any], str, str, dict[str, Any]]] = [
                (swept, ".-", "one threshold", {"linewidth": 1}),
                (cosine, ".:", "by cosine", {"linewidth": 1}),
                (exits, "s", "all leave there", {"markerfacecolor": "none"}),
                (paper, "*", "the paper's schedule", {"markersize": 13}),
            ]
            for axis, key in zip(axes, ("loss", metric), strict=True):
                for points, marks, label, style in curves:
                    x = [row.exit or last if points is exits else row.mean_loops for row in points]
                    y, name = [getattr(row, key) for row in points], f"{artifact}: {label}" if points else None
                    axis.plot(x, y, marks, color=PALETTE[index % len(PALETTE)], label=name, **style)
        for axis, label in zip(axes, ("loss (nats)", metric), strict=True):
            axis.set(xlabel="mean loops", ylabel=label)
        axes[0].legend(frameon=False, fontsize=8)
    return path


def draw_text_lengths(run: Path) -> Path | None:
    """Write ``plots/text_lengths.png``: the word counts of the texts of each set, as in figure 3 of paper A.

    Returns:
        Path of the picture; None if matplotlib is not installed or the run has no word counts.
    """
    manifest = read_run(run)
    sets = list(manifest.data.text_words.items())[:_MAX_SETS]
    if not sets or not can_draw():
        return None
    path = run / "plots" / "text_lengths.png"
    title = " · ".join((manifest.run, "words of a text, once cleaned", *cautions(manifest)))
    with drawing(path, title, len(sets), (3.6 * len(sets) + 0.6, 4.0)) as axes:
        for axis, (name, lengths) in zip(axes, sets, strict=True):
            edges, width = lengths.edges, lengths.edges[1] - lengths.edges[0]
            # Bars are centred on whole numbers: the bar of one word spans 0.5 to 1.5.
            lefts = [edge - 0.5 for edge in edges[:-1]]
            bars = axis.bar(lefts, lengths.texts, width=width, align="edge", color=BLUE, linewidth=0)
            if lengths.max >= edges[-1]:
                bars[-1].set_color(GREY)  # includes all longer texts
                style: Any = {"ha": "right", "va": "bottom", "fontsize": 8, "color": GREY}
                axis.annotate(f"≥ {edges[-2]:,}", (edges[-1] - 0.5, lengths.texts[-1]), **style)
            axis.axvline(lengths.median, color=ORANGE, linewidth=1.2)
            axis.set(xlabel=f"words (bins of {width})" if width > 1 else "words", xlim=(-0.5, edges[-1] - 0.5))
            counts, rows = manifest.data.label_rows.get(name, {}), max(manifest.data.rows[name], 1)
            shares = ", ".join(f"{literal(shorten_name(label))} {n / rows:.2%}" for label, n in counts.items())
            lines = [
                f"{literal(shorten_name(name))} · {sum(lengths.texts):,} texts",
                f"{lengths.min:,} to {lengths.max:,} words, median {lengths.median:g}, mean {lengths.mean:.1f}",
            ]
            if len(counts) <= _MAX_LABELS:
                lines += textwrap.wrap(shares, _TITLE_WIDTH, break_on_hyphens=False)
            axis.set_title("\n".join(lines), fontsize=8.5, va="bottom")
        axes[0].set_ylabel("texts")
    return path
