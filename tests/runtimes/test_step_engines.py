"""Engines of step, decode and trimmed graphs: built for real where tensorrt-rtx is, run by a stand-in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest, Engine, Parity
from edgeformer.artifacts.progress import SILENT
from edgeformer.bundle import Bundle, seal
from edgeformer.inference.generate import GenerateOptions, generate
from edgeformer.inference.verify import record, verify
from edgeformer.run import Location
from edgeformer.runtimes.runtime import BuildJob, OpenOptions, Target
from edgeformer.runtimes.tensorrt import RTX_INT8, RUNTIME, TensorRTBuilder
from edgeformer.runtimes.tensorrt.session import GpuCache, TensorRTSession
from edgeformer.tasks.scoring import max_batch_rows
from tests.runtimes.stand_in_tensorrt import CARD, LONGEST, VERSION, StandInCuda, stand_in
from tests.test_old_format import OLD

needs_rtx = pytest.mark.skipif(
    util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx, of the extra rtx, is not installed"
)
TARGET = Target("tensorrt-rtx", "rtx4050", "8.9")
WRITING = ("onnx-fp32-step", "onnx-fp32-decode")


@pytest.fixture(scope="module")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model's bundle, into which engines are really built."""
    folder = Path(shutil.copytree(OLD / "language-v1" / "bundle", tmp_path_factory.mktemp("built") / "bundle"))
    (folder / "engines").mkdir()
    return folder


@pytest.fixture(scope="module")
def engines(bundle_folder: Path) -> dict[str, ArtifactManifest]:
    pytest.importorskip("tensorrt_rtx")
    opened = Bundle.open(bundle_folder)
    graphs = tuple(element for element in opened.built("step", "decode") if element.precision == "fp16")
    length, longest = opened.manifest.max_length, opened.manifest.max_positions
    assert longest is not None
    job = BuildJob(bundle_folder, graphs, "fp16", length, longest, None, SILENT, print, lambda: None)
    return {entry.role: entry for entry in TensorRTBuilder().build(TARGET, job)}


