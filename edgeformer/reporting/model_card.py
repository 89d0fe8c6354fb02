"""The model card of a run: what the model is, what it was trained on, how good it is, what it is not."""

from __future__ import annotations

from pathlib import Path

import yaml
from tabulate import tabulate

from edgeformer.formats.files import write_text
from edgeformer.formats.language_recipe import LanguageRecipe
from edgeformer.formats.manifest import RunManifest
from edgeformer.formats.recipes import AnyRecipe
from edgeformer.formats.scores import ClassificationScore
from edgeformer.formats.shipped import load_recipe
from edgeformer.formats.units import format_duration
from edgeformer.formats.workspace import RECIPE_FILE, read_run
from edgeformer.reporting.caution import overlaps, warnings
from edgeformer.reporting.language_card import language_card


def write_model_card(run: Path) -> Path:
    """Write ``model/README.md``; returns its path."""
    path = run / "model" / "README.md"
    write_text(path, model_card(read_run(run), load_recipe(str(run / RECIPE_FILE))))
    return path


def model_card(manifest: RunManifest, recipe: AnyRecipe) -> str:
    """The card as Markdown with the front matter that model hubs read."""
    if isinstance(recipe, LanguageRecipe):
        return language_card(manifest, recipe)
    front = {
        "library_name": "edgeformer",
        "pipeline_tag": "text-classification",
        "tags": ["weight-sharing", "recurrent-depth", "edge", "onnx"],
    }
    m, t = recipe.model, recipe.training
    scores = {"validation": manifest.validation, **manifest.tests}
    rows = [
        (name, f"{s.n:,}", f"{s.accuracy:.4f}", f"{s.precision:.4f}", f"{s.recall:.4f}", f"{s.f1:.4f}", f"{s.loss:.4f}")
        for name, s in scores.items()
        if isinstance(s, ClassificationScore)
    ]
    header = ("set", "rows", "accuracy", "precision", "recall", "F1", "loss")
    epochs = f"{manifest.epochs} epochs, {manifest.steps:,} steps, {format_duration(manifest.seconds)}"
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {manifest.run}\n\n{recipe.description}.\n\n"
        f"{warnings(manifest)}"
        f"- **Model:** {m.layers} layers × {m.iterations} iterations, width {m.hidden_size}, {m.heads} heads, "
        f"FFN {m.ffn_size}, α = {m.residual_scale}; {manifest.parameters:,} parameters\n"
        f"- **Labels:** {', '.join(recipe.data.labels)}; at most {recipe.data.max_length} tokens\n"
        f"- **Training:** {epochs} in {manifest.precision} on {manifest.host.get('cpu')}; weights of epoch "
        f"{manifest.best_epoch}, chosen by validation {t.select_by}; seed {recipe.seed}\n"
        f"- **Split:** {manifest.data.split}, "
        f"{', '.join(f'{name} {count:,}' for name, count in manifest.data.rows.items())} rows\n\n"
        f"## Scores\n\n{tabulate(rows, header, tablefmt='github', disable_numparse=True)}\n\n"
        "Two classes: precision, recall and F1 are those of the second label. More: macro-averaged.\n\n"
        f"## Seen in training\n\n{overlaps(manifest)}\n"
        "The exact recipe is `recipe.yaml` in the run's folder; every version and the host are in `run.json`.\n"
    )
