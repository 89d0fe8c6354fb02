"""Runtimes that use a card: ONNX Runtime's CUDA provider and TensorRT, where they are installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.timing import TINY
from edgeformer.backends import default_provider, on_gpu
from edgeformer.backends.backend import OpenOptions
from edgeformer.backends.onnxruntime.providers import CUDA, available_providers
from edgeformer.backends.tensorrt.state import why_engine_cannot_run
from edgeformer.bundle import Bundle
from edgeformer.formats.documents import load_profile, shipped_names
from edgeformer.formats.errors import ArtifactError
from edgeformer.stages.profiling.estimating.check import CalibrationOptions, improve
from edgeformer.stages.profiling.profile import ProfileOptions, profile_bundle
from edgeformer.stages.profiling.request import find_target
from edgeformer.stages.verifying.verify import verify

pytestmark = pytest.mark.gpu


@pytest.fixture
def bundle(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of a trained classifier's FP32 and FP16 graphs."""
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run" / "bundle"


def inputs() -> dict[str, np.ndarray]:
    ids = np.arange(1, 33, dtype=np.int64).reshape(2, 16)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


@pytest.mark.parametrize(("name", "tolerance"), [("onnx-fp32", 1e-3), ("onnx-fp16", 2e-2)])
def test_the_cuda_provider_computes_what_the_cpu_computes(bundle: Path, name: str, tolerance: float) -> None:
    if CUDA not in available_providers():
        pytest.skip("this ONNX Runtime was built without CUDA")
    opened = Bundle.open(bundle)
    artifact, answers = opened.artifact(name), []
    for provider in (CUDA, "CPUExecutionProvider"):
        session = opened.session(artifact, OpenOptions(provider=provider))
        assert session.provider == provider
        answers.append(session.run(inputs())["logits"])
        session.close()
    assert np.allclose(*answers, atol=tolerance)


def built(bundle: Path) -> Path:
    """The bundle with an engine for this very card. Skips where nothing here can build one."""
    from edgeformer.stages.exporting.export import export
    from edgeformer.stages.exporting.variants import ExportOptions

    here = [
        profile.name
        for profile in map(load_profile, shipped_names("profiles"))
        if profile.kind == "cuda" and find_target(profile).present
    ]
    if not here:
        pytest.skip("no shipped profile is of this card")
    export(bundle.parent, ExportOptions(fp16=True, build=("tensorrt",), target=here[0]))
    engines = [one for one in Bundle.open(bundle).artifacts if not one.is_graph]
    if all(engine.status == "unavailable" for engine in engines):
        pytest.skip(str(engines[0].reason if engines else "no engine was asked for"))
    assert [engine.reason for engine in engines if engine.status == "rejected"] == []
    return bundle


def test_an_engine_is_built_runs_and_answers_as_torch_did(bundle: Path) -> None:
    opened = Bundle.open(built(bundle))
    (engine,) = [one for one in opened.artifacts if not one.is_graph and one.status == "built"]
    if (reason := why_engine_cannot_run(engine)) is not None:
        pytest.skip(reason)
    check = next(check for check in verify(opened).artifacts if check.artifact == engine.id)
    assert check.status == "verified", check.reason
    assert check.parity is not None and check.parity.top1_agreement is not None
    device = next(load_profile(name) for name in shipped_names("profiles") if find_target(load_profile(name)).present)
    from edgeformer.run import Location

    options = ProfileOptions(batches=(1,), seqs=(16,), artifacts=(engine.id,))
    rows = profile_bundle(Location(None, bundle), device, options).rows
    assert any(row.phase == "steady" and row.latency_ms.status == "measured" for row in rows)


def test_an_engine_for_another_card_is_refused_with_words(bundle: Path) -> None:
    opened = Bundle.open(built(bundle))
    (engine,) = [one for one in opened.artifacts if not one.is_graph and one.status == "built"]
    if why_engine_cannot_run(engine) is not None:
        pytest.skip("no engine runs here at all")
    assert engine.built_for is not None
    other = engine.model_copy(update={"built_for": {**engine.built_for, "compute_capability": "1.0"}})
    reason = why_engine_cannot_run(other)
    assert reason is not None and "1.0" in reason


def test_an_engine_that_was_cut_short_is_no_crash(bundle: Path) -> None:
    opened = Bundle.open(built(bundle))
    (engine,) = [one for one in opened.artifacts if not one.is_graph and one.status == "built"]
    path = bundle / str(engine.file)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ArtifactError):
        Bundle.open(bundle).session(engine)


def test_estimates_for_this_card_are_checked_on_it(bundle: Path, tmp_path: Path) -> None:
    present = (profile for profile in map(load_profile, shipped_names("profiles")) if profile.kind == "cuda")
    device = next((profile for profile in present if find_target(profile).present), None)
    if device is None:
        pytest.skip("no shipped profile is of this card")
    if not on_gpu(default_provider()):
        pytest.skip("this ONNX Runtime computes on no card")
    options = CalibrationOptions(False, True, ((1, 16), (8, 16)), None, TINY)
    found, path = improve(bundle, device, options, tmp_path)
    assert found.calibration is not None and found.calibration.error is not None
    assert found.calibration.error.kind == "cuda" and found.calibration.error.cases == 4
    assert load_profile(device.name, path.parent).calibration == found.calibration
