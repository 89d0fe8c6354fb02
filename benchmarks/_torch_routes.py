"""Settings of torch's eager mode for products with one row, and the fastest of them here.

A route that computes in fewer bits than FP32 is none: ``medium`` makes bfloat16 of FP32 on processors that multiply in
it, with errors of a hundredth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_PASSES = 9


def with_vector(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A layer's forward that takes one row as a vector: a product that reads the matrix once, without packing it."""

    def forward(x: Tensor) -> Tensor:
        if x.numel() != layer.in_features:
            return nn.functional.linear(x, layer.weight, layer.bias)
        y = torch.mv(layer.weight, x.reshape(-1))
        y = y if layer.bias is None else y.add_(layer.bias)
        return y.view(*x.shape[:-1], -1)

    return forward


def settings(
    precision: str = "highest", *, mkldnn: bool = True, vector: bool = False
) -> Callable[[list[nn.Linear]], None]:
    """A route: what it sets for these layers, and in torch.

    Args:
        precision: of ``set_float32_matmul_precision``.
        mkldnn: whether oneDNN may compute.
        vector: :func:`with_vector`.
    """

    def set_(layers: list[nn.Linear]) -> None:
        torch.set_float32_matmul_precision(precision)
        torch.backends.mkldnn.enabled = mkldnn  # type: ignore[assignment]
        for layer in layers:
            layer.__dict__.pop("forward", None)
            if vector:
                layer.forward = with_vector(layer)  # type: ignore[method-assign, assignment]

    return set_


ROUTES = {
    "highest": settings(),
    "high": settings("high"),
    "medium": settings("medium"),
    "without oneDNN": settings(mkldnn=False),
    "product with a vector": settings(vector=True),
}


@torch.inference_mode()
def tune(model: Any, most_error: float) -> dict[str, Any]:
    """Set the fastest route that is exact enough; what was found of each, and which was ``chosen``.

    Milliseconds are of one row through every layer of the block and the head: the fastest of a few passes in turns.

    Args:
        model: a CRT.
        most_error: of a product, as a share of its largest number.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    rows = [torch.randn(1, 1, layer.in_features) for layer in layers]
    # The layers that a token passes in every loop, and one head.
    often = [number for number, layer in enumerate(layers) if layer is model.head or layer in {*looped(model)}]
    results: dict[str, dict[str, float]] = {name: {"ms": float("inf"), "error": 0.0} for name in ROUTES}
    for number in range(_PASSES):
        for name, route in ROUTES.items():
            route(layers)
            if not number:
                pairs = zip(layers, rows, strict=True)
                results[name]["error"] = max(error_of(layer, row) for layer, row in pairs)
            began = time.perf_counter()
            for place in often:
                layers[place](rows[place])
            took = 1000 * (time.perf_counter() - began)
            results[name]["ms"] = min(results[name]["ms"], took)
    exact = {name: item for name, item in results.items() if item["error"] <= most_error}
    chosen = min(exact, key=lambda name: exact[name]["ms"])
    ROUTES[chosen](layers)
    return {"chosen": chosen, "routes": results}


def looped(model: Any) -> list[nn.Module]:
    """Modules that every loop passes."""
    return [module for part in (model.attention, model.trm) for module in part.modules()]


def error_of(layer: nn.Linear, row: Tensor) -> float:
    """Of a product, against one in 64 bits."""
    bias = None if layer.bias is None else layer.bias.double()
    exact = nn.functional.linear(row.double(), layer.weight.double(), bias)
    return float((layer(row).double() - exact).abs().max() / exact.abs().max())
