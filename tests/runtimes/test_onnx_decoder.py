"""Decoding with ONNX Runtime equals the uncached torch model, whichever token leaves where."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.export.graphs import write_graph
from edgeformer.models.crt.adapter import build_crt
from edgeformer.models.crt.graphs import compose_decode, step_specs
from edgeformer.models.tracing import export_graph
from edgeformer.models.weights import load_model
from edgeformer.runtimes import OpenOptions
from edgeformer.runtimes.decoder import Decoder, StepEngine, StepSession, decode_windows
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from tests.export.language_run import EXIT, LOOPS, POSITIONS, WORDS, exported_language_run
from tests.models.crt_oracle import small_config

TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_language_run(tmp_path_factory) / "bundle"


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, WORDS, size=(3, POSITIONS))


@pytest.fixture(scope="module")
def uncached(bundle: Path, ids: np.ndarray) -> dict[int, np.ndarray]:
    model = load_model(bundle.parent)
    with torch.inference_mode():
        return {loop: model.logits(torch.from_numpy(ids), loop).numpy() for loop in (EXIT, LOOPS)}


def artifact_of(bundle: Path, id_: str) -> ArtifactManifest:
    return next(a for a in Bundle.open(bundle).artifacts if a.id == id_)


def opened(bundle: Path, id_: str) -> Decoder[Any]:
    exits = (EXIT, LOOPS) if id_.endswith("step") else (LOOPS,)
    return Bundle.open(bundle).decoder(artifact_of(bundle, id_), exits, OpenOptions(threads=1))


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("prompt", [1, 20])
def test_prompt_then_single_tokens_that_leave_anywhere(
    bundle: Path, ids: np.ndarray, uncached: dict[int, np.ndarray], precision: str, prompt: int
) -> None:
    choose = random.Random(prompt)
    decoder = opened(bundle, f"onnx-{precision}-step")
    decoder.read(ids[0, :prompt].tolist())
    for place in range(prompt - 1, POSITIONS):
        if place >= prompt:
            decoder.read([int(ids[0, place])])
        loop = choose.choices((EXIT, LOOPS), weights=(4, 1))[0]
        decoder.advance(loop)
        assert np.abs(decoder.logits(loop) - uncached[loop][0, place]).max() < TOLERANCE[precision], (place, loop)
        if loop == EXIT and choose.random() < 0.2:  # it was not sure: the same token goes on
            decoder.advance(LOOPS)
            assert np.abs(decoder.logits(LOOPS) - uncached[LOOPS][0, place]).max() < TOLERANCE[precision]
    assert decoder.length == POSITIONS
    decoder.close()


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("first", [1, 40, POSITIONS])
def test_decode_graph_over_windows(
    bundle: Path, ids: np.ndarray, uncached: dict[int, np.ndarray], precision: str, first: int
) -> None:
    file = artifact_of(bundle, f"onnx-{precision}-decode").file
    assert file is not None
    with OnnxSession(bundle / file, threads=1) as graph:
        actual = decode_windows(graph, ids, first)
    assert actual.shape == (3, POSITIONS - first + 1, WORDS)
    assert np.abs(actual - uncached[LOOPS][:, first - 1 :]).max() < TOLERANCE[precision]


def test_tokens_that_are_read_in_pieces_go_through_together(
    bundle: Path, ids: np.ndarray, uncached: dict[int, np.ndarray]
) -> None:
    for id_ in ("onnx-fp32-step", "onnx-fp32-decode"):
        decoder = opened(bundle, id_)
        assert decoder.provider == "CPUExecutionProvider"
        decoder.read(ids[0, :3].tolist())
        decoder.read(ids[0, 3:10].tolist())
        decoder.advance(LOOPS)
        assert np.abs(decoder.logits(LOOPS) - uncached[LOOPS][0, 9]).max() < 1e-5


@pytest.mark.parametrize("id_", ["onnx-fp32-step", "onnx-fp32-decode"])
def test_misuse(bundle: Path, ids: np.ndarray, id_: str) -> None:
    decoder = opened(bundle, id_)
    with pytest.raises(ValueError, match="read one first"):
        decoder.advance(LOOPS)
    with pytest.raises(ValueError, match="nothing was computed yet"):
        decoder.logits(LOOPS)
    decoder.read(ids[0, :70].tolist())
    decoder.advance(LOOPS)
    with pytest.raises(ValueError, match=f"no token waits in front of loop {LOOPS}"):
        decoder.advance(LOOPS)
    with pytest.raises(InputError, match=f"{POSITIONS + 1} tokens; the model takes at most {POSITIONS}"):
        decoder.read(ids[0, : POSITIONS - 69].tolist())
    decoder.read(ids[0, : POSITIONS - 70].tolist())
    with pytest.raises(ValueError, match="nothing was computed yet"):
        decoder.logits(LOOPS)  # of a token that was only read


def test_without_convolutions_and_with_a_head_for_every_exit(tmp_path: Path) -> None:
    """Convolution caches then have no rows; the graphs still take and return them."""
    torch.manual_seed(0)
    model = build_crt(small_config(trm="linear", heads="separate", loops=3, exits=(1, 2), cycles=1)).eval()
    text = torch.randint(0, 60, (2, 20))
    graphs = {part: export_graph(spec) for part, spec in step_specs(model).items()}
    graphs["decode"] = compose_decode(model, graphs)
    paths = {part: tmp_path / f"{part}.onnx" for part in graphs}
    for part, graph in graphs.items():
        write_graph(graph, paths[part])
    with torch.inference_mode():
        expected = {loop: model.logits(text, loop).numpy() for loop in model.exits}
    decoder = Decoder(StepEngine(StepSession(paths, 3, exits=model.exits)))
    for place, loop in enumerate((1, 1, 2, 3, 1, 2, 2, 1, 3, 1) * 2):
        decoder.read_rows(text[:, place : place + 1].numpy())
        decoder.advance(loop)
        assert np.abs(decoder.row_logits(loop) - expected[loop][:, place]).max() < 1e-5
    with OnnxSession(paths["decode"], threads=1) as graph:
        assert np.abs(decode_windows(graph, text.numpy(), 7) - expected[3][:, 6:]).max() < 1e-5


def test_what_cannot_write_is_refused(bundle: Path) -> None:
    for id_ in ("onnx-fp32", "onnx-fp32-exit1"):
        with pytest.raises(InputError, match=f"'{id_}' keeps nothing of earlier tokens"):
            Bundle.open(bundle).decoder(artifact_of(bundle, id_), (LOOPS,))
    with pytest.raises(InputError, match="'onnx-fp32-decode' always runs all 2 loops; use a step artifact"):
        Bundle.open(bundle).decoder(artifact_of(bundle, "onnx-fp32-decode"), (EXIT,))
    with pytest.raises(InputError, match="no exit after loop 7"):
        Bundle.open(bundle).decoder(artifact_of(bundle, "onnx-fp32-step"), (7,))
    rejected = artifact_of(bundle, "onnx-fp32-step").model_copy(update={"status": "rejected", "reason": "overflow"})
    with pytest.raises(ArtifactError, match=r"was not built \(rejected: overflow\)"):
        Bundle.open(bundle).decoder(rejected, (LOOPS,))


@pytest.mark.parametrize("kind", ["step", "decode"])
@pytest.mark.parametrize("read", [0, 1, 20])
def test_peeking_gives_the_next_tokens_logits_and_leaves_everything_as_it_was(
    bundle: Path, ids: np.ndarray, uncached: dict[int, np.ndarray], kind: str, read: int
) -> None:
    decoder = opened(bundle, f"onnx-fp32-{kind}")
    if read:
        decoder.read_rows(ids[:, :read])
        decoder.advance(LOOPS)
    for _ in range(2):
        actual = decoder.peek(ids[:, read : read + 1], LOOPS)
        assert np.abs(actual - uncached[LOOPS][:, read]).max() < TOLERANCE["fp32"]
    assert decoder.length == read
    decoder.read_rows(ids[:, read : read + 1])
    with pytest.raises(ValueError, match="wait in front of"):
        decoder.peek(ids[:, :1], LOOPS)
    decoder.advance(LOOPS)
    assert np.abs(decoder.row_logits(LOOPS) - uncached[LOOPS][:, read]).max() < TOLERANCE["fp32"]
    decoder.close()


@pytest.mark.parametrize("kind", ["step", "decode"])
def test_peeking_behind_the_last_place_is_refused(bundle: Path, ids: np.ndarray, kind: str) -> None:
    decoder = opened(bundle, f"onnx-fp32-{kind}")
    decoder.read_rows(ids)
    decoder.advance(LOOPS)
    with pytest.raises(InputError, match=f"{POSITIONS + 1} tokens; the model takes at most {POSITIONS}"):
        decoder.peek(ids[:, :1], LOOPS)
    decoder.close()


def test_a_decode_graph_cannot_peek_at_an_exit(bundle: Path, ids: np.ndarray) -> None:
    decoder = opened(bundle, "onnx-fp32-decode")
    with pytest.raises(ValueError, match=f"runs all {LOOPS} loops"):
        decoder.peek(ids[:, :1], EXIT)
    decoder.close()
