"""Runs and RUN arguments: names, locations, and errors."""

import json
import re
import shutil
from pathlib import Path

import pytest

from edgeformer.api import Bundle
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.scores import read_evaluation
from edgeformer.models import load_recipe
from edgeformer.report.compare import score_note
from edgeformer.report.listing import run_records
from edgeformer.run import Location, Run, find_bundle, locate
from edgeformer.system.lock import lock_folder
from edgeformer.training.train import folder_to_resume
from tests.cli.run_cli import edgeformer, run_json
from tests.conftest import OLD_FORMAT

TRAINED_AS = {name: json.loads((OLD_FORMAT / name / "run.json").read_text(encoding="utf-8"))["run"]
              for name in ("classifier-v1", "language-v1")}  # fmt: skip


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    shutil.copytree(OLD_FORMAT / "classifier-v1", tmp_path / "artifacts" / "renamed")
    return tmp_path / "artifacts"


def test_properties_of_a_run() -> None:
    run = Run.open(OLD_FORMAT / "language-v1")
    assert (run.name, run.task.name, run.model_spec.kind) == (TRAINED_AS["language-v1"], "language-modeling", "crt")
    assert run.exits == (2, 4) and run.answers_with_losses and not run.leaks
    assert run.reader().vocabulary and run.recipe.name
    assert {row.artifact for row in read_evaluation(run.folder).rows} >= {"torch"}
    classifier = Run.open(OLD_FORMAT / "classifier-v1")
    assert classifier.exits == (1, 2) and not classifier.answers_with_losses
    assert classifier.reader().vocabulary == classifier.recipe.model.vocab_size


def test_an_unfinished_run_is_refused(artifacts: Path) -> None:
    path = artifacts / "renamed" / "run.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    command = re.escape(f"--resume --name renamed --artifacts {artifacts}")
    for status in ("interrupted", "running"):  # no process trains it
        path.write_text(json.dumps({**manifest, "status": status}), encoding="utf-8")
        message = rf"training is not finished \(status: interrupted\); .*: edgeformer train .*{command}"
        with pytest.raises(ArtifactError, match=message):
            Run.open(artifacts / "renamed").require_finished()
        assert run_records(artifacts)[0]["status"] == "interrupted"
    with lock_folder(artifacts / "renamed", "is being trained"):
        assert run_records(artifacts)[0]["status"] == "running"
        with pytest.raises(ArtifactError, match="is being trained; wait until it has finished"):
            Run.open(artifacts / "renamed").require_finished()
    shutil.rmtree(artifacts / "renamed" / "model")
    with pytest.raises(ArtifactError, match=r"has no trained model \(tokenizer\.json\)"):
        Run.open(artifacts / "renamed").reader()


def test_all_arguments_for_a_run_give_the_same_name(artifacts: Path, tmp_path: Path) -> None:
    run, bundle = artifacts / "renamed", artifacts / "renamed" / "bundle"
    shutil.copytree(bundle, tmp_path / "device")
    files = {"model_fp16.onnx": "onnx-fp16", "step_embed.onnx": "onnx-fp32-step"}
    places = {str(bundle / "onnx" / name): (run, bundle, artifact) for name, artifact in files.items()}
    places |= dict.fromkeys(("renamed", str(run), str(bundle)), (run, bundle, None))
    places[str(tmp_path / "device")] = (None, tmp_path / "device", None)
    for argument, expected in places.items():
        location = locate(argument, artifacts)
        assert (location.run, location.bundle, location.artifact) == expected
        assert location.name == TRAINED_AS["classifier-v1"]
    assert locate(None, artifacts).run == run


@pytest.mark.slow
def test_commands_agree_on_the_name_of_a_renamed_run(artifacts: Path, tmp_path: Path) -> None:
    opened = Bundle.open(artifacts / "renamed" / "bundle")
    assert opened._location == locate("renamed", artifacts)
    assert opened._location.open_bundle() is opened, "read once"
    (row,) = run_records(artifacts)
    assert locate(row["run"], artifacts).run == artifacts / "renamed"
    shutil.copytree(artifacts / "renamed" / "bundle", tmp_path / "device")
    for argument in ("artifacts/renamed", "device"):
        for command in (("predict", argument, "a fine film"), ("verify", argument)):
            assert run_json(*command, cwd=tmp_path)["run"] == TRAINED_AS["classifier-v1"]


def test_missing_runs_and_bundles_are_refused(artifacts: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no run 'renmaed': .*; did you mean 'renamed'\? runs in"):
        locate("renmaed", artifacts)
    with pytest.raises(ArtifactError, match=r"--resume: no run 'Renmaed' in .*; did you mean 'renamed'\? runs"):
        folder_to_resume(load_recipe("quickstart"), artifacts, "Renmaed")
    with pytest.raises(ArtifactError, match=r"no run 'absent': .* runs in .*artifacts: renamed"):
        locate("absent", artifacts)
    with pytest.raises(ArtifactError, match=r"no finished run in .* \(none\)"):
        locate(None, tmp_path)
    stray = tmp_path / "stray.onnx"
    stray.write_bytes(b"")
    with pytest.raises(ArtifactError, match="not in a bundle"):
        locate(str(stray), artifacts)
    unlisted = artifacts / "renamed" / "bundle" / "unlisted.onnx"
    unlisted.write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"not listed in its bundle\.json"):
        locate(str(unlisted), artifacts)
    shutil.rmtree(artifacts / "renamed" / "bundle")
    location = locate("renamed", artifacts)
    assert find_bundle(artifacts / "renamed") is None
    with pytest.raises(ArtifactError, match=r"has no bundle yet; make one: edgeformer export .*renamed"):
        location.open_bundle()
    with pytest.raises(ArtifactError, match="is a bundle without its run"):
        Location(None, tmp_path).open_run()


def test_a_list_of_runs_fits_80_columns(artifacts: Path, tmp_path: Path) -> None:
    shutil.copytree(OLD_FORMAT / "language-v1", artifacts / "language-v1-trained")
    (artifacts / "broken").mkdir()
    (artifacts / "broken" / "run.json").write_text("{", encoding="utf-8")
    outcome = edgeformer("list", "runs", "--artifacts", str(artifacts), cwd=tmp_path)
    table, separator, problem = outcome.out.partition("unreadable: ")
    lines = [line.rstrip().removesuffix(" (SYNTHETIC)") for line in table.splitlines() if "─" not in line]
    assert outcome.code == 0 and max(map(len, lines)) <= 80 and separator and "invalid JSON" in problem
    assert "accuracy" in outcome.out and "perplexity" in outcome.out


def test_scores_on_different_data_do_not_rank_runs(artifacts: Path, tmp_path: Path) -> None:
    first = artifacts / "renamed"
    shutil.copytree(first, artifacts / "same")
    shutil.copytree(first, artifacts / "other")
    path = artifacts / "other" / "run.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["run"], manifest["data"]["fingerprints"][next(iter(manifest["tests"]))] = "other", "f" * 64
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert score_note([Location(first, None), Location(artifacts / "same", None)]) is None
    outcome = edgeformer("compare", "renamed", "other", "--artifacts", str(artifacts), cwd=tmp_path)
    assert "do not compare the scores, because the test sets differ:" in outcome.out and "ffffffff" in outcome.out
    shutil.copytree(OLD_FORMAT / "language-v1", artifacts / "language")
    note = score_note([Location(first, None), Location(artifacts / "language", None)])
    assert note is not None and "the tasks differ" in note
