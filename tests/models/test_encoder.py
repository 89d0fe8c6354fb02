"""The encoder: parameter counts, building blocks and recurrence against their equations, graphs, weights files."""

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.recipe import PlateauSchedule
from edgeformer.export.graphs import write_graph
from edgeformer.models import load_recipe
from edgeformer.models.blocks.layers import MASKED, RMSNorm, fp16_copy
from edgeformer.models.blocks.tracing import Exits, GraphSpec, export_graph
from edgeformer.models.encoder import EncoderConfig, adapter
from edgeformer.models.encoder.adapter import ADAPTER
from edgeformer.models.encoder.model import FIRST, EncoderClassifier, Rotation, SelfAttention, SwiGLU
from edgeformer.models.weights import load_weights
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.training.plan.plan import count_offline

SMALL = EncoderConfig(
    kind="encoder", vocab_size=40, hidden_size=16, layers=2, iterations=3, heads=2, ffn_size=24, residual_scale=0.5,
    dropout=0.1, max_positions=32,
)  # fmt: skip
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0]])
ROTATE = Rotation(has_neighbours=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_encoder(seed: int = 1, **changes: Any) -> EncoderClassifier:
    torch.manual_seed(seed)
    return EncoderClassifier(SMALL.model_copy(update=changes), classes=3).eval()


def angles(positions: int, head_size: int) -> tuple[Tensor, Tensor]:
    model = EncoderClassifier(SMALL.model_copy(update={"hidden_size": head_size, "heads": 1}), classes=2)
    return model.cos[:positions, None].double(), model.sin[:positions, None].double()


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        ("baseline_sst2", 2, 25_912_706),
        ("baseline_sst2", 3, 25_913_091),
        ("recurrent_sst2", 2, 10_972_162),
        ("recurrent_wide_sst2", 2, 18_817_538),
        ("recurrent_domains_fast", 3, 10_972_419),
    ],
)
def test_parameter_count_of_the_paper(name: str, classes: int, parameters: int) -> None:
    labels = ["a", "b", "c"][:classes]
    assert count_offline(load_recipe(name, [f"data.labels={labels}"])) == parameters


@pytest.mark.parametrize(
    "name",
    [
        "baseline_sst2", "recurrent_sst2", "recurrent_wide_sst2", "baseline_yelp", "recurrent_yelp", "baseline_domains",
        "recurrent_domains",
    ],
)  # fmt: skip
def test_protocol_of_the_paper(name: str) -> None:
    """AdamW 3e-5, batch 16, clipping at 1.0, half the rate after 2 bad epochs, the end after 3 of them."""
    training = load_recipe(name).training
    assert training == load_recipe("baseline_sst2").training
    assert isinstance(training.schedule, PlateauSchedule) and training.early_stopping is not None
    assert (training.optimizer.lr, training.batch_size, training.clip_norm) == (3e-5, 16, 1.0)
    assert (training.schedule.factor, training.schedule.patience) == (0.5, 1)  # torch counts from one more
    assert (training.early_stopping.patience, training.early_stopping.min_delta) == (3, 1e-3)
    assert training.select_by == "loss" and training.label_smoothing == 0
    model, _, data = name.rpartition("_")
    assert load_recipe(name).model == load_recipe(f"{model}_sst2").model
    if data != "sst2":  # the rows of the faster protocol, with 512 tokens
        assert load_recipe(name).data == load_recipe(f"{name}_fast").data.model_copy(update={"max_length": 512})


@pytest.mark.parametrize("data", ["yelp", "domains"])
def test_recipes_compare_architectures_on_equal_terms(data: str) -> None:
    light, wide, stacked = (load_recipe(f"{name}_{data}_fast") for name in ("recurrent", "recurrent_wide", "baseline"))
    assert light.data == wide.data == stacked.data and light.training == wide.training == stacked.training
    assert light.training == load_recipe("recurrent_wide_sst2_fast").training
    assert light.data.cleaning == load_recipe("recurrent_sst2").data.cleaning == "paper"
    if data == "yelp":
        assert [source.rows for source in light.data.parts["train"]] == [68_221], "as many as SST-2 has"
    for recipe, published in ((light, "recurrent_sst2"), (wide, "recurrent_wide_sst2"), (stacked, "baseline_sst2")):
        assert recipe.model == load_recipe(published, ["model.dropout=0.15"]).model


def test_rotation_turns_interleaved_pairs() -> None:
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    cos, sin = angles(5, 8)
    rotated = ROTATE(x, cos, sin)
    for i in range(4):
        pair = torch.stack((x[..., 2 * i], x[..., 2 * i + 1]), -1)
        for m in range(5):
            c, s = cos[m, 0, i], sin[m, 0, i]
            expected = pair[:, m] @ torch.stack((torch.stack((c, -s)), torch.stack((s, c)))).T
            assert torch.allclose(rotated[:, m, :, i], expected[..., 0])
            assert torch.allclose(rotated[:, m, :, 4 + i], expected[..., 1])


