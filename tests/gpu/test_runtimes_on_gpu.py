"""Runtimes that use a card: ONNX Runtime's CUDA provider and TensorRT, where they are installed."""

import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime
import pytest

from benchmarks.gpu.timing import TINY
from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.documents import load_profile, shipped_names
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.benchmark.choice import ChoiceOptions
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.bundle import Bundle
from edgeformer.estimate.calibrate import CalibrationOptions, improve
from edgeformer.inference.verify import verify
from edgeformer.measurement.target import find_target
from edgeformer.run import Location
from edgeformer.runtimes import default_provider, on_gpu
from edgeformer.runtimes.onnxruntime.providers import CUDA
from edgeformer.runtimes.runtime import OpenOptions
from edgeformer.runtimes.tensorrt.state import why_engine_cannot_run
from tests.conftest import OLD_FORMAT
from tests.runtimes.test_step_session import write_tokens

pytestmark = pytest.mark.gpu


@pytest.fixture
def bundle(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of a trained classifier's FP32 and FP16 graphs."""
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run" / "bundle"


@pytest.mark.parametrize(("name", "tolerance"), [("onnx-fp32", 1e-3), ("onnx-fp16", 2e-2)])
def test_the_cuda_provider_computes_what_the_cpu_computes(bundle: Path, name: str, tolerance: float) -> None:
    if CUDA not in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime was built without CUDA")
    opened = Bundle.open(bundle)
    artifact, answers = opened.artifact(name), []
    ids = np.arange(1, 33, dtype=np.int64).reshape(2, 16)
    for provider in (CUDA, "CPUExecutionProvider"):
        session = opened.session(artifact, OpenOptions(provider=provider))
        assert session.provider == provider
        answers.append(session.run({"input_ids": ids, "attention_mask": np.ones_like(ids)})["logits"])
        session.close()
    assert np.allclose(*answers, atol=tolerance)


def test_caches_that_stay_on_the_card_write_what_the_cpu_writes() -> None:
    if CUDA not in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime was built without CUDA")
    old = Bundle.open(OLD_FORMAT / "language-v1" / "bundle")
    for name in ("onnx-fp32-decode", "onnx-fp32-step"):
        texts = []
        for provider in (CUDA, "CPUExecutionProvider"):
            decoder = old.decoder(old.artifact(name), (old.loops,), OpenOptions(provider))
            texts.append(write_tokens(decoder, 16))
            decoder.close()
        assert texts[0] == texts[1], name


def profile_of_card() -> DeviceProfile:
    """Return a shipped profile of this card. Skips if there is none."""
    for name in shipped_names("profiles"):
        profile = load_profile(name)
        if profile.kind == "cuda" and find_target(profile).present:
            return profile
    pytest.skip("no shipped profile is of this card")


def built(bundle: Path, *, int8: bool = False, exits: tuple[int, ...] | Literal["all"] = ()) -> list[ArtifactManifest]:
    """Engines for this very card, added to the bundle. Skips where nothing here can build or run one."""
    from edgeformer.export.export import export
    from edgeformer.export.variants import ExportOptions

    target = profile_of_card().name
    options = ExportOptions(fp16=True, int8=int8, exits=exits, build=("tensorrt",), target=target, keep_going=True)
    export(bundle.parent, options)
    engines = [engine for engine in Bundle.open(bundle).artifacts if not engine.is_graph]
    if all(engine.status == "unavailable" for engine in engines):
        pytest.skip(str(engines[0].reason if engines else "no engine was asked for"))
    assert [(engine.id, engine.reason) for engine in engines if engine.status == "rejected"] == []
    if (reason := why_engine_cannot_run(engines[0])) is not None:
        pytest.skip(reason)
    return [engine for engine in engines if engine.status == "built"]


def test_an_engine_is_compared_scored_measured_and_picked(bundle: Path) -> None:
    (engine,) = built(bundle)
    graph = Bundle.open(bundle).artifact("onnx-fp16")
    assert engine.parity is not None and engine.parity.status == "measured" and engine.parity.provider == engine.format
    assert engine.validation is not None and graph.validation is not None
    drop = Bundle.open(bundle).task.lost(engine.validation, graph.validation, "fp16", trimmed=False)
    assert drop is None, drop
    check = next(check for check in verify(Bundle.open(bundle)).artifacts if check.artifact == engine.id)
    assert check.status == "verified", check.reason
    options = ProfileOptions(batches=(1,), seqs=(16,), artifacts=(engine.id,), choose=ChoiceOptions())
    report = profile_bundle(Location(None, bundle), profile_of_card(), options)
    steady = [row for row in report.rows if row.phase == "steady" and row.latency_ms.status == "measured"]
    assert steady
    if engine.format == "tensorrt-rtx":
        facts = [row.conditions.model_dump() for row in steady]
        strategies = {(row["kernel_specialization"], row["cuda_graphs"]) for row in facts}
        assert strategies == {("eager", "whole_graph_capture")}
        with Bundle.open(bundle).session(engine) as session:
            assert session.settings()["runtime_cache"] == "loaded", "measuring left its kernels"
    assert report.search is not None and report.search.pick == 0, report.search.reason  # type: ignore[union-attr]


def test_int8_engines_keep_what_their_task_scores(bundle: Path) -> None:
    pytest.importorskip("nncf")
    engines = {engine.precision: engine for engine in built(bundle, int8=True) if engine.role == "full"}
    assert engines["int8"].validation is not None and engines["int8"].parity is not None
    assert engines["int8"].parity.top1_agreement is not None and engines["int8"].parity.top1_agreement > 0.9


def test_a_language_model_writes_with_its_engines_what_its_graphs_write(finished_language_run, tmp_path):
    """The step engines and the decode engine, whose caches stay on the card; the first call has an empty cache."""
    shutil.copytree(finished_language_run, tmp_path / "run")
    bundle, roles = tmp_path / "run" / "bundle", {"step", "decode"}
    engines = [engine for engine in built(bundle, exits="all") if engine.role in roles]
    assert {engine.role for engine in engines} == roles
    opened = Bundle.open(bundle)
    for engine in engines:
        assert engine.parity is not None and engine.parity.status == "measured"
        answers = []
        for name in (engine.id, f"onnx-fp16-{engine.role}"):
            decoder = opened.decoder(opened.artifact(name), (opened.loops,))
            logits = []
            for piece in ([1, 2, 3, 4, 5], [6], [7], [8]):
                decoder.read(piece)
                decoder.advance(opened.loops)
                logits.append(decoder.row_logits(opened.loops)[0])
            decoder.close()
            answers.append(np.stack(logits))
        assert np.allclose(answers[0], answers[1], atol=2e-2 * float(answers[1].std()) + 1e-3), engine.id


def test_estimates_for_this_card_are_checked_on_it(bundle: Path, tmp_path: Path) -> None:
    device = profile_of_card()
    if not on_gpu(default_provider()):
        pytest.skip("this ONNX Runtime computes on no card")
    options = CalibrationOptions(False, True, ((1, 16), (8, 16)), None, TINY)
    profile, path = improve(bundle, device, options, tmp_path)
    assert profile.calibration is not None and profile.calibration.error is not None
    assert profile.calibration.error.kind == "cuda" and profile.calibration.error.cases == 4
    assert load_profile(device.name, path.parent).calibration == profile.calibration
