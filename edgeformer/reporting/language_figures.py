"""The training figures of a language model (paper B): four panels, and the loss of every exit. From our own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from edgeformer.formats.manifest import RunManifest
from edgeformer.reporting.canvas import BLUE, GREY, ORANGE, RED, drawing
from edgeformer.reporting.caution import cautions
from edgeformer.tasks.language_modeling.scoring import LanguageScore

_LOOPS = ("#a9c7e8", "#6f9fd0", "#2f6fb3", "#174a80", "#0b2c4f")
"""Light to dark: the deeper the exit, the darker."""

Records = Sequence[dict[str, Any]]


def draw_language_curves(run: Path, manifest: RunManifest, records: Records) -> Path:
    """Write ``plots/learning_curve.png`` and ``plots/loss_per_exit.png``. Returns the path of the first.

    Four panels: loss over epochs, perplexity per exit, where tokens leave under the τ schedule, perplexity against
    loops. Panels (b) to (d) are those of the kept weights on the validation set; a run without them leaves them empty.
    """
    steps = [r for r in records if r["kind"] == "step"]
    epochs = [r for r in records if r["kind"] == "epoch"]
    path = run / "plots" / "learning_curve.png"
    with drawing(path, _title(manifest), 4, (17.5, 4.1)) as (losses, exits, shares, trade):
        losses.figure.get_layout_engine().set(wspace=0.04)
        _draw_losses(losses, steps, epochs, manifest.best_epoch)
        score = manifest.validation
        if isinstance(score, LanguageScore):
            _draw_exits(exits, score)
            _draw_shares(shares, score)
            _draw_trade(trade, score)
    _draw_loss_per_exit(run / "plots" / "loss_per_exit.png", manifest, steps, epochs)
    return path


def _title(manifest: RunManifest) -> str:
    parts = [manifest.run, f"{manifest.parameters:,} parameters", *cautions(manifest)]
    return " · ".join(parts)


def _draw_losses(axis: Any, steps: Records, epochs: Records, best: int | None) -> None:
    if steps:
        axis.plot(_of(steps, "epoch"), _of(steps, "loss_final"), color=GREY, linewidth=1, label="training, last loop")
    axis.plot(_of(epochs, "epoch"), _of(epochs, "train_loss"), "o-", color=BLUE, label="training, weighted over exits")
    axis.plot(_of(epochs, "epoch"), _of(epochs, "val_loss"), "o-", color=ORANGE, label="validation, last loop")
    kept = next((r for r in epochs if round(r["epoch"]) == best), None)
    if kept:
        note = f"kept: {kept['val_loss']:.4f}"
        axis.plot(kept["epoch"], kept["val_loss"], "*", color=RED, markersize=13, label=note, zorder=3)
    axis.set(title="(a) loss", xlabel="epoch", ylabel="nats per token")
    _whole_epochs(axis)
    axis.legend(frameon=False, fontsize=8)


def _draw_exits(axis: Any, score: LanguageScore) -> None:
    loops = sorted(map(int, score.exits))
    values = [score.exits[str(loop)].perplexity for loop in loops]
    bars = axis.bar([str(loop) for loop in loops], values, color=_shades(len(loops)), width=0.65)
    axis.bar_label(bars, [_short(value) for value in values], fontsize=8, padding=2)
    axis.set(title="(b) perplexity of each exit", xlabel="exit after loop", ylabel="perplexity per token")
    axis.margins(y=0.12)


def _draw_shares(axis: Any, score: LanguageScore) -> None:
    early = score.early_exit
    axis.set(title="(c) where tokens leave", xlabel="loop", ylabel="share of tokens", ylim=(0, 1.12))
    if early is None:
        return
    loops = sorted(map(int, early.share))
    shares = [early.share[str(loop)] for loop in loops]
    labels = [f"{loop}\nτ {early.thresholds[str(loop)]:.2f}" if str(loop) in early.thresholds else f"{loop}\nthe rest"
              for loop in loops]  # fmt: skip
    bars = axis.bar(labels, shares, color=_shades(len(loops)), width=0.65)
    axis.bar_label(bars, [f"{share:.1%}" for share in shares], fontsize=8, padding=2)


def _draw_trade(axis: Any, score: LanguageScore) -> None:
    loops = sorted(map(int, score.exits))
    values = [score.exits[str(loop)].perplexity for loop in loops]
    axis.plot(loops, values, "o-", color=BLUE, label="every token leaves at one exit")
    early = score.early_exit
    if early is not None:
        note = f"by confidence: {_short(early.perplexity)} at {early.mean_loops:.2f} loops"
        axis.plot(early.mean_loops, early.perplexity, "*", color=RED, markersize=13, label=note, zorder=3)
    axis.set(title="(d) quality against loops", xlabel="loops computed per token (not time)")
    axis.set(ylabel="perplexity per token", xlim=(0, max(loops) * 1.06), xticks=loops)
    axis.margins(y=0.18)
    axis.legend(frameon=False, fontsize=8)


def _draw_loss_per_exit(path: Path, manifest: RunManifest, steps: Records, epochs: Records) -> None:
    """Training (thin) and validation loss of every exit over epochs."""
    names = [key for key in (epochs[-1] if epochs else {}) if key.startswith("val_loss_exit")]
    loops = sorted(int(name.removeprefix("val_loss_exit")) for name in names)
    with drawing(path, _title(manifest), 2, (11.5, 4.3)) as (training, validation):
        for number, (loop, shade) in enumerate(zip(loops, _shades(len(loops)), strict=True)):
            key = "loss_final" if loop == loops[-1] else f"loss_exit{loop}"
            # Exits often agree to a pixel: the lines drawn first are wider, and stay visible.
            width = 0.6 + 0.6 * (len(loops) - number)
            look: dict[str, Any] = {"color": shade, "label": f"loop {loop}", "linewidth": width}
            training.plot(_of(steps, "epoch"), _of(steps, key), **look)
            validation.plot(_of(epochs, "epoch"), _of(epochs, f"val_loss_exit{loop}"), "o-", markersize=5, **look)
        for axis, title in ((training, "training"), (validation, "validation")):
            axis.set(title=f"{title} loss of each exit", xlabel="epoch", ylabel="nats per token")
            _whole_epochs(axis)
            if loops:
                axis.legend(frameon=False, fontsize=8)


def _whole_epochs(axis: Any) -> None:
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _shades(count: int) -> list[str]:
    """``count`` shades from light to dark."""
    if count == 1:
        return [_LOOPS[2]]
    return [_LOOPS[round(number * (len(_LOOPS) - 1) / (count - 1))] for number in range(count)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def _of(records: Records, key: str) -> list[float]:
    return [record.get(key, float("nan")) for record in records]
