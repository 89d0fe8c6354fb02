"""A copied bundle is what was exported, or it is said which file is not and which artifact computes something else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import pytest
from rich.console import Console

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import Engine, Parity
from edgeformer.bundle import Bundle
from edgeformer.inference.verify import INT8_AGREEMENT_LOSS, INT8_ERROR_FACTOR, verify
from edgeformer.report.tables import print_verification
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.session import Array
from edgeformer.runtimes.tensorrt import state as tensorrt_state_module
from edgeformer.runtimes.tensorrt.state import TensorRTState
from edgeformer.system.cuda_driver import Device
from tests.cli.run_cli import edgeformer
from tests.inference.golden_bundle import (
    approve,
    change,
    change_golden,
    damage,
    run_golden,
    status_of,
    update,
    write_classifier,
)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_classifier(tmp_path / "bundle")


class TestFiles:
    def test_a_good_bundle(self, bundle: Path) -> None:
        found = verify(Bundle.open(bundle))
        assert found.exit_code == 0 and damage(found) == {}
        (check,) = [check for check in found.artifacts if check.artifact == "model"]
        assert check.status == "verified" and check.parity is not None
        assert check.parity.n == 5 and check.parity.max_abs_error == 0.0 and check.parity.top1_agreement == 1.0
        assert {check.file for check in found.files} == {"golden.npz", "onnx/model.onnx", "onnx/other.onnx"}

    def test_nothing_is_written(self, bundle: Path) -> None:
        before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in bundle.rglob("*") if path.is_file()}
        verify(Bundle.open(bundle))
        assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in bundle.rglob("*") if p.is_file()}

    def test_truncated(self, bundle: Path) -> None:
        path = bundle / "onnx" / "model.onnx"
        path.write_bytes(path.read_bytes()[:500])
        found = verify(Bundle.open(bundle))
        assert found.exit_code == 2 and damage(found) == {"onnx/model.onnx": "truncated"}
        status, reason = status_of(found)
        assert status == "damaged" and "500 of" in reason

    def test_swapped(self, bundle: Path) -> None:
        one, other = bundle / "onnx" / "model.onnx", bundle / "onnx" / "other.onnx"
        one.rename(bundle / "kept"), other.rename(one), (bundle / "kept").rename(other)
        found = verify(Bundle.open(bundle))
        assert found.exit_code == 2
        assert damage(found) == {"onnx/model.onnx": "changed", "onnx/other.onnx": "truncated"}
        assert status_of(found)[0] == "damaged"

    def test_one_bit(self, bundle: Path) -> None:
        path = bundle / "onnx" / "model.onnx"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        found = verify(Bundle.open(bundle))
        assert found.exit_code == 2 and damage(found) == {"onnx/model.onnx": "changed"}

    def test_missing(self, bundle: Path) -> None:
        (bundle / "onnx" / "model.onnx").unlink()
        found = verify(Bundle.open(bundle))
        assert found.exit_code == 2 and damage(found) == {"onnx/model.onnx": "missing"}

    def test_what_nobody_exported(self, bundle: Path) -> None:
        (bundle / "onnx" / "model_fp64.onnx").write_bytes(b"?")
        (bundle / ".DS_Store").write_bytes(b"?")
        (bundle / ".git").mkdir()
        (bundle / ".git" / "config").write_bytes(b"?")
        found = verify(Bundle.open(bundle))
        assert found.exit_code == 2 and damage(found) == {"onnx/model_fp64.onnx": "unexpected"}
        assert status_of(found)[0] == "verified"  # the artifact itself is intact

    def test_reports_of_profile_are_no_damage(self, bundle: Path) -> None:
        (bundle / "reports").mkdir()
        (bundle / "reports" / "host.html").write_text("<p>", encoding="utf-8")
        assert verify(Bundle.open(bundle)).exit_code == 0

    @pytest.mark.parametrize("shared", ["onnx/model.onnx_data", "onnx/step_embed.onnx"])
    def test_shared_weights_and_parts_belong_to_the_artifact(self, bundle: Path, shared: str) -> None:
        (bundle / shared).write_bytes(b"weights")
        update(bundle, files={**Bundle.open(bundle).manifest.files, shared: "0" * 64})
        weights = shared.endswith("_data")
        change(bundle, "model", weights_file=shared if weights else None, parts={} if weights else {"embed": shared})
        status, reason = status_of(verify(Bundle.open(bundle)))
        assert status == "damaged" and reason.startswith(f"{shared} is changed")

    @pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "C:\\outside", "a/../../b"])
    def test_a_manifest_that_points_outside_is_refused(self, bundle: Path, name: str) -> None:
        update(bundle, files={name: "0" * 64})
        with pytest.raises(ArtifactError, match="outside the bundle"):
            verify(Bundle.open(bundle))

    @pytest.mark.parametrize("where", ["../x.onnx", "/x.onnx", "onnx/linked.onnx"])
    def test_an_artifact_outside_the_bundle_is_refused_even_without_a_checksum(self, bundle: Path, where: str) -> None:
        """Once such a file ran, and counted as verified: no checksum was asked for, and no file check looked at it."""
        good = (bundle / "onnx" / "model.onnx").read_bytes()
        (bundle.parent / "x.onnx").write_bytes(good)
        if "linked" in where:
            (bundle / where).symlink_to(bundle.parent / "x.onnx")
        change(bundle, "model", file=where, sha256=None, size_bytes=None)
        with pytest.raises(ArtifactError, match="outside the bundle"):
            verify(Bundle.open(bundle))

    def test_an_artifact_without_a_checksum_is_not_passed(self, bundle: Path) -> None:
        change(bundle, "model", sha256=None)
        found = verify(Bundle.open(bundle))
        assert found.exit_code == 2 and damage(found) == {"onnx/model.onnx": "unexpected"}
        status, reason = status_of(found)
        assert status == "damaged" and "bundle.json has no checksum of it" in reason

    def test_parts_that_are_not_listed_are_not_passed(self, bundle: Path) -> None:
        (bundle.parent / "x.onnx").write_bytes(b"weights")
        change(bundle, "model", weights_file="../x.onnx")
        with pytest.raises(ArtifactError, match="outside the bundle"):
            verify(Bundle.open(bundle))
        (bundle / "x.onnx").write_bytes(b"weights")
        change(bundle, "model", weights_file="x.onnx")
        assert status_of(verify(Bundle.open(bundle)))[0] == "damaged"

    def test_a_changed_manifest(self, bundle: Path) -> None:
        path = bundle / "bundle.json"
        path.write_text(path.read_text(encoding="utf-8").replace('"parameters": ', '"parameters": 1'), encoding="utf-8")
        with pytest.raises(ArtifactError, match=r"bundle\.json: changed since it was exported .* export the run again"):
            verify(Bundle.open(bundle))

    def test_an_older_manifest_is_not_protected_and_that_is_said(
        self, bundle: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = bundle / "bundle.json"
        assert verify(Bundle.open(bundle)).manifest_protected
        document = json.loads(path.read_text(encoding="utf-8"))
        del document["manifest_sha256"]
        path.write_text(json.dumps(document), encoding="utf-8")
        found = verify(Bundle.open(bundle))
        assert found.exit_code == 0 and not found.manifest_protected
        twice = found.model_copy(update={"artifacts": found.artifacts * 2})  # as two runtimes compute them
        print_verification(twice, Console())
        shown, artifacts = capsys.readouterr().out, len(found.artifacts)
        verified = sum(check.status == "verified" for check in found.artifacts)
        assert "bundle.json itself is not protected" in shown
        assert f"{verified} of {artifacts} artifacts verified" in " ".join(shown.split())

    def test_damaged_manifest(self, bundle: Path) -> None:
        path = bundle / "bundle.json"
        path.write_text(path.read_text(encoding="utf-8")[:-100], encoding="utf-8")
        with pytest.raises(ArtifactError, match=r"bundle\.json: damaged"):
            verify(Bundle.open(bundle))


class TestAnswers:
    def test_a_graph_without_one_of_its_weights(self, bundle: Path) -> None:
        path = bundle / "onnx" / "model.onnx"
        graph = onnx.load(path)
        del graph.graph.initializer[0]
        onnx.save(graph, path)
        approve(bundle, "model")
        found = verify(Bundle.open(bundle))
        assert damage(found) == {} and found.exit_code == 2
        status, reason = status_of(found)
        assert status == "damaged" and "cannot be opened by onnxruntime" in reason and "model.onnx" in reason

    def test_fp32_is_held_to_1e_4(self, bundle: Path) -> None:
        logits = run_golden(bundle, "onnx/model.onnx")
        for shift, expected in ((5e-5, 0), (3e-4, 3)):
            change_golden(bundle, logits=logits + np.float32(shift))
            found = verify(Bundle.open(bundle))
            assert found.exit_code == expected
        assert status_of(found)[0] == "failed" and "1e-04" in status_of(found)[1]

    def test_fp16_is_held_to_a_hundredth_of_the_spread(self, bundle: Path) -> None:
        logits = run_golden(bundle, "onnx/model.onnx")
        change(bundle, "model", precision="fp16")
        for part, expected in ((0.005, 0), (0.02, 3)):
            change_golden(bundle, logits=logits + np.float32(part * logits.std()))
            assert verify(Bundle.open(bundle)).exit_code == expected

    def test_int8_is_held_to_what_export_saw(self, bundle: Path) -> None:
        logits = run_golden(bundle, "onnx/model.onnx")
        seen = Parity(
            status="measured", n=5, max_abs_error=0.1, top1_agreement=1.0, tolerance=None, tolerance_kind="score"
        )
        change(bundle, "model", precision="int8", parity=seen)
        bar = np.float32(INT8_ERROR_FACTOR * 0.1 + 0.01 * logits.std())
        for shift, expected in ((0.98 * bar, 0), (1.1 * bar, 3)):
            change_golden(bundle, logits=logits + np.float32(shift))
            found = verify(Bundle.open(bundle))
            assert found.exit_code == expected, status_of(found)
        assert "is above" in status_of(found)[1]
        change(bundle, "model", parity=seen.model_copy(update={"max_abs_error": 100.0}))
        change_golden(bundle, logits=-logits)
        assert "agreement 0.0%" in status_of(verify(Bundle.open(bundle)))[1]
        change(bundle, "model", parity=None)
        assert status_of(verify(Bundle.open(bundle))) == (
            "failed",
            "bundle.json does not say how close it was at export",
        )

    def test_int8_may_differ_in_two_rows_of_few(self, bundle: Path) -> None:
        logits = run_golden(bundle, "onnx/model.onnx")
        seen = Parity(
            status="measured", n=5, max_abs_error=100.0, top1_agreement=1.0, tolerance=None, tolerance_kind="score"
        )
        change(bundle, "model", precision="int8", parity=seen)
        assert 2 / len(logits) > INT8_AGREEMENT_LOSS
        for other, expected in ((2, 0), (3, 3)):
            turned = logits.copy()
            turned[:other] = turned[:other, ::-1]
            change_golden(bundle, logits=turned)
            assert verify(Bundle.open(bundle)).exit_code == expected

    def test_exits_have_their_own_answers(self, bundle: Path) -> None:
        change(bundle, "model", role="exit", exit=1)
        found = verify(Bundle.open(bundle))
        assert status_of(found)[0] == "failed"
        (parity,) = [check.parity for check in found.artifacts if check.artifact == "model"]
        assert parity is not None and parity.max_abs_error == pytest.approx(1.0, abs=1e-6)
        change(bundle, "model", role="exit", exit=7)
        status, reason = status_of(verify(Bundle.open(bundle)))
        assert status == "unavailable" and "logits_exit7" in reason

    def test_trimmed_artifacts_have_their_own_golden_inputs(self, bundle: Path) -> None:
        (bundle / "trimmed").mkdir()
        (bundle / "golden.npz").rename(bundle / "trimmed" / "golden.npz")
        known = Bundle.open(bundle).manifest.files["golden.npz"]
        update(bundle, files={"trimmed/golden.npz": known})
        change(bundle, "model", trimmed=True)
        assert status_of(verify(Bundle.open(bundle)))[0] == "verified"

    def test_damaged_golden_inputs_are_no_fault_of_the_artifact(self, bundle: Path) -> None:
        path = bundle / "golden.npz"
        path.write_bytes(path.read_bytes()[:-200])
        found = verify(Bundle.open(bundle))
        assert found.exit_code == 2 and damage(found) == {"golden.npz": "changed"}
        status, reason = status_of(found)
        assert status == "unavailable" and "golden.npz" in reason

    def test_rejected_artifacts_are_not_run(self, bundle: Path) -> None:
        status, reason = status_of(verify(Bundle.open(bundle)), "other")
        assert status == "unavailable" and reason == "rejected at export: not meant to be used"

    def test_asked_for_what_cannot_be_checked(self, bundle: Path) -> None:
        assert verify(Bundle.open(bundle), "model").exit_code == 0
        assert verify(Bundle.open(bundle), "other").exit_code == 3
        with pytest.raises(InputError, match=r"--artifact absent: .* has model, other"):
            verify(Bundle.open(bundle), "absent")

    def test_engine_for_another_gpu_is_unavailable(self, bundle: Path) -> None:
        built_for = {"compute_capability": "9.9", "tensorrt": "0.1"}
        change(bundle, "other", status="built", reason=None, format="tensorrt-rtx", built_for=built_for)
        found = verify(Bundle.open(bundle))
        assert found.exit_code == 0
        status, reason = status_of(found, "other")
        assert status == "unavailable" and "9.9" in reason
        assert verify(Bundle.open(bundle), "other").exit_code == 3

    def test_engine_on_a_machine_with_another_gpu_names_both(
        self, bundle: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpu = Device(0, "Some Other GPU", "8.6")
        here = TensorRTState("tensorrt-rtx", "1.7", gpus=(gpu,))
        monkeypatch.setattr(tensorrt_state_module, "tensorrt_state", lambda name: here)
        built_for = {"compute_capability": "8.9", "tensorrt-rtx": "1.7"}
        change(bundle, "other", status="built", reason=None, format="tensorrt-rtx", built_for=built_for)
        found = verify(Bundle.open(bundle))
        assert found.exit_code == 0
        status, reason = status_of(found, "other")
        assert status == "unavailable" and "capability 8.9" in reason and "Some Other GPU with 8.6" in reason

    def test_engine_on_its_target_gets_the_parity_that_export_could_not_measure(
        self, bundle: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Target(OnnxSession):
            """Stands in for a TensorRT session, which needs the GPU."""

            rows: ClassVar[list[int]] = []

            def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
                self.rows.append(len(inputs["input_ids"]))
                return super().run(inputs)

        monkeypatch.setattr(Bundle, "cannot_run", lambda bundle, artifact, provider: None)
        monkeypatch.setattr(Bundle, "session", lambda bundle, artifact, how: Target(bundle.check(artifact)))
        unknown = Parity(status="unavailable", tolerance=1e-2, tolerance_kind="relative", reason="built without a GPU")
        shapes = dict.fromkeys(("input_ids", "attention_mask"), ((1, 1), (2, 8), (2, 24)))
        engine = Engine(builder="b", seconds=1.0, checked_by="size", graph_bytes=1, shapes=shapes)
        changes = {"format": "tensorrt-rtx", "precision": "fp16", "parity": unknown, "engine": engine}
        change(bundle, "model", **changes)
        before = (bundle / "bundle.json").read_bytes()
        found = verify(Bundle.open(bundle), "model")
        assert found.exit_code == 0 and Target.rows == [2, 2, 1]  # no more rows than the engine takes
        (check,) = found.artifacts
        assert check.parity is not None and check.parity.status == "measured" and check.parity.n == 5
        assert (bundle / "bundle.json").read_bytes() == before

    def test_a_bundle_of_which_nothing_runs_is_not_verified(self, bundle: Path) -> None:
        change(bundle, "model", status="unavailable", reason="no builder")
        assert verify(Bundle.open(bundle)).exit_code == 3


def test_command_as_json_and_as_text(bundle: Path, tmp_path: Path) -> None:
    outcome = edgeformer("verify", str(bundle), "--json", cwd=tmp_path)
    document = json.loads(outcome.out)
    assert outcome.code == 0 and document["exit_code"] == 0
    assert [check["status"] for check in document["artifacts"]] == ["verified", "unavailable"]
    assert all(check["status"] == "intact" for check in document["files"])
    path = bundle / "onnx" / "model.onnx"
    path.write_bytes(path.read_bytes()[:500])
    outcome = edgeformer("verify", str(bundle), cwd=tmp_path)
    flat = " ".join(outcome.out.split())
    assert outcome.code == 2 and "Traceback" not in outcome.err
    assert "truncated: onnx/model.onnx (500 of" in flat and "2 of 3 files intact" in flat
