"""Row 2: the same steps of the recipe for 6 GB with each lever for memory or speed changed, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.recipes import WIKITEXT_2_STEPS, recipe_for, some_steps
from benchmarks.gpu.session import Column, Figures, Row, Session
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import EdgeformerError

RECIPE, ENCODER, LIGHT, DEVICE = "crt_deep_rtx4050", "baseline_sst2_fast", "recurrent_sst2_fast", "rtx4050"
AS_IT_IS = "as the recipe is"


@contextmanager
def math_attention() -> Iterator[None]:
    """torch's SDPA computes the whole matrix of scores."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


@dataclass(frozen=True)
class Lever:
    """One change. ``sets``: recipe keys; ``within``: what no recipe key says; ``recipe``: of what."""

    sets: tuple[str, ...] = ()
    within: Callable[[], AbstractContextManager[None]] = nullcontext
    recipe: str = RECIPE


def _encoder(*sets: str) -> Lever:
    return Lever(sets, recipe=ENCODER)


_COMPILED = "training.compile={shapes: 1}"  # packed rows have one
LEVERS = {
    AS_IT_IS: Lever(),
    "no checkpointing": Lever(("training.checkpointing=none",)),
    "checkpointing: cycles": Lever(("training.checkpointing=cycles",)),
    "whole logits": Lever(("training.chunked_loss=false",)),
    "no checkpointing, whole logits": Lever(("training.checkpointing=none", "training.chunked_loss=false")),
    "attention: SDPA": Lever(("model.attention=sdpa",)),
    "attention: math": Lever(("model.attention=sdpa",), within=math_attention),
    "paragraphs without padding": Lever(("data.mode=paragraphs",)),
    "padded paragraphs": Lever(("data.mode=paragraphs", "model.attention=sdpa")),
    "AdamW: foreach": Lever(("training.optimizer.kernels=foreach",)),
    "AdamW: loop": Lever(("training.optimizer.kernels=loop",)),
    "memory not pinned": Lever(("training.pinned_memory=false",)),
    "fp32": Lever(("training.precision=fp32",)),
    "fp32, TF32": Lever(("training.precision=fp32", "training.tf32=true")),
    "4 rows at a time": Lever(("training.batch_size=4", "training.accumulation=4")),
    "8 rows at a time": Lever(("training.batch_size=8", "training.accumulation=2")),
    "torch.compile": Lever((_COMPILED,)),
    "encoder": _encoder(),
    "encoder, shuffled": _encoder("training.batching=shuffled"),
    "encoder, fp32": _encoder("training.precision=fp32"),
    "encoder, fp32, TF32": _encoder("training.precision=fp32", "training.tf32=true"),
    "encoder, memory not pinned": _encoder("training.pinned_memory=false"),
    "encoder, torch.compile": _encoder("training.compile={shapes: 4}"),
    **{
        f"{name}, {batching}, dropout {dropout}, {attention}": Lever(
            (f"training.batching={batching}", f"model.dropout={dropout}", f"model.attention={attention}"), recipe=recipe
        )
        for name, recipe in (("encoder", ENCODER), ("light encoder", LIGHT))
        for batching in ("shuffled", "bucketed")
        for dropout, attention in ((0.0, "sdpa"), (0.0, "auto"), (0.15, "sdpa"))
    },
    "light encoder": Lever(recipe=LIGHT),
    "light encoder, shuffled": Lever(("training.batching=shuffled",), recipe=LIGHT),
}
"""``auto``, the encoders' default, is flash-attn with dropout, where that is installed, and torch's kernel without."""

TRIED = (
    *(AS_IT_IS, "attention: SDPA", "attention: math", "paragraphs without padding", "AdamW: loop", "fp32, TF32"),
    *("encoder", "light encoder, shuffled, dropout 0.0, auto"),
)
"""In a dry run. Nothing is compiled: that takes a minute."""
STEPS = {RECIPE: (WIKITEXT_2_STEPS, 12, 3), ENCODER: (None, 80, 4), LIGHT: (None, 80, 4)}
"""Recipe → its data as it is brought, steps, and steps between two lines of the log: a shape that is compiled within a
line spoils its speed, and the median passes over a few."""


def settings(lever: Lever) -> list[str]:
    """What is changed of its recipe, as ``--set`` takes it."""
    data, _, log_every = STEPS[lever.recipe]
    return [*filter(None, [data]), f"training.log_every={log_every}", *lever.sets]


def measure(session: Session) -> None:
    """One training each; an out-of-memory that no smaller batch mends is this lever's answer."""
    device = load_profile(DEVICE)
    levers = {name: lever for name, lever in LEVERS.items() if not session.tiny or name in TRIED}
    for name, lever in levers.items():
        recipe = recipe_for(session, lever.recipe, settings(lever))

        def train(recipe: Any = recipe, lever: Lever = lever) -> Figures:
            base_figures = {"asked_batch_size": recipe.training.batch_size}
            try:
                with lever.within():  # also try what is predicted not to fit
                    steps = 1 if session.tiny else STEPS[lever.recipe][1]
                    return {**some_steps(session, recipe, "lever", steps, device, refuse=False), **base_figures}
            except EdgeformerError as error:
                if "out of memory" not in str(error):
                    raise
                return {**base_figures, "does_not_fit": str(error)}

        session.case(name, train)
    _compare(session)


def _compare(session: Session) -> None:
    base = session.figures(AS_IT_IS)
    if base is None or "tokens_per_s" not in base:
        return
    measured = {name: session.figures(name) for name in session.cases}
    _compare_encoder(session, {name: results for name, results in measured.items() if results is not None})
    speeds = {
        name: results["tokens_per_s"] for name, results in measured.items() if results and "tokens_per_s" in results
    }
    session.conclude({"speed_over_recipe": {name: speed / base["tokens_per_s"] for name, speed in speeds.items()}})
    # One that had to be halved does not fit as requested; fp32 and paragraphs are other trainings.
    fitting = [name for name in speeds if measured[name]["batch_size"] == measured[name]["asked_batch_size"]]  # type: ignore[index]
    session.conclude({"fastest_that_fits": max(fitting, key=lambda name: speeds[name], default=None)})


def _compare_encoder(session: Session, measured: dict[str, Figures]) -> None:
    speeds = {name: results["samples_per_s"] for name, results in measured.items() if name.startswith("encoder")}
    if "encoder" in speeds:
        ratios = {name: speed / speeds["encoder"] for name, speed in speeds.items()}
        session.conclude({"encoder_speed_over_recipe": ratios})


ROW = Row(
    number=2,
    topic="levers",
    question="how much do our memory and speed levers buy?",
    wanted="the recipe's setting is the fastest that fits in 6 GB",
    measure=measure,
    columns=(
        Column("tokens/s", "tokens_per_s", "{:,.0f}"),
        Column("rows/s", "samples_per_s", "{:,.0f}"),
        Column("measured peak, bytes", "measured_peak_bytes", "{:,}"),
        Column("predicted over measured", "predicted_over_measured", "{:.2f}"),
        Column("rows at a time", "batch_size"),
        Column("computed in", "precision"),
        Column("does not fit", "does_not_fit"),
    ),
)
