"""Row 8: what a text costs in energy, of the stacked baseline and of the models that share their layers."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.recipes import in_format, model_of, recipe_for
from benchmarks.gpu.session import Column, Figures, Row, Session
from benchmarks.gpu.timing import rules_of

MODELS = {
    "stacked": "baseline_sst2_fast",
    "wider, shared": "recurrent_wide_sst2_fast",
    "light, shared": "recurrent_sst2_fast",
}
STACKED = "stacked"


def measure(session: Session) -> None:
    """The counter over a loop of calls, less what the idle card draws meanwhile."""
    formats = ("float32",) if session.tiny else ("float32", "float16")
    batches, seq = ((2,), 8) if session.tiny else ((1, 64), 128)
    for batch in batches:
        for format_ in formats:
            for title, name in MODELS.items():

                def case(name: str = name, batch: int = batch, format_: str = format_) -> Figures:
                    return _energy(session, recipe_for(session, name), (batch, seq), format_)

                session.case(f"{title}, {batch}×{seq}, {format_}", case)
    _compare(session)


def _energy(session: Session, recipe: Any, shape: tuple[int, int], format_: str) -> Figures:
    import torch

    from edgeformer.measurement.trackers import energy_counter, measure_energy

    model = in_format(model_of(recipe, session.device), format_)
    ids = torch.randint(1, recipe.model.vocab_size, shape, device=session.device)
    mask = torch.ones_like(ids)

    @torch.inference_mode()
    def call(_: int) -> None:
        model(ids, mask)
        if session.device == "cuda":
            torch.cuda.synchronize()

    for number in range(3):
        call(number)
    counter = energy_counter(f"torch-{session.device}", session.card.uuid if session.card is not None else None)
    results = measure_energy(call, counter, rules_of(session.tiny))
    per_sample = None if results.value is None else results.value / shape[0]
    return {"mj_per_sample": per_sample, "status": results.status, "reason": results.reason}


def _compare(session: Session) -> None:
    over = {}
    for name, case in session.cases.items():
        title, _, rest = name.rpartition(", ")
        title, _, shape = title.rpartition(", ")
        base = session.figures(f"{STACKED}, {shape}, {rest}")
        results = case.get("figures")
        if results and base and results["mj_per_sample"] and base["mj_per_sample"]:
            over[name] = results["mj_per_sample"] / base["mj_per_sample"]
    session.conclude({"over_stacked": over})


ROW = Row(
    number=8,
    topic="energy",
    question="what does a text cost in energy, stacked against shared layers?",
    wanted="millijoules per text, idle subtracted",
    measure=measure,
    columns=(Column("mJ per text", "mj_per_sample", "{:.2f}"), Column("how", "reason")),
)
