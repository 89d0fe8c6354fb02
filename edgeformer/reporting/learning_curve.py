"""The training figures of a run, from its metrics.jsonl and its manifest; with exits, also those of each exit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeformer.formats.caution import cautions
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.manifest import RunManifest
from edgeformer.formats.scores import Score
from edgeformer.reporting.canvas import BLUE, GREY, ORANGE, RED, can_draw, drawing
from edgeformer.run import read_run
from edgeformer.tasks import task_named

_LOOPS = ("#a9c7e8", "#6f9fd0", "#2f6fb3", "#174a80", "#0b2c4f")
"""Light to dark: the deeper the exit, the darker."""

_EXIT = "val_loss_exit"
"""Beginning of a record's keys that hold the validation loss of an exit."""

Records = Sequence[dict[str, Any]]


def draw_learning_curve(run: Path) -> Path | None:
    """Write ``plots/learning_curve.png``, of a model with exits also ``loss_per_exit.png``.

    Returns:
        The first's path; None where matplotlib is not installed.

    Raises:
        ArtifactError: the run has no metrics.jsonl, because it was imported, or a damaged one.
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
    score = manifest.validation
    with_exits = (score is not None and bool(score.by_exit)) or any("loss_final" in record for record in steps)
    path = run / "plots" / "learning_curve.png"
    if with_exits:
        _draw_with_exits(path, manifest, steps, epochs)
        _draw_loss_per_exit(run / "plots" / "loss_per_exit.png", manifest, steps, epochs)
    else:
        _draw_plain(path, manifest, steps, epochs)
    return path


def _title(manifest: RunManifest) -> str:
    split = f"split {manifest.data.split}"
    return " · ".join((manifest.run, f"{manifest.parameters:,} parameters", split, *cautions(manifest)))


def _kept(epochs: Records, best: int | None) -> dict[str, Any] | None:
    """The record of the weights that were kept; those of a stop in mid-epoch are the last."""
    if best is None:
        return next((r for r in reversed(epochs) if r["epoch"] != round(r["epoch"])), None)
    return next((r for r in epochs if round(r["epoch"]) == best), None)


def _draw_plain(path: Path, manifest: RunManifest, steps: Records, epochs: Records) -> None:
    """Loss, the task's metric and learning rate over epochs."""
    with drawing(path, _title(manifest), 3, (12.5, 3.9)) as (loss, metric, rate):
        if steps:
            loss.plot(_of(steps, "epoch"), _of(steps, "loss"), color=GREY, linewidth=1, label="training (running)")
        loss.plot(_of(epochs, "epoch"), _of(epochs, "train_loss"), "o-", color=BLUE, label="training (epoch)")
        loss.plot(_of(epochs, "epoch"), _of(epochs, "val_loss"), "o-", color=ORANGE, label="validation")
        loss.set(xlabel="epoch", ylabel="loss (nats)", ylim=(0, None))
        loss.legend(frameon=False)
        _draw_metric(metric, manifest, epochs)
        rate.plot(_of(steps, "epoch"), _of(steps, "lr"), color=BLUE)
        rate.set(xlabel="epoch", ylabel="learning rate", ylim=(0, None))


def _draw_metric(axis: Any, manifest: RunManifest, epochs: Records) -> None:
    metric = task_named(manifest.task).metric
    key = f"val_{metric.name}"
    axis.plot(_of(epochs, "epoch"), _of(epochs, key), "o-", color=ORANGE, label="validation")
    best = _kept(epochs, manifest.best_epoch)
    if best:
        note = f"kept: {metric.text(best[key])}"
        axis.plot(best["epoch"], best[key], "*", color=BLUE, markersize=14, label=note)
    for name, score in manifest.tests.items():
        value = metric.of(score)
        if value is None:
            continue
        axis.axhline(value, color=GREY, linestyle=":", linewidth=1)
        place: Any = ("axes fraction", "data")
        text = f"test {name}: {metric.text(value)}"
        axis.annotate(text, (0.02, value), xycoords=place, va="bottom", fontsize=8, color=GREY)
    axis.set(xlabel="epoch", ylabel=metric.name)
    axis.legend(frameon=False, loc="center right")


