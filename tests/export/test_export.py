"""Export of a run: graphs that compute what torch computes, each weight once; rejected artifacts are named."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.export import run_source
from edgeformer.export.audit import audit_sharing
from edgeformer.export.export import export
from edgeformer.export.graphs import weights_file, write_graph
from edgeformer.export.variants import ExportOptions
from edgeformer.run import read_run
from edgeformer.runtimes.runtime import stored_twice
from tests.export import graphs


@pytest.fixture(scope="module")
def artifacts(fresh_run: Path) -> dict[str, ArtifactManifest]:
    return {artifact.id: artifact for artifact in Bundle.open(fresh_run / "bundle").artifacts}


@pytest.mark.slow
def test_both_precisions_are_close_and_store_every_weight_once(fresh_run, artifacts):
    parameters = read_run(fresh_run).parameters
    assert set(artifacts) == {"onnx-fp32", "onnx-fp16"} and Bundle.open(fresh_run / "bundle").manifest.loops == 2
    for artifact in artifacts.values():
        assert artifact.status == "built", artifact.reason
        assert (artifact.parity.n, artifact.parity.top1_agreement) == (64, 1.0)
        assert artifact.sharing.stored_parameters == artifact.sharing.unique_parameters == parameters
    fp32, fp16 = artifacts["onnx-fp32"], artifacts["onnx-fp16"]
    assert fp32.parity.max_abs_error < 1e-4 and 0 < fp16.parity.relative_error < 1e-2
    rotary = 2 * 512 * 8 * 4  # cos and sin stay in float32
    halved = (fp16.sharing.weight_bytes - rotary) / (fp32.sharing.weight_bytes - rotary)
    assert halved == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
def test_audit_sees_weights_that_were_copied_or_hidden_in_constants(fresh_run: Path) -> None:
    graph = onnx.load(str(fresh_run / "bundle" / "onnx" / "model.onnx"), load_external_data=False)
    unique = read_run(fresh_run).parameters
    value = onnx.numpy_helper.from_array(np.zeros((3, 4), dtype=np.float32))
    graph.graph.node.append(onnx.helper.make_node("Constant", [], ["hidden"], value=value))
    assert audit_sharing(graph, unique).stored_parameters == unique + 12
    copy = onnx.TensorProto()
    copy.CopyFrom(max(graph.graph.initializer, key=lambda tensor: int(np.prod(tensor.dims))))
    copy.name = "copied"
    graph.graph.initializer.append(copy)
    result = audit_sharing(graph, unique)
    assert result.stored_parameters == unique + 12 + int(np.prod(copy.dims))
    assert f"stores {result.stored_parameters:,} parameters for a model of {unique:,}" in str(stored_twice(result))
    assert stored_twice(result.model_copy(update={"unique_parameters": result.stored_parameters + 1})) is None


def test_fp16_keeps_norms_softmax_and_rotary_in_fp32(fresh_run: Path, artifacts: dict[str, ArtifactManifest]) -> None:
    kept = artifacts["onnx-fp16"].ops_in_fp32
    assert kept["Pow"] == kept["Sqrt"] == 2 * 1 * 2 + 1  # two per layer, one layer, two iterations, and the final one
    assert "MatMul" not in kept and "Gemm" not in kept
    graph = onnx.load(str(fresh_run / "bundle" / "onnx" / "model_fp16.onnx"), load_external_data=False).graph
    softmaxes = [node for node in graph.node if node.op_type == "Softmax"]
    casts = {node.output[0] for node in graph.node if node.op_type == "Cast"}
    assert all(node.input[0] in casts for node in softmaxes)
    assert kept["Softmax"] == len(softmaxes) == 1 * 2  # one layer, two iterations


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", None, "training is not finished"),
        ("model/model.safetensors", b"\0" * 1000, r"model\.safetensors"),
        ("model/tokenizer.json", b"{", r"tokenizer\.json: missing or damaged"),
        ("model/tokenizer.json", b"", r"tokenizer\.json: missing or damaged"),
        ("model/config.json", b"[]", r"config\.json: damaged \(an object is expected\)"),
        ("model/golden_inputs.npz", b"PK", r"golden_inputs\.npz: .*damaged.*train the run again"),
    ],
)
def test_a_damaged_run_keeps_the_old_bundle(run: Path, file: str, content: bytes | None, message: str) -> None:
    if content is None:
        manifest = json.loads((run / file).read_text(encoding="utf-8"))
        content = json.dumps({**manifest, "status": "interrupted"}).encode()
    (run / file).write_bytes(content)
    old = sha256_of(run / "bundle" / "bundle.json")
    with pytest.raises(ArtifactError, match=message):
        export(run)
    assert sha256_of(run / "bundle" / "bundle.json") == old
    assert not list(run.glob(".bundle*"))


@pytest.mark.slow
@pytest.mark.usefixtures("traced_once")
def test_keep_going_builds_after_rejected_artifacts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """INT8 fails as a whole, FP16 cannot hold an activation, and the device needs JetPack; FP32 is built."""

    def refuse(graphs: object, *_: object) -> None:
        raise EdgeformerError("INT8: cannot quantize these weights: w")

    monkeypatch.setattr(run_source, "quantized_graphs", refuse)
    monkeypatch.setattr(run_source, "max_abs_activation", lambda *_: 1e6)
    options = {"int8": True, "fp16": True, "keep_going": True, "replace": True}
    target = {"build": ("tensorrt",), "target": "jetson-orin-nano-8gb"}
    exported = export(run, ExportOptions(**options, **target)).artifacts  # type: ignore[arg-type]
    artifacts = {artifact.id: artifact for artifact in exported}
    engine = artifacts.pop(max(artifacts))
    assert (engine.status, engine.file) == ("unavailable", None)
    assert "8.7" in str(engine.reason) and "JetPack" in str(engine.reason)
    statuses = {"onnx-fp32": "built", "onnx-int8": "rejected", "onnx-fp16": "rejected"}
    assert {artifact.id: artifact.status for artifact in artifacts.values()} == statuses
    assert "cannot quantize" in str(artifacts["onnx-int8"].reason)
    assert "overflow" in str(artifacts["onnx-fp16"].reason)
    assert Bundle.open(run / "bundle").artifact("onnx-fp16").status == "rejected"  # it could be written, and read again
    files = {path.name for path in (run / "bundle" / "onnx").iterdir()}
    assert files == {"model.onnx"}, "a client would open a rejected graph by its name"


@pytest.mark.slow
@pytest.mark.usefixtures("traced_once")
def test_after_a_rejected_artifact_nothing_is_built(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def refuse(graphs: object, *_: object) -> None:
        calls.append(graphs)
        raise EdgeformerError("INT8: no")

    monkeypatch.setattr(run_source, "quantized_graphs", refuse)
    options = ExportOptions(int8=True, fp16=True, replace=True)
    stopped = export(run, options).artifacts
    statuses = {"onnx-fp32": "built", "onnx-int8": "rejected", "onnx-fp16": "unavailable"}
    assert {artifact.id: artifact.status for artifact in stopped} == statuses and len(calls) == 1
    assert stopped[-1].reason == "not made, because onnx-int8 was rejected; make it with --keep-going"
    listed = {*Bundle.open(run / "bundle").manifest.files, "onnx/model.onnx", "bundle.json"}
    assert {p.relative_to(run / "bundle").as_posix() for p in (run / "bundle").rglob("*") if p.is_file()} == listed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "rtx4050"}, r"--target: .* add --trt"),
        ({"build": ("nonsense",)}, r"--build nonsense: no such builder; give one of .*tensorrt"),
        ({"exits": (3,)}, r"--exit 3: .* has exits after the loops 1, 2"),
        ({"vocab_keep": 3}, r"--vocab-keep: changes what --vocab-trim keeps; add --vocab-trim"),
    ],
)
def test_invalid_options_list_the_valid_ones(finished_run: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        export(finished_run, ExportOptions(**options))  # type: ignore[arg-type]


def test_incomplete_weights_file_is_not_renamed(tmp_path: Path) -> None:
    graph = onnx_ir.from_proto(graphs.embedding(rows=400))
    with pytest.raises(RuntimeError), weights_file(tmp_path / "model.onnx_data") as weights:
        write_graph(graph, tmp_path / "all.onnx", weights)
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["all.onnx"]
