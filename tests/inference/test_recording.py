"""What export could not run is compared and scored on its target, and a search goes by that until it is built again.

A runtime that is a stand-in for an engine's: export is told that it does not run there, its target that it does.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import ArtifactError, DataError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.report import Report
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.benchmark.search import SearchOptions
from edgeformer.bundle import Bundle
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.verify import record, verify
from edgeformer.run import Location
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks.classification import Classification
from tests.cli.run_cli import edgeformer
from tests.fakes.install import installed
from tests.inference.golden_bundle import change

ENGINE = "onnx-reference-fp32"
FAST = MeasureRules(warmup_min_s=0.01, warmup_max_s=0.3, min_s=0.02, max_s=0.5, idle_s=0.01, energy_s=0.01)


@pytest.fixture(scope="module", autouse=True)
def _stand_in() -> Iterator[None]:
    with installed("reference_runtime"), pytest.MonkeyPatch.context() as patch:
        # ONNX's own evaluator, which child processes have, takes a minute for a validation split.
        session = importlib.import_module("edgeformer_reference.session").ReferenceSession
        patch.setattr(session, "run", lambda self, inputs: OnnxSession(self._path).run(inputs))
        yield


def exported(run: Path, *, here: bool) -> ArtifactManifest:
    """Export the stand-in's artifact again; ``here``: whether it runs where that is done."""
    runtime = importlib.import_module("edgeformer_reference").ReferenceRuntime
    with pytest.MonkeyPatch.context() as patch:
        if not here:
            patch.setattr(runtime, "cannot_run", lambda self, artifact: "device: it is not here")
        bundle = export(run, ExportOptions(build=("reference",)))
    return next(artifact for artifact in bundle.artifacts if artifact.id == ENGINE)


