"""Row 12: the card is full when a phase of the first step begins; training goes on as if it had never been."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.gpu.recipes import WIKITEXT_2_STEPS, device_profile, recipe_for, some_steps
from benchmarks.gpu.session import Column, Figures, Row, Session, main
from edgeformer.artifacts.recipe import Recipe

RECIPE, DEVICE = "crt_deep_rtx4050", "rtx4050"
OPTIMIZER_STEP = "optimizer step"
PHASES = ("optimizer state", "forward", "backward", OPTIMIZER_STEP)
"""Of the first step. The last one allocates nothing with the recipe's fused kernels, so a full card must not matter."""
FEWER_LOOPS = ("model.loops=2", "model.exits=[1]", "data.first_n=4000")
"""As many weights, and a quarter of the kernels of a step."""
ALLOWED = 1e-3
"""Relative difference of a step's loss, or twice that of two equal trainings, if that is more."""


@contextmanager
def full_card(phase: str, device: str) -> Iterator[list[str]]:
    """Cap torch's allocator at what it holds while ``phase`` runs for the first time.

    Yields:
        The errors that this led to. A CPU has no cap: there the phase fails at once, if it allocates anything.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    from edgeformer.training.loop import step as stepper
    from edgeformer.training.loop.objective import Objective

    places: dict[str, tuple[Any, str]] = {
        "optimizer state": (stepper, "allocate_state"),
        "forward": (Objective, "losses"),
        "backward": (Accelerator, "backward"),
        OPTIMIZER_STEP: (AcceleratedOptimizer, "step"),
    }
    owner, name = places[phase]
    original: Callable[..., Any] = getattr(owner, name)
    calls, errors = 0, list[str]()

    def limited(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            return original(*arguments, **options)
        try:
            if device == "cpu":
                if phase != OPTIMIZER_STEP:
                    raise torch.OutOfMemoryError("dry run")
                return original(*arguments, **options)
            start = torch.cuda.get_per_process_memory_fraction()
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved() / torch.cuda.get_device_properties().total_memory
            torch.cuda.set_per_process_memory_fraction(reserved)
            try:
                return original(*arguments, **options)
            finally:
                torch.cuda.set_per_process_memory_fraction(start)
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}"[:300])
            raise

    setattr(owner, name, limited)
    try:
        yield errors
    finally:
        setattr(owner, name, original)


def measure(session: Session) -> None:
    """Without a full card, twice with the recipe's rows at a time and once with half of them; then in each phase."""
    for precision in ("fp32", "bf16") if session.tiny else ("bf16", "fp16"):
        sets = (f"training.precision={precision}", "training.log_every=1", *FEWER_LOOPS)
        recipe = recipe_for(session, RECIPE, [WIKITEXT_2_STEPS, *sets], sets)
        training = recipe.training
        half = {"batch_size": training.batch_size // 2, "accumulation": training.accumulation * 2}
        halved = recipe.model_copy(update={"training": training.model_copy(update=half)})
        for name, run in (("whole", recipe), ("whole again", recipe), ("half", halved)):
            session.case(f"{precision}, {name}", partial(_train, session, run))
        for phase in PHASES:

            def case(phase: str = phase, recipe: Recipe = recipe) -> Figures:
                with full_card(phase, session.device) as errors:
                    figures = _train(session, recipe)
                return {**figures, "error": errors[0] if errors else None}

            session.case(f"{precision}, full in {phase}", case)
        _compare(session, precision)


def _train(session: Session, recipe: Recipe) -> Figures:
    steps = 2 if session.tiny else 6
    figures = some_steps(session, recipe, "steps", steps, device_profile(DEVICE), refuse=False)
    lines = (session.work / "steps" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "step" and not record.get("skipped")]
    return {**figures, "losses": {str(record["step"]): record["loss"] for record in records}}


def _compare(session: Session, precision: str) -> None:
    """Whether each training went on, with as many rows at a time as it should have, and has the same losses."""
    full, full_again, half = (session.figures(f"{precision}, {name}") for name in ("whole", "whole again", "half"))
    if full is None or full_again is None or half is None:
        return
    noise = _difference(full, full_again)
    allowed = max(ALLOWED, 2 * noise)
    for phase in PHASES:
        figures = session.figures(f"{precision}, full in {phase}")
        if figures is None:
            continue
        expected = full if phase == OPTIMIZER_STEP else half
        difference = _difference(figures, expected)
        survived = (figures["error"] is None) == (phase == OPTIMIZER_STEP) and difference <= allowed
        survived = survived and figures["batch_size"] == expected["batch_size"]
        case = {"survived": survived, "loss_difference": difference, "noise": noise}
        session.conclude({f"{precision}, full in {phase}": case})


def _difference(figures: Figures, expected: Figures) -> float:
    """Largest relative difference of a step's loss; infinite where other steps have one."""
    losses, expected_losses = figures["losses"], expected["losses"]
    if losses.keys() != expected_losses.keys() or not losses:
        return float("inf")
    return max(abs(losses[step] / expected_losses[step] - 1) for step in losses)


ROW = Row(
    number=12,
    topic="out-of-memory",
    question="does a real out-of-memory survive?",
    wanted="training goes on with half the rows at a time and the same losses, in bf16 and fp16",
    measure=measure,
    columns=(
        Column("rows at a time", "batch_size"),
        Column("first loss", "first_loss", "{:.4f}"),
        Column("last loss", "last_loss", "{:.4f}"),
        Column("error", "error", "{:.37}"),
    ),
    module="out_of_memory",
)

if __name__ == "__main__":
    raise SystemExit(main(ROW))
