"""Engines of a wrapped graph, built by tensorrt-rtx itself, which needs no GPU for that."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from onnx import helper

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.export.export import export as export_bundle
from edgeformer.export.import_onnx import wrap
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.verify import verify
from edgeformer.runtimes.tensorrt.state import tensorrt_state
from tests.export import graphs
from tests.inference.golden_bundle import update

ID, FILE = "tensorrt-rtx-fp32", "engines/model.rtx4050.engine"


@pytest.fixture
def bundle(wrapped_engine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wrapped_engine, tmp_path / "bundle"))


def built(bundle: Path, device: str = "rtx4050", **options: object) -> ArtifactManifest:
    export_bundle(bundle, ExportOptions(build=("tensorrt",), target=device, **options))  # type: ignore[arg-type]
    return Bundle.open(bundle).artifact(ID)


def intact(bundle: Path) -> bool:
    return {check.status for check in verify(Bundle.open(bundle)).files} == {"intact"}


def test_it_takes_the_shapes_of_the_inputs_and_waits_for_its_card(wrapped_engine: Path) -> None:
    opened = Bundle.open(wrapped_engine)
    output = opened.artifact(ID)
    assert (output.status, output.file, output.precision) == ("built", FILE, "fp32") and output.engine is not None
    assert output.engine.shapes == dict.fromkeys(("input_ids", "attention_mask"), ((1, 1), (1, 64), (16, 512)))
    assert output.built_for is not None and output.built_for["compute_capability"] == "8.9"
    assert output.engine.weight_bytes is not None and output.engine.weight_bytes >= 4 * (64 * 16 + 16 * 16)
    assert output.size_bytes == (wrapped_engine / FILE).stat().st_size > output.engine.weight_bytes
    if opened.cannot_run(output) is not None:
        assert output.parity is not None and "verify --write" in str(output.parity.reason)


def test_one_that_cannot_be_built_again_stays(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorrt_rtx", None)  # how Python says that there is no such package
        tensorrt_state.cache_clear()
        remaining = built(bundle)
    tensorrt_state.cache_clear()
    assert (remaining.status, remaining.kept, remaining.file) == ("built", True, FILE)
    assert str(remaining.reason).startswith("kept; it cannot be made again: NVIDIA GeForce RTX 4050")
    assert "tensorrt-rtx builds for it on any machine, but here package: not installed" in str(remaining.reason)
    assert intact(bundle)
    export_bundle(bundle, ExportOptions(fp16=True))
    assert Bundle.open(bundle).artifact(remaining.id).reason is None, "nobody asked for it this time"


def test_one_whose_successor_is_rejected_leaves_no_file(wrapped_engine: Path, tmp_path: Path) -> None:
    """An engine of another time, of a graph that today's builder refuses: TensorRT has no determinants."""
    node = helper.make_node("Det", ["x"], ["y"])
    ends = ([graphs.value("x", graphs.FLOAT, ["batch", 4, 4])], [graphs.value("y", graphs.FLOAT, ["batch"])])
    bundle = tmp_path / "bundle"
    wrap(graphs.save(tmp_path, graphs.model([node], *ends)), bundle)
    (bundle / FILE).parent.mkdir()
    shutil.copy(wrapped_engine / FILE, bundle / FILE)
    update(bundle, artifacts=(*Bundle.open(bundle).artifacts, Bundle.open(wrapped_engine).artifact(ID)))
    assert intact(bundle)
    output = built(bundle)
    assert (output.status, output.file) == ("rejected", None) and "Det" in str(output.reason)
    assert not (bundle / FILE).exists() and intact(bundle)


def test_one_for_another_device_is_not_lost_unasked(bundle: Path) -> None:
    old = Bundle.open(bundle).artifact(ID)
    with pytest.raises(InputError, match=f"would lose {ID} .*another device than --target rtx3050-6gb"):
        built(bundle, "rtx3050-6gb")
    assert Bundle.open(bundle).artifact(ID) == old and (bundle / FILE).is_file()
    new = built(bundle, "rtx3050-6gb", replace=True)
    assert new.file == "engines/model.rtx3050-6gb.engine" and not (bundle / FILE).exists()
    assert new.built_for is not None and new.built_for["compute_capability"] == "8.6"
    assert intact(bundle)
