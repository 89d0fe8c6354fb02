"""An import is compared with the library that the model came from; a difference refuses it or marks it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers, of the extra hf, is not installed")

import edgeformer as edgeformer_api
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.manifest import UNPROVEN, cautions
from edgeformer.bundle import Bundle
from edgeformer.data.probes import PROBE_PAIRS, PROBE_TEXTS
from edgeformer.imports.encoder import HfOptions, import_hf
from edgeformer.imports.proof import Compared, prove, prove_encoder, unproven
from edgeformer.models.pretrained.source import open_source
from edgeformer.run import Run, read_run
from tests.cli.run_cli import edgeformer
from tests.export.hf_models import RecordedProgress, make_model

LABELS = ("no", "perhaps", "yes")


def exported(run: Path) -> None:
    """Export the run as an ONNX graph in FP32."""
    edgeformer_api.Run.open(run).export()


def test_the_text_with_the_largest_difference_is_named() -> None:
    same, far, near = np.zeros(3), np.array([0.0, 0.2, 0.0]), np.array([0.0, 1e-3, 0.0])
    answers = [Compared("equal", same, same), Compared("far", same, far), Compared("near", same, near)]
    with pytest.raises(InputError, match=r"the answer to 'far' differs by 2\.0e-01 from that of lib 1.*--unproven"):
        prove("lib 1", answers, allow_difference=False)
    proof = prove("lib 1", answers, allow_difference=True)
    assert (proof.texts, proof.largest_difference) == (3, pytest.approx(0.2))
    assert proof.reason is not None and "'far'" in proof.reason


def test_nothing_compared_is_not_proven() -> None:
    assert prove("lib", [], allow_difference=False).reason is not None


@pytest.mark.parametrize("actual", [np.array([np.nan]), np.zeros(2), np.array([np.inf])])
def test_what_cannot_be_compared_differs(actual: np.ndarray) -> None:
    with pytest.raises(InputError, match="the answer to 'x' differs"):
        prove("lib", [Compared("x", np.zeros(1), actual)], allow_difference=False)


def test_a_difference_is_relative_to_large_numbers_only() -> None:
    large = np.array([1000.0])
    assert prove("lib", [Compared("x", large, large + 0.05)], allow_difference=False).reason is None
    with pytest.raises(InputError):
        prove("lib", [Compared("x", large / 1000, large / 1000 + 0.05)], allow_difference=False)


def test_the_proof_is_in_the_run_the_bundle_and_the_card(tmp_path: Path) -> None:
    make_model(tmp_path / "bert", "bert", LABELS)
    run = import_hf(str(tmp_path / "bert"), HfOptions(tmp_path / "artifacts"))
    proof = read_run(run).proof
    assert proof is not None and proof.reason is None and str(proof.library).startswith("transformers ")
    assert proof.texts >= len(PROBE_TEXTS) + len(PROBE_PAIRS) - 3  # those without a text have no answer
    assert proof.largest_difference is not None and proof.largest_difference < 1e-5
    exported(run)
    manifest = Bundle.open(run / "bundle").manifest
    assert manifest.proof == proof and UNPROVEN not in cautions(manifest)
    assert "probe texts as transformers" in (run / "bundle" / "README.md").read_text(encoding="utf-8")


def test_another_tokenizer_is_a_difference(tmp_path: Path) -> None:
    """The run reads capitals as another tokenizer does than the library's."""
    make_model(tmp_path / "bert", "bert", LABELS)
    run = Run.open(import_hf(str(tmp_path / "bert"), HfOptions(tmp_path / "artifacts")))
    file = tmp_path / "artifacts" / "bert-001" / "model" / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    document["normalizer"] = None
    file.write_text(json.dumps(document), encoding="utf-8")
    source, progress = open_source(str(tmp_path / "bert")), RecordedProgress()
    with (
        run.session() as session,
        pytest.raises(InputError, match=r"the answer to '.*' differs by .* from that of transformers"),
    ):
        prove_encoder(source, run.recipe, run.reader(), session.run, progress, max_length=None, allow_difference=False)


def test_an_unproven_import_is_marked_everywhere(tmp_path: Path) -> None:
    make_model(tmp_path / "bert", "bert", LABELS)
    run = import_hf(str(tmp_path / "bert"), HfOptions(tmp_path / "artifacts"))
    write_json(run / "run.json", read_run(run).model_copy(update={"proof": unproven("no library was there")}))
    assert UNPROVEN in cautions(read_run(run))
    exported(run)
    assert UNPROVEN in cautions(Bundle.open(run / "bundle").manifest)
    outcome = edgeformer("profile", str(run), "--device", "host", "--batch", "1", "--seq", "16", cwd=tmp_path)
    assert outcome.code in (0, 3, 4) and "the import is not proven: no library was there" in outcome.out
    report = (run / "reports" / "host.md").read_text(encoding="utf-8")
    assert UNPROVEN in report and "no library was there" in report
