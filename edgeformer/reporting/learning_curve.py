"""The learning curve of a run, from its metrics.jsonl and its manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.manifest import RunManifest
from edgeformer.reporting.caution import cautions
from edgeformer.run import read_run
from edgeformer.tasks.classification.scoring import ClassificationScore


def draw_learning_curve(run: Path) -> Path:
    """Write ``plots/learning_curve.png`` (of a language model also ``loss_per_exit.png``). Returns its path.

    Raises:
        ArtifactError: the run has no metrics.jsonl, because it was imported, or a damaged one.
    """
    manifest, records = read_run(run), _records(run / "metrics.jsonl")
    if manifest.task == "language-modeling":
        from edgeformer.reporting.language_figures import draw_language_curves

        return draw_language_curves(run, manifest, records)
    return _draw_classification(run, manifest, records)


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: no metrics to draw ({error}); only runs trained here have them") from None


def _draw_classification(run: Path, manifest: RunManifest, records: list[dict[str, Any]]) -> Path:
    """Loss, accuracy and learning rate over epochs."""
    from edgeformer.reporting.canvas import BLUE, GREY, ORANGE, drawing

    steps = [r for r in records if r["kind"] == "step"]
    epochs = [r for r in records if r["kind"] == "epoch"]
    caution = "".join(f" · {text}" for text in cautions(manifest))
    title = f"{manifest.run} · {manifest.parameters:,} parameters · split {manifest.data.split}{caution}"
    path = run / "plots" / "learning_curve.png"
    with drawing(path, title, 3, (12.5, 3.9)) as (loss, accuracy, rate):
        if steps:
            loss.plot(_of(steps, "epoch"), _of(steps, "loss"), color=GREY, linewidth=1, label="training (running)")
        loss.plot(_of(epochs, "epoch"), _of(epochs, "train_loss"), "o-", color=BLUE, label="training (epoch)")
        loss.plot(_of(epochs, "epoch"), _of(epochs, "val_loss"), "o-", color=ORANGE, label="validation")
        loss.set(xlabel="epoch", ylabel="loss (nats)", ylim=(0, None))
        loss.legend(frameon=False)
        accuracy.plot(_of(epochs, "epoch"), _of(epochs, "val_accuracy"), "o-", color=ORANGE, label="validation")
        best = next((r for r in epochs if round(r["epoch"]) == manifest.best_epoch), None)
        if best:
            note = f"kept: {best['val_accuracy']:.4f}"
            accuracy.plot(best["epoch"], best["val_accuracy"], "*", color=BLUE, markersize=14, label=note)
        for name, score in manifest.tests.items():
            if not isinstance(score, ClassificationScore):
                continue
            accuracy.axhline(score.accuracy, color=GREY, linestyle=":", linewidth=1)
            accuracy.annotate(
                f"test {name}: {score.accuracy:.4f}", (0.02, score.accuracy), xycoords=("axes fraction", "data"),
                va="bottom", fontsize=8, color=GREY,
            )  # fmt: skip
        accuracy.set(xlabel="epoch", ylabel="accuracy")
        accuracy.legend(frameon=False, loc="center right")
        rate.plot(_of(steps, "epoch"), _of(steps, "lr"), color=BLUE)
        rate.set(xlabel="epoch", ylabel="learning rate", ylim=(0, None))
    return path


def _of(records: list[dict[str, Any]], key: str) -> list[float]:
    return [record[key] for record in records]
