"""Step and decode artifacts as sessions and decoders: the committed runs' graphs give what their torch models give."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.bundle import Bundle
from edgeformer.models.blocks.tracing import Exits
from edgeformer.models.weights import load_model
from edgeformer.runtimes import OpenOptions, runtime_of
from edgeformer.runtimes.decoder import Decoder, LoopEngine, StepSession
from edgeformer.runtimes.onnxruntime.providers import CPU, CUDA
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.session import Array
from edgeformer.tasks.metric import top_probability
from tests.conftest import OLD_FORMAT

LOOPS, POSITIONS, WORDS = 4, 64, 300  # of the language model
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def parts() -> dict[str, Path]:
    bundle = Bundle.open(OLD_FORMAT / "classifier-v1" / "bundle")
    return {part: bundle.folder / file for part, file in bundle.artifact("onnx-fp32-step").parts.items()}


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(OLD_FORMAT / "language-v1" / "bundle")


def texts(rows: int = 16, length: int = 9) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, length + 1, size=(rows, 1))
    mask = (np.arange(length) < lengths).astype(np.int64)
    return {"input_ids": rng.integers(1, 40, size=(rows, length)) * mask, "attention_mask": mask}


@torch.inference_mode()
def logits_of(ids: np.ndarray) -> np.ndarray:
    logits: np.ndarray = load_model(OLD_FORMAT / "language-v1").logits(torch.from_numpy(ids), LOOPS).numpy()
    return logits


@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0, None])
def test_rows_leave_when_they_are_sure(parts: dict[str, Path], quantile: float | None) -> None:
    inputs, model = texts(), load_model(OLD_FORMAT / "classifier-v1")
    with torch.inference_mode():
        ids, mask = (torch.from_numpy(inputs[name]) for name in ("input_ids", "attention_mask"))
        exits = [logits.numpy() for logits in Exits(model)(ids, mask)[:2]]
    sure = top_probability(exits[0])
    # Between two probabilities, so that rounding does not decide.
    thresholds = {} if quantile is None else {1: float(np.quantile(sure, quantile, method="midpoint")) + 1e-4}
    expected = [1 if thresholds and probability >= thresholds[1] else 2 for probability in sure]
    with StepSession(parts, 2, early=thresholds) as session:
        actual = session.run(inputs)
    assert actual["loops"].dtype == np.int64 and actual["loops"].tolist() == expected
    for row, loop in enumerate(expected):
        assert np.abs(actual["logits"][row] - exits[loop - 1][row]).max() < 1e-5
    assert quantile != 0.5 or set(expected) == {1, 2}


def test_refusals(parts: dict[str, Path], bundle: Bundle) -> None:
    with pytest.raises(InputError, match="always runs all loops"):
        bundle.session(bundle.artifact("onnx-fp32"), OpenOptions(exits=(2, LOOPS)))
    with pytest.raises(InputError, match="a language model exits early per token"):
        bundle.session(bundle.artifact("onnx-fp32-step"), OpenOptions(early={2: 0.5}))
    with pytest.raises(InputError, match="no exit after loop 4, because it has 2 loops"):
        StepSession(parts, 2, exits=(4,))
    with pytest.raises(ArtifactError, match="lacks its part 'readout'"):
        StepSession({name: path for name, path in parts.items() if name != "readout"}, 2)
    session = StepSession(parts, 2)
    with pytest.raises(InputError, match="'attention_mask' is missing"):
        session.run({"input_ids": texts()["input_ids"]})
    with pytest.raises(InputError, match="must be int64"):
        session.run({"input_ids": np.zeros((1, 0), np.int64), "attention_mask": np.zeros((1, 0), np.int64)})
    session.close()
    with pytest.raises(EdgeformerError, match="closed"):
        session.run(texts())


@pytest.mark.parametrize(
    ("precision", "tolerance", "shape"),
    [("fp32", 1e-5, (3, 17)), ("fp32", 1e-5, (1, 1)), ("fp16", 1e-2, (1, POSITIONS))],
)
def test_a_language_models_steps_and_decode_graph_are_the_model(bundle, precision, tolerance, shape):
    ids = np.random.default_rng(0).integers(0, WORDS, size=shape)
    expected = logits_of(ids)
    for role in ("step", "decode"):
        with bundle.session(bundle.artifact(f"onnx-{precision}-{role}"), OpenOptions(threads=1)) as session:
            actual = session.run({"input_ids": ids})["logits"]
            for broken in (np.zeros((1, POSITIONS + 1), np.int64), np.zeros((1, 0), np.int64)):
                with pytest.raises(InputError):
                    session.run({"input_ids": broken})
            with pytest.raises(InputError, match="input_ids"):
                session.run({})
        assert actual.shape == expected.shape and actual.dtype == np.float32
        assert np.abs(actual - expected).max() < tolerance * max(1.0, expected.std())


def open_decoder(bundle: Bundle, id_: str) -> Decoder[Any]:
    exits = (2, LOOPS) if id_.endswith("step") else (LOOPS,)
    return bundle.decoder(bundle.artifact(id_), exits, OpenOptions(threads=1))


@pytest.mark.parametrize(("kind", "length"), [("step", 0), ("step", 20), ("decode", 20)])
def test_peeking_gives_the_next_tokens_logits_and_reads_nothing(bundle: Bundle, kind: str, length: int) -> None:
    decoder = open_decoder(bundle, f"onnx-fp32-{kind}")
    ids = np.random.default_rng(0).integers(0, WORDS, size=(3, POSITIONS))
    expected = logits_of(ids)
    if length:
        decoder.read_rows(ids[:, :length])
        decoder.advance(LOOPS)
    for _ in range(2):
        actual = decoder.peek(ids[:, length : length + 1], LOOPS)
        assert np.abs(actual - expected[:, length]).max() < 1e-5
    assert decoder.length == length
    decoder.read_rows(ids[:, length:])
    decoder.advance(LOOPS)
    assert np.abs(decoder.row_logits(LOOPS) - expected[:, -1]).max() < 1e-5
    with pytest.raises(InputError, match=f"{POSITIONS + 1} tokens, and the model takes at most {POSITIONS}"):
        decoder.peek(ids[:, :1], LOOPS)
    decoder.close()


def write_tokens(decoder: Decoder[Any], tokens: int = 12) -> list[int]:
    decoder.read([5, 9, 2, 11])
    text = []
    for _ in range(tokens):
        decoder.advance(LOOPS)
        text.append(int(decoder.row_logits(LOOPS)[0].argmax()))
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
    expected = write_tokens(open_decoder(bundle, "onnx-fp32-decode"))
    card = CardBuild(monkeypatch)
    card.forbids_plain_runs = True
    decoder = bundle.decoder(bundle.artifact("onnx-fp32-decode"), (LOOPS,), OpenOptions(CUDA, threads=1))
    assert write_tokens(decoder) == expected
    previous_uploads = card.uploaded
    decoder.advance(LOOPS)
    assert card.uploaded - previous_uploads == 2 * 8, "the token and its position, however long the text is"
    assert card.bound_to("cpu") == {"logits"} and len(card.bound_to("cuda")) == 13
    card.forbids_plain_runs = False
    card.bound.clear()
    steps = bundle.decoder(bundle.artifact("onnx-fp32-step"), (LOOPS,), OpenOptions(CUDA, threads=1))
    assert len(write_tokens(steps)) == len(expected)
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


class Recorder(LoopEngine[Tokens]):
    """A state is the tokens themselves; it keeps what went through each stretch, and how often it was called."""

    provider = "recorder"

    def __init__(self, stops: tuple[int, ...] = (1, 2, 3, 4), max_positions: int | None = None) -> None:
        self.stops, self.max_positions = stops, max_positions
        self.read: list[int] = []
        self.through: list[list[int]] = [[] for _ in stops]
        self.calls = [0 for _ in stops]
        self.joins: list[int] = []

    def embed(self, ids: Array, start: int, *, keep: bool) -> Tokens:
        assert start == len(self.read), "places follow one another"
        tokens = tuple(ids[0].tolist())
        if keep:
            self.read += tokens
        return tokens

    def advance(self, stretch: int, states: Sequence[Tokens], *, keep: bool) -> Tokens:
        if len(states) > 1:
            self.joins.append(len(states))
        state = tuple(chain.from_iterable(states))
        previous = self.read if stretch == 0 else self.through[stretch - 1]
        first = len(self.through[stretch])
        if keep:
            assert tuple(previous[first : first + len(state)]) == state, "every token runs exactly once"
            self.through[stretch] += state
            self.calls[stretch] += 1
        return state

    def readout(self, state: Tokens, loop: int) -> Array:
        return np.array([[state[-1], loop]], dtype=np.float32)


@pytest.mark.parametrize("seed", range(50))
def test_any_exits_in_any_order(seed: int) -> None:
    choose, engine = random.Random(seed), Recorder()
    decoder = Decoder(engine)
    text: list[int] = []
    for _ in range(40):
        new = [choose.randrange(100) for _ in range(choose.choice((1, 1, 1, 3)))]
        decoder.read(new)
        text += new
        if choose.random() < 0.2:
            continue  # read more before anything is computed
        for loop in sorted(choose.sample(engine.stops, choose.choice((1, 1, 2)))):
            decoder.advance(loop)
            assert decoder.row_logits(loop)[0].tolist() == [text[-1], loop]
            assert engine.through[loop - 1] == text, "all that waited went through before the newest"
    assert engine.read == text and decoder.length == len(text)


def test_what_waits_goes_through_in_one_call_and_peeking_changes_nothing() -> None:
    engine = Recorder()
    decoder = Decoder(engine)
    for token in range(5):
        decoder.read([token])
        decoder.advance(1)
    assert (engine.calls, engine.through[1]) == ([5, 0, 0, 0], [])
    for loop in (2, 4):
        with pytest.raises(ValueError, match=f"tokens wait in front of loop {loop}"):
            decoder.peek(np.array([[8]]), loop)
    decoder.read([5])
    decoder.advance(4)
    assert (engine.calls, engine.through[3]) == ([6, 1, 1, 1], [0, 1, 2, 3, 4, 5])
    assert engine.joins == [6], "nothing is copied while it waits, however long that is"
    assert decoder.peek(np.array([[8]]), 2).tolist() == [[8, 2]]
    assert (engine.calls, engine.read, decoder.length) == ([6, 1, 1, 1], [0, 1, 2, 3, 4, 5], 6)


def test_misuse() -> None:
    engine = Recorder(max_positions=3)
    decoder = Decoder(engine)
    with pytest.raises(ValueError, match="read one first"):
        decoder.advance(1)
    with pytest.raises(ValueError, match="nothing was computed yet"):
        decoder.row_logits(1)
    with pytest.raises(ValueError, match="no stop after loop 9, but after 1, 2, 3, 4"):
        decoder.advance(9)
    decoder.read([1, 2])
    with pytest.raises(InputError, match="4 tokens, and the model takes at most 3"):
        decoder.read([3, 4])
    assert engine.read == [1, 2]
    decoder.advance(4)
    with pytest.raises(ValueError, match="no token waits in front of loop 4"):
        decoder.advance(4)
    decoder.close()
    assert decoder.provider == "recorder" and decoder.caveats() == ()
