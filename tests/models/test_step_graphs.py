"""The pieces that a host loops, in torch: together they are the model, whatever variant of it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import torch

from edgeformer.artifacts.errors import InputError
from edgeformer.export.graphs import write_graph
from edgeformer.models.crt.adapter import build_crt
from edgeformer.models.crt.graphs import compose_decode, step_specs
from edgeformer.models.crt.model import CRT
from edgeformer.models.encoder import EncoderConfig
from edgeformer.models.encoder.adapter import ADAPTER, EncoderExits, encoder_graphs
from edgeformer.models.encoder.model import EncoderClassifier
from edgeformer.models.layers import half_for_export
from edgeformer.models.tracing import GraphSpec, ask_inputs, export_graph
from edgeformer.runtimes.decoder import Decoder
from edgeformer.runtimes.onnxruntime.decode import StepEngine, decode_windows
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from tests.models.crt_oracle import small_config
from tests.models.torch_graph import torch_parts

TOKENS = 30
VARIANTS = [
    {}, {"heads": "separate"}, {"heads": "tied"}, {"exits": ()}, {"trm": "linear"}, {"trm": "conv"},
    {"trm": "depthwise"}, {"norm": "rms"}, {"norm": "none"}, {"norm": "batch"},
    {"embedding_cycles": 0, "embedding_projection": False, "embedding_size": 32}, {"dilations": (3, 1)},
    {"loops": 1, "exits": ()},
]  # fmt: skip


def crt(**changes: object) -> CRT:
    torch.manual_seed(0)
    return build_crt(small_config(**changes)).eval()


def uncached(model: CRT, ids: torch.Tensor) -> dict[int, np.ndarray]:
    with torch.inference_mode():
        return {loop: model.logits(ids, loop).numpy() for loop in model.exits}


def opened(path: Path, graph: onnx_ir.Model) -> OnnxSession:
    write_graph(graph, path)
    return OnnxSession(path, threads=1)


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("changes", VARIANTS)
def test_step_graphs_are_the_model_whichever_token_leaves_where(changes: dict[str, object]) -> None:
    model, choose = crt(**changes), random.Random(0)
    ids = torch.randint(0, 60, (2, TOKENS))
    expected = uncached(model, ids)
    decoder = Decoder(StepEngine(torch_parts(model)))
    decoder.read_rows(ids[:, :7].numpy())
    for place in range(6, TOKENS):
        if place > 6:
            decoder.read_rows(ids[:, place : place + 1].numpy())
        loop = choose.choice(model.exits)
        decoder.advance(loop)
        assert close(decoder.row_logits(loop), expected[loop][:, place]), (place, loop)
        if loop != model.loops and choose.random() < 0.3:  # it was not sure: further on with the same token
            decoder.advance(model.loops)
            assert close(decoder.row_logits(model.loops), expected[model.loops][:, place])
    assert decoder.length == TOKENS


def test_all_loops_of_the_decode_graph_share_one_mask(tmp_path: Path) -> None:
    model = crt(loops=3, exits=(), cycles=1, embedding_cycles=1)
    decode = compose_decode(model, {name: export_graph(spec) for name, spec in step_specs(model).items()})
    counted = Counter(node.op_type for node in decode.graph)
    assert [counted[name] for name in ("Trilu", "Not", "Where", "Shape")] == [1, 1, 3, 3]
    asked = [(node.inputs[0].name, node.attributes["start"].value) for node in decode.graph if node.op_type == "Shape"]
    assert sorted(asked) == [("input_ids", 0), ("input_ids", 1), ("past_key_values.0.key", 2)]
    ids = torch.randint(0, 60, (2, 9))
    found = decode_windows(opened(tmp_path / "decode.onnx", decode), ids.numpy(), 6)
    assert close(found, uncached(model, ids)[3][:, 5:])


def test_a_size_inside_of_a_piece_is_asked_where_it_is() -> None:
    """The head of a decode graph was traced with several tokens, and is given one."""
    piece = onnx_ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 20]> g (float[batch, sequence] x) => (int64[1] inner, int64[1] outer) {
            y = Neg(x)
            inner = Shape<start = 1, end = 2>(y)
            outer = Shape<start = 1, end = 2>(x)
        }"""
    )
    for value in (piece.graph.inputs[0], piece.graph.node(0).outputs[0]):
        value.shape = onnx_ir.Shape(["batch", "sequence"])
    ids = onnx_ir.Value(name="ids", shape=onnx_ir.Shape(["batch", "sequence"]), type=piece.graph.inputs[0].type)
    piece.graph.inputs.insert(0, ids)
    ask_inputs(piece, {"x"})
    assert [node.inputs[0].name for node in piece.graph if node.op_type == "Shape"] == ["y", "ids"]