def _draw_with_exits(path: Path, manifest: RunManifest, steps: Records, epochs: Records) -> None:
    """Loss over epochs, the metric at each exit, where early exit by confidence leaves, the metric against loops.

    Panels (b) to (d) are those of the kept weights on the validation set; a run without them leaves them empty. From
    paper B, with our own numbers.
    """
    with drawing(path, _title(manifest), 4, (17.5, 4.1)) as (losses, exits, shares, trade):
        losses.figure.get_layout_engine().set(wspace=0.04)
        _draw_losses(losses, steps, epochs, _kept(epochs, manifest.best_epoch))
        score = manifest.validation
        if score is None:
            return
        name = task_named(manifest.task).metric.name
        loops, values = list(score.by_exit), [float(getattr(exit_, name)) for exit_ in score.by_exit.values()]
        bars = exits.bar([*map(str, loops)], values, color=_shades(len(loops)), width=0.65)
        exits.bar_label(bars, [_short(value) for value in values], fontsize=8, padding=2)
        exits.set(title=f"(b) {name} of each exit", xlabel="exit after loop", ylabel=f"{name} per token")
        exits.margins(y=0.12)
        _draw_shares(shares, score)
        trade.plot(loops, values, "o-", color=BLUE, label="every token leaves at one exit")
        early = score.leaving_early
        if early is not None:
            value = float(getattr(early, name))
            note = f"by confidence: {_short(value)} at {early.mean_loops:.2f} loops"
            trade.plot(early.mean_loops, value, "*", color=RED, markersize=13, label=note, zorder=3)
        trade.set(title="(d) quality against loops", xlabel="loops computed per token (not time)")
        trade.set(ylabel=f"{name} per token", xlim=(0, max(loops) * 1.06), xticks=loops)
        trade.margins(y=0.18)
        trade.legend(frameon=False, fontsize=8)


def _draw_losses(axis: Any, steps: Records, epochs: Records, kept: dict[str, Any] | None) -> None:
    if steps:
        axis.plot(_of(steps, "epoch"), _of(steps, "loss_final"), color=GREY, linewidth=1, label="training, last loop")
    axis.plot(_of(epochs, "epoch"), _of(epochs, "train_loss"), "o-", color=BLUE, label="training, weighted over exits")
    axis.plot(_of(epochs, "epoch"), _of(epochs, "val_loss"), "o-", color=ORANGE, label="validation, last loop")
    if kept:
        note = f"kept: {kept['val_loss']:.4f}"
        axis.plot(kept["epoch"], kept["val_loss"], "*", color=RED, markersize=13, label=note, zorder=3)
    axis.set(title="(a) loss", xlabel="epoch", ylabel="nats per token")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False, fontsize=8)


def _draw_shares(axis: Any, score: Score) -> None:
    early = score.leaving_early
    axis.set(title="(c) where tokens leave", xlabel="loop", ylabel="share of tokens", ylim=(0, 1.12))
    if early is None:
        return
    loops = sorted(map(int, early.share))
    shares = [early.share[str(loop)] for loop in loops]
    labels = [f"{loop}\nτ {early.thresholds[str(loop)]:.2f}" if str(loop) in early.thresholds else f"{loop}\nthe rest"
              for loop in loops]  # fmt: skip
    bars = axis.bar(labels, shares, color=_shades(len(loops)), width=0.65)
    axis.bar_label(bars, [f"{share:.1%}" for share in shares], fontsize=8, padding=2)


def _draw_loss_per_exit(path: Path, manifest: RunManifest, steps: Records, epochs: Records) -> None:
    """Training (thin) and validation loss of every exit over epochs."""
    names = [key for key in (epochs[-1] if epochs else {}) if key.startswith(_EXIT)]
    loops = sorted(int(name.removeprefix(_EXIT)) for name in names)
    with drawing(path, _title(manifest), 2, (11.5, 4.3)) as (training, validation):
        for number, (loop, shade) in enumerate(zip(loops, _shades(len(loops)), strict=True)):
            key = "loss_final" if loop == loops[-1] else f"loss_exit{loop}"
            # Exits often agree to a pixel: the lines drawn first are wider, and stay visible.
            width = 0.6 + 0.6 * (len(loops) - number)
            look: dict[str, Any] = {"color": shade, "label": f"loop {loop}", "linewidth": width}
            training.plot(_of(steps, "epoch"), _of(steps, key), **look)
            validation.plot(_of(epochs, "epoch"), _of(epochs, f"{_EXIT}{loop}"), "o-", markersize=5, **look)
        for axis, title in ((training, "training"), (validation, "validation")):
            axis.set(title=f"{title} loss of each exit", xlabel="epoch", ylabel="nats per token")
            axis.xaxis.get_major_locator().set_params(integer=True)
            if loops:
                axis.legend(frameon=False, fontsize=8)


def _shades(count: int) -> list[str]:
    """``count`` shades from light to dark."""
    if count == 1:
        return [_LOOPS[2]]
    return [_LOOPS[round(number * (len(_LOOPS) - 1) / (count - 1))] for number in range(count)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def _of(records: Records, key: str) -> list[float]:
    return [record.get(key, float("nan")) for record in records]
