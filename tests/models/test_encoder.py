"""The encoder: exact parameter counts, recurrence, padding, and what is chosen for attention."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.models import load_recipe, model_spec_of
from edgeformer.models.adapter import Place, count_parameters
from edgeformer.models.encoder import EncoderConfig
from edgeformer.models.encoder.adapter import choose_attention, encoder_graphs
from edgeformer.models.encoder.model import MASKED, EncoderClassifier, exported_form, sdpa
from edgeformer.models.weights import load_weights
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.plan import count_offline

SMALL = EncoderConfig(
    kind="encoder",
    vocab_size=40,
    hidden_size=16,
    layers=2,
    iterations=3,
    heads=2,
    ffn_size=24,
    residual_scale=0.5,
    dropout=0.1,
    max_positions=32,
)


def model_of(config: EncoderConfig) -> EncoderClassifier:
    torch.manual_seed(1)
    return EncoderClassifier(classes=3, **config.model_dump(exclude={"kind", "attention"})).eval()


def loaded(path: Path) -> EncoderClassifier:
    """A model with other fresh weights, which those in the file replace."""
    torch.manual_seed(2)
    model = EncoderClassifier(classes=3, **SMALL.model_dump(exclude={"kind", "attention"}))
    load_weights(model, path)
    assert not model.training
    return model


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        ("baseline_sst2", 2, 25_912_706),
        ("baseline_sst2", 3, 25_913_091),
        ("recurrent_sst2", 2, 10_972_162),
        ("recurrent_sst2", 3, 10_972_419),
        ("recurrent_wide_sst2", 2, 18_817_538),
        ("recurrent_sst2_fast", 2, 10_972_162),
        ("recurrent_wide_sst2_fast", 2, 18_817_538),
        ("recurrent_domains_fast", 3, 10_972_419),
        ("baseline_domains_fast", 3, 25_913_091),
        ("baseline_sst2_fast", 2, 25_912_706),
    ],
)
def test_parameter_counts_are_the_papers(name: str, classes: int, parameters: int) -> None:
    labels = ["a", "b", "c"][:classes]
    assert count_offline(load_recipe(name, [f"data.labels={labels}"])) == parameters


@pytest.mark.parametrize("data", ["yelp", "domains"])
def test_architectures_are_compared_on_the_same_data_by_the_same_training(data: str) -> None:
    light, wide, stacked = (load_recipe(f"{name}_{data}_fast") for name in ("recurrent", "recurrent_wide", "baseline"))
    assert light.data == wide.data == stacked.data and light.training == wide.training == stacked.training
    assert light.training == load_recipe("recurrent_wide_sst2_fast").training
    for ours, published in ((light, "recurrent_sst2"), (wide, "recurrent_wide_sst2"), (stacked, "baseline_sst2")):
        assert ours.model == load_recipe(published, ["model.dropout=0.15"]).model


def test_offline_count_is_the_built_models() -> None:
    recipe = load_recipe("quickstart")
    assert isinstance(recipe, ClassificationRecipe)
    assert count_offline(recipe) == count_parameters(model_spec_of(recipe).adapter.build(recipe, Place())[0])


def test_recurrence_follows_the_formula() -> None:
    """h ← F(h) + α·h over R iterations (paper A), written out over all positions."""
    model = model_of(SMALL)
    ids = torch.randint(0, 40, (2, 7))
    h = model.tokens(ids) + model.types.weight[0]
    cos, sin = model.cos[:7, None], model.sin[:7, None]
    for _ in range(3):
        f = h
        for layer in model.layers:
            f = layer(f, cos, sin, None)
        h = f + 0.5 * h
    expected = model.head(model.norm(h[:, 0]))
    assert torch.allclose(model(ids), expected, atol=1e-5)


def test_stacked_model_is_one_iteration_without_the_outer_residual() -> None:
    model = model_of(SMALL.model_copy(update={"iterations": 1, "residual_scale": 0.0}))
    ids = torch.randint(0, 40, (1, 5))
    h = model.tokens(ids) + model.types.weight[0]
    for layer in model.layers:
        h = layer(h, model.cos[:5, None], model.sin[:5, None], None)
    assert torch.allclose(model(ids), model.head(model.norm(h[:, 0])), atol=1e-6)


def test_padding_does_not_change_the_logits() -> None:
    model = model_of(SMALL)
    ids = torch.randint(0, 40, (1, 6))
    padded = torch.cat((ids, torch.zeros(1, 9, dtype=torch.int64)), 1)
    mask = torch.tensor([[1] * 6 + [0] * 9])
    assert torch.allclose(model(padded, mask), model(ids), atol=1e-5)


def test_tokens_beyond_cls_matter() -> None:
    model = model_of(SMALL)
    ids = torch.randint(0, 40, (1, 6))
    other = ids.clone()
    other[0, 4] = (other[0, 4] + 1) % 40
    assert not torch.allclose(model(ids), model(other), atol=1e-6)


def test_mask_is_representable_in_fp16() -> None:
    assert torch.isfinite(torch.tensor(MASKED, dtype=torch.float16))


def test_flash_says_why_not_on_a_machine_without_it() -> None:
    attention, reason = choose_attention("flash", "cpu", "bf16")
    assert attention is sdpa
    assert reason is not None and "CUDA" in reason
    reason = choose_attention("flash", "cuda", "fp32")[1]
    assert reason is not None and "fp32" in reason
    assert choose_attention("sdpa", "cpu", "fp32") == (sdpa, None)


def test_exported_form_computes_the_same_with_the_same_numbers() -> None:
    model = model_of(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = exported_form(model)
    ids, mask = torch.randint(0, 40, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 4:] = 0
    assert torch.allclose(made(ids, mask), model(ids, mask), rtol=1e-4, atol=1e-5)
    assert torch.allclose(made(ids), model(ids), rtol=1e-4, atol=1e-5)
    own = dict(model.named_parameters())
    copied = {name for name, parameter in made.named_parameters() if parameter is not own.get(name)}
    products, parts = ("attention.qkv", "ffn.gate", "ffn.value"), ("weight", "bias")
    assert copied == {f"layers.{n}.{one}.{part}" for n in range(2) for one in products for part in parts}
    assert sum(parameter.numel() for parameter in made.parameters()) == sum(map(torch.numel, model.parameters()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_exported_graph_takes_nothing_with_a_stride_and_turns_no_key_twice() -> None:
    graphs = encoder_graphs(model_of(SMALL), steps=True)
    for name, graph in (("exits", graphs.exits), ("loop", graphs.steps["loop"])):
        steps = [node.inputs[4] for node in graph.graph if node.op_type == "Slice" and len(node.inputs) > 4]
        assert all(step is None or step.const_value.numpy().tolist() == [1] for step in steps), name
        moved = [tuple(node.attributes["perm"].as_ints()) for node in graph.graph if node.op_type == "Transpose"]
        counted = Counter(moved)
        # q, k, v and what comes out of two layers; and the keys once more, which runtimes make part of the product.
        if name == "loop":
            assert counted == {(0, 2, 1, 3): 4 * 2, (0, 1, 3, 2): 2}
            assert sum(node.op_type == "Reshape" for node in graph.graph) == 4 * 2
        assert set(counted) == {(0, 2, 1, 3), (0, 1, 3, 2)}, name


class TestLoading:
    def test_round_trip(self, tmp_path: Path) -> None:
        model = model_of(SMALL)
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        ids = torch.randint(0, 40, (2, 4))
        assert torch.equal(loaded(tmp_path / "model.safetensors")(ids), model(ids))

    def test_truncated_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        save_file(model_of(SMALL).state_dict(), path)
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(ArtifactError, match=r"model\.safetensors: cannot be read"):
            loaded(path)

    def test_foreign_weights_are_named(self, tmp_path: Path) -> None:
        state = model_of(SMALL).state_dict()
        state["head.weight"] = torch.zeros(5, 16)
        del state["norm.weight"]
        save_file(state, tmp_path / "model.safetensors")
        with pytest.raises(ArtifactError, match=r"head\.weight is \[5, 16\], not \[3, 16\]; missing norm\.weight"):
            loaded(tmp_path / "model.safetensors")
