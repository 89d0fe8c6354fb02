"""Language models: golden.npz keeps the largest logits and the log-sum-exp, and a wrong logit shows all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeformer.bundle import Bundle
from edgeformer.inference.verify import verify
from tests.inference.golden_bundle import approve, change_golden, status_of, write_language_model


@pytest.fixture
def language_bundle(tmp_path: Path) -> Path:
    return write_language_model(tmp_path / "bundle")


def test_every_exit(language_bundle: Path) -> None:
    found = verify(Bundle.open(language_bundle))
    assert found.exit_code == 0
    assert [check.artifact for check in found.artifacts] == ["model_exit1", "model"]
    for check in found.artifacts:
        assert check.status == "verified" and check.parity is not None and check.parity.n == 21
        assert check.parity.max_abs_error is not None and check.parity.max_abs_error < 1e-5


def test_exits_that_were_swapped_with_their_checksums(language_bundle: Path) -> None:
    one, other = (language_bundle / "onnx" / name for name in ("model.onnx", "model_exit1.onnx"))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    approve(language_bundle, "model")
    approve(language_bundle, "model_exit1")
    found = verify(Bundle.open(language_bundle))
    assert found.exit_code == 3
    assert {check.status for check in found.artifacts} == {"failed"}


@pytest.mark.parametrize("array", ["top_values_exit2", "log_sum_exp_exit2"])
def test_a_wrong_logit_shows(language_bundle: Path, array: str) -> None:
    with np.load(language_bundle / "golden.npz") as golden:
        changed = golden[array].copy()
    changed[1, 3] += 1e-3
    change_golden(language_bundle, **{array: changed})
    found = verify(Bundle.open(language_bundle))
    assert status_of(found, "model")[0] == "failed" and status_of(found, "model_exit1")[0] == "verified"
    (parity,) = [check.parity for check in found.artifacts if check.artifact == "model"]
    assert parity is not None and parity.max_abs_error == pytest.approx(1e-3, rel=0.01)


def test_older_golden_inputs_are_said_to_be_old(language_bundle: Path) -> None:
    with np.load(language_bundle / "golden.npz") as golden:
        kept = {name: golden[name] for name in golden.files if "std" not in name}
    np.savez(language_bundle / "golden.npz", **kept)  # type: ignore[arg-type]
    change_golden(language_bundle)
    status, reason = status_of(verify(Bundle.open(language_bundle)), "model")
    assert status == "unavailable" and "logits_std_exit2" in reason and "export the run again" in reason