@needs_rtx
class TestBuilt:
    """Of a language model and a classifier that are tiny."""

    def test_a_decode_engine_takes_its_first_token_and_its_last(self, engines: dict[str, ArtifactManifest]) -> None:
        decode = engines["decode"]
        assert (decode.id, decode.status, decode.reason) == ("tensorrt-rtx-fp16-decode", "built", None)
        assert decode.engine is not None
        shapes = decode.engine.shapes
        smallest, best, largest = shapes["past_key_values.0.key"]
        assert smallest[2] == 0 and best[2] > 0 and largest[2] == LONGEST - 1
        assert shapes["input_ids"][0] == shapes["input_ids"][1] == (1, 1), "tuned for a token at a time"
        assert max_batch_rows(decode) == 4
        assert not any("self-consistent" in warning for warning in decode.engine.warnings)

    def test_a_step_engine_is_one_of_every_part(
        self, bundle_folder: Path, engines: dict[str, ArtifactManifest]
    ) -> None:
        step = engines["step"]
        assert (step.id, step.status, step.reason) == ("tensorrt-rtx-fp16-step", "built", None)
        assert step.parts.keys() == {"embed", "loop", "readout", "readout_exit"} and step.file == step.parts["loop"]
        sizes = {part: (bundle_folder / file).stat().st_size for part, file in step.parts.items()}
        assert step.size_bytes == sum(sizes.values()) and step.sha256 == sha256_of(bundle_folder / str(step.file))
        assert step.engine is not None and step.engine.weight_bytes is not None
        assert max_batch_rows(step) == 4, "the loop's number is no row"
        assert step.parity is not None and "verify --write" in str(step.parity.reason)

    def test_trimmed_graphs_have_engines_beside_the_whole_ones(self, tmp_path: Path) -> None:
        bundle = Path(shutil.copytree(OLD / "classifier-v1" / "bundle", tmp_path / "bundle"))
        (bundle / "engines").mkdir(exist_ok=True)
        opened = Bundle.open(bundle)
        graph, trimmed = opened.artifact("onnx-fp16"), opened.artifact("onnx-fp16-trim")
        job = BuildJob(bundle, (graph, trimmed), "fp16", 24, 64, None, SILENT, print, lambda: None)
        full_engine, small = TensorRTBuilder().build(TARGET, job)
        assert (small.id, small.trimmed, small.status) == ("tensorrt-rtx-fp16-trim", True, "built")
        assert small.vocabulary == trimmed.vocabulary and full_engine.file != small.file
        assert small.file == "engines/model_fp16_trim.rtx4050.engine" and (bundle / small.file).is_file()

    def test_int8_is_quantised_for_tensorrt(self, tmp_path: Path) -> None:
        pytest.importorskip("nncf")
        bundle = Path(shutil.copytree(OLD / "classifier-v1" / "bundle", tmp_path / "bundle"))
        (bundle / "engines").mkdir(exist_ok=True)
        opened = Bundle.open(bundle)
        golden = opened.golden().inputs(("input_ids", "attention_mask"))
        calls = [{name: array[row : row + 1] for name, array in golden.items()} for row in range(8)]
        graphs = (opened.artifact("onnx-fp32"), opened.artifact("onnx-int8"))
        notes: list[str] = []
        job = BuildJob(
            bundle, graphs, "fp16", 24, 64, None, SILENT, notes.append, lambda: None, calibration=lambda: calls
        )
        (engine,) = TensorRTBuilder().build(TARGET, job)
        assert (engine.id, engine.precision, engine.status, engine.reason) == (
            "tensorrt-rtx-int8", "int8", "built", None,
        )  # fmt: skip
        assert engine.parity is not None and engine.parity.tolerance_kind == "score"
        assert RTX_INT8 in notes, "an INT8 engine may gain nothing on an RTX card"
        assert engine.engine is not None and engine.engine.layers_by_precision["INT8"] > 0
        assert engine.engine.weight_elements["INT8"] > engine.engine.weight_elements["FP32"]
        assert sorted(path.suffix for path in (bundle / "engines").iterdir() if "int8" in path.name) == [".engine"]
        (without,) = TensorRTBuilder().build(TARGET, replace(job, calibration=_no_rows))
        assert without.status == "unavailable" and "no rows to calibrate with: lost" in str(without.reason)


def _no_rows() -> NoReturn:
    raise DataError("lost")


def with_engines(name: str, folder: Path) -> Path:
    """An old bundle with engines of the stand-in: of its full, step and decode graphs in FP32."""
    shutil.copytree(OLD / name / "bundle", folder)
    (folder / "engines").mkdir(exist_ok=True)
    manifest = Bundle.open(folder).manifest
    engines, files = [], dict(manifest.files)
    for graph in (
        element
        for element in manifest.artifacts
        if element.precision == "fp32" and element.is_graph and element.role != "exit"
    ):
        parts = {}
        for part, source in (graph.parts or {"loop": str(graph.file)}).items():
            parts[part] = f"engines/{Path(source).stem}.rtx4050.engine"
            (folder / parts[part]).write_text(str(folder / source), encoding="utf-8")
            files |= {parts[part]: sha256_of(folder / parts[part])} if graph.parts else {}
        engines.append(
            graph.model_copy(
                update={
                    "id": graph.id.replace("onnx", "tensorrt-rtx"),
                    "format": "tensorrt-rtx",
                    "file": parts["loop"],
                    "parts": parts if graph.parts else {},
                    "weights_file": None,
                    "sha256": sha256_of(folder / parts["loop"]),
                    "built_for": {"compute_capability": "8.9", "tensorrt-rtx": VERSION},
                    "parity": Parity(status="unavailable", tolerance=1e-4, tolerance_kind="absolute", reason="no GPU"),
                    "engine": Engine(
                        builder="stand-in",
                        seconds=0.0,
                        checked_by="size",
                        graph_bytes=1,
                        shapes={"input_ids": ((1, 1), (1, 32), (16, LONGEST)), "loop": ((1,), (1,), (1,))},
                    ),
                    "score": None,
                    "validation": None,
                }
            )
        )
    seal(folder, manifest.model_copy(update={"artifacts": (*manifest.artifacts, *engines), "files": files}))
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Iterator[Path]:
    """Of a language model."""
    with stand_in():
        yield with_engines("language-v1", tmp_path / "bundle")


