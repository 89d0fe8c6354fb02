"""The causality probe passes causal models, detects models that look ahead, and reports when it is blind."""

from __future__ import annotations

import pytest
import torch

from edgeformer.models.causal import TOLERANCE
from edgeformer.models.crt.adapter import ADAPTER
from edgeformer.models.crt.checkpoint import convert_weights
from edgeformer.models.crt.model import CRT
from tests.models.crt_oracle import public_weights, small_config


def fresh_crt(**changes: object) -> CRT:
    torch.manual_seed(0)
    return CRT(small_config(**changes))


@pytest.mark.parametrize(
    ("trm", "norm"), [("conv_linear", "layer"), ("conv", "rms"), ("linear", "none"), ("depthwise", "batch")]
)
def test_causal_variants_pass(trm: str, norm: str) -> None:
    probe = ADAPTER.causality(fresh_crt(trm=trm, norm=norm))
    assert not probe.leaks and probe.reach == 0
    assert set(probe.largest_change) == {"1", "3", "4"}
    assert max(probe.largest_change.values()) < TOLERANCE / 10


def test_published_architecture_leaks_as_far_as_its_convolutions_reach() -> None:
    probe = ADAPTER.causality(fresh_crt(causal=False, cycles=8))
    assert probe.leaks and all(change > 10 * TOLERANCE for change in probe.largest_change.values())
    sizes = {"loops": 1, "exits": (), "cycles": 2, "embedding_cycles": 1, "dilations": (2, 3)}
    config = small_config(causal=False, heads="tied", **sizes)
    model = CRT(config)  # fresh weights are so small that distant tokens have less effect than rounding
    model.load_state_dict(convert_weights(public_weights(config), config, "checkpoint"))
    assert ADAPTER.causality(model).reach == 2 + 2 + 3


@pytest.mark.parametrize(("part", "cycles"), [("refine", slice(None)), ("trm", slice(None)), ("trm", slice(4, 5))])
def test_single_leak_is_detected(part: str, cycles: slice) -> None:
    model = fresh_crt(cycles=8)
    for cycle in getattr(model, part).cycles[cycles]:
        cycle.depthwise.causal = False
    probe = ADAPTER.causality(model)
    assert probe.leaks and probe.reach > 0


def test_attention_without_causal_mask_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, attn_mask=None, is_causal=False: sdpa(q, k, v),
    )
    assert ADAPTER.causality(fresh_crt()).leaks


@pytest.mark.parametrize(("weight", "value"), [("tokens", 0.0), ("norm1", float("nan"))])
def test_degenerate_model_is_refused(weight: str, value: float) -> None:
    model = fresh_crt()
    with torch.no_grad():
        getattr(model, weight).weight.fill_(value)
    with pytest.raises(ValueError, match="change no output"):
        ADAPTER.causality(model)


def test_probe_restores_mode_and_depends_on_its_seed_alone() -> None:
    model = fresh_crt().train()
    torch.manual_seed(5)
    first = ADAPTER.causality(model, seed=1)
    assert model.training and model.trm.training
    torch.manual_seed(6)
    assert ADAPTER.causality(model, seed=1) == first
    assert torch.initial_seed() == 6
