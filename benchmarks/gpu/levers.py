"""Row 2: the same steps of the recipe for 6 GB with each lever for memory or speed changed, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.recipes import WIKITEXT_2_STEPS, device_profile, recipe_for, some_steps
from benchmarks.gpu.session import Column, Figures, Row, Session, main
from edgeformer.formats.errors import EdgeformerError

RECIPE, DEVICE = "crt_deep_rtx4050", "rtx4050"
AS_IT_IS = "as the recipe is"


@contextmanager
def math_attention() -> Iterator[None]:
    """torch's SDPA computes the whole matrix of scores."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def looped_adamw() -> Iterator[None]:
    """AdamW in one kernel per tensor and operation."""
    from edgeformer.stages.training import optimization

    def plain(parameters: Any, **options: Any) -> Any:
        return adamw(parameters, **{**options, "fused": False, "foreach": False})

    adamw = optimization.AdamW
    with patch.object(optimization, "AdamW", plain):
        yield


@contextmanager
def compiled() -> Iterator[None]:
    """Training through torch.compile: packed rows have one shape. Validation and the probe for leaks stay eager."""
    import torch

    from edgeformer.families.crt.network import CRTNetwork

    def build(network: CRTNetwork, recipe: Any, place: Any) -> Any:
        model, attention = eager(network, recipe, place)
        if not place.for_export:  # memory is planned on tensors without data, as they are
            plain = model.forward
            fast = torch.compile(plain)
            model.forward = lambda *given, **named: (fast if model.training else plain)(*given, **named)
        return model, attention

    eager = CRTNetwork.build
    with patch.object(CRTNetwork, "build", build):
        yield


@contextmanager
def tf32() -> Iterator[None]:
    """Products of float32 in 10 bits of mantissa, as training would be asked for with fp32."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Lever:
    """One change. ``sets``: recipe keys; ``within``: what no recipe key says."""

    sets: tuple[str, ...] = ()
    within: Callable[[], AbstractContextManager[None]] = nullcontext


LEVERS = {
    AS_IT_IS: Lever(),
    "no checkpointing": Lever(("training.checkpointing=none",)),
    "checkpointing: cycles": Lever(("training.checkpointing=cycles",)),
    "whole logits": Lever(("training.chunked_loss=false",)),
    "no checkpointing, whole logits": Lever(("training.checkpointing=none", "training.chunked_loss=false")),
    "attention: math": Lever(within=math_attention),
    "padded paragraphs": Lever(("data.mode=paragraphs",)),
    "AdamW in a loop": Lever(within=looped_adamw),
    "fp32": Lever(("training.precision=fp32",)),
    "fp32, TF32": Lever(("training.precision=fp32",), tf32),
    "4 rows at a time": Lever(("training.batch_size=4", "training.accumulation=4")),
    "8 rows at a time": Lever(("training.batch_size=8", "training.accumulation=2")),
    "torch.compile": Lever(within=compiled),
}

TRIED = (AS_IT_IS, "attention: math", "AdamW in a loop")
"""In a dry run: the recipe itself, and what is changed from outside of it. Nothing is compiled: that takes a minute."""


def measure(session: Session) -> None:
    """One training each; an out-of-memory that no smaller batch mends is this lever's answer."""
    device = device_profile(DEVICE)
    levers = {name: lever for name, lever in LEVERS.items() if not session.tiny or name in TRIED}
    steps = 1 if session.tiny else 12
    for name, lever in levers.items():
        recipe = recipe_for(session, RECIPE, [WIKITEXT_2_STEPS, "training.log_every=3", *lever.sets])

        def train(recipe: Any = recipe, lever: Lever = lever) -> Figures:
            asked = {"asked_batch_size": recipe.training.batch_size}
            try:
                with lever.within():  # what is predicted not to fit is tried all the same
                    return {**some_steps(session, recipe, "lever", steps, device, refuse=False), **asked}
            except EdgeformerError as error:
                if "out of memory" not in str(error):
                    raise
                return {**asked, "does_not_fit": str(error)}

        session.case(name, train)
    _compare(session)


def _compare(session: Session) -> None:
    base = session.figures(AS_IT_IS)
    if base is None or "tokens_per_s" not in base:
        return
    measured = {name: session.figures(name) for name in session.cases}
    speeds = {name: found["tokens_per_s"] for name, found in measured.items() if found and "tokens_per_s" in found}
    session.conclude({"speed_over_recipe": {name: speed / base["tokens_per_s"] for name, speed in speeds.items()}})
    # One that had to be halved does not fit as it was asked for; fp32 and paragraphs are other trainings.
    fitting = [name for name in speeds if measured[name]["batch_size"] == measured[name]["asked_batch_size"]]  # type: ignore[index]
    session.conclude({"fastest_that_fits": max(fitting, key=lambda name: speeds[name], default=None)})


ROW = Row(
    number=2,
    topic="levers",
    question="how much do our memory and speed levers buy?",
    wanted="the recipe's setting is the fastest that fits in 6 GB",
    measure=measure,
    columns=(
        Column("tokens/s", "tokens_per_s", "{:,.0f}"),
        Column("measured peak, bytes", "measured_peak_bytes", "{:,}"),
        Column("predicted over measured", "predicted_over_measured", "{:.2f}"),
        Column("rows at a time", "batch_size"),
        Column("computed in", "precision"),
        Column("does not fit", "does_not_fit"),
    ),
    module="levers",
)

if __name__ == "__main__":
    raise SystemExit(main(ROW))