def test_texts_leave_the_step_engines_of_a_classifier_early(tmp_path: Path) -> None:
    with stand_in():
        opened = Bundle.open(with_engines("classifier-v1", tmp_path / "bundle"))
        inputs = opened.golden().inputs(("input_ids", "attention_mask"))
        call = {name: array[:16] for name, array in inputs.items()}
        for options in (OpenOptions(), OpenOptions(early={1: 0.7}), OpenOptions(exits=(1, 2))):
            answers = []
            for name in ("onnx-fp32-step", "tensorrt-rtx-fp32-step"):
                with opened.session(opened.artifact(name), options) as session:
                    answers.append(session.run(call))
            assert answers[0].keys() == answers[1].keys()
            assert all(np.allclose(answers[0][name], answers[1][name], atol=1e-6) for name in answers[0])
        with pytest.raises(InputError, match="always runs all of its loops; rows can leave a step artifact early"):
            opened.session(opened.artifact("tensorrt-rtx-fp32"), OpenOptions(early={1: 0.7}))


@pytest.mark.parametrize("name", WRITING)
def test_a_text_is_written_as_the_graphs_write_it(bundle: Path, name: str) -> None:
    opened = Bundle.open(bundle)
    loops, ids = opened.loops, np.random.default_rng(0).integers(1, 50, 20).tolist()
    answers = []
    for artifact in (name, name.replace("onnx", "tensorrt-rtx")):
        decoder = opened.decoder(opened.artifact(artifact), (loops,))
        actual = []
        for piece in (ids[:7], *([element] for element in ids[7:])):
            decoder.read(piece)
            decoder.advance(loops)
            actual.append(decoder.logits(loops))
            peeked = decoder.peek(np.array([[3]]), loops)  # keeps nothing
            assert peeked.shape == (1, actual[-1].shape[-1])
        answers.append(np.stack(actual))
        assert decoder.provider == ("CPUExecutionProvider" if artifact == name else "tensorrt-rtx")
        decoder.close()
    assert np.array_equal(answers[0], answers[1])


