"""Checkpoints in the public CRT layout convert exactly; every mismatch is listed by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.models.crt.checkpoint import convert_weights, extract_state_dict, infer_config, public_layout
from edgeformer.models.crt.model import CRT
from tests.models.crt_oracle import Oracle, public_weights, small_config

SMALL = small_config(heads="separate", causal=False)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return public_weights(SMALL)


def test_logits_equal_the_oracle(weights: dict[str, Tensor]) -> None:
    """Read, derive the sizes and convert; then float32 against the float64 oracle at every exit."""
    state_dict = extract_state_dict(weights, "checkpoint")
    config = infer_config(state_dict, "checkpoint")
    assert config == SMALL
    model = CRT(config).eval()
    model.load_state_dict(convert_weights(state_dict, config, "checkpoint"))
    ids = torch.randint(0, 60, (2, 64), generator=torch.Generator().manual_seed(3))
    expected = Oracle(weights).logits(ids)
    assert list(expected) == [1, 3, 4]
    with torch.inference_mode():
        for loop, logits in expected.items():
            assert torch.allclose(model.logits(ids, loop).double(), logits, atol=1e-5, rtol=0), loop


def test_layout_of_the_released_size() -> None:
    config = small_config(
        vocab_size=50_257, hidden_size=512, embedding_size=256, ffn_size=2048, loops=8, cycles=8, exits=(2, 4, 6),
        max_positions=1024, heads="separate", causal=False,
    )  # fmt: skip
    shapes = {name: shape for name, (_, shape) in public_layout(config).items()}
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 143_516_928
    assert shapes["trm.convs.7.depthwise.weight"] == (512, 1, 3)
    assert shapes["embed.refine.convs.2.pointwise.weight"] == (512, 512, 1)


@pytest.mark.parametrize(("key", "prefix"), [("model", "_orig_mod.module."), ("model_state_dict", "module.")])
def test_wrapped_and_prefixed_weights(weights: dict[str, Tensor], key: str, prefix: str) -> None:
    content = {"epoch": 9, key: {prefix + name: tensor for name, tensor in weights.items()}, "loss": 0.07}
    state_dict = extract_state_dict(content, "checkpoint")
    assert state_dict.keys() == weights.keys() and all(state_dict[name] is weights[name] for name in weights)
    without_exits = {name: tensor for name, tensor in weights.items() if not name.startswith("intermediate_heads")}
    assert infer_config(without_exits, "checkpoint").heads == "tied"


@pytest.mark.parametrize("content", [None, [], {"model": {}}, {"model": {"a": 1}}, {"epoch": 3, "w": torch.ones(1)}])
def test_content_without_a_state_dict(content: object) -> None:
    with pytest.raises(ArtifactError, match="checkpoint: has no state dict"):
        extract_state_dict(content, "checkpoint")


def test_every_mismatch_is_listed(weights: dict[str, Tensor]) -> None:
    del weights["trm.norms.2.bias"], weights["norm1.weight"]
    weights["trm.extra.weight"] = torch.zeros(3, 4)
    weights["q_proj.weight"] = torch.zeros(32, 31)
    weights["trm.convs.1.pointwise.weight"] = torch.zeros(32, 32)
    config = infer_config(weights, "checkpoint")
    with pytest.raises(ArtifactError) as raised:
        convert_weights(weights, config, "checkpoint")
    listed = [line.strip() for line in str(raised.value).splitlines()[1:]]
    assert listed == [
        "missing norm1.weight [32]",
        "missing trm.norms.2.bias [32]",
        "q_proj.weight is [32, 31], not [32, 32]",
        "trm.convs.1.pointwise.weight is [32, 32], not [32, 32, 1]",
        "unexpected trm.extra.weight [3, 4]",
    ]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("trm.lin1.0.weight", None, r"not a CRT checkpoint: trm\.lin1\.0\.weight is missing"),
        ("loop_encodings", (4, 32), "loop_encodings has 2 dimensions, not 4"),
        ("lm_head.weight", (60, 30), "width 30 is not a multiple"),
        ("intermediate_heads.loop_9.weight", (60, 32), "exits"),  # a head after the last loop
    ],
)
def test_impossible_sizes(weights: dict[str, Tensor], name: str, shape: tuple[int, ...] | None, message: str) -> None:
    weights.pop(name, None)
    with pytest.raises(ArtifactError, match=message):
        infer_config({**weights, **({name: torch.zeros(shape)} if shape else {})}, "checkpoint")
