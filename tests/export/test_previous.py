"""Export into an existing bundle: artifacts that are not requested stay, or the export is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.export.export import export, remove_rejected
from edgeformer.export.previous import PreviousBundle, Requested
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.verify import verify
from edgeformer.runtimes.runtime import Target
from tests.export.language_run import exported_language_run
from tests.fakes.install import installed


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """With FP32 and FP16 in its bundle."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in folder.rglob("*") if path.is_file()}


def assert_verified(run: Path, expected: set[str]) -> None:
    result = verify(Bundle.open(run / "bundle"))
    assert {file.status for file in result.files} == {"intact"}
    assert {check.artifact: check.status for check in result.artifacts} == dict.fromkeys(expected, "verified")
    assert not list(run.glob(".bundle*")), "temporary folders must be removed"


def test_artifacts_that_are_not_requested_stay(run: Path) -> None:
    old = contents(run / "bundle")
    with installed("reference_runtime"):
        export(run, ExportOptions(int8=True, vocab_trim=True, build=("reference",)))
        added = export(run, ExportOptions())
        artifacts = {artifact.id: artifact.kept for artifact in added.artifacts}
        kept = ("onnx-int8", "onnx-int8-trim", "onnx-fp16", "onnx-reference-fp32")
        assert artifacts == {"onnx-fp32": False, **dict.fromkeys(kept, True)}
        assert contents(run / "bundle")["onnx/model_fp16.onnx"] == old["onnx/model_fp16.onnx"]
        assert any(note.startswith("FP16: a CPU") for note in added.notes)
        assert_verified(run, set(artifacts))


@pytest.mark.torture
def test_graphs_with_shared_weights_stay(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Alone, the full graph and decode need fewer weights, which lie elsewhere in the file that all have together."""
    run = Path(shutil.copytree(exported_language_run(tmp_path_factory), tmp_path / "run"))
    old = contents(run / "bundle")
    ids = {artifact.id for artifact in Bundle.open(run / "bundle").artifacts}
    added = {artifact.id: artifact for artifact in export(run, ExportOptions()).artifacts}
    assert added.keys() == ids
    assert {id_ for id_, artifact in added.items() if not artifact.kept} == {"onnx-fp32", "onnx-fp32-decode"}
    new = contents(run / "bundle")
    weights = "onnx/model.onnx_data"
    assert new.keys() == old.keys()
    assert new["onnx/model_int8.onnx_data"] == old["onnx/model_int8.onnx_data"]
    size = {
        folder: (folder / "bundle" / weights).stat().st_size
        for folder in (run, exported_language_run(tmp_path_factory))
    }
    assert len(set(size.values())) == 1, "no weight may be stored twice"
    assert_verified(run, ids)


def other_weights(run: Path) -> str:
    weights = run / "model" / "model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights)
    return "made of another model/model.safetensors"


def damaged_file(run: Path) -> str:
    path = run / "bundle" / "onnx" / "model_fp16.onnx"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return "model_fp16.onnx: changed since it was exported"


def strange_file(run: Path) -> str:
    (run / "bundle" / "notes.txt").write_text("mine", encoding="utf-8")
    return "notes.txt (bundle.json does not list it)"


@pytest.mark.parametrize(
    "harm", [*(pytest.param(harm, marks=pytest.mark.torture) for harm in (other_weights, damaged_file)), strange_file]
)
def test_losses_are_listed_and_need_replace(run: Path, harm: Callable[[Path], str]) -> None:
    reason = harm(run)
    old = contents(run)
    with pytest.raises(InputError, match="--replace") as refused:
        export(run)
    assert reason in str(refused.value) and contents(run) == old
    assert ("onnx-fp16" in str(refused.value)) == (harm is not strange_file)
    if harm is not strange_file:  # asked for again, nothing is lost
        assert {a.id: a.kept for a in export(run, ExportOptions(fp16=True)).artifacts} == {
            "onnx-fp32": False,
            "onnx-fp16": False,
        }
    replaced = export(run, ExportOptions(replace=True))
    assert [artifact.id for artifact in replaced.artifacts] == ["onnx-fp32"]
    assert_verified(run, {"onnx-fp32"})


def test_damaged_bundle_needs_replace(run: Path) -> None:
    (run / "bundle" / "bundle.json").write_text("{", encoding="utf-8")
    old = contents(run)
    with pytest.raises(InputError, match=r"everything in it .*bundle\.json: damaged"):
        export(run)
    assert contents(run) == old


def engine(id_: str = "tensorrt-rtx-fp16", device: str = "rtx4050", **facts: object) -> ArtifactManifest:
    file = f"engines/model_fp16.{device}.engine"
    fields = {"id": id_, "file": file, "format": "tensorrt-rtx", "precision": "fp16", "status": "built", **facts}
    return ArtifactManifest.model_validate(fields)


def test_engine_without_its_builder_stays(tmp_path: Path) -> None:
    absent = engine(file=None, status="unavailable", reason="no GPU")
    (kept,) = PreviousBundle(tmp_path, kept={absent.id: engine(kept=True)}).merge([absent])
    assert (kept.status, kept.kept) == ("built", True) and "cannot be made again: no GPU" in str(kept.reason)


def test_engine_of_another_device_is_reported(tmp_path: Path) -> None:
    requested = Requested(ExportOptions(fp16=True), [6], [Target("tensorrt-rtx", "rtx4090")])
    assert not requested.includes(engine()) and "another device than --target rtx4090" in str(
        requested.replaces_device(engine())
    )
    same = Requested(ExportOptions(fp16=True), [6], [Target("tensorrt-rtx", "rtx4050")])
    assert same.includes(engine()) and same.replaces_device(engine()) is None
    assert not same.includes(engine(role="exit", exit=2)) and same.includes(engine(role="exit", exit=6))


def test_unreached_artifact_stays_unless_its_weights_change(tmp_path: Path) -> None:
    def graph(id_: str, **facts: object) -> ArtifactManifest:
        fields = {"id": id_, "file": f"onnx/{id_}", "format": "onnx", "precision": "int8", "status": "built", **facts}
        return ArtifactManifest.model_validate(fields)

    rejected = graph("onnx-int8", file=None, status="rejected", reason="too bad")
    old = graph("onnx-int8-exit2", kept=True)
    previous = PreviousBundle(tmp_path, kept={old.id: old}, required_files={old.id: [str(old.file), "onnx/weights"]})
    assert previous.merge([rejected]) == [rejected, old]
    fp32 = graph("onnx-fp32", weights_file="onnx/weights")
    with pytest.raises(InputError, match=r"lose onnx-int8-exit2 .*--keep-going"):
        previous.merge([fp32, rejected])


def test_rejected_variant_leaves_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "onnx"
    folder.mkdir()
    for name in ("model", "model_fp16"):
        for suffix in ("onnx", "onnx_data"):
            (folder / f"{name}.{suffix}").write_bytes(b"x")
    kept, rejected = remove_rejected(
        tmp_path,
        [
            ArtifactManifest(
                id=f"onnx-{precision}",
                file=f"onnx/{name}.onnx",
                weights_file=f"onnx/{name}.onnx_data",
                format=ONNX,
                precision=precision,
                status=status,
            )
            for name, precision, status in (("model", "fp32", "built"), ("model_fp16", "fp16", "rejected"))
        ],
    )
    assert sorted(path.name for path in folder.iterdir()) == ["model.onnx", "model.onnx_data"]
    assert kept.weights_file == "onnx/model.onnx_data" and (rejected.file, rejected.weights_file) == (None, None)