def test_tokens_that_leave_early_are_caught_up_with_on_the_card(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    step, exits = opened.artifact("tensorrt-rtx-fp32-step"), opened.manifest.exits
    early, late = exits[0], exits[-1]
    answers = []
    for artifact in (step, opened.artifact("onnx-fp32-step")):
        decoder = opened.decoder(artifact, exits)
        actual = []
        for number, token in enumerate((5, 9, 2, 11, 4)):
            decoder.read([token])
            decoder.advance(early)
            actual.append(decoder.logits(early))
            if number % 2:
                decoder.advance(late)
                actual.append(decoder.logits(late))
        decoder.close()
        answers.append(np.stack(actual))
    assert np.array_equal(answers[0], answers[1])


def test_a_token_costs_no_copy_of_what_is_kept(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    artifact = opened.artifact("tensorrt-rtx-fp32-decode")
    decoder = opened.decoder(artifact, (opened.loops,))
    decoder.read(list(range(1, 30)))
    decoder.advance(opened.loops)
    costs = []
    for token in range(1, 20):
        previous_uploads = StandInCuda.uploaded
        decoder.read([token])
        decoder.advance(opened.loops)
        costs.append(StandInCuda.uploaded - previous_uploads)
    assert set(costs) == {2 * 8}, "the token and its place"
    decoder.close()


def test_memory_is_used_again_and_given_back(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    files = opened.files(opened.artifact("tensorrt-rtx-fp32-step"))
    graph = TensorRTSession(files.file, files.artifact, LONGEST)
    state = np.ones((1, 1, 16), np.float32)
    kept = {name: graph.empty(name, 1) for name in ("past_key", "past_value", "past_conv")}
    assert kept["past_key"].shape == (1, 2, 0, 8) and kept["past_conv"].shape == (1, 10, 16)
    sizes = []
    for _ in range(20):
        actual = graph.run({"state": state, "loop": np.array([0]), **kept})
        assert isinstance(actual["present_key"], GpuCache) and isinstance(actual["next_state"], np.ndarray)
        kept = {name: actual[name.replace("past", "present")] for name in kept}
        sizes.append(graph.memory_by_name()["kept of earlier tokens"])
    assert kept["past_key"].shape == (1, 2, 20, 8)
    del actual
    assert sizes[-1] <= 4 * sum(int(np.prod(element.shape)) * 4 for element in kept.values()) + 6 * 1024
    assert len(set(sizes)) < 6, "blocks grow by doubling"
    too_long = {**kept, "past_key": np.zeros((1, 2, LONGEST, 8), np.float32)}
    with pytest.raises(InputError, match=r"past_key.*0 to 63"):
        graph.run({"state": state, "loop": np.array([0]), **too_long})
    graph.close()  # the stand-in looks that all memory is freed
    del kept


def test_generate_writes_with_an_engine(bundle: Path) -> None:
    location = Location(None, bundle)
    options = GenerateOptions(max_tokens=8)
    texts = {}
    for name in ("onnx-fp32-decode", "tensorrt-rtx-fp32-decode", "tensorrt-rtx-fp32-step"):
        actual = generate(location, "the food was", replace(options, artifact=name))
        texts[name] = actual.tokens
        assert actual.artifact == name
    assert len(set(texts.values())) == 1
    with pytest.raises(InputError, match="tensorrt-rtx-fp32-step, tensorrt-rtx-fp32-decode"):
        generate(location, "the", replace(options, artifact="tensorrt-rtx-fp32"))


def test_their_target_compares_them_and_says_which_card_it_is(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    actual = verify(opened)
    checks = {check.artifact: check for check in actual.artifacts}
    engines = [name for name in checks if name.startswith("tensorrt")]
    assert {name: checks[name].status for name in engines} == dict.fromkeys(engines, "verified"), checks
    recorded = record(opened, actual).recorded
    assert recorded is not None
    records = {element.artifact: element for element in recorded.records}
    assert records.keys() == set(engines)
    full = records["tensorrt-rtx-fp32"]
    assert (full.device, full.compute_capability) == (CARD.name, "8.9")
    assert full.score is not None and records["tensorrt-rtx-fp32-step"].score is None
    # Another file in the place of a part: what was recorded of the step engines says nothing any more.
    files = {**opened.manifest.files, "engines/step_embed.rtx4050.engine": "0" * 64}
    changed = seal(bundle, opened.manifest.model_copy(update={"files": files}))
    stale = {element.artifact: element.why_refused(changed) for element in Bundle.open(bundle).records.records}
    assert "stale" in str(stale["tensorrt-rtx-fp32-step"]) and stale["tensorrt-rtx-fp32-decode"] is None


def test_an_engine_of_another_card_does_not_write(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    artifact = opened.artifact("tensorrt-rtx-fp32-decode").model_copy(
        update={"built_for": {"compute_capability": "12.0", "tensorrt-rtx": VERSION}}
    )
    with pytest.raises(Exception, match=r"built for compute capability 12\.0, but this GPU is NVIDIA GeForce RTX 4050"):
        RUNTIME.open_decoder(opened.files(artifact), None, OpenOptions())
