"""Export into an existing bundle: artifacts that are not requested stay, or the export is refused."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file, save_file

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.export.export import export, remove_rejected
from edgeformer.export.previous import PreviousBundle
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.verify import verify
from edgeformer.runtimes.runtime import Target
from tests.export.language_run import exported_language_run
from tests.fakes.install import installed


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in folder.rglob("*") if path.is_file()}


def assert_verified(run: Path, expected: set[str]) -> None:
    result = verify(Bundle.open(run / "bundle"))
    assert {file.status for file in result.files} == {"intact"}
    assert {check.artifact: check.status for check in result.artifacts} == dict.fromkeys(expected, "verified")
    assert not list(run.glob(".bundle*")), "temporary folders must be removed"


@pytest.mark.slow
@pytest.mark.usefixtures("traced_once")
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
    """Graphs of one precision share a file of weights, so that all of them are made again with one of them."""
    original, weights = exported_language_run(tmp_path_factory), "bundle/onnx/model.onnx_data"
    run = Path(shutil.copytree(original, tmp_path / "run"))
    old = contents(run / "bundle")
    ids = {artifact.id for artifact in Bundle.open(run / "bundle").artifacts}
    added = {artifact.id: artifact for artifact in export(run, ExportOptions()).artifacts}
    assert added.keys() == ids
    fp32 = {id_ for id_, artifact in added.items() if artifact.precision == "fp32"}
    assert {id_ for id_, artifact in added.items() if not artifact.kept} == fp32 and len(fp32) > 2
    new = contents(run / "bundle")
    assert new.keys() == old.keys()
    assert new["onnx/model_int8.onnx_data"] == old["onnx/model_int8.onnx_data"]
    assert (run / weights).stat().st_size == (original / weights).stat().st_size, "no weight may be stored twice"
    assert_verified(run, ids)


def harm(run: Path, kind: str) -> str:
    """Change the run or its bundle. Return what the refusal to export says of it."""
    bundle, weights = run / "bundle", run / "model" / "model.safetensors"
    if kind == "other weights":
        save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights)
        return "another model/model.safetensors"
    if kind == "damaged file":
        content = bytearray((bundle / "onnx" / "model_fp16.onnx").read_bytes())
        content[len(content) // 2] ^= 1
        (bundle / "onnx" / "model_fp16.onnx").write_bytes(content)
        return "model_fp16.onnx: changed since it was exported"
    if kind == "strange file":
        (bundle / "notes.txt").write_text("mine", encoding="utf-8")
        return "notes.txt (not listed in bundle.json)"
    (bundle / "bundle.json").write_text("{", encoding="utf-8")
    return "bundle.json: damaged"


@pytest.mark.slow
@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("kind", ["other weights", "damaged file", "strange file", "damaged manifest"])
def test_losses_are_listed_and_need_replace(run: Path, kind: str) -> None:
    reason = harm(run, kind)
    old = contents(run)
    with pytest.raises(InputError, match="--replace") as refused:
        export(run)
    assert reason in str(refused.value) and contents(run) == old
    assert ("onnx-fp16" in str(refused.value)) == (kind in ("other weights", "damaged file"))
    if kind == "strange file":
        assert [artifact.id for artifact in export(run, ExportOptions(replace=True)).artifacts] == ["onnx-fp32"]
        assert_verified(run, {"onnx-fp32"})


def entry(id_: str, file: str | None = "", **facts: object) -> ArtifactManifest:
    fields = {"id": id_, "file": file if file != "" else f"onnx/{id_}", "format": "onnx", "precision": "int8"}
    return ArtifactManifest.model_validate({**fields, "status": "built", **facts})


def engine(file: str | None = "engines/model_fp16.rtx4050.engine", **facts: object) -> ArtifactManifest:
    return entry("tensorrt-rtx-fp16", file, **{"format": "tensorrt-rtx", "precision": "fp16", **facts})


def test_what_cannot_be_made_again_stays_unless_its_weights_change(tmp_path: Path) -> None:
    absent = engine(None, status="unavailable", reason="no GPU")
    (kept,) = PreviousBundle(tmp_path, kept={absent.id: engine(kept=True)}).merge([absent])
    assert (kept.status, kept.kept) == ("built", True) and "cannot be made again: no GPU" in str(kept.reason)
    rejected = entry("onnx-int8", None, status="rejected", reason="too bad")
    old = entry("onnx-int8-exit2", kept=True)
    previous = PreviousBundle(tmp_path, kept={old.id: old}, required_files={old.id: [str(old.file), "onnx/weights"]})
    assert previous.merge([rejected]) == [rejected, old]
    with pytest.raises(InputError, match=r"delete onnx-int8-exit2 .*--keep-going"):
        previous.merge([entry("onnx-fp32", weights_file="onnx/weights"), rejected])


def test_engine_of_another_device_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exit_engines = [engine(role="exit", exit=loop).model_copy(update={"id": f"exit{loop}"}) for loop in (2, 6)]
    manifest, contents = SimpleNamespace(notes=(), files={}), SimpleNamespace(needed_by=lambda _: [])
    bundle = SimpleNamespace(manifest=manifest, contents=contents, artifacts=(entry("base"), engine(), *exit_engines))
    monkeypatch.setattr(Bundle, "open", lambda _: bundle)
    options, targets = ExportOptions(fp16=True), [Target("tensorrt-rtx", f"rtx40{number}0") for number in (9, 5)]
    other, same = (PreviousBundle.of(tmp_path, options, [target], None, exits=[6]) for target in targets)
    assert not other.rebuilt and "another device than rtx4090" in other.losses["tensorrt-rtx-fp16"]
    assert same.rebuilt.keys() == {"tensorrt-rtx-fp16", "exit6"} and not same.losses


def test_rejected_variant_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    for name in ("a.onnx", "a.onnx_data", "b.onnx", "b.onnx_data"):
        (tmp_path / "onnx" / name).write_bytes(b"x")
    a = entry("a", "onnx/a.onnx", weights_file="onnx/a.onnx_data")
    b = entry("b", "onnx/b.onnx", weights_file="onnx/b.onnx_data", status="rejected")
    kept, rejected = remove_rejected(tmp_path, [a, b])
    assert sorted(path.name for path in (tmp_path / "onnx").iterdir()) == ["a.onnx", "a.onnx_data"]
    assert kept == a and (rejected.file, rejected.weights_file) == (None, None)
