"""Row 11: the recipe for 6 GB with 2, 4 and 8 rows at a time at the same effective batch: how busy is the card?"""

from __future__ import annotations

from benchmarks.gpu.number_formats import floor
from benchmarks.gpu.recipes import WIKITEXT_2_STEPS, recipe_for, some_steps
from benchmarks.gpu.session import Column, Figures, Row, Session
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.recipe import Recipe
from edgeformer.training.plan.duration import StepWork
from edgeformer.training.plan.memory import predict_peak

RECIPE, DEVICE = "crt_deep_rtx4050", "rtx4050"
EFFECTIVE_BATCH = 16
BATCH_SIZES = (2, 4, 8)
STEPS, TINY_STEPS = 20, 2
_RATES = {"fp32": "fp32_operations_per_s", "bf16": "bf16_operations_per_s", "fp16": "fp16_operations_per_s"}
"""Precision of training → the figure of the case `floor`. torch sums products of 16-bit numbers in FP32."""


def measure(session: Session) -> None:
    """The card's own rates, then one training for each batch size."""
    session.case("floor", lambda: floor(session))
    device = load_profile(DEVICE)
    for batch_size in BATCH_SIZES:
        accumulation = EFFECTIVE_BATCH // batch_size
        settings = [f"training.batch_size={batch_size}", f"training.accumulation={accumulation}"]
        recipe = recipe_for(session, RECIPE, [WIKITEXT_2_STEPS, "training.log_every=2", *settings])

        def train(recipe: Recipe = recipe) -> Figures:
            steps = TINY_STEPS if session.tiny else STEPS
            figures = some_steps(session, recipe, "batch-size", steps, device)
            return {**figures, "accumulation": recipe.training.accumulation, **_share(session, recipe, figures)}

        session.case(f"batch_size {batch_size}, accumulation {accumulation}", train)
    speeds = {
        name: figures["tokens_per_s"]
        for name in session.cases
        if (figures := session.figures(name)) is not None and "tokens_per_s" in figures
    }
    if speeds:
        first = next(iter(speeds.values()))
        session.conclude({"speed_over_batch_size_2": {name: speed / first for name, speed in speeds.items()}})


def _share(session: Session, recipe: Recipe, figures: Figures) -> Figures:
    """The products of training per second, and their share of the rate that this card was measured to have."""
    rates, precision = session.figures("floor"), figures["precision"]
    # After an out-of-memory fewer rows are computed at a time.
    size = figures["batch_size"]
    training = recipe.training.model_copy(update={"batch_size": size})
    work = StepWork()
    predict_peak(recipe.model_copy(update={"training": training}), device_kind="cuda", precision=precision, work=work)
    per_s = work.operations / (size * recipe.data.tokens_at_once) * figures["tokens_per_s"]
    share = per_s / rates[_RATES[precision]] if rates is not None else None
    return {"operations_per_s": per_s, "share_of_peak": share}


ROW = Row(
    number=11,
    topic="batch-sizes",
    question="is the card busy with 2, 4 and 8 rows at a time at the same effective batch?",
    wanted="2 rows at a time reach the speed of 8, or a larger batch that fits becomes the recipe's",
    measure=measure,
    columns=(
        Column("tokens/s", "tokens_per_s", "{:,.0f}"),
        Column("measured peak, bytes", "measured_peak_bytes", "{:,}"),
        Column("predicted peak, bytes", "predicted_peak_bytes", "{:,}"),
        Column("rows at a time", "batch_size"),
        Column("batches of a step", "accumulation"),
        Column("products, operations/s", "operations_per_s", "{:.3g}"),
        Column("of this card's rate, summed in FP32", "share_of_peak", "{:.2f}"),
        Column("computed in", "precision"),
    ),
)
