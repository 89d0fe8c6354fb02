"""Row 7: a classifier's time in every number format, eager, as a CUDA graph and compiled, beside the card's floor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.recipes import in_format, model_of, recipe_for
from benchmarks.gpu.session import Column, Figures, Row, Session
from benchmarks.gpu.timing import on_device_ms, rules_of, times

MODELS = {"stacked": "baseline_sst2_fast", "shared": "recurrent_sst2_fast"}
CLAIMED = "40–45%"
"""Of the FP32 time, that paper A says FP16 saves."""


@dataclass(frozen=True)
class Variant:
    """How a model is run. ``tf32``: products of float32 may be cut to 10 bits; ``how``: eager, graph, compiled."""

    format: str = "float32"
    tf32: bool = False
    how: str = "eager"
    autocast: bool = False


VARIANTS = {
    "fp32": Variant(),
    "fp32, TF32": Variant(tf32=True),
    "fp16": Variant("float16"),
    "bf16": Variant("bfloat16"),
    "bf16 autocast": Variant("bfloat16", autocast=True),
    "fp32, CUDA graph": Variant(how="graph"),
    "fp16, CUDA graph": Variant("float16", how="graph"),
    "fp16, compiled": Variant("float16", how="compiled"),
}

TRIED = ("fp32", "fp16", "bf16 autocast")
"""In a dry run; a CPU has no CUDA graphs."""


def measure(session: Session) -> None:
    """First what the card can do, then each model at each shape; what must be compiled comes last, it takes longest."""
    session.case("floor", lambda: floor(session))
    shapes = [(1, 8)] if session.tiny else [(batch, seq) for batch in (1, 16) for seq in (16, 64, 128, 512)]
    longest = max(seq for _, seq in shapes)
    eager = {name: variant for name, variant in VARIANTS.items() if variant.how != "compiled"}
    for title, name in MODELS.items():
        recipe = recipe_for(session, name, [f"model.max_positions={max(longest, 128)}"])
        for batch, seq in shapes:
            _shape(session, recipe, title, (batch, seq), eager)
    for title, name in MODELS.items() if session.device == "cuda" else ():
        recipe = recipe_for(session, name)
        _shape(session, recipe, title, (1, 128), {"fp16, compiled": VARIANTS["fp16, compiled"]})
    _saved(session)


def _shape(session: Session, recipe: Any, title: str, shape: tuple[int, int], variants: dict[str, Variant]) -> None:
    for name, variant in variants.items():
        if (session.tiny and name not in TRIED) or (variant.how == "graph" and session.device != "cuda"):
            continue
        place = f"{title}, {shape[0]}×{shape[1]}, {name}"
        session.case(place, lambda variant=variant: timed(session, recipe, shape, variant))  # type: ignore[misc]


def timed(session: Session, recipe: Any, shape: tuple[int, int], variant: Variant) -> Figures:
    """Times of a model with random weights at a shape; beside them the floor, where that was measured."""
    import torch

    start = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if variant.tf32 else "highest")
    try:
        model = model_of(recipe, session.device)
        if variant.format != "float32" and not variant.autocast:
            model = in_format(model, variant.format)
        ids = torch.randint(1, recipe.model.vocab_size, shape, device=session.device)
        call = _call(model, ids, variant)
        operations = _operations(model, ids)
        figures = times(call, session.device, rules_of(session.tiny))
    finally:
        torch.set_float32_matmul_precision(start)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    figures |= {"operations": operations, "weight_bytes": weights}
    return {**figures, "floor_ms": _floor_ms(session, variant, operations, weights)}


def _call(model: Any, ids: Any, variant: Variant) -> Callable[[], object]:
    import torch

    mask = torch.ones_like(ids)
    kind = ids.device.type
    half = torch.autocast(kind, getattr(torch, variant.format)) if variant.autocast else nullcontext()

    @torch.inference_mode()
    def plain() -> object:
        with half:
            return model(ids, mask)

    if variant.how == "compiled":
        model.compile(dynamic=False)
    if variant.how != "graph":
        return plain
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is captured must have run before: libraries take their workspaces then
        for _ in range(3):
            plain()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain()
    return graph.replay


def _operations(model: Any, ids: Any) -> int:
    """Of matrix products and attention, as torch counts them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(ids, torch.ones_like(ids))
    return int(counter.get_total_flops())


def floor(session: Session) -> Figures:
    """What the card does best: products of large matrices, and copying."""
    import torch

    size, bytes_ = (64, 1 << 16) if session.tiny else (8192, 1 << 30)
    figures: Figures = {}
    for name, format_, tf32 in (
        ("fp32", torch.float32, False),
        ("tf32", torch.float32, True),
        ("fp16", torch.float16, False),
        ("bf16", torch.bfloat16, False),
    ):
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        remaining, right = (torch.randn(size, size, device=session.device).to(format_) for _ in "ab")
        figures[f"{name}_operations_per_s"] = 2 * size**3 / _seconds(session, lambda: remaining @ right)  # noqa: B023
    torch.set_float32_matmul_precision("highest")
    source = torch.zeros(bytes_, dtype=torch.uint8, device=session.device)
    target = torch.empty_like(source)
    # A copy reads and writes every byte.
    figures["copied_bytes_per_s"] = 2 * bytes_ / _seconds(session, lambda: target.copy_(source))
    empty = torch.zeros(1, device=session.device)
    figures["launch_us"] = 1e6 * _seconds(session, lambda: [empty.add_(1) for _ in range(100)]) / 100
    return figures


def _seconds(session: Session, call: Callable[[], object]) -> float:
    if session.device != "cuda":
        return float(times(call, session.device, rules_of(session.tiny))["p50_ms"]) / 1000
    for _ in range(3):
        call()
    return on_device_ms(call, 20) / 1000


def _floor_ms(session: Session, variant: Variant, operations: int, weight_bytes: int) -> float | None:
    """The larger of computing all products at the measured rate, and reading all weights once."""
    card = session.figures("floor")
    if card is None:
        return None
    rate = {"float32": "tf32" if variant.tf32 else "fp32", "float16": "fp16", "bfloat16": "bf16"}[variant.format]
    seconds = max(operations / card[f"{rate}_operations_per_s"], weight_bytes / card["copied_bytes_per_s"])
    return 1000 * seconds


def _saved(session: Session) -> None:
    """Share of the FP32 time that FP16 saves, for every shape; of CUDA graphs too."""
    saved = {}
    for name in session.cases:
        place, _, rest = name.partition(", fp32")
        other = session.figures(f"{place}, fp16{rest}")
        item = session.figures(name)
        if rest in ("", ", CUDA graph") and name != place and item is not None and other is not None:
            saved[f"{place}{rest}"] = 1 - other["p50_ms"] / item["p50_ms"]
    session.conclude({"fp16_saves": saved, "claimed": CLAIMED})


ROW = Row(
    number=7,
    topic="number-formats",
    question="what do FP16, bf16, CUDA graphs and torch.compile bring a small classifier?",
    wanted=f"a time for each; paper A says that FP16 saves {CLAIMED}",
    measure=measure,
    variants=Column("p50, ms", "p50_ms", "{:.2f}"),
    columns=(
        Column("p50, ms", "p50_ms", "{:.3f}"),
        Column("on the card, ms", "device_p50_ms", "{:.3f}"),
        Column("floor, ms", "floor_ms", "{:.4f}"),
        Column("steady", "stable"),
    ),
)
