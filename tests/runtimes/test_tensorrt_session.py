"""Engines run by a stand-in for TensorRT and the card: answers, caches, memory, limits of a call, compiled kernels."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle, seal
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.predict import predict
from edgeformer.inference.verify import record, verify
from edgeformer.run import Location
from edgeformer.runtimes import OpenOptions
from edgeformer.runtimes.session import DeviceCache
from edgeformer.runtimes.tensorrt.session import TensorRTSession
from edgeformer.system import cuda_driver
from edgeformer.system.cuda_driver import Device
from edgeformer.system.leftovers import cache_folder
from tests.runtimes import stand_in_tensorrt
from tests.runtimes.stand_in_tensorrt import CARD, LONGEST, StandInEngine, StandInRuntimeCache, stand_in, with_engines
from tests.runtimes.tiny_bundle import VOCABULARY, classifier_graph, inputs

TEXTS = [f"the {food} was {how} indeed" for food in ("pizza", "soup", "tea", "bread", "fish") for how in "abcd"]
"""As long as each other, so that they share a call; an engine takes 16."""
MEASURING, ANSWERING = OpenOptions(repeated_shapes=True), OpenOptions()
FULL = "tensorrt-rtx-fp32"


@pytest.fixture
def bundle(tmp_path: Path) -> Iterator[Bundle]:
    """Of a language model."""
    with stand_in():
        yield Bundle.open(with_engines("language-v1", tmp_path / "bundle"))


@pytest.fixture
def classifier(tmp_path: Path) -> Iterator[Bundle]:
    with stand_in():
        yield Bundle.open(with_engines("classifier-v1", tmp_path / "bundle"))


@pytest.fixture(params=["names of the graph", "names of torch-tensorrt"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TensorRTSession]:
    """An engine of the tiny classifier, which TensorRT or torch-tensorrt have built."""
    graph = classifier_graph()
    graph.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "sequence"
    graph.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "sequence"
    graph.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 2
    if "torch" in request.param:
        for node in graph.graph.node:
            node.output[:] = ["output0" if name == "logits" else name for name in node.output]
        graph.graph.output[0].name = "output0"
    onnx.save(graph, tmp_path / "model.onnx")
    (tmp_path / "model.engine").write_text(str(tmp_path / "model.onnx"), encoding="utf-8")
    types = {"input_ids": "int64[batch, sequence]", "attention_mask": "int64[batch, sequence]"}
    artifact = ArtifactManifest(
        id="engine", file="model.engine", format="tensorrt", precision="fp32", status="built",
        inputs=types, outputs={"logits": "float32[batch, 2]"},
    )  # fmt: skip
    with stand_in():
        yield TensorRTSession(tmp_path / "model.engine", artifact)


def text(*rows: list[int]) -> dict[str, np.ndarray]:
    ids = np.array(rows, dtype=np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def test_inputs_go_in_and_outputs_and_the_cards_own_time_come_back(session: TensorRTSession) -> None:
    both = session.run(text([1, 2, 3], [4, 5, 6]))["logits"]
    assert both.shape == (2, 2) and np.allclose(session.run(text([4, 5, 6]))["logits"], both[1:], atol=1e-6)
    assert session.memory_by_name() == {"activations (TensorRT)": 4096, "inputs and outputs": 2 * 2 * 3 * 8 + 2 * 2 * 4}
    with pytest.raises(InputError, match=r"'input_ids' must be int64\[1 to 16, 1 to 64\]"):
        session.run(text([1] * 65))
    assert session.device_ms(text([1, 2, 3])) == pytest.approx(1.5), "without copies"
    with pytest.raises(EdgeformerError, match="the engine failed"):
        session.device_ms(text([VOCABULARY]))
    session.close()
    with pytest.raises(EdgeformerError, match="closed"):
        session.device_ms(text([1]))


def test_rows_leave_the_step_engines_of_a_classifier_early(classifier: Bundle) -> None:
    inputs = classifier.golden().inputs(("input_ids", "attention_mask"))
    call = {name: array[:16] for name, array in inputs.items()}
    for options in (OpenOptions(), OpenOptions(early={1: 0.7}), OpenOptions(exits=(1, 2))):
        answers = []
        for name in ("onnx-fp32-step", "tensorrt-rtx-fp32-step"):
            with classifier.session(classifier.artifact(name), options) as session:
                answers.append(session.run(call))
        assert answers[0].keys() == answers[1].keys()
        assert all(np.allclose(answers[0][name], answers[1][name], atol=1e-6) for name in answers[0])
    with pytest.raises(InputError, match="always runs all loops; early exit needs a step artifact"):
        classifier.session(classifier.artifact("tensorrt-rtx-fp32"), OpenOptions(early={1: 0.7}))


@pytest.mark.parametrize("kind", ["step", "decode"])
def test_logits_are_those_of_the_graphs(bundle: Bundle, kind: str) -> None:
    cuda, loops = stand_in_tensorrt.StandInCuda, bundle.loops
    ids = np.random.default_rng(0).integers(1, 50, 20).tolist()
    answers = []
    for format_, provider in (("onnx", "CPUExecutionProvider"), ("tensorrt-rtx", "tensorrt-rtx")):
        decoder = bundle.decoder(bundle.artifact(f"{format_}-fp32-{kind}"), (loops,))
        logits = []
        for piece in (ids[:7], *([token] for token in ids[7:])):
            uploaded = cuda.uploaded
            decoder.read(piece)
            decoder.advance(loops)
            if (format_, kind, len(piece)) == ("tensorrt-rtx", "decode", 1):
                assert cuda.uploaded - uploaded == 2 * 8, "the token and its position, and no cache"
            logits.append(decoder.row_logits(loops)[0])
            decoder.peek(np.array([[3]]), loops)  # keeps nothing
        answers.append(np.stack(logits))
        assert decoder.provider == provider
        decoder.close()
    assert np.array_equal(*answers)


@pytest.mark.parametrize("tokens_per_call", [LONGEST, 5])
def test_tokens_that_left_early_are_caught_up_with(bundle, tokens_per_call, monkeypatch):
    """In one call, or in several if they are more than a call takes."""
    monkeypatch.setattr(stand_in_tensorrt, "MAX_TOKENS_PER_CALL", tokens_per_call)
    early, *_, late = bundle.manifest.exits
    answers = []
    for artifact in ("onnx-fp32-step", "tensorrt-rtx-fp32-step"):
        decoder = bundle.decoder(bundle.artifact(artifact), (early, late))
        logits = []
        for token in range(1, 13):
            decoder.read([token])
            decoder.advance(early)
            logits.append(decoder.row_logits(early)[0])
        decoder.advance(late)
        answers.append([*logits, decoder.row_logits(late)[0]])
        decoder.close()
    assert np.allclose(*answers, atol=1e-6)


def test_memory_is_used_again_and_given_back(bundle: Bundle) -> None:
    files = bundle.files(bundle.artifact("tensorrt-rtx-fp32-step"))
    graph = TensorRTSession(files.file, files.artifact, LONGEST)
    state = np.ones((1, 1, 16), np.float32)
    caches = {name: graph.empty(name, 1) for name in ("past_key", "past_value", "past_conv")}
    assert caches["past_key"].shape == (1, 2, 0, 8) and caches["past_conv"].shape == (1, 10, 16)
    sizes = []
    for _ in range(20):
        outputs = graph.run({"state": state, "loop": np.array([0]), **caches})
        assert isinstance(outputs["present_key"], DeviceCache) and isinstance(outputs["next_state"], np.ndarray)
        caches = {name: outputs[name.replace("past", "present")] for name in caches}
        sizes.append(graph.memory_by_name()["kept of earlier tokens"])
    assert caches["past_key"].shape == (1, 2, 20, 8)
    del outputs
    assert sizes[-1] <= 4 * sum(int(np.prod(cache.shape)) * 4 for cache in caches.values()) + 6 * 1024
    assert len(set(sizes)) < 6, "blocks grow by doubling"
    too_long = {**caches, "past_key": np.zeros((1, 2, LONGEST, 8), np.float32)}
    with pytest.raises(InputError, match=r"past_key.*0 to 63"):
        graph.run({"state": state, "loop": np.array([0]), **too_long})
    graph.close()  # the stand-in checks that all memory is freed
    del caches


@pytest.mark.parametrize("kind", ["", "-step"])
def test_more_rows_than_an_engine_takes_are_answered_and_scored(classifier: Bundle, kind: str, tmp_path: Path) -> None:
    location = Location(None, classifier.folder)
    names = (f"onnx-fp32{kind}", f"tensorrt-rtx-fp32{kind}")
    expected, actual = ([answer.as_dict()["label"] for answer in predict(location, TEXTS, name)[1]] for name in names)
    assert actual == expected
    file = tmp_path / "rows.tsv"
    label = classifier.manifest.labels[0]
    file.write_text("\n".join(["label\ttext", *(f"{label}\t{text}" for text in TEXTS)]), encoding="utf-8")
    scored = []
    for name, batch in zip(names, (20, 16), strict=True):
        rows = evaluate(location, EvaluateOptions(artifact=name, data=file)).rows
        scored.append([(row.exit, row.n, row.accuracy, pytest.approx(row.loss, abs=1e-6)) for row in rows])
        assert rows[0].batch == batch, "rows of one call"
    assert scored[0] == scored[1]


@pytest.mark.slow
def test_verify_compares_engines_on_their_card_and_records_it(bundle: Bundle) -> None:
    result = verify(bundle)
    checks = {check.artifact: check for check in result.artifacts}
    engines = [name for name in checks if name.startswith("tensorrt")]
    assert {name: checks[name].status for name in engines} == dict.fromkeys(engines, "verified"), checks
    recorded = record(bundle, result).recorded
    assert recorded is not None
    records = {entry.artifact: entry for entry in recorded.records}
    assert records.keys() == set(engines)
    full = records["tensorrt-rtx-fp32"]
    assert (full.device, full.compute_capability) == (CARD.name, "8.9")
    assert full.score is not None and records["tensorrt-rtx-fp32-step"].score is None
    # Another file in the place of a part: the record of the step engines is stale.
    files = {**bundle.manifest.files, "engines/step_embed.rtx4050.engine": "0" * 64}
    changed = seal(bundle.folder, bundle.manifest.model_copy(update={"files": files}))
    stale = {entry.artifact: entry.why_refused(changed) for entry in Bundle.open(bundle.folder).records.records}
    assert "is ignored, because" in str(stale["tensorrt-rtx-fp32-step"]) and stale["tensorrt-rtx-fp32-decode"] is None


def run(classifier: Bundle, options: OpenOptions = MEASURING, calls: int = 1) -> tuple[dict[str, Any], StandInEngine]:
    """Open the full engine, call it, close it; return its settings and the stand-in that computed."""
    with classifier.session(classifier.artifact(FULL), options) as session:
        for _ in range(calls):
            session.run(inputs(2, 8))
        return session.settings(), StandInEngine.opened[-1]


def cache_files() -> list[Path]:
    return sorted(cache_folder().rglob("*.cache"))


def test_the_stand_in_has_nothing_that_tensorrt_rtx_lacks() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    settings = vars(stand_in_tensorrt.StandInRuntimeConfig()).keys() - {"cache"}
    for name in settings | {"create_runtime_cache", "set_runtime_cache"}:
        assert hasattr(trt.IRuntimeConfig, name), name
    assert hasattr(trt.ICudaEngine, "create_runtime_config")
    assert hasattr(trt.IRuntimeCache, "serialize") and hasattr(trt.IRuntimeCache, "deserialize")
    for strategy in ("DynamicShapesKernelSpecializationStrategy", "CudaGraphStrategy"):
        ours = getattr(sys.modules[StandInEngine.__module__], strategy)
        assert set(ours.__members__) == set(getattr(trt, strategy).__members__)


def test_measuring_compiles_before_the_first_answer_and_captures(classifier: Bundle) -> None:
    settings, engine = run(classifier, MEASURING, calls=5)
    assert settings == {"kernel_specialization": "eager", "cuda_graphs": "whole_graph_capture", "runtime_cache": "new"}
    strategy = stand_in_tensorrt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    assert engine.config is not None and engine.config.cuda_graph_strategy is strategy
    assert len(engine.calls) == 5 and len(set(engine.calls)) == 1, "shapes and addresses repeat: one captured graph"
    settings, _ = run(classifier, ANSWERING)
    assert (settings["kernel_specialization"], settings["cuda_graphs"]) == ("lazy", "disabled")


def test_an_engine_with_caches_neither_specialises_nor_captures(bundle: Bundle) -> None:
    for options in (MEASURING, ANSWERING):
        decoder = bundle.decoder(bundle.artifact("tensorrt-rtx-fp32-decode"), (bundle.loops,), options)
        for token in range(1, 9):
            decoder.read([token])
            decoder.advance(bundle.loops)
        settings, engine = decoder.settings(), StandInEngine.opened[-1]
        decoder.close()
        assert (settings["kernel_specialization"], settings["cuda_graphs"]) == ("none", "disabled")
        assert len(set(engine.calls)) == 8, "every token has a shape of its own"
    assert engine.compiled == [], "the second process found the kernels of the first"


def test_kernels_are_compiled_once_per_engine_and_gpu(classifier: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = run(classifier)
    settings, second = run(classifier)
    assert (len(first.compiled), second.compiled, settings["runtime_cache"]) == (1, [], "loaded")
    (file,) = cache_files()
    engine = sha256_of(classifier.folder / str(classifier.artifact(FULL).file))
    assert file.name == f"{engine}-nvidia-geforce-rtx-4050-laptop-gpu-8.9-1.7.1.cache"
    monkeypatch.setattr(cuda_driver, "devices", lambda: (Device(0, "NVIDIA GeForce RTX 4060 Laptop GPU", "8.9"),))
    settings, third = run(classifier)
    assert (len(third.compiled), settings["runtime_cache"]) == (1, "new")
    assert len(cache_files()) == 2


def test_a_cache_that_cannot_be_used_is_written_again(classifier, tmp_path, monkeypatch):
    """A damaged file does not reach TensorRT; that of another driver is refused by it."""
    run(classifier)
    (file,) = cache_files()
    content, unusable = file.read_bytes(), "new, because the cache file was damaged, or of another driver or version"
    for damaged in (content[:-1], content[:20], content[:40] + b"?" + content[41:]):
        file.write_bytes(damaged)
        with monkeypatch.context() as patch:
            patch.setattr(StandInRuntimeCache, "deserialize", lambda *_: pytest.fail("damaged bytes reached TensorRT"))
            settings, engine = run(classifier)
        assert settings["runtime_cache"] == unusable
        assert len(engine.compiled) == 1 and file.read_bytes() == content
    monkeypatch.setattr(StandInRuntimeCache, "environment", b"driver 600;")
    assert run(classifier)[0]["runtime_cache"] == unusable
    assert run(classifier)[0]["runtime_cache"] == "loaded"
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("EDGEFORMER_CACHE", str(tmp_path / "file"))  # no folder: it costs no answer
    settings, engine = run(classifier)
    assert settings["runtime_cache"].startswith("new") and len(engine.calls) == 1
