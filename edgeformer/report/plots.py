"""bundle.png: what each artifact weighs and scores, and how its error grows from loop to loop."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeformer.artifacts.data_warnings import cautions
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, DataSummary, Lengths, RunManifest
from edgeformer.artifacts.scores import Score
from edgeformer.report.canvas import BLUE, GREY, ORANGE, PALETTE, RED, can_draw, drawing
from edgeformer.report.panels import named, plain
from edgeformer.report.tables import comparable_scores
from edgeformer.run import read_run
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


# The training figures of a run, from its metrics.jsonl and its manifest; with exits, also those of each exit.


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


# The picture of how long a run's texts are: word counts of each set (paper A, figure 3), with our own numbers.


_MOST_SETS = 5
_LABELS = 4
"""Of which shares are written over a panel."""
_CHARACTERS = 44
"""Of a line over a panel."""


def draw_text_lengths(run: Path) -> Path | None:
    """Write ``plots/text_lengths.png``: how many texts of each set have how many words.

    Returns:
        Its path; None where matplotlib is not installed, or the run knows of no lengths.
    """
    manifest = read_run(run)
    sets = list(manifest.data.text_words.items())[:_MOST_SETS]
    if not sets or not can_draw():
        return None
    path = run / "plots" / "text_lengths.png"
    title = " · ".join((manifest.run, "words of a text, once cleaned", *cautions(manifest)))
    with drawing(path, title, len(sets), (3.6 * len(sets) + 0.6, 4.0)) as axes:
        for axis, (name, lengths) in zip(axes, sets, strict=True):
            _draw(axis, lengths)
            axis.set_title("\n".join(_lines(manifest.data, name, lengths)), fontsize=8.5, va="bottom")
        axes[0].set_ylabel("texts")
    return path


def _draw(axis: Any, lengths: Lengths) -> None:
    """Bars around whole numbers: that of one word alone reaches from 0.5 to 1.5."""
    width = lengths.edges[1] - lengths.edges[0]
    lefts = [edge - 0.5 for edge in lengths.edges[:-1]]
    bars = axis.bar(lefts, lengths.texts, width=width, align="edge", color=BLUE, linewidth=0)
    if lengths.max >= lengths.edges[-1]:
        bars[-1].set_color(GREY)  # it holds all longer texts, too
        place = (lengths.edges[-1] - 0.5, lengths.texts[-1])
        axis.annotate(f"≥ {lengths.edges[-2]:,}", place, ha="right", va="bottom", fontsize=8, color=GREY)
    axis.axvline(lengths.median, color=ORANGE, linewidth=1.2)
    axis.set(xlabel=f"words (bins of {width})" if width > 1 else "words", xlim=(-0.5, lengths.edges[-1] - 0.5))


def _lines(data: DataSummary, name: str, lengths: Lengths) -> list[str]:
    """What stands over a panel: the set, its lengths, and the shares of its labels where they are few."""
    counts, rows = data.label_rows.get(name, {}), max(data.rows[name], 1)
    shares = [f"{plain(named(label))} {count / rows:.2%}" for label, count in counts.items()]
    told = textwrap.wrap(", ".join(shares), _CHARACTERS, break_on_hyphens=False) if len(shares) <= _LABELS else []
    return [
        f"{plain(named(name))} · {sum(lengths.texts):,} texts",
        f"{lengths.min:,} to {lengths.max:,} words, median {lengths.median:g}, mean {lengths.mean:.1f}",
        *told,
    ]
