"""Step bundles as one session: of a language model, and of a classifier whose rows may leave early."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.bundle import Bundle
from edgeformer.export.audit import audit_sharing
from edgeformer.export.graphs import write_graph
from edgeformer.models.adapter import count_parameters
from edgeformer.models.encoder import EncoderConfig
from edgeformer.models.encoder.adapter import encoder_graphs
from edgeformer.models.encoder.model import EncoderClassifier
from edgeformer.models.layers import convert_weights_to_fp16
from edgeformer.models.weights import load_model
from edgeformer.runtimes import OpenOptions
from edgeformer.runtimes.decoder import StepSession
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks.metric import top_probability
from tests.export.language_run import LOOPS, POSITIONS, WORDS, exported_language_run

ITERATIONS = 3


def write_steps(model: EncoderClassifier, folder: Path) -> dict[str, Path]:
    graphs = encoder_graphs(model, steps=True).steps
    parts = {part: folder / f"{part}.onnx" for part in graphs}
    for part, graph in graphs.items():
        write_graph(graph, parts[part])
    return parts


@pytest.fixture(scope="module")
def encoder() -> EncoderClassifier:
    torch.manual_seed(0)
    config = EncoderConfig(
        kind="encoder", vocab_size=40, hidden_size=16, layers=1, iterations=ITERATIONS, heads=2, ffn_size=24,
        residual_scale=0.5, dropout=0.1, max_positions=32,
    )  # fmt: skip
    model = EncoderClassifier(classes=3, **config.model_dump(exclude={"kind", "attention"})).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # no two alike, or they would rightly be stored once
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(scope="module")
def parts(encoder: EncoderClassifier, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_steps(encoder, tmp_path_factory.mktemp("steps"))


def texts(rows: int = 16, length: int = 9) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, length + 1, size=(rows, 1))
    mask = (np.arange(length) < lengths).astype(np.int64)
    return {"input_ids": rng.integers(1, 40, size=(rows, length)) * mask, "attention_mask": mask}


def exit_logits_of(model: EncoderClassifier, inputs: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
    ids, mask = (torch.from_numpy(inputs[name]) for name in ("input_ids", "attention_mask"))
    with torch.inference_mode():
        h, actual = model.embed(ids), {}
        for loop in range(1, ITERATIONS + 1):
            h = model.iterate(h, mask)
            actual[loop] = model.readout(h).numpy()
    return actual


class TestClassifier:
    @pytest.mark.parametrize(("rows", "length"), [(16, 9), (1, 1), (1, 32), (3, 1)])
    def test_is_the_model(self, encoder: EncoderClassifier, parts: dict[str, Path], rows: int, length: int) -> None:
        inputs = texts(rows, length)
        with StepSession(parts, ITERATIONS) as session, torch.inference_mode():
            expected = encoder(*map(torch.from_numpy, inputs.values())).numpy()
            assert np.abs(session.run(inputs)["logits"] - expected).max() < 1e-5
            assert session.provider == "CPUExecutionProvider"

    def test_a_fixed_exit(self, encoder: EncoderClassifier, parts: dict[str, Path]) -> None:
        inputs = texts()
        with StepSession(parts, ITERATIONS, exits=(1,)) as session:
            assert np.abs(session.run(inputs)["logits_exit1"] - exit_logits_of(encoder, inputs)[1]).max() < 1e-5

    @pytest.mark.parametrize("thresholds", [{1: 0.9, 2: 0.7}, {2: 0.5}, {1: 0.0}, {1: 1.0, 2: 1.0}, {}])
    def test_rows_leave_when_they_are_sure(
        self, encoder: EncoderClassifier, parts: dict[str, Path], thresholds: dict[int, float]
    ) -> None:
        inputs = texts()
        exits = exit_logits_of(encoder, inputs)
        expected = [
            next(
                (
                    exit_loop
                    for exit_loop, least in thresholds.items()
                    if top_probability(exits[exit_loop][row, None])[0] >= least
                ),
                3,
            )
            for row in range(16)
        ]
        with StepSession(parts, ITERATIONS, early=thresholds) as session:
            actual = session.run(inputs)
        assert actual["loops"].dtype == np.int64 and actual["loops"].tolist() == expected
        for row, loop in enumerate(expected):
            assert np.abs(actual["logits"][row] - exits[loop][row]).max() < 1e-5
        if thresholds == {1: 0.9, 2: 0.7}:
            assert set(expected) == {1, 2, 3}  # else this test would show little

    def test_every_weight_is_stored_once(self, encoder: EncoderClassifier, parts: dict[str, Path]) -> None:
        stored = [audit_sharing(onnx.load(str(path)), 0).stored_parameters for path in parts.values()]
        assert sum(stored) == count_parameters(encoder)

    @pytest.mark.slow
    def test_half_precision(self, encoder: EncoderClassifier, tmp_path: Path) -> None:
        """An iteration of FP16 states, with padding; the other parts are one product each."""
        mask = texts()["attention_mask"]
        state = torch.randn(16, 9, 16, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            expected = encoder.iterate(state, torch.from_numpy(mask)).numpy()
        half = convert_weights_to_fp16(copy.deepcopy(encoder))
        assert isinstance(half, EncoderClassifier)
        write_graph(encoder_graphs(half, steps=True).steps["loop"], tmp_path / "loop.onnx")
        with OnnxSession(tmp_path / "loop.onnx", threads=1) as session:
            actual = session.run({"state": state.half().numpy(), "attention_mask": mask})["next_state"]
        assert actual.dtype == np.float16
        assert 0 < np.abs(actual - expected).max() < 1e-2 * expected.std()

    def test_refusals(self, parts: dict[str, Path]) -> None:
        with pytest.raises(InputError, match="no exit after loop 4: the model has 3 loops"):
            StepSession(parts, ITERATIONS, exits=(4,))
        with pytest.raises(ArtifactError, match="without a part 'readout'"):
            StepSession({name: path for name, path in parts.items() if name != "readout"}, ITERATIONS)
        session = StepSession(parts, ITERATIONS)
        with pytest.raises(InputError, match="'attention_mask' is missing"):
            session.run({"input_ids": texts()["input_ids"]})
        with pytest.raises(InputError, match="must be int64"):
            session.run({"input_ids": np.zeros((1, 0), np.int64), "attention_mask": np.zeros((1, 0), np.int64)})
        session.close()
        with pytest.raises(EdgeformerError, match="closed"):
            session.run(texts())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_language_run(tmp_path_factory) / "bundle"


class TestLanguageModel:
    @pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp16", 1e-2)])
    @pytest.mark.parametrize("shape", [(3, 17), (1, 1), (1, POSITIONS)])
    def test_is_the_model(self, bundle: Path, precision: str, tolerance: float, shape: tuple[int, int]) -> None:
        ids = np.random.default_rng(0).integers(0, WORDS, size=shape)
        with torch.inference_mode():
            expected = load_model(bundle.parent).logits(torch.from_numpy(ids)).numpy()
        for role in ("step", "decode"):
            artifact = next(a for a in Bundle.open(bundle).artifacts if a.id == f"onnx-{precision}-{role}")
            with Bundle.open(bundle).session(artifact, OpenOptions(threads=1)) as session:
                actual = session.run({"input_ids": ids})["logits"]
            assert actual.shape == expected.shape and actual.dtype == np.float32
            assert np.abs(actual - expected).max() < tolerance * max(1.0, expected.std())

    def test_an_early_exit(self, bundle: Path) -> None:
        artifact = next(a for a in Bundle.open(bundle).artifacts if a.id == "onnx-fp32-step")
        paths = {part: bundle / file for part, file in artifact.parts.items()}
        ids = np.arange(24, dtype=np.int64).reshape(2, 12)
        with torch.inference_mode():
            expected = load_model(bundle.parent).logits(torch.from_numpy(ids), 1).numpy()
        with StepSession(paths, LOOPS, exits=(1,)) as session:
            assert np.abs(session.run({"input_ids": ids})["logits_exit1"] - expected).max() < 1e-5
        with pytest.raises(InputError, match="rows of a language model cannot leave early"):
            StepSession(paths, LOOPS, early={1: 0.5})

    def test_every_exit_in_one_call(self, bundle: Path) -> None:
        ids = np.arange(24, dtype=np.int64).reshape(2, 12)
        opened = Bundle.open(bundle)
        artifact = opened.artifact("onnx-fp32-step")
        with opened.session(artifact, OpenOptions(exits=(1, LOOPS))) as session:
            actual = session.run({"input_ids": ids})
        assert list(actual) == ["logits_exit1", f"logits_exit{LOOPS}"]
        for loop in (1, LOOPS):
            with torch.inference_mode():
                expected = load_model(bundle.parent).logits(torch.from_numpy(ids), loop).numpy()
            assert np.abs(actual[f"logits_exit{loop}"] - expected).max() < 1e-5
        with pytest.raises(InputError, match="after its last loop only"):
            opened.session(opened.artifact("onnx-fp32"), OpenOptions(exits=(1, LOOPS)))

    @pytest.mark.parametrize("role", ["step", "decode"])
    def test_refuses_what_it_cannot_read(self, bundle: Path, role: str) -> None:
        artifact = next(a for a in Bundle.open(bundle).artifacts if a.id == f"onnx-fp32-{role}")
        with Bundle.open(bundle).session(artifact, OpenOptions(threads=1)) as session:
            with pytest.raises(InputError, match=f"at most {POSITIONS}"):
                session.run({"input_ids": np.zeros((1, POSITIONS + 1), np.int64)})
            with pytest.raises(InputError):
                session.run({"input_ids": np.zeros((1, 0), np.int64)})
            with pytest.raises(InputError, match="input_ids"):
                session.run({})

    def test_changed_parts_and_weights_are_noticed(self, bundle: Path, tmp_path: Path) -> None:
        manifest = Bundle.open(bundle).manifest
        artifact = next(a for a in manifest.artifacts if a.id == "onnx-fp32-step")
        for number, name in enumerate([*artifact.parts.values(), artifact.weights_file]):
            assert name is not None
            other = tmp_path / str(number)
            shutil.copytree(bundle, other)
            Bundle.open(other).check(artifact)
            content = bytearray((other / name).read_bytes())
            content[len(content) // 2] ^= 1
            (other / name).write_bytes(bytes(content))
            with pytest.raises(ArtifactError, match=f"{Path(name).name}: changed since it was exported"):
                Bundle.open(other).session(artifact)
        unlisted = {name: sha for name, sha in manifest.files.items() if name != artifact.parts["embed"]}
        with pytest.raises(ArtifactError, match=r"onnx-fp32-step needs onnx/step_embed\.onnx, which is not listed"):
            Bundle(bundle, manifest.model_copy(update={"files": unlisted})).check(artifact)


def test_only_what_is_kept_may_be_empty(bundle: Path) -> None:
    with OnnxSession(bundle / "onnx" / "step_loop.onnx", threads=1) as loop:
        assert loop.empty("past_key", 2).shape[2] == 0 and loop.empty("past_conv", 2).any() is np.False_
        start = {name: loop.empty(name, 1) for name in ("past_key", "past_value", "past_conv")}
        state = np.zeros((1, 1, start["past_conv"].shape[2]), np.float32)
        assert loop.run({"state": state, "loop": np.array([0]), **start})["present_key"].shape[2] == 1
        with pytest.raises(InputError, match="'state' must be float32"):
            loop.run({"state": state[:, :0], "loop": np.array([0]), **start})
