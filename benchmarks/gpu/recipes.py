"""Shipped recipes on the data that was brought, or cut down to nearly nothing for a dry run; and some steps of them."""

from __future__ import annotations

import gc
import json
import shutil
import statistics
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.gpu.session import Figures, Session
from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.recipe import Recipe
from edgeformer.models import load_recipe
from edgeformer.run import Run

_WIKITEXT = "kind: hub, name: Salesforce/wikitext, config: wikitext-2-raw-v1, label: null"
WIKITEXT_2 = (
    f"data.parts={{train: [{{{_WIKITEXT}, split: train}}], validation: [{{{_WIKITEXT}, split: validation}}], "
    f"test: [{{{_WIKITEXT}, split: test}}]}}"
)
"""In place of WikiText-103, which is too large to be brought."""
WIKITEXT_2_STEPS = (
    f"data.parts={{train: [{{{_WIKITEXT}, split: train}}], validation: [{{{_WIKITEXT}, split: validation}}]}}"
)
"""The same where only steps are timed: nothing is tested."""
VALIDATION_LINES = 200
"""Of the validation text, where only steps are timed: all of it takes longer than the steps."""
_SYNTHETIC = "kind: synthetic-reviews"
TINY_TEXT = (
    f"data.parts={{train: [{{{_SYNTHETIC}, rows: 40, seed: 1}}], validation: [{{{_SYNTHETIC}, rows: 4, seed: 2}}], "
    f"test: [{{{_SYNTHETIC}, rows: 4, seed: 3}}]}}", "tokenizer={kind: trained, algorithm: bpe}",
    "data.min_characters=20", "data.sequence_length=16", "model.vocab_size=300", "model.hidden_size=16",
    "model.embedding_size=8", "model.attention_heads=2", "model.ffn_size=32", "model.loops=2", "model.exits=[1]",
    "model.cycles=1", "model.embedding_cycles=1", "model.dilations=[1]", "model.max_positions=64",
    "training.epochs=1", "training.batch_size=2", "training.accumulation=2", "training.precision=fp32",
    "training.log_every=1",
)  # fmt: skip
TINY_CLASSES = (
    f"data.parts={{train: [{{{_SYNTHETIC}, rows: 200, seed: 1}}]}}", "data.split=random-split",
    "data.max_length=32", "tokenizer={kind: trained, algorithm: wordpiece}", "model.vocab_size=300",
    "model.hidden_size=16", "model.heads=2", "model.ffn_size=32", "training.epochs=1", "training.precision=fp32",
)  # fmt: skip
TINY_DECODER = (
    *(record for record in TINY_TEXT if not record.startswith("model.")), "model.vocab_size=300",
    "model.hidden_size=16", "model.heads=2", "model.kv_heads=1", "model.ffn_size=32", "model.max_positions=64",
    "model.rope_theta=10000.0",
)  # fmt: skip
_TINY = {"crt": TINY_TEXT, "decoder": TINY_DECODER, "encoder": TINY_CLASSES, "pretrained": TINY_CLASSES}


def recipe_for(session: Session, name: str, overrides: Sequence[str] = (), tiny: Sequence[str] = ()) -> Recipe:
    """Return a shipped recipe as this session trains it; ``tiny`` is for dry runs. Raises InputError: no data."""
    recipe = None
    if session.options.data is not None:
        from benchmarks.studies.jobs import load_local_data, with_local_data

        recipe = with_local_data(load_recipe(name, [*overrides]), [session.options.data], load_local_data())
    if session.tiny:  # after the recipe itself: a dry run is to find out that its data is not here
        local = [record for record in overrides if not record.startswith("data.parts=")]
        return load_recipe(name, [*_TINY[load_recipe(name).model.kind], *local, *tiny])
    if recipe is None:
        raise InputError("no data here: bring it (benchmarks/gpu/pack.py), or say --data DIR")
    return recipe


