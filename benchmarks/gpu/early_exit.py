"""Row 4: what leaving after loop 2, 4 or 6 saves of the time of all 8: reading a text, and writing with a cache."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.gpu.recipes import WIKITEXT_2_STEPS, in_format, model_of, recipe_for
from benchmarks.gpu.session import Column, Figures, Row, Session, main
from benchmarks.gpu.timing import ratio, rules_of, times
from edgeformer.artifacts.report import MeasureRules

RECIPE = "crt_deep_rtx4050"
CLAIMED = {2: 4.0, 4: 2.0, 6: 1.33}
"""Paper B's own speed-ups."""
FORMATS = ("bfloat16", "float32")
RULES = MeasureRules(
    warmup_min_calls=3, window_calls=3, warmup_max_s=1.0, min_s=0.2, min_calls=10, max_s=1.5
)  # fmt: skip
"""A call takes tens of milliseconds, and there are twelve samples to a case."""


def measure(session: Session) -> None:
    """Random weights: no time depends on them. Exits take turns, round after round."""
    recipe = recipe_for(session, RECIPE, [WIKITEXT_2_STEPS], ["model.loops=8", "model.exits=[2, 4, 6]"])
    batches, context = ((1,), 8) if session.tiny else ((1, 16), 512)
    for format_ in FORMATS:
        model = None
        for batch in batches:
            for phase, prepare in (("prefill", _prefill), ("decode", _decode)):

                def case(batch: int = batch, prepare: Any = prepare, format_: str = format_) -> Figures:
                    nonlocal model
                    model = model or _model(recipe, session, format_)
                    return _exits(
                        session, model, {exit_: prepare(model, batch, context, exit_) for exit_ in model.exits}
                    )

                session.case(f"{phase}, batch {batch}, {format_}", case)
    session.conclude({"claimed": {str(exit_): value for exit_, value in CLAIMED.items()}})


def _model(recipe: Any, session: Session, format_: str) -> Any:
    return in_format(model_of(recipe, session.device), format_)


def _tokens(model: Any, batch: int, count: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.tokens.num_embeddings, (batch, count), generator=generator)
    return ids.to(model.tokens.weight.device)


def _prefill(model: Any, batch: int, context: int, exit_: int) -> Callable[[], object]:
    """Reads a text and answers after its last token, as any decoder does."""
    import torch

    ids = _tokens(model, batch, context)

    @torch.inference_mode()
    def call() -> Any:
        return model.head_of(exit_)(model(ids, until=exit_)[exit_][:, -1])

    return call


def _decode(model: Any, batch: int, context: int, exit_: int) -> Callable[[], object]:
    """One token more for every text, with all that was computed before kept; the text does not grow over the calls."""
    from edgeformer.models.crt.model import CachedLoops

    kept, token = CachedLoops(model), _tokens(model, batch, 1)

    def read(ids: Any, start: int, *, keep: bool) -> Any:
        state = kept.embed(ids, start, keep=keep)
        for number in range(exit_):
            state = kept.run_loop(number, state, keep=keep)
        return kept.logits(state[:, -1], exit_)

    read(_tokens(model, batch, context), 0, keep=True)
    return lambda: read(token, context, keep=False)


def _exits(session: Session, model: Any, calls: dict[int, Callable[[], object]]) -> Figures:
    rounds = 1 if session.tiny else 3
    rules = rules_of(session.tiny) if session.tiny else RULES
    results: dict[int, list[float]] = {exit_: [] for exit_ in calls}
    alone: dict[int, list[float]] = {exit_: [] for exit_ in calls}
    for _ in range(rounds):
        for exit_, call in calls.items():
            duration = times(call, session.device, rules)
            results[exit_].append(duration["p50_ms"])
            alone[exit_].append(duration["device_p50_ms"] or duration["p50_ms"])
    last = model.loops
    early = [exit_ for exit_ in calls if exit_ != last]
    return {
        "ms": {str(exit_): median(values) for exit_, values in results.items()},
        "device_ms": {str(exit_): median(values) for exit_, values in alone.items()},
        "all_loops_over_exit": {str(exit_): ratio(results[last], results[exit_]) for exit_ in early},
    }


ROW = Row(
    number=4,
    topic="early-exit",
    question="how much faster is it really to leave after loop 2, 4 or 6 of 8?",
    wanted="measured ratios beside the claimed ones: 4.0, 2.0 and 1.33",
    measure=measure,
    columns=(
        Column("all loops, ms", "ms.8", "{:.3f}"),
        *(Column(f"times as fast after {n} (claimed {CLAIMED[n]})", f"all_loops_over_exit.{n}.median", "{:.2f}")
          for n in CLAIMED),
    ),
    module="early_exit",
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(ROW))
