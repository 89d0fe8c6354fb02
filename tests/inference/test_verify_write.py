"""``verify --write``: artifacts that export could not run are scored on their target, and a search uses these scores.

A reference runtime stands in for an engine's: export is made to believe that it does not run there.
"""

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import ArtifactError, DataError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.report import Choice, Report
from edgeformer.benchmark.choice import ChoiceOptions
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.bundle import Bundle
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.verification import Recorded, Verification
from edgeformer.inference.verify import record, verify
from edgeformer.run import Location
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks.classification import Classification
from tests.cli.run_cli import edgeformer, run_json
from tests.fakes.install import installed
from tests.inference.golden_bundle import change
from tests.measurement.measuring_child import RULES

pytestmark = pytest.mark.slow

ENGINE = "onnx-reference-fp32"


@pytest.fixture(scope="module", autouse=True)
def _reference_runtime() -> Iterator[None]:
    with installed("reference_runtime"), pytest.MonkeyPatch.context() as patch:
        # ONNX's own evaluator, which child processes use, takes a minute for a validation split.
        session = importlib.import_module("edgeformer_reference.session").ReferenceSession
        patch.setattr(session, "run", lambda self, inputs: OnnxSession(self.path).run(inputs))
        yield


def export_engine(run: Path, *, runs_on_host: bool) -> ArtifactManifest:
    """Export the reference runtime's artifact again."""
    runtime = importlib.import_module("edgeformer_reference").ReferenceRuntime
    with pytest.MonkeyPatch.context() as patch:
        if not runs_on_host:
            patch.setattr(runtime, "cannot_run", lambda self, artifact: "device: it is not here")
        bundle = export(run, ExportOptions(build=("reference",)))
    return next(artifact for artifact in bundle.artifacts if artifact.id == ENGINE)


@pytest.fixture(scope="module")
def unscored_run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose bundle holds an engine without parity and scores. Read only."""
    run = Path(shutil.copytree(finished_run, tmp_path_factory.mktemp("unscored") / "small"))
    engine = export_engine(run, runs_on_host=False)
    assert engine.status == "built" and engine.score is None and engine.validation is None
    assert engine.parity is not None and engine.parity.status == "unavailable"
    return run


@pytest.fixture
def run(unscored_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unscored_run, tmp_path / "small"))


def profile(run: Path, accuracy: float = 0.5) -> tuple[Report, Choice]:
    """Search for the fastest artifact with an accuracy; return the report and its search."""
    sizes: dict[str, Any] = {"batches": (1,), "seqs": (16,), "threads": (1,)}
    options = ProfileOptions(**sizes, rules=RULES, artifacts=(ENGINE,), choose=ChoiceOptions(accuracy))
    report = profile_bundle(Location(run, run / "bundle"), load_profile("host"), options)
    return report, report.search


def verify_and_record(run: Path) -> tuple[Verification, Recorded]:
    bundle = Bundle.open(run / "bundle")
    verification = record(bundle, verify(bundle))
    return verification, verification.recorded


def test_a_search_picks_an_engine_after_verify_write(run: Path) -> None:
    _, search = profile(run)
    reason = str(search.candidates[0].reason)
    assert search.pick is None and "it has no score" in reason and "verify --write" in reason

    manifest = (run / "bundle" / "bundle.json").read_bytes()
    (written,) = run_json("verify", str(run), "--write", cwd=run)["recorded"]["records"]
    assert (written["artifact"], written["status"], written["unscored"]) == (ENGINE, "verified", None)
    assert written["device"] and written["runtime"].keys() == {"onnx"} and written["validation"]["accuracy"] > 0.5
    assert (run / "bundle" / "bundle.json").read_bytes() == manifest
    assert verify(Bundle.open(run / "bundle")).exit_code == 0, "targets.json is not an unexpected file"

    _, search = profile(run)
    assert search.pick == 0 and search.candidates[0].scored_on == written["device"]
    assert search.candidates[0].score == written["validation"]["accuracy"]
    assert profile(run, accuracy=0.9999)[1].pick is None
    printed = edgeformer("verify", str(run), "--write", cwd=run).out
    assert f"recorded: {ENGINE} on {written['device']}: verified" in printed and "targets.json" in printed


def test_a_record_of_another_build_is_stale(run: Path) -> None:
    verify_and_record(run)
    targets = (run / "bundle" / "targets.json").read_bytes()
    entry = export_engine(run, runs_on_host=False)  # the same bytes, so the record remains valid
    assert (run / "bundle" / "targets.json").read_bytes() == targets and entry.validation is None
    assert profile(run)[1].pick == 0

    engine = run / "bundle" / str(entry.file)
    content = engine.read_bytes() + b"\x7a\x01x"  # an unknown field: another file with the same graph
    engine.unlink()
    engine.write_bytes(content)
    change(run / "bundle", ENGINE, sha256=sha256_of(engine), size_bytes=len(content))
    report, search = profile(run)
    assert search.pick is None
    assert any("is ignored" in note and "built again" in note for note in report.notes)
    assert "is ignored" in edgeformer("verify", str(run), cwd=run).out


def test_an_engine_that_fails_on_its_target_is_never_picked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = importlib.import_module("edgeformer_reference.session").ReferenceSession
    answer = session.run
    monkeypatch.setattr(session, "run", lambda self, inputs: {k: v + 1 for k, v in answer(self, inputs).items()})
    verification, recorded = verify_and_record(run)
    assert verification.exit_code == 3
    assert [(entry.status, entry.score) for entry in recorded.records] == [("failed", None)]
    _, search = profile(run)
    assert search.pick is None and "parity: absolute error" in str(search.candidates[0].reason)


def test_without_the_data_an_engine_is_compared_but_not_scored(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_set(*_: object, **__: object) -> None:
        raise DataError("reviews.tsv: no such file")

    monkeypatch.setattr(Classification, "read_set", read_set)
    (entry,) = verify_and_record(run)[1].records
    assert entry.status == "verified" and entry.score is not None
    assert "reviews.tsv: no such file" in str(entry.unscored)
    _, search = profile(run)
    assert search.pick is None
    assert "compared its outputs but did not score it on the validation split" in str(search.candidates[0].reason)


def test_nothing_is_recorded_of_complete_or_damaged_bundles(run: Path, finished_run: Path) -> None:
    _, recorded = verify_and_record(finished_run)
    assert recorded.file is None and "export already scored every artifact" in str(recorded.reason)
    targets, golden = run / "bundle" / "targets.json", run / "bundle" / "golden.npz"
    targets.write_text("{", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"targets\.json: damaged"):
        profile(run)
    targets.unlink()
    content = golden.read_bytes()
    golden.unlink()
    golden.write_bytes(content[:-9])
    with pytest.raises(InputError, match=r"golden.npz in .* is damaged, so nothing was recorded"):
        verify_and_record(run)
