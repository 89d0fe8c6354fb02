"""Caches of step and decode graphs that stay on the device from one call to the next, by ONNX Runtime's IO binding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from edgeformer.bundle import Bundle
from edgeformer.runtimes import OpenOptions, runtime_of
from edgeformer.runtimes.decoder import Decoder, FullDepthEngine, StepEngine, StepSession
from edgeformer.runtimes.onnxruntime.providers import CPU, CUDA
from edgeformer.runtimes.onnxruntime.session import Cache, OnnxSession

BUNDLE = Path(__file__).resolve().parents[1] / "old_format" / "language-v1" / "bundle"
Open = Callable[[Path], OnnxSession]


def decoder_of(kind: str, open_part: Open) -> Decoder[Any]:
    bundle = Bundle.open(BUNDLE)
    files = bundle.files(bundle.artifact(f"onnx-fp32-{kind}"))
    if kind == "decode":
        return Decoder(FullDepthEngine(open_part(files.file)))
    return Decoder(StepEngine(StepSession(files.parts, bundle.loops, open_part)))


def written(decoder: Decoder[Any], tokens: int = 12) -> tuple[list[int], list[np.ndarray[Any, Any]]]:
    """The likeliest token, read back in, again and again; with the logits of each."""
    decoder.read([5, 9, 2, 11])
    cached, logits = [], []
    for _ in range(tokens):
        decoder.advance(decoder.loops)
        logits.append(decoder.logits(decoder.loops))
        cached.append(int(logits[-1].argmax()))
        peeked = decoder.peek(np.array([[3]]), decoder.loops)  # keeps nothing
        assert peeked.shape == (1, len(logits[-1]))
        decoder.read(cached[-1:])
    return cached, logits


@pytest.mark.parametrize("kind", ["decode", "step"])
def test_bound_caches_write_the_same_tokens(kind: str) -> None:
    plain = written(decoder_of(kind, lambda path: OnnxSession(path, threads=1)))
    bound = written(decoder_of(kind, lambda path: OnnxSession(path, threads=1, cache_device="cpu")))
    assert plain[0] == bound[0]
    assert np.array_equal(plain[1], bound[1])


@pytest.mark.parametrize("kind", ["decode", "step"])
def test_several_texts_at_once_and_a_prompt_in_pieces(kind: str) -> None:
    ids = np.random.default_rng(0).integers(1, 50, (3, 9))
    answers = []
    for device in (None, "cpu"):
        decoder = decoder_of(kind, lambda path, device=device: OnnxSession(path, threads=1, cache_device=device))
        for piece in np.split(ids, (4, 5), axis=1):
            decoder.read_rows(piece)
            decoder.advance(decoder.loops)
        answers.append(decoder.row_logits(decoder.loops))
    assert np.array_equal(*answers)


def test_the_cpu_returns_arrays_unless_told_otherwise() -> None:
    """On two cores binding cost 0.1 ms per call more than arrays, which ONNX Runtime returns there without a copy."""
    inputs = {"input_ids": np.array([[5]]), "position_ids": np.array([[0]])}
    for device, kind in ((None, np.ndarray), ("cpu", Cache)):
        session = OnnxSession(BUNDLE / "onnx" / "decode.onnx", threads=1, cache_device=device)  # type: ignore[arg-type]
        empty = {name: session.empty(name, 1) for name in session.inputs if name.startswith("past")}
        cached = session.run({**inputs, **empty})
        assert {type(cached[name]) for name in cached if name.startswith("present")} == {kind}
        assert isinstance(cached["logits"], np.ndarray)
        assert cached["present.0.key"].shape == (1, 2, 1, 8)


class CardBuild:
    """ONNX Runtime with a CUDA provider whose memory is the CPU's; it records what is bound to which device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.forbids_plain_runs = True
        self.bound: dict[str, str] = {}
        self.uploaded = 0
        """Bytes of the host that were bound as inputs."""
        create, build = onnxruntime.InferenceSession, self

        class Binding:
            def __init__(self, session: Any) -> None:
                self.real = create.io_binding(session)

            def bind_cpu_input(self, name: str, array: np.ndarray[Any, Any]) -> None:
                build.uploaded += array.nbytes
                self.real.bind_cpu_input(name, array)

            def bind_ortvalue_input(self, name: str, value: Any) -> None:
                self.real.bind_ortvalue_input(name, value)

            def bind_output(self, name: str, device: str, number: int) -> None:
                build.bound[name] = device
                self.real.bind_output(name, "cpu", number)

            def get_outputs(self) -> Any:
                return self.real.get_outputs()

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


def test_on_cuda_caches_are_bound_to_the_card_and_a_token_costs_its_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = written(decoder_of("decode", lambda path: OnnxSession(path, threads=1)))
    card, bundle = CardBuild(monkeypatch), Bundle.open(BUNDLE)
    artifact = bundle.artifact("onnx-fp32-decode")
    decoder = bundle.decoder(artifact, (bundle.loops,), OpenOptions(CUDA, threads=1))
    decoder.read([5, 9, 2, 11])
    tokens, costs = [], []
    for _ in expected:
        previous_uploads = card.uploaded
        decoder.advance(decoder.loops)
        costs.append(card.uploaded - previous_uploads)
        tokens.append(int(decoder.logits(decoder.loops).argmax()))
        decoder.read(tokens[-1:])
    assert tokens == expected
    assert set(costs[1:]) == {2 * 8}, "the token and its place, however long the text is"
    devices = {device: [name for name in card.bound if card.bound[name] == device] for device in ("cuda", "cpu")}
    assert devices["cpu"] == ["logits"]
    assert devices["cuda"] == [name for name in card.bound if name.startswith("present")] and len(devices["cuda"]) == 13


def test_on_cuda_the_parts_of_a_step_artifact_keep_their_caches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the readout, which keeps nothing, nothing is bound."""
    card, bundle = CardBuild(monkeypatch), Bundle.open(BUNDLE)
    card.forbids_plain_runs = False
    decoder = bundle.decoder(bundle.artifact("onnx-fp32-step"), (bundle.loops,), OpenOptions(CUDA, threads=1))
    decoder.read([5, 9])
    decoder.advance(decoder.loops)
    assert decoder.logits(decoder.loops).shape == (300,)
    assert {name for name, device in card.bound.items() if device == "cuda"} == {
        "present_conv", "present_key", "present_value",
    }  # fmt: skip
    assert {name for name, device in card.bound.items() if device == "cpu"} == {"state", "next_state"}


def test_outputs_of_a_foreign_graph_stay_arrays_whatever_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """An imported decoder is a full graph whose results are compared and scored."""
    card, bundle = CardBuild(monkeypatch), Bundle.open(BUNDLE)
    card.forbids_plain_runs = False
    files = bundle.files(bundle.artifact("onnx-fp32-decode"))
    full = replace(files, artifact=files.artifact.model_copy(update={"role": "full"}))
    with runtime_of("onnx").open(full, OpenOptions(CUDA, threads=1)) as session:
        assert isinstance(session, OnnxSession)
        empty = {name: session.empty(name, 1) for name in session.inputs if name.startswith("past")}
        cached = session.run({"input_ids": np.array([[5]]), "position_ids": np.array([[0]]), **empty})
    assert card.bound == {} and {type(array) for array in cached.values()} == {np.ndarray}
