"""Scores and predictions of artifacts, from a run and from a bundle alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import ClassVar

import pytest

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.progress import Silent
from edgeformer.bundle import Bundle, seal
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.predict import opened, predict
from edgeformer.run import locate, read_run


def test_artifacts_score_what_training_reported(finished_run: Path) -> None:
    location = locate(str(finished_run), finished_run.parent)
    found = evaluate(location, EvaluateOptions(artifact="all"))
    rows = {row.artifact: row for row in found.rows if row.exit is None}
    assert set(rows) == {"onnx-fp32", "onnx-fp16", "torch"}
    test = read_run(finished_run).test
    assert test is not None
    for row in rows.values():
        assert row.split == "random-split" and row.n == 300
        assert row.ms_per_sample is not None and row.ms_per_sample > 0
    assert rows["torch"].accuracy == rows["onnx-fp32"].accuracy == test.accuracy
    assert rows["onnx-fp32"].loss == pytest.approx(test.loss, abs=1e-5)
    assert rows["onnx-fp16"].loss == pytest.approx(test.loss, abs=1e-2)
    kept = json.loads((finished_run / "evaluation.json").read_text(encoding="utf-8"))["rows"]
    assert {"onnx-fp32", "onnx-fp16", "torch"} <= {row["artifact"] for row in kept}


def test_bundle_alone_is_enough(finished_run: Path, tmp_path: Path) -> None:
    """The synthetic data is generated again from the manifest; a labelled file works too."""
    shutil.copytree(finished_run / "bundle", tmp_path / "device")
    location = locate(str(tmp_path / "device"), tmp_path)
    assert location.run is None
    test = read_run(finished_run).test
    assert test is not None
    assert evaluate(location, EvaluateOptions(artifact="onnx-fp32")).rows[0].accuracy == test.accuracy
    file = tmp_path / "reviews.tsv"
    file.write_text("label\ttext\npositive\twonderful\nnegative\tterrible\n", encoding="utf-8")
    row = evaluate(location, EvaluateOptions(artifact="onnx-fp32", data=file)).rows[0]
    assert (row.split, row.n) == ("reviews.tsv", 2)


def test_changed_data_are_refused(finished_run: Path, tmp_path: Path) -> None:
    """Cut anew, training rows would land in the test set."""
    bundle = tmp_path / "device"
    shutil.copytree(finished_run / "bundle", bundle)
    manifest = Bundle.open(bundle).manifest
    document = manifest.model_dump(mode="json")
    document["data"]["parts"]["train"][0]["rows"] += 1
    seal(bundle, type(manifest).model_validate_json(json.dumps(document), strict=False))
    with pytest.raises(InputError, match="not the one of this model's training"):
        evaluate(locate(str(bundle), tmp_path), EvaluateOptions(artifact="onnx-fp32"))


def test_artifact_file_as_run_argument(finished_run: Path) -> None:
    location = locate(str(finished_run / "bundle" / "onnx" / "model_fp16.onnx"), finished_run.parent)
    assert [row.artifact for row in evaluate(location, EvaluateOptions()).rows] == ["onnx-fp16"]


def test_unknown_artifact_and_split(finished_run: Path) -> None:
    location = locate(str(finished_run), finished_run.parent)
    with pytest.raises(InputError, match="onnx-fp32, onnx-fp16, torch"):
        evaluate(location, EvaluateOptions(artifact="onnx-int8"))
    with pytest.raises(InputError, match="--split 'tset'"):
        evaluate(location, EvaluateOptions(split="tset"))


def test_truncated_graph_is_refused(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run / "bundle", tmp_path / "device")
    graph = tmp_path / "device" / "onnx" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1000])
    with pytest.raises(ArtifactError, match=r"model\.onnx"):
        evaluate(locate(str(tmp_path / "device"), tmp_path), EvaluateOptions())


def test_what_was_scored_is_kept_when_a_later_artifact_fails(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    (run / "evaluation.json").unlink(missing_ok=True)
    graph = run / "bundle" / "onnx" / "model_fp16.onnx"
    graph.write_bytes(graph.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="model_fp16"):
        evaluate(locate(str(run), tmp_path), EvaluateOptions(artifact="all"))
    kept = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["rows"]
    assert {row["artifact"] for row in kept} == {"onnx-fp32"}


def test_predictions(finished_run: Path) -> None:
    location = locate(str(finished_run), finished_run.parent)
    artifact, found = predict(location, ["Wonderful!!! <br /> I loved it", "terrible, awful, boring " * 40])
    assert artifact == "onnx-fp32"
    assert [p.truncated for p in found] == [False, True]
    for prediction in found:
        assert prediction.label == max(prediction.probabilities, key=lambda k: prediction.probabilities[k])
        assert prediction.probability == max(prediction.probabilities.values())
        assert sum(prediction.probabilities.values()) == pytest.approx(1.0)


def test_predictions_do_not_depend_on_their_neighbours(finished_run: Path) -> None:
    location = locate(str(finished_run), finished_run.parent)
    texts = ["good", "the food was not good at all", "a very long and quite friendly evening with fine music"]
    together = predict(location, texts)[1]
    for text, prediction in zip(texts, together, strict=True):
        alone = predict(location, [text])[1][0]
        assert alone.probability == pytest.approx(prediction.probability, abs=1e-5)


def test_no_text(finished_run: Path) -> None:
    with pytest.raises(InputError, match="no text given"):
        predict(locate(str(finished_run), finished_run.parent), [])


def test_the_runs_own_weights_are_computed_by_torch_as_asked_and_that_is_said(finished_run: Path) -> None:
    torch = pytest.importorskip("torch")

    class Told(Silent):
        lines: ClassVar[list[str]] = []

        def message(self, text: str) -> None:
            self.lines.append(text)

    location = locate(str(finished_run), finished_run.parent)
    kept = (finished_run / "evaluation.json").read_bytes()
    row = evaluate(location, EvaluateOptions("torch", runtime="torch-cpu"), Told()).rows[0]
    assert (row.artifact, row.provider) == ("torch", "torch-cpu")
    assert Told.lines == ["torch: the run's own weights are computed by torch-cpu"]
    assert (finished_run / "evaluation.json").read_bytes() == kept, "of a named runtime nothing is kept"
    assert predict(location, ["a fine film"], "torch", runtime="torch-cpu") == predict(
        location, ["a fine film"], "torch"
    )
    with opened(location, "torch", runtime="torch-cpu") as model:
        assert [*model.notes()] == Told.lines
    for runtime, message in (("torch-cuda", "torch sees no CUDA card"), ("openvino", "opens none of torch")):
        if runtime != "torch-cuda" or not torch.cuda.is_available():
            with pytest.raises(InputError, match=f"--runtime {runtime}: {message}"):
                predict(location, ["a fine film"], "torch", runtime=runtime)
