"""The looped decoder: sizes that are refused, packed documents, caches, and its tied head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from edgeformer.artifacts.errors import RecipeError
from edgeformer.models import load_recipe
from edgeformer.models.adapter import count_parameters
from edgeformer.models.causal import probe_causality
from edgeformer.models.decoder import DecoderConfig
from edgeformer.models.decoder.adapter import ADAPTER
from edgeformer.models.decoder.model import CachedDecoder, DecoderModel
from edgeformer.run import Run
from edgeformer.training.train import TrainOptions, train
from tests.export.language_run import language_recipe

SIZES: dict[str, Any] = {
    "kind": "decoder", "vocab_size": 100, "hidden_size": 48, "layers": 2, "iterations": 3, "heads": 6, "kv_heads": 2,
    "ffn_size": 64, "max_positions": 64,
}  # fmt: skip
IDS = torch.arange(20).reshape(2, 10) * 7 % 100


def decoder(**changes: Any) -> DecoderModel:
    torch.manual_seed(0)
    return DecoderModel(DecoderConfig(**{**SIZES, **changes})).eval()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 4}, "kv_heads must be a divisor of heads"),
        ({"heads": 5, "kv_heads": 1}, "hidden_size 48 must be a multiple of heads"),
        ({"heads": 16, "kv_heads": 1}, "head_size must be even"),
        ({"exits": [2, 1]}, "exits must be increasing iterations before the last one"),
        ({"exits": [3]}, "exits must be increasing iterations before the last one"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DecoderConfig(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.iterations=1", "training.exit_weight has no effect without early exits"),
        ("training.checkpointing=cycles", "checkpointing: cycles exists for model.kind: crt only"),
    ],
)
def test_settings_without_effect_are_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("looped_mini", [override])


def test_every_iteration_is_an_exit_unless_the_recipe_names_them() -> None:
    assert decoder().exits == (1, 2, 3) and decoder(exits=[2]).exits == (2, 3) and decoder(exits=[]).exits == (3,)
    assert [*decoder(exits=[2])(IDS)] == [2, 3] and [*decoder(exits=[2])(IDS, every=True)] == [0, 1, 2, 3]


def test_a_tied_head_is_no_parameter_of_its_own() -> None:
    tied, separate = decoder(), decoder(tied=False)
    assert count_parameters(separate) - count_parameters(tied) == 100 * 48
    assert "head.weight" not in tied.state_dict() and tied.head.weight is tied.tokens.weight
    assert ADAPTER.needed(tied)[3] == ADAPTER.needed(separate)[3]  # ONNX needs both orders of the table


@torch.inference_mode()
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"qk_norm": True}, {"head_size": 16, "kv_heads": 6}])
def test_caches_change_no_answer(changes: dict[str, Any]) -> None:
    model = decoder(**changes)
    cached, states = CachedDecoder(model), []
    for start, end in ((0, 4), (4, 5), (5, 10)):
        state = cached.embed(IDS[:, start:end], start, keep=True)
        for number in range(model.loops):
            peeked = cached.run_loop(number, state, keep=False)
            state = cached.run_loop(number, state, keep=True)
            assert torch.equal(peeked, state)
        states.append(state)
    exact = model.logits(IDS)
    assert torch.allclose(cached.logits(torch.cat(states, 1), 3), exact, atol=1e-5)


@torch.inference_mode()
def test_a_document_does_not_see_the_one_before_it() -> None:
    model = decoder()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    packed, alone = model(IDS[:1], positions)[3], model(IDS[:1, 4:])[3]
    assert torch.allclose(packed[:, 4:], alone, atol=1e-5)


def test_recomputation_changes_no_gradient() -> None:
    def gradient(checkpointing: Any) -> torch.Tensor:
        model = decoder().train()
        model.checkpointing = checkpointing
        model(IDS)[3].square().sum().backward()
        assert model.tokens.weight.grad is not None
        return model.tokens.weight.grad

    assert torch.allclose(gradient("none"), gradient("loop"), rtol=1e-4, atol=1e-6)


def test_no_output_depends_on_later_tokens() -> None:
    assert not probe_causality(decoder()).leaks


def test_a_decoder_without_early_exits_trains_and_is_scored(tmp_path: Path) -> None:
    recipe = language_recipe(**{**SIZES, "vocab_size": 300, "iterations": 1}, exits=[])
    run = Run.open(train(recipe, TrainOptions(tmp_path, name="stacked", max_steps=2)))
    assert run.exits == (1,) and run.manifest.validation is not None
    assert [*run.manifest.validation.exits] == ["1"]
