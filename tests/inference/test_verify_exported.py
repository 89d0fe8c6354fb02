"""What export writes is verified: every role of artifact, of both kinds of model."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeformer.bundle import Bundle
from edgeformer.inference.verify import verify
from tests.export.language_run import exported_language_run


@pytest.fixture(scope="module")
def language_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_language_run(tmp_path_factory) / "bundle"


def test_classifier(finished_run: Path) -> None:
    found = verify(Bundle.open(finished_run / "bundle"))
    assert found.exit_code == 0 and found.damaged == ()
    assert {check.artifact for check in found.artifacts} >= {"onnx-fp32", "onnx-fp16"}
    assert {check.status for check in found.artifacts} == {"verified"}


def test_language_model(language_bundle: Path) -> None:
    found, built = verify(Bundle.open(language_bundle)), {}
    assert found.damaged == ()
    for artifact in Bundle.open(language_bundle).manifest.artifacts:
        built[artifact.id] = artifact.status == "built"
    checks = {check.artifact: check for check in found.artifacts}
    assert {id_: check.status for id_, check in checks.items()} == {
        id_: "verified" if well else "unavailable" for id_, well in built.items()
    }, [(check.artifact, check.reason) for check in found.artifacts if check.reason]
    roles = {check.role for check in found.artifacts if check.status == "verified"}
    assert roles == {"full", "exit", "step", "decode"}


def test_the_largest_logits_show_what_all_of_them_show(language_bundle: Path) -> None:
    checks = {check.artifact: check.parity for check in verify(Bundle.open(language_bundle)).artifacts}
    for artifact in Bundle.open(language_bundle).manifest.artifacts:
        here, there = checks[artifact.id], artifact.parity
        if artifact.status != "built" or artifact.role == "decode":
            continue  # export decodes half of every window at once, verify all of it token by token
        assert here is not None and there is not None
        assert here.max_abs_error is not None and there.max_abs_error is not None
        # Of 32 logits the error cannot be larger than of all; the log-sum-exp has a rounding of its own.
        assert here.max_abs_error <= there.max_abs_error + 1e-5
        assert here.top1_agreement == there.top1_agreement
        assert here.n == there.n