def some_steps(
    session: Session, recipe: Recipe, name: str, steps: int, cap: DeviceProfile, *, refuse: bool = True
) -> Figures:
    """Do some optimizer steps of the real training, from nothing, in a run of this name.

    Args:
        cap: the card is cut down to what this profile leaves to a process; not on a CPU, where there is nothing to cut.
        refuse: do not begin where the prediction says that it will not fit (InputError).

    Returns:
        Speed (median of what is logged, less the first record: libraries load in it), predicted and measured peak.

    Raises:
        EdgeformerError: a single row does not fit into memory.
    """
    import torch

    from edgeformer.training.train import TrainOptions, train

    shutil.rmtree(session.work / name, ignore_errors=True)
    recipe = _with_little_validation(session, recipe)
    gc.collect()
    if session.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    on = cap if session.device == "cuda" else None
    options = TrainOptions(session.work, name=name, max_steps=steps, as_device=on, ignore_memory=not (on and refuse))
    run = Run.open(train(recipe, options))
    figures = trained(run)
    if session.device == "cuda":
        figures["reserved_peak_bytes"] = int(torch.cuda.max_memory_reserved())
    return figures


def _with_little_validation(session: Session, recipe: Recipe) -> Recipe:
    """A language model's recipe with the first lines of its validation text: only steps are timed."""
    source = recipe.data.parts["validation"][0] if "validation" in recipe.data.parts else None
    if recipe.task != "language-modeling" or source is None or source.kind != "file":
        return recipe
    beginning = session.work / "validation.txt"
    beginning.parent.mkdir(parents=True, exist_ok=True)
    with Path(source.path).open(encoding="utf-8") as text, beginning.open("w", encoding="utf-8") as file:
        file.writelines(islice(text, VALIDATION_LINES))
    parts = {**recipe.data.parts, "validation": (source.model_copy(update={"path": str(beginning)}),)}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"parts": parts})})


def trained(run: Run) -> Figures:
    """What a finished run says of its speed, memory and losses."""
    manifest, memory = run.manifest, run.manifest.memory
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # A step that fp16 skipped has neither a loss nor a speed that count.
    records = [item for item in map(json.loads, lines) if item["kind"] == "step" and not item.get("skipped")]
    steady = records[1:] or records
    figures: Figures = {"steps": manifest.steps, "batch_size": manifest.batch_size, "precision": manifest.precision}
    figures["attention"] = f"{manifest.attention.used}{', unpadded' if manifest.attention.unpadded else ''}"
    for key in ("tokens_per_s", "samples_per_s"):
        if all(key in record for record in steady) and steady:
            figures[key] = statistics.median(record[key] for record in steady)
    figures |= {"first_loss": records[0]["loss"], "last_loss": records[-1]["loss"]} if records else {}
    if memory is not None:
        predicted, measured = memory.predicted_peak_bytes, memory.measured_peak_bytes
        compared = predicted
        if memory.device == "cuda" and predicted is not None:
            # The measured peak is of allocated tensors: without the allocator's gaps, which the reserve is for.
            compared = predicted - (memory.predicted_reserve_bytes or 0)
        figures |= {"predicted_peak_bytes": predicted, "measured_peak_bytes": measured}
        figures |= {"budget_bytes": memory.budget_bytes, "measured_as": memory.measured_as}
        figures["predicted_over_measured"] = compared / measured if compared and measured else None
    return figures


def model_of(recipe: Any, device: str) -> Any:
    """A recipe's model with random weights, in evaluation mode: no time depends on them."""
    import torch

    from edgeformer.models import model_spec_of

    torch.manual_seed(0)
    return model_spec_of(recipe).adapter.build(recipe).eval().to(device)


def in_format(model: Any, format_: str) -> Any:
    """Put the model's weights into another number format, as exported graphs have them: norms stay in FP32."""
    import torch

    for module in model.modules():
        if not getattr(module, "keeps_float32", False):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(getattr(torch, format_))
    return model