def test_every_distinct_head_is_a_part() -> None:
    parts = {heads: list(step_specs(crt(heads=heads))) for heads in ("shared", "separate", "tied")}
    assert parts == {
        "shared": ["embed", "loop", "readout", "readout_exit"],
        "separate": ["embed", "loop", "readout", "readout_exit1", "readout_exit3"],
        "tied": ["embed", "loop", "readout"],
    }
    assert list(step_specs(crt(exits=()))) == ["embed", "loop", "readout"]  # the shared head answers nowhere


def test_half_precision_keeps_states_and_caches_in_half_and_logits_in_float() -> None:
    model = crt()
    ids = torch.randint(0, 60, (1, TOKENS))
    expected = uncached(model, ids)
    half_for_export(model)
    for part, spec in step_specs(model).items():
        floats = {name: tensor.dtype for name, tensor in spec.inputs.items() if tensor.is_floating_point()}
        assert set(floats.values()) <= {torch.float16}, part
        with torch.inference_mode():
            found = spec.module(*spec.inputs.values())
        found = found if isinstance(found, tuple) else (found,)
        for name, tensor in zip(spec.outputs, found, strict=True):
            assert tensor.dtype == (torch.float32 if name == "logits" else torch.float16), (part, name)
    decoder = Decoder(StepEngine(torch_parts(model)))
    for place, loop in enumerate((1, 3, 1, 4, 1, 1, 4)):
        decoder.read(ids[0, place : place + 1].tolist())
        decoder.advance(loop)
        assert np.abs(decoder.logits(loop) - expected[loop][0, place]).max() < 1e-2 * expected[loop].std()


def test_a_model_that_looks_ahead_has_none() -> None:
    with pytest.raises(InputError, match="needs a causal model"):
        step_specs(crt(causal=False))


@pytest.mark.parametrize("scale", [0.5, 0.0])
def test_the_encoders_pieces_are_the_encoder(scale: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = EncoderConfig(
        kind="encoder", vocab_size=40, hidden_size=16, layers=2, iterations=3, heads=2, ffn_size=24,
        residual_scale=scale, dropout=0.1, max_positions=32,
    )  # fmt: skip
    model = EncoderClassifier(classes=3, **config.model_dump(exclude={"kind", "attention"})).eval()
    ids = torch.randint(0, 40, (4, 9))
    mask = (torch.arange(9) < torch.tensor([[9], [5], [1], [8]])).long()
    graphs = encoder_graphs(model, steps=True)
    with torch.inference_mode():
        logits, states = model(ids, mask).numpy(), [value.numpy() for value in EncoderExits(model)(ids, mask)]
    texts = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    sessions = {part: opened(tmp_path / f"{part}.onnx", graph) for part, graph in graphs.steps.items()}
    state = sessions["embed"].run({"input_ids": texts["input_ids"]})["state"]
    for _ in range(3):
        state = sessions["loop"].run({"state": state, "attention_mask": texts["attention_mask"]})["next_state"]
    assert np.abs(sessions["readout"].run({"state": state})["logits"] - logits).max() < 1e-5
    found = opened(tmp_path / "exits.onnx", graphs.exits).run(texts)
    for name, value in zip(EncoderExits(model).outputs, states, strict=True):
        assert np.abs(found[name] - value).max() < 1e-5, name


def test_a_layer_is_traced_once_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time that an export takes is torch's, for every layer and for every iteration of it."""
    traced: list[str] = []

    def watched(spec: GraphSpec) -> onnx_ir.Model:
        traced.append(",".join(spec.outputs))
        return export_graph(spec)

    monkeypatch.setitem(encoder_graphs.__globals__, "export_graph", watched)  # of the module that is called below
    sizes = {"vocab_size": 40, "hidden_size": 16, "heads": 2, "ffn_size": 24, "max_positions": 32}
    counts = []
    for layers, iterations in ((1, 1), (3, 2)):
        model = EncoderClassifier(
            classes=3, layers=layers, iterations=iterations, residual_scale=0.5, dropout=0.0, **sizes
        ).eval()
        graphs = encoder_graphs(model, steps=True)
        products = [node.op_type for node in graphs.exits.graph].count("Softmax")
        assert products == layers * iterations + iterations - 1  # the last layer twice where an exit follows
        half_for_export(model)
        half = ADAPTER.trace_half(model, ("input_ids", "attention_mask"), graphs, steps=True)
        assert half.steps["loop"].graph.inputs[0].dtype == onnx_ir.DataType.FLOAT16  # and was not traced
        counts.append(len(traced))
        traced.clear()
    assert counts == [5, 5]
