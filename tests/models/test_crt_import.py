"""Checkpoints in the public layout become our weights, exactly; what does not fit is listed by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.models.crt.adapter import build_crt
from edgeformer.models.crt.checkpoint import config_of, convert, public_shapes, weights_in
from tests.models.crt_oracle import Oracle, public_weights, small_config

SMALL = small_config(heads="separate", causal=False)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return public_weights(SMALL)


def test_logits_equal_the_plain_equations(weights: dict[str, Tensor]) -> None:
    """Float32 against the float64 oracle, at every exit (the whole way: read, guess sizes, convert)."""
    found = weights_in(weights, "here")
    config = config_of(found, "here")
    model = build_crt(config).eval()
    model.load_state_dict(convert(found, config, "here"))
    ids = torch.randint(0, 60, (2, 64), generator=torch.Generator().manual_seed(3))
    expected = Oracle(weights).logits(ids)
    assert list(expected) == [1, 3, 4]
    with torch.inference_mode():
        for loop, logits in expected.items():
            assert torch.allclose(model.logits(ids, loop).double(), logits, atol=1e-5, rtol=0), loop


def test_sizes_are_read_from_the_shapes(weights: dict[str, Tensor]) -> None:
    assert config_of(weights, "here") == SMALL
    without = {name: tensor for name, tensor in weights.items() if not name.startswith("intermediate_heads")}
    config = config_of(without, "here")
    assert config.exits == () and config.heads == "tied"


def test_layout_of_the_released_size() -> None:
    config = small_config(
        vocab_size=50_257, hidden_size=512, embedding_size=256, ffn_size=2048, loops=8, cycles=8, exits=(2, 4, 6),
        max_positions=1024, heads="separate", causal=False,
    )  # fmt: skip
    shapes = public_shapes(config)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 143_516_928
    assert shapes["trm.convs.7.depthwise.weight"] == (512, 1, 3)
    assert shapes["embed.refine.convs.2.pointwise.weight"] == (512, 512, 1)


@pytest.mark.parametrize("key", ["model", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_wrapped_as_training_scripts_do(weights: dict[str, Tensor], key: str, prefix: str) -> None:
    content = {"epoch": 9, key: {prefix + name: tensor for name, tensor in weights.items()}, "loss": 0.07}
    found = weights_in(content, "here")
    assert found.keys() == weights.keys()
    assert all(found[name] is weights[name] for name in weights)


@pytest.mark.parametrize(
    "content", [None, [], {}, "text", {"model": {}}, {"a": 1}, {"model": {"a": 1}}, {"epoch": 3, "w": torch.ones(1)}]
)
def test_no_state_dict_at_all(content: object) -> None:
    with pytest.raises(ArtifactError, match="here: holds no state dict"):
        weights_in(content, "here")


def test_everything_that_does_not_fit_is_named(weights: dict[str, Tensor]) -> None:
    del weights["trm.norms.2.bias"], weights["norm1.weight"]
    weights["trm.extra.weight"] = torch.zeros(3, 4)
    weights["q_proj.weight"] = torch.zeros(32, 31)
    weights["trm.convs.1.pointwise.weight"] = torch.zeros(32, 32)
    config = config_of(weights, "here")
    with pytest.raises(ArtifactError) as caught:
        convert(weights, config, "here")
    listed = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert listed == [
        "missing norm1.weight [32]",
        "missing trm.norms.2.bias [32]",
        "q_proj.weight is [32, 31], not [32, 32]",
        "trm.convs.1.pointwise.weight is [32, 32], not [32, 32, 1]",
        "unexpected trm.extra.weight [3, 4]",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [("lm_head.weight", "is missing"), ("loop_encodings", "is missing"), ("trm.lin1.0.weight", "is missing")],
)
def test_another_kind_of_model(weights: dict[str, Tensor], name: str, message: str) -> None:
    del weights[name]
    with pytest.raises(ArtifactError, match=f"is no CRT checkpoint: {name} {message}"):
        config_of(weights, "here")


def test_sizes_that_no_model_can_have(weights: dict[str, Tensor]) -> None:
    with pytest.raises(ArtifactError, match="loop_encodings has 2 dimensions, not 4"):
        config_of({**weights, "loop_encodings": torch.zeros(4, 32)}, "here")
    with pytest.raises(ArtifactError, match="width 30 is no multiple"):
        config_of({**weights, "lm_head.weight": torch.zeros(60, 30)}, "here")
    with pytest.raises(ArtifactError, match="exits"):  # a head behind the last loop
        config_of({**weights, "intermediate_heads.loop_9.weight": torch.zeros(60, 32)}, "here")


def test_half_precision_checkpoints_become_float32(weights: dict[str, Tensor]) -> None:
    converted = convert({name: tensor.half() for name, tensor in weights.items()}, SMALL, "here")
    assert {tensor.dtype for tensor in converted.values()} == {torch.float32}
    assert torch.equal(converted["head.weight"], weights["lm_head.weight"].half().float())
