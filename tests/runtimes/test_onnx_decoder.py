"""Decoding with ONNX Runtime: equals the uncached torch model, whichever token leaves where; caches stay on a card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from edgeformer.artifacts.errors import InputError
from edgeformer.bundle import Bundle
from edgeformer.models.weights import load_model
from edgeformer.runtimes import OpenOptions, runtime_of
from edgeformer.runtimes.decoder import Decoder
from edgeformer.runtimes.onnxruntime.providers import CPU, CUDA
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from tests.test_old_format import OLD

EXIT, LOOPS, POSITIONS, WORDS = 2, 4, 64, 300
TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3}


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(OLD / "language-v1" / "bundle")


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, WORDS, size=(3, POSITIONS))


@pytest.fixture(scope="module")
def uncached(ids: np.ndarray) -> dict[int, np.ndarray]:
    model = load_model(OLD / "language-v1")
    with torch.inference_mode():
        return {loop: model.logits(torch.from_numpy(ids), loop).numpy() for loop in (EXIT, LOOPS)}


def open_decoder(bundle: Bundle, id_: str) -> Decoder[Any]:
    exits = (EXIT, LOOPS) if id_.endswith("step") else (LOOPS,)
    return bundle.decoder(bundle.artifact(id_), exits, OpenOptions(threads=1))


@pytest.mark.parametrize(("kind", "length"), [("step", 0), ("step", 20), ("decode", 20)])
def test_peeking_gives_the_next_tokens_logits_and_reads_nothing(
    bundle: Bundle, ids: np.ndarray, uncached: dict[int, np.ndarray], kind: str, length: int
) -> None:
    decoder = open_decoder(bundle, f"onnx-fp32-{kind}")
    if length:
        decoder.read_rows(ids[:, :length])
        decoder.advance(LOOPS)
    for _ in range(2):
        actual = decoder.peek(ids[:, length : length + 1], LOOPS)
        assert np.abs(actual - uncached[LOOPS][:, length]).max() < TOLERANCE["fp32"]
    assert decoder.length == length
    decoder.read_rows(ids[:, length:])
    decoder.advance(LOOPS)
    assert np.abs(decoder.row_logits(LOOPS) - uncached[LOOPS][:, -1]).max() < TOLERANCE["fp32"]
    with pytest.raises(InputError, match=f"{POSITIONS + 1} tokens, and the model takes at most {POSITIONS}"):
        decoder.peek(ids[:, :1], LOOPS)
    decoder.close()


def generate(decoder: Decoder[Any], tokens: int = 12) -> list[int]:
    """Return the likeliest tokens."""
    decoder.read([5, 9, 2, 11])
    text = []
    for _ in range(tokens):
        decoder.advance(LOOPS)
        text.append(int(decoder.logits(LOOPS).argmax()))
        decoder.peek(np.array([[3]]), LOOPS)  # keeps nothing
        decoder.read(text[-1:])
    return text


class CardBuild:
    """ONNX Runtime with a CUDA provider whose memory is the CPU's; it records what is bound to which device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.forbids_plain_runs = False
        self.bound: dict[str, str] = {}
        self.uploaded = 0
        """Bytes of the host that were bound as inputs."""
        create, build = onnxruntime.InferenceSession, self

        class Binding:
            def __init__(self, session: Any) -> None:
                self.real = create.io_binding(session)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.real, name)

            def bind_cpu_input(self, name: str, array: np.ndarray[Any, Any]) -> None:
                build.uploaded += array.nbytes
                self.real.bind_cpu_input(name, array)

            def bind_output(self, name: str, device: str, number: int) -> None:
                build.bound[name] = device
                self.real.bind_output(name, "cpu", number)

        class Session(create):  # type: ignore[misc]
            def __init__(self, path: str, options: Any, providers: list[Any], enable_fallback: int) -> None:
                assert providers == [(CUDA, {"use_tf32": "0"})] and not enable_fallback
                super().__init__(path, options, providers=[CPU])

            def get_providers(self) -> list[str]:
                return [CUDA, CPU]

            def io_binding(self) -> Any:
                return Binding(self)

            def run_with_iobinding(self, binding: Binding, options: Any = None) -> None:
                super().run_with_iobinding(binding.real, options)

            def run(self, *arguments: Any) -> Any:
                assert not build.forbids_plain_runs, "a run without binding copies every cache to the host"
                return super().run(*arguments)

        patch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
        patch.setattr(onnxruntime, "InferenceSession", Session)

    def bound_to(self, device: str) -> set[str]:
        return {name for name, bound_device in self.bound.items() if bound_device == device}


def test_on_cuda_caches_stay_on_the_card(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the readout, which keeps nothing, nothing is bound; nor of an imported decoder, which is a full graph."""
    expected = generate(open_decoder(bundle, "onnx-fp32-decode"))
    card = CardBuild(monkeypatch)
    card.forbids_plain_runs = True
    decoder = bundle.decoder(bundle.artifact("onnx-fp32-decode"), (LOOPS,), OpenOptions(CUDA, threads=1))
    assert generate(decoder) == expected
    previous_uploads = card.uploaded
    decoder.advance(LOOPS)
    assert card.uploaded - previous_uploads == 2 * 8, "the token and its position, however long the text is"
    assert card.bound_to("cpu") == {"logits"} and len(card.bound_to("cuda")) == 13
    card.forbids_plain_runs = False
    card.bound.clear()
    steps = bundle.decoder(bundle.artifact("onnx-fp32-step"), (LOOPS,), OpenOptions(CUDA, threads=1))
    assert len(generate(steps)) == len(expected)
    assert card.bound_to("cuda") == {"present_conv", "present_key", "present_value"}
    assert card.bound_to("cpu") == {"state", "next_state"}
    card.bound.clear()
    files = bundle.files(bundle.artifact("onnx-fp32-decode"))
    full = replace(files, artifact=files.artifact.model_copy(update={"role": "full"}))
    with runtime_of("onnx").open(full, OpenOptions(CUDA, threads=1)) as session:
        assert isinstance(session, OnnxSession)
        empty = {name: session.empty(name, 1) for name in session.inputs if name.startswith("past")}
        outputs = session.run({"input_ids": np.array([[5]]), "position_ids": np.array([[0]]), **empty})
    assert card.bound == {} and {type(array) for array in outputs.values()} == {np.ndarray}
