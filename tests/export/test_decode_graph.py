"""Decode graphs of the looped decoder: several tokens behind cached ones; precision of the head."""

import numpy as np
import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.bundle import Bundle
from edgeformer.export.export import export
from edgeformer.export.quantize import quantized_graphs
from edgeformer.export.variants import ExportOptions
from edgeformer.models.decoder.adapter import ADAPTER
from edgeformer.runtimes import OpenOptions
from edgeformer.web import PageOptions, publish
from tests.export.language_run import WORDS, language_recipe, write_language_run

LOOPS = 2
SIZES = {
    "kind": "decoder", "hidden_size": 64, "layers": 1, "iterations": LOOPS, "heads": 4, "kv_heads": 2, "ffn_size": 96,
}  # fmt: skip
IDS = np.random.default_rng(0).integers(0, WORDS, (1, 24))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    run = write_language_run(tmp_path_factory.mktemp("caches") / "looped", language_recipe(**SIZES))
    export(run, ExportOptions(int8=True))
    return Bundle.open(run / "bundle")


@pytest.mark.slow
@pytest.mark.parametrize("artifact", ["onnx-fp32-decode", "onnx-int8-decode"])
def test_a_decode_graph_takes_several_tokens_behind_others(bundle: Bundle, artifact: str) -> None:
    expected = bundle.session(bundle.artifact(artifact)).run({"input_ids": IDS})["logits"]  # token by token
    decoder = bundle.decoder(bundle.artifact(artifact), [2], OpenOptions(threads=1))
    for piece in np.split(IDS, [7, 8, 13], axis=1):
        decoder.read_rows(piece)
        decoder.advance(2)
        difference = np.abs(decoder.row_logits(2) - expected[:, decoder.length - 1]).max()
        assert difference < (1e-4 if "fp32" in artifact else 0.02)


@pytest.mark.slow
def test_the_head_of_the_step_artifact_has_8_bits_as_in_the_other_graphs() -> None:
    model = ADAPTER.build(language_recipe(**SIZES)).eval()
    graphs = quantized_graphs(ADAPTER.trace(model, ["input_ids"], steps=True), "int4")
    bits = {
        part: {node.attributes.get_int("bits", 0) for node in graph.graph if node.op_type == "MatMulNBits"}
        for part, graph in {**graphs.steps, "decode": graphs.decode}.items()
        if graph is not None
    }
    assert bits == {"embed": set(), "loop": {4}, "readout": {8}, "decode": {4, 8}}


@pytest.mark.slow
def test_a_page_leaves_keys_and_values_in_int8_out(bundle, tmp_path, monkeypatch):
    """Earlier versions could export such graphs."""
    inputs = bundle.artifact("onnx-int8-decode").inputs
    caches = [name for name in inputs if name.startswith("past")]
    assert len(caches) == 2 * LOOPS
    for name in caches:
        monkeypatch.setitem(inputs, name, inputs[name].replace("float32", "int8"))
    options = PageOptions(artifacts=("onnx-int8-decode",))
    with pytest.raises(InputError, match="onnx-int8-decode: a page keeps no keys and values in INT8"):
        publish(bundle, tmp_path / "page", options)
