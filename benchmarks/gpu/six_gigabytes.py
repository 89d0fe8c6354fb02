"""Row 1: trains the recipe for 6 GB on a card that is cut down to them, and puts the peak beside what was predicted."""

from __future__ import annotations

from benchmarks.gpu.recipes import WIKITEXT_2_STEPS, device_profile, recipe_for, some_steps
from benchmarks.gpu.session import Column, Figures, Row, Session, main

RECIPE, DEVICE = "crt_deep_rtx4050", "rtx4050"
ALLOWED = 0.10
"""Of the measured peak of tensors, that their prediction may be off."""


def measure(session: Session) -> None:
    """``plan`` for the device, then the steps on what it leaves to a process."""
    recipe = recipe_for(session, RECIPE, [WIKITEXT_2_STEPS])
    device = device_profile(DEVICE)

    def plan() -> Figures:
        from edgeformer.training.plan.plan import plan

        planned = plan(recipe, device, session.work)
        tensors = planned.peak_bytes - planned.breakdown.reserve
        sizes = {"predicted_peak_bytes": planned.peak_bytes, "predicted_tensor_bytes": tensors}
        return {**sizes, **planned.model_dump(mode="json")}

    planned = session.case(f"plan --device {DEVICE}", plan)
    steps = 2 if session.tiny else 30
    name = f"train --as-device {DEVICE}, {steps} steps"
    trained = session.case(name, lambda: some_steps(session, recipe, "capped", steps, device))
    if planned is None or trained is None:
        return
    # Planned for the RTX 4050; training predicts for the card that it runs on, which may have other libraries.
    # The measured peak is of allocated tensors. The reserve is for gaps and scratch, which the reserved peak has.
    off = planned["predicted_tensor_bytes"] / trained["measured_peak_bytes"] - 1
    halved = trained["batch_size"] != recipe.training.batch_size
    session.conclude({"prediction_off": off, "within": abs(off) <= ALLOWED, "ran_out_of_memory": halved})
    if "reserved_peak_bytes" in trained:
        session.conclude({"with_reserve_off": planned["peak_bytes"] / trained["reserved_peak_bytes"] - 1})


ROW = Row(
    number=1,
    topic="six-gigabytes",
    question="does the CRT-Deep recipe really train in 6 GB?",
    wanted="no step runs out of memory, and the predicted peak is at most 10% off the measured one",
    measure=measure,
    columns=(
        Column("predicted peak, bytes", "predicted_peak_bytes", "{:,}"),
        Column("tensors of it, bytes", "predicted_tensor_bytes", "{:,}"),
        Column("measured peak, bytes", "measured_peak_bytes", "{:,}"),
        Column("reserved peak, bytes", "reserved_peak_bytes", "{:,}"),
        Column("budget, bytes", "budget_bytes", "{:,}"),
        Column("rows at a time", "batch_size"),
        Column("tokens/s", "tokens_per_s", "{:,.0f}"),
    ),
    module="six_gigabytes",
)

if __name__ == "__main__":
    raise SystemExit(main(ROW))
