"""``verify`` finds damaged files and artifacts whose answers differ from the golden answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import EngineBuild, Parity
from edgeformer.bundle import Bundle
from edgeformer.inference.verify import INT8_ERROR_FACTOR, verify
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.session import Array
from tests.export.language_run import exported_language_run
from tests.inference.golden_bundle import (
    approve,
    change,
    change_golden,
    damage,
    run_golden,
    status_of,
    write_classifier,
    write_language_model,
)

MODEL = "onnx/model.onnx"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_classifier(tmp_path / "bundle")


def parity_of(bundle: Path, artifact: str = "model") -> Parity:
    (check,) = verify(Bundle.open(bundle), artifact).artifacts
    return check.parity


def test_an_intact_bundle_is_verified_and_unexpected_files_are_damage(bundle: Path) -> None:
    def files() -> dict[Path, tuple[int, bytes]]:
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in bundle.rglob("*") if path.is_file()}

    before = files()
    (bundle / "reports").mkdir()  # of profile
    result = verify(Bundle.open(bundle))
    assert result.exit_code == 0 and damage(result) == {} and status_of(result)[0] == "verified"
    assert verify(Bundle.open(bundle), "other").exit_code == 3, "a requested artifact that cannot be checked fails"
    with pytest.raises(InputError, match=r"--artifact absent: .* has model, other"):
        verify(Bundle.open(bundle), "absent")
    assert {check.file for check in result.files} == {"golden.npz", MODEL, "onnx/other.onnx"}
    assert status_of(result, "other") == ("unavailable", "rejected at export: not meant to be used")
    assert files() == before
    parity = parity_of(bundle)
    assert (parity.n, parity.max_abs_error, parity.top1_agreement) == (5, 0.0, 1.0)
    for name in (".DS_Store", ".git/config", "reports/host.html"):
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).write_bytes(b"?")
    assert verify(Bundle.open(bundle)).exit_code == 0
    (bundle / "onnx" / "model_fp64.onnx").write_bytes(b"?")
    result = verify(Bundle.open(bundle))
    assert result.exit_code == 2 and damage(result) == {"onnx/model_fp64.onnx": "unexpected"}
    assert status_of(result)[0] == "verified"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


def swap(bundle: Path) -> None:
    first, second, temporary = bundle / MODEL, bundle / "onnx" / "other.onnx", bundle / "temporary"
    first.rename(temporary), second.rename(first), temporary.rename(second)


def flip_bit(bundle: Path) -> None:
    content = bytearray((bundle / MODEL).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / MODEL).write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "expected", "status"),
    [
        (lambda bundle: cut(bundle / MODEL), {MODEL: "truncated"}, "damaged"),
        (swap, {MODEL: "changed", "onnx/other.onnx": "truncated"}, "damaged"),
        (flip_bit, {MODEL: "changed"}, "damaged"),
        (lambda bundle: (bundle / MODEL).unlink(), {MODEL: "missing"}, "damaged"),
        (lambda bundle: change(bundle, "model", sha256=None), {MODEL: "unexpected"}, "damaged"),
        (lambda bundle: cut(bundle / "golden.npz"), {"golden.npz": "changed"}, "unavailable"),
    ],
)
def test_damaged_files_are_found(bundle, spoil, expected, status):
    spoil(bundle)
    result = verify(Bundle.open(bundle))
    assert result.exit_code == 2 and damage(result) == expected
    assert status_of(result)[0] == status and (status == "damaged" or "golden.npz" in status_of(result)[1])


@pytest.mark.parametrize(
    ("key", "path"), [("file", "../x.onnx"), ("file", "onnx/linked.onnx"), ("weights_file", "/x.onnx")]
)
def test_an_artifact_outside_the_bundle_is_refused(bundle: Path, key: str, path: str) -> None:
    """Also without a checksum."""
    (bundle.parent / "x.onnx").write_bytes((bundle / MODEL).read_bytes())
    (bundle / "onnx" / "linked.onnx").symlink_to(bundle.parent / "x.onnx")
    change(bundle, "model", **{key: path, "sha256": None, "size_bytes": None})
    with pytest.raises(ArtifactError, match="outside the bundle"):
        verify(Bundle.open(bundle))


def test_a_graph_that_does_not_open_is_damaged(bundle: Path) -> None:
    graph = onnx.load(bundle / MODEL)
    del graph.graph.initializer[0]
    onnx.save(graph, bundle / MODEL)
    approve(bundle, "model")
    result = verify(Bundle.open(bundle))
    assert damage(result) == {} and result.exit_code == 2
    status, reason = status_of(result)
    assert status == "damaged" and "cannot be opened by onnxruntime" in reason and "model.onnx" in reason


@pytest.mark.parametrize(
    ("precision", "absolute", "relative", "exit_code"),
    [("fp32", 5e-5, 0, 0), ("fp32", 3e-4, 0, 3), ("fp16", 0, 0.005, 0), ("fp16", 0, 0.02, 3)],
)
def test_tolerances_of_fp32_and_fp16(bundle, precision, absolute, relative, exit_code):
    logits = run_golden(bundle, MODEL)
    change(bundle, "model", precision=precision)
    change_golden(bundle, logits=logits + np.float32(absolute + relative * logits.std()))
    result = verify(Bundle.open(bundle))
    assert result.exit_code == exit_code and status_of(result)[0] == ("failed" if exit_code else "verified")


def int8_parity(max_abs_error: float) -> Parity:
    return Parity(
        status="measured", n=5, max_abs_error=max_abs_error, top1_agreement=1.0, tolerance=None, tolerance_kind="score"
    )


def test_int8_is_compared_with_the_error_at_export(bundle: Path) -> None:
    logits = run_golden(bundle, MODEL)
    change(bundle, "model", precision="int8", parity=int8_parity(0.1))
    limit = np.float32(INT8_ERROR_FACTOR * 0.1 + 0.01 * logits.std())
    for shift, exit_code in ((0.98 * limit, 0), (1.1 * limit, 3)):
        change_golden(bundle, logits=logits + np.float32(shift))
        result = verify(Bundle.open(bundle))
        assert result.exit_code == exit_code, status_of(result)
    assert "is above" in status_of(result)[1]
    change(bundle, "model", parity=int8_parity(100.0))
    change_golden(bundle, logits=-logits)
    assert "agreement 0.0%" in status_of(verify(Bundle.open(bundle)))[1]
    change(bundle, "model", parity=None)
    reason = "bundle.json records no error from export; export the run again"
    assert status_of(verify(Bundle.open(bundle))) == ("failed", reason)


def test_an_exit_is_compared_with_its_own_answers(bundle: Path) -> None:
    change(bundle, "model", role="exit", exit=1)
    assert status_of(verify(Bundle.open(bundle)))[0] == "failed"
    assert parity_of(bundle).max_abs_error == pytest.approx(1.0, abs=1e-6)
    change(bundle, "model", role="exit", exit=7)
    status, reason = status_of(verify(Bundle.open(bundle)))
    assert status == "unavailable" and "logits_exit7" in reason


def test_an_engine_on_its_target_gets_a_parity(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Target(OnnxSession):
        """Stands in for a TensorRT session, which needs the GPU."""

        rows: ClassVar[list[int]] = []

        def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
            self.rows.append(len(inputs["input_ids"]))
            return super().run(inputs)

    monkeypatch.setattr("edgeformer.inference.verify.cannot_run", lambda artifact, provider: None)
    monkeypatch.setattr(Bundle, "session", lambda bundle, artifact, options: Target(bundle.check(artifact)))
    unmeasured = Parity(status="unavailable", tolerance=1e-2, tolerance_kind="relative", reason="built without a GPU")
    shapes = dict.fromkeys(("input_ids", "attention_mask"), ((1, 1), (2, 8), (2, 24)))
    engine = EngineBuild(builder="b", seconds=1.0, checked_by="size", graph_bytes=1, shapes=shapes)
    changes: dict[str, Any] = {"format": "tensorrt-rtx", "precision": "fp16", "parity": unmeasured, "engine": engine}
    change(bundle, "model", **changes)
    parity = parity_of(bundle)
    assert (parity.status, parity.n) == ("measured", 5)
    assert Target.rows == [2, 2, 1]  # no more rows than the engine takes


@pytest.mark.parametrize("array", ["top_values_exit2", "log_sum_exp_exit2"])
def test_a_wrong_logit_of_a_language_model_fails(tmp_path: Path, array: str) -> None:
    language_bundle = write_language_model(tmp_path / "bundle")
    with np.load(language_bundle / "golden.npz") as golden:
        values = golden[array].copy()
    values[1, 3] += 1e-3
    change_golden(language_bundle, **{array: values})
    result = verify(Bundle.open(language_bundle))
    assert status_of(result, "model")[0] == "failed" and status_of(result, "model_exit1")[0] == "verified"
    assert parity_of(language_bundle).max_abs_error == pytest.approx(1e-3, rel=0.01)


@pytest.mark.slow
def test_an_exported_language_model_is_verified(tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = Bundle.open(exported_language_run(tmp_path_factory) / "bundle")
    result = verify(bundle)
    assert result.damaged == ()
    for check, artifact in zip(result.artifacts, bundle.artifacts, strict=True):
        assert check.status == ("verified" if artifact.status == "built" else "unavailable"), check
        if artifact.status != "built" or artifact.role == "decode":
            continue  # export decodes half of every window at once, verify all of it token by token
        parity, recorded = check.parity, artifact.parity
        # The 32 largest logits cannot have a larger error than all; the log-sum-exp is rounded, too.
        assert parity.max_abs_error <= recorded.max_abs_error + 1e-5
        assert (parity.top1_agreement, parity.n) == (recorded.top1_agreement, recorded.n)
    roles = {check.role for check in result.artifacts if check.status == "verified"}
    assert roles == {"full", "exit", "step", "decode"}
