"""Incremental decoding of CRT-Deep equals the full forward pass for any sequence of exits: caches and step graphs."""

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgeformer.artifacts.errors import InputError
from edgeformer.export.graphs import write_graph
from edgeformer.models.blocks.layers import fp16_copy
from edgeformer.models.blocks.tracing import GraphSpec
from edgeformer.models.crt.adapter import ADAPTER, piece_specs
from edgeformer.models.crt.model import CRT, CachedLoops
from edgeformer.runtimes.decoder import Decoder, StepEngine, StepSession, decode_windows
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.torch.session import TorchEngine
from tests.models.crt_oracle import make_crt

Array = NDArray[Any]
TOKENS = 256
VARIANTS: list[dict[str, Any]] = [
    {}, {"heads": "separate", "norm": "rms"}, {"heads": "tied", "trm": "conv"}, {"trm": "linear", "norm": "none"},
    {"trm": "depthwise", "norm": "batch"}, {"loops": 1, "exits": (), "dilations": (3, 1)},
    {"embedding_cycles": 0, "embedding_projection": False, "embedding_size": 32},
]  # fmt: skip


class TorchGraph:
    """Runs a graph's spec in torch with the interface of OnnxSession, without the minutes of exporting it."""

    provider, max_positions = "torch-cpu", None

    def __init__(self, spec: GraphSpec) -> None:
        self.spec = spec
        self.inputs = {
            name: ("", [None if axis in spec.axes.get(name, {}) else size for axis, size in enumerate(example.shape)])
            for name, example in spec.inputs.items()
        }

    def empty(self, name: str, rows: int) -> Array:
        example, axes = self.spec.inputs[name], self.spec.axes[name]
        shape = (rows, *(0 if axis in axes else size for axis, size in enumerate(example.shape) if axis))
        return example.new_zeros(shape).numpy()

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        arguments = [torch.from_numpy(np.ascontiguousarray(inputs[name])) for name in self.inputs]
        for name, argument in zip(self.inputs, arguments, strict=True):
            example, axes = self.spec.inputs[name], self.spec.axes.get(name, {})
            fixed = [axis for axis in range(example.ndim) if axis not in axes]
            assert argument.dtype == example.dtype, name
            assert all(argument.shape[axis] == example.shape[axis] for axis in fixed), (name, argument.shape)
        with torch.inference_mode():
            results = self.spec.module(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        return {name: tensor.numpy() for name, tensor in zip(self.spec.outputs, results, strict=True)}


def step_decoder(model: CRT) -> Decoder[Any]:
    specs = piece_specs(model)
    paths = {part: Path(part) for part in specs if part not in ("text_embed", "block")}
    steps = StepSession(paths, model.loops, lambda path: TorchGraph(specs[path.name]), exits=model.exits)  # type: ignore
    return Decoder(StepEngine(steps))


def full_logits(model: CRT, ids: Tensor) -> dict[int, Array]:
    """Return exit → logits [B, T, V] of the full forward pass."""
    with torch.inference_mode():
        return {loop: model.logits(ids, loop).numpy() for loop in model.exits}


def logits_after(decoder: Decoder[Any], loop: int) -> Array:
    """Run the newest token up to ``loop`` and return its logits [B, V]."""
    decoder.advance(loop)
    return decoder.row_logits(loop)


def close(actual: Array, expected: Array) -> bool:
    return bool(np.abs(actual - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max()))


@pytest.fixture(scope="module")
def model() -> CRT:
    return make_crt(loops=8, exits=(2, 4, 6), embedding_cycles=2, cycles=4)


@pytest.fixture(scope="module")
def ids() -> Array:
    return torch.randint(0, 60, (1, TOKENS), generator=torch.Generator().manual_seed(1)).numpy()


@pytest.fixture(scope="module")
def expected(model: CRT, ids: Array) -> dict[int, Array]:
    return full_logits(model, torch.from_numpy(ids))


@pytest.fixture
def decoder(model: CRT) -> Decoder[Tensor]:
    return Decoder(TorchEngine(CachedLoops(model)))


@pytest.mark.parametrize(
    ("pieces", "exits"),
    [
        ((1,) * TOKENS, (8,)),
        ((1,) * TOKENS, (2, 2, 2, 4, 2, 6, 8)),
        ((37, 1, 1, 61), (2, 4, 6, 8)),
        ((65, 127, 64), (2, 4, 6, 8)),
    ],
    ids=["last exit", "any exit", "pieces", "large pieces"],
)
def test_decoding_equals_the_full_text(
    decoder: Decoder[Tensor], ids: Array, expected: dict[int, Array], pieces: tuple[int, ...], exits: tuple[int, ...]
) -> None:
    """Tokens that exit early wait and catch up, so that later ones see every loop's state of them."""
    choice = random.Random(0)
    for piece in pieces:
        decoder.read_rows(ids[:, decoder.length : decoder.length + piece])
        loop = choice.choice(exits)
        assert close(logits_after(decoder, loop), expected[loop][:, decoder.length - 1]), (decoder.length, loop)


def test_peek_leaves_the_cache_unchanged(decoder: Decoder[Tensor], ids: Array, expected: dict[int, Array]) -> None:
    for length in (0, 70):  # after 70 tokens the key buffers have grown
        if length:
            decoder.read_rows(ids[:, :length])
            decoder.advance(8)
        for _ in range(2):
            assert close(decoder.peek(ids[:, length : length + 1], 8), expected[8][:, length])
        assert decoder.length == length
    decoder.read_rows(ids[:, 70:71])
    assert close(logits_after(decoder, 8), expected[8][:, 70])
    with pytest.raises(InputError, match="321 tokens, and the model takes at most 320"):
        decoder.read_rows(ids[:, :250])


def test_model_that_looks_ahead_is_refused() -> None:
    model = make_crt(causal=False)
    with pytest.raises(InputError, match="cached decoding needs a causal model"):
        CachedLoops(model)
    assert list(piece_specs(model)) == ["text_embed", "block", "readout", "readout_exit"]


@pytest.mark.parametrize("make_decoder", [step_decoder, lambda model: Decoder(TorchEngine(CachedLoops(model)))])
@pytest.mark.parametrize("changes", VARIANTS)
def test_every_variant_decodes(changes: dict[str, Any], make_decoder: Any) -> None:
    model, choice = make_crt(**changes), random.Random(0)
    texts = torch.randint(0, 60, (2, 30))
    expected, decoder = full_logits(model, texts), make_decoder(model)
    decoder.read_rows(texts[:, :7].numpy())
    for position in range(6, 30):
        if position > 6:
            decoder.read_rows(texts[:, position : position + 1].numpy())
        loop = choice.choice(model.exits)
        assert close(logits_after(decoder, loop), expected[loop][:, position]), (position, loop)
        if loop != model.loops and choice.random() < 0.3:  # the same token continues to the last loop
            assert close(logits_after(decoder, model.loops), expected[model.loops][:, position])
    assert decoder.length == 30


def test_every_distinct_head_is_a_part() -> None:
    assert {heads: list(piece_specs(make_crt(heads=heads)))[4:] for heads in ("shared", "separate", "tied")} == {
        "shared": ["readout", "readout_exit"],
        "separate": ["readout", "readout_exit1", "readout_exit3"],
        "tied": ["readout"],
    }
    assert list(piece_specs(make_crt(exits=())))[4:] == ["readout"]  # no exit uses the shared head


def test_fp16_parts_keep_states_in_fp16_and_logits_in_float32() -> None:
    model, texts = make_crt(), torch.randint(0, 60, (1, 30))
    expected, model = full_logits(model, texts), fp16_copy(model)
    for part, spec in piece_specs(model).items():
        input_types = {tensor.dtype for tensor in spec.inputs.values() if tensor.is_floating_point()}
        assert input_types <= {torch.float16}, part
        with torch.inference_mode():
            results = spec.module(*spec.inputs.values())
        results = results if isinstance(results, tuple) else (results,)
        for name, tensor in zip(spec.outputs, results, strict=True):
            assert tensor.dtype == (torch.float32 if name == "logits" else torch.float16), (part, name)
    decoder = step_decoder(model)
    for position, loop in enumerate((1, 3, 1, 4, 1, 1, 4)):
        decoder.read(texts[0, position : position + 1].tolist())
        decoder.advance(loop)
        assert np.abs(decoder.row_logits(loop)[0] - expected[loop][0, position]).max() < 1e-2 * expected[loop].std()


@pytest.mark.slow
def test_loops_of_the_decode_graph_share_one_mask(tmp_path: Path) -> None:
    model = make_crt(loops=3, exits=(), cycles=1, embedding_cycles=1)
    decode: Any = ADAPTER.trace(model, ("input_ids",), steps=False).decode
    counts = Counter(node.op_type for node in decode.graph)
    assert [counts[name] for name in ("Trilu", "Not", "Where", "Shape")] == [1, 1, 3, 3]
    shapes = [(node.inputs[0].name, node.attributes["start"].value) for node in decode.graph if node.op_type == "Shape"]
    assert sorted(shapes) == [("input_ids", 0), ("input_ids", 1), ("past_key_values.0.key", 2)]
    write_graph(decode, tmp_path / "decode.onnx")
    texts = torch.randint(0, 60, (2, 9))
    with OnnxSession(tmp_path / "decode.onnx", threads=1) as session:
        assert close(decode_windows(session, texts.numpy(), 6), full_logits(model, texts)[3][:, 5:])
