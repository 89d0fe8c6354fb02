"""The causality probe: passes what is causal, catches what looks ahead, and says when it cannot tell."""

from __future__ import annotations

import pytest
import torch

from edgeformer.models.crt import CRTConfig
from edgeformer.models.crt.adapter import TOLERANCE, build_crt, probe_causality
from edgeformer.models.crt.checkpoint import convert
from edgeformer.models.crt.model import CRT, TRM, DilatedConv
from tests.models.crt_oracle import public_weights, small_config


def fresh(**changes: object) -> CRT:
    torch.manual_seed(0)
    return build_crt(small_config(**changes))


def look_ahead(trm: TRM) -> None:
    for cycle in trm.cycles:
        assert isinstance(cycle.depthwise, DilatedConv)
        cycle.depthwise.causal = False


@pytest.mark.parametrize("trm", ["conv_linear", "conv", "linear", "depthwise"])
@pytest.mark.parametrize("norm", ["layer", "rms", "batch", "none"])
def test_every_causal_variant_passes(trm: str, norm: str) -> None:
    found = probe_causality(fresh(trm=trm, norm=norm))
    assert not found.leaks and found.reach == 0
    assert set(found.largest_change) == {"1", "3", "4"}
    assert max(found.largest_change.values()) < TOLERANCE / 10


def with_larger_weights(config: CRTConfig) -> CRT:
    """Fresh weights are so small that what comes from far away drowns in rounding; these are not."""
    model = build_crt(config)
    model.load_state_dict(convert(public_weights(config), config, "the test's weights"))
    return model


def test_catches_the_published_architecture_at_every_exit() -> None:
    found = probe_causality(fresh(causal=False, cycles=8))
    assert found.leaks
    assert all(change > 10 * TOLERANCE for change in found.largest_change.values())


def test_the_published_architecture_looks_far_beyond_one_loop() -> None:
    found = probe_causality(with_larger_weights(small_config(causal=False, cycles=8, heads="separate")))
    # Eight cycles look 30 positions ahead in one loop, three in the embedding 7 more, and there are four loops.
    assert 37 < found.reach <= 127


def test_reach_is_what_the_convolutions_add_up_to() -> None:
    changes = {"loops": 1, "exits": (), "cycles": 2, "embedding_cycles": 1, "dilations": (2, 3)}
    found = probe_causality(with_larger_weights(small_config(causal=False, heads="tied", **changes)))
    assert found.reach == 2 + 2 + 3


@pytest.mark.parametrize("part", ["refine", "trm"])
def test_catches_a_leak_in_one_place_only(part: str) -> None:
    model = fresh()
    look_ahead(getattr(model, part))
    found = probe_causality(model)
    assert found.leaks and found.reach > 0


def test_catches_attention_without_its_triangle(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh()
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, attn_mask=None, is_causal=False: plain(q, k, v),
    )
    assert probe_causality(model).leaks


def test_catches_a_single_convolution_that_looks_one_position_ahead() -> None:
    model = fresh(cycles=8)
    conv = model.trm.cycles[4].depthwise
    assert conv is not None and conv.dilation == 1
    conv.causal = False
    found = probe_causality(model)
    assert found.leaks
    assert found.reach >= 1


def test_a_model_without_any_effect_is_no_pass() -> None:
    model = fresh()
    with torch.no_grad():
        model.tokens.weight.zero_()
    with pytest.raises(ValueError, match="change no output at all"):
        probe_causality(model)


def test_a_model_of_nans_is_no_pass() -> None:
    model = fresh()
    with torch.no_grad():
        model.norm1.weight.fill_(float("nan"))
    with pytest.raises(ValueError):
        probe_causality(model)


def test_leaves_the_model_as_it_was_and_depends_on_the_seed_alone() -> None:
    model = fresh().train()
    torch.manual_seed(5)
    first = probe_causality(model, seed=1)
    assert model.training and model.trm.training
    torch.manual_seed(6)
    assert probe_causality(model, seed=1) == first
    assert torch.initial_seed() == 6


def test_lengths_end_at_the_position_table() -> None:
    found = probe_causality(fresh(max_positions=40))
    assert found.lengths == (2, 17, 40)