@pytest.fixture(scope="module")
def elsewhere(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose bundle holds an engine that nobody has compared. Copy it."""
    run = Path(shutil.copytree(finished_run, tmp_path_factory.mktemp("elsewhere") / "small"))
    engine = exported(run, here=False)
    assert engine.status == "built" and engine.score is None and engine.validation is None
    assert engine.parity is not None and engine.parity.status == "unavailable"
    return run


@pytest.fixture
def run(elsewhere: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(elsewhere, tmp_path / "small"))


def searched(run: Path, least: float = 0.5) -> Report:
    options = ProfileOptions(
        batches=(1,),
        seqs=(16,),
        rules=FAST,
        threads=(1,),
        artifacts=(ENGINE,),
        search=SearchOptions({"accuracy": least}),
    )
    return profile_bundle(Location(run, run / "bundle"), load_profile("host"), options)


def test_where_it_runs_export_compares_and_scores_it_like_any_other(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "small"))
    engine = exported(run, here=True)
    graph = Bundle.open(run / "bundle").artifact("onnx-fp32")
    assert (
        engine.parity is not None and engine.parity.status == "measured" and engine.parity.provider == "onnx-reference"
    )
    assert engine.parity.max_abs_error is not None and engine.parity.max_abs_error < 1e-4
    assert engine.score == graph.score or engine.score is not None
    assert engine.validation is not None and graph.validation is not None
    assert vars(engine.validation)["accuracy"] == vars(graph.validation)["accuracy"]
    (pick,) = searched(run).search.candidates  # type: ignore[union-attr]
    assert pick.feasible and pick.scored_on is None


def test_one_that_computes_something_else_is_rejected_by_the_export(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = importlib.import_module("edgeformer_reference.session").ReferenceSession
    good = session.run
    monkeypatch.setattr(session, "run", lambda self, inputs: {n: a + 1 for n, a in good(self, inputs).items()})
    run = Path(shutil.copytree(finished_run, tmp_path / "small"))
    engine = exported(run, here=True)
    assert engine.status == "rejected" and "parity: absolute error" in str(engine.reason) and engine.file is None


def test_a_search_picks_it_once_its_target_has_scored_it(run: Path) -> None:
    before = searched(run).search
    assert before is not None and before.pick is None
    assert "never scored" in str(before.candidates[0].reason) and "verify --write" in str(before.candidates[0].reason)

    manifest = (run / "bundle" / "bundle.json").read_bytes()
    outcome = edgeformer("verify", str(run), "--write", "--json", cwd=run)
    assert outcome.code == 0, outcome.err
    (written,) = json.loads(outcome.out)["recorded"]["records"]
    assert (written["artifact"], written["status"], written["unscored"]) == (ENGINE, "verified", None)
    assert written["device"] and written["runtime"].keys() == {"onnx"} and written["validation"]["accuracy"] > 0.5
    assert (run / "bundle" / "bundle.json").read_bytes() == manifest
    assert verify(Bundle.open(run / "bundle")).exit_code == 0, "what was written is no damage"

    found = searched(run).search
    assert found is not None and found.pick == 0 and found.candidates[0].scored_on == written["device"]
    assert found.candidates[0].score == written["validation"]["accuracy"]
    assert searched(run, least=0.9999).search.pick is None  # type: ignore[union-attr]
    told = edgeformer("verify", str(run), "--write", cwd=run)
    assert f"recorded: {ENGINE} on {written['device']}: verified" in told.out and "targets.json" in told.out


def test_an_engine_that_was_built_again_is_unscored_and_the_old_record_is_named_stale(run: Path) -> None:
    bundle = Bundle.open(run / "bundle")
    record(bundle, verify(bundle))
    kept = (run / "bundle" / "targets.json").read_bytes()
    entry = exported(run, here=False)  # the same bytes: the record holds, and stays through an export
    assert (run / "bundle" / "targets.json").read_bytes() == kept and entry.validation is None
    assert searched(run).search.pick == 0  # type: ignore[union-attr]

    engine = run / "bundle" / str(entry.file)
    changed = engine.read_bytes() + b"\x7a\x01x"  # a model's unknown field: another file, the same graph
    engine.unlink()
    engine.write_bytes(changed)
    change(run / "bundle", ENGINE, sha256=sha256_of(engine), size_bytes=len(changed))
    report = searched(run)
    assert report.search is not None and report.search.pick is None
    assert any("stale" in note and "built again" in note for note in report.notes)
    outcome = edgeformer("verify", str(run), cwd=run)
    assert "stale" in outcome.out


def test_what_fails_on_its_target_is_recorded_and_never_picked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = importlib.import_module("edgeformer_reference.session").ReferenceSession
    good = session.run
    monkeypatch.setattr(session, "run", lambda self, inputs: {n: a + 1 for n, a in good(self, inputs).items()})
    bundle = Bundle.open(run / "bundle")
    found = record(bundle, verify(bundle))
    assert found.exit_code == 3 and found.recorded is not None
    assert [(one.status, one.score) for one in found.recorded.records] == [("failed", None)]
    report = searched(run)
    assert report.search is not None and report.search.pick is None
    assert "parity: absolute error" in str(report.search.candidates[0].reason)


def test_without_the_data_it_is_compared_and_said_to_be_unscored(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise DataError("reviews.tsv: no such file")

    monkeypatch.setattr(Classification, "read_set", absent)
    bundle = Bundle.open(run / "bundle")
    recorded = record(bundle, verify(bundle)).recorded
    assert recorded is not None and recorded.records[0].status == "verified" and recorded.records[0].score is not None
    assert "reviews.tsv: no such file" in str(recorded.records[0].unscored)
    found = searched(run).search
    assert found is not None and found.pick is None
    assert "it was compared, but not scored on the validation split" in str(found.candidates[0].reason)


def test_nothing_is_recorded_of_a_damaged_bundle_or_where_nothing_is_left_open(run: Path, finished_run: Path) -> None:
    complete = Bundle.open(finished_run / "bundle")
    recorded = record(complete, verify(complete)).recorded
    assert recorded is not None and recorded.file is None and "export compared every artifact" in str(recorded.reason)
    bundle = Bundle.open(run / "bundle")
    golden = run / "bundle" / "golden.npz"
    content = golden.read_bytes()
    golden.unlink()
    golden.write_bytes(content[:-9])
    with pytest.raises(InputError, match=r"is damaged \(golden.npz\); nothing was recorded"):
        record(bundle, verify(bundle))


def test_a_damaged_targets_file_is_named(run: Path) -> None:
    (run / "bundle" / "targets.json").write_text("{", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"targets\.json: damaged"):
        searched(run)
    assert edgeformer("verify", str(run), cwd=run).code == 2