def test_parts_follow_their_formulas() -> None:
    cos, sin = angles(7, 8)
    for m, i in itertools.product(range(7), range(4)):
        angle = m * 10_000.0 ** (-2 * i / 8)
        assert cos[m, 0, i] == pytest.approx(math.cos(angle), abs=1e-7)
        assert sin[m, 0, i] == pytest.approx(math.sin(angle), abs=1e-7)
    x, norm, ffn = torch.randn(4, 6, dtype=torch.float64), RMSNorm(6, eps=1e-6).double(), SwiGLU(6, 10).double()
    torch.nn.init.normal_(norm.weight)
    expected = torch.stack([row / math.sqrt(float((row**2).mean()) + 1e-6) * norm.weight for row in x])
    assert torch.allclose(norm(x), expected, atol=1e-14)
    large = torch.tensor([[1000.0, -1000.0, 1000.0, 1000.0]], dtype=torch.float16)
    assert torch.equal(RMSNorm(4, eps=1e-6)(large), large / 1000), "squares do not overflow"
    gate, value = (x @ ffn.w12.weight.T + ffn.w12.bias).split(10, -1)
    expected = (gate / (1 + torch.exp(-gate)) * value) @ ffn.w3.weight.T + ffn.w3.bias
    assert torch.allclose(ffn(x), expected, atol=1e-14)


def test_attention_follows_the_formula() -> None:
    attention = SelfAttention(8, heads=2, dropout=0.0).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.float64)
    cos, sin = angles(5, 4)
    result = attention(x, cos, sin, (1 - real)[:, None, None] * MASKED)
    q, k, v = attention.qkv(x).split(8, dim=-1)
    heads = []
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        head_q, head_k = (ROTATE(x[..., part].unsqueeze(2), cos, sin).squeeze(2) for x in (q, k))
        scores = (head_q @ head_k.transpose(1, 2) / 2.0).masked_fill(real[:, None] == 0, -torch.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    assert torch.allclose(result, attention.out(torch.cat(heads, -1)), atol=1e-12)
    first = attention(x, cos, sin, (1 - real)[:, None, None] * MASKED, FIRST)
    assert torch.allclose(first, result[:, :1], atol=1e-14)
    assert torch.isfinite(torch.tensor(MASKED, dtype=torch.float16))


@pytest.mark.parametrize(("iterations", "scale"), [(3, 0.5), (1, 0.0)], ids=["recurrent", "stacked"])
def test_recurrence_follows_the_formula(iterations: int, scale: float) -> None:
    """h ← F(h) + α·h over R iterations (paper A), over all positions."""
    model = make_encoder(iterations=iterations, residual_scale=scale)
    ids = torch.randint(0, 40, (2, 7))
    h = model.tokens(ids) + model.types.weight[0]
    for _ in range(iterations):
        f = h
        for layer in model.layers:
            f = layer(f, model.cos[:7, None], model.sin[:7, None], None)
        h = f + scale * h
    assert torch.allclose(model(ids), model.head(model.norm(h[:, 0])), atol=1e-5)


@pytest.mark.slow
def test_graphs_of_a_stacked_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without residual (conformance checks one with it).

    No slice has a stride. Tracing is most of an export's time: five pieces, and none for FP16.
    """
    model, pieces = make_encoder(residual_scale=0.0), list[GraphSpec]()
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "export_graph", lambda spec: pieces.append(spec) or export_graph(spec))
        graphs = ADAPTER.trace(model, (), steps=True)
    softmaxes = [node.op_type for node in graphs.exits.graph].count("Softmax")
    assert len(pieces) == 5 and softmaxes == 2 * 3 + 3 - 1  # two last layers in iterations with an exit
    ids, exits = torch.randint(0, 40, (2, 9)), Exits(model)
    with torch.inference_mode():
        outputs = exits(ids, MASK)
    write_graph(graphs.exits, tmp_path / "graph.onnx")
    with OnnxSession(tmp_path / "graph.onnx", threads=1) as session:
        results = session.run({"input_ids": ids.numpy(), "attention_mask": MASK.numpy()})
    for name, output in zip(exits.outputs, outputs, strict=True):
        assert np.abs(results[name] - output.numpy()).max() < 1e-5, name
    for name, graph in (("exits", graphs.exits), ("loop", graphs.steps["loop"])):
        steps = [node.inputs[4] for node in graph.graph if node.op_type == "Slice" and len(node.inputs) > 4]
        assert all(step is None or step.const_value.numpy().tolist() == [1] for step in steps), name
        transposed = [node.attributes["perm"].as_ints() for node in graph.graph if node.op_type == "Transpose"]
        counts = Counter(map(tuple, transposed))
        assert set(counts) == {(0, 2, 1, 3), (0, 1, 3, 2)}, name
        if name == "loop":  # q, k, v and the result in two layers; and the keys, which runtimes fold into the product
            assert counts == {(0, 2, 1, 3): 4 * 2, (0, 1, 3, 2): 2}
            assert sum(node.op_type == "Reshape" for node in graph.graph) == 4 * 2
    monkeypatch.delattr(adapter, "export_graph")
    fp16 = ADAPTER.trace(fp16_copy(model), (), steps=True, base=graphs)
    assert fp16.steps["loop"].graph.inputs[0].dtype == onnx_ir.DataType.FLOAT16


def test_unusable_weights_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "model.safetensors", make_encoder()
    state = model.state_dict()
    state["head.weight"] = torch.zeros(5, 16)
    del state["norm.weight"]
    save_file(state, path)
    with pytest.raises(ArtifactError, match=r"head\.weight is \[5, 16\], not \[3, 16\]; missing norm\.weight"):
        load_weights(model, path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ArtifactError, match=r"model\.safetensors: cannot be read"):
        load_weights(model, path)
