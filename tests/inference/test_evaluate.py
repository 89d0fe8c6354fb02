"""``evaluate``: scores of classifiers and language models, at every exit and with early exit."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeformer.artifacts.data_config import FileTokenizer
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.scores import Evaluation, EvaluationRow
from edgeformer.bundle import Bundle, seal
from edgeformer.data.batching import TextRows, text_batch
from edgeformer.data.encoding import PlainText
from edgeformer.data.language import encode_paragraphs, paragraphs
from edgeformer.data.tokenization import load_language_tokenizer
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.predict import open_predictor, predict
from edgeformer.models import load_recipe
from edgeformer.models.weights import load_model
from edgeformer.run import Location, locate, read_run
from edgeformer.tasks.early_exit import SWEEP
from tests.export.language_run import EXIT, LOOPS, WORDS, exported_language_run
from tests.training.runs import Messages

THRESHOLD = 0.018
"""Some tokens of the language model reach it: all 300 words are about equally likely."""


def at(folder: Path) -> Location:
    return locate(str(folder), folder.parent)


def run_evaluate(folder: Path, **options: Any) -> Evaluation:
    return evaluate(at(folder), EvaluateOptions(**options))


def rows_of(folder: Path, **options: Any) -> dict[tuple[str, int | None], EvaluationRow]:
    """Return (artifact, exit) → row."""
    return {(row.artifact, row.exit): row for row in run_evaluate(folder, **options).rows}


def saved_rows(run: Path, key: str = "rows") -> list[dict[str, Any]]:
    return json.loads((run / "evaluation.json").read_text(encoding="utf-8"))[key]


def test_artifacts_score_what_training_reported(finished_run: Path) -> None:
    rows = {row.artifact: row for row in run_evaluate(finished_run, artifact="all").rows if row.exit is None}
    assert set(rows) == {"onnx-fp32", "onnx-fp16", "torch"}
    test = read_run(finished_run).test
    for row in rows.values():
        assert row.split == "random-split" and row.n == 300
        assert row.ms_per_sample is not None and row.ms_per_sample > 0
    assert rows["torch"].accuracy == rows["onnx-fp32"].accuracy == test.accuracy
    assert rows["onnx-fp32"].loss == pytest.approx(test.loss, abs=1e-5)
    assert rows["onnx-fp16"].loss == pytest.approx(test.loss, abs=1e-2)
    assert {"onnx-fp32", "onnx-fp16", "torch"} <= {row["artifact"] for row in saved_rows(finished_run)}


def test_a_bundle_without_its_run_is_scored(finished_run: Path, tmp_path: Path) -> None:
    """Synthetic data is generated again from the manifest; a labelled file works, too."""
    bundle = Path(shutil.copytree(finished_run / "bundle", tmp_path / "device"))
    test = read_run(finished_run).test
    assert at(bundle).run is None
    assert run_evaluate(bundle, artifact="onnx-fp32").rows[0].accuracy == test.accuracy
    file = tmp_path / "reviews.tsv"
    file.write_text("label\ttext\npositive\twonderful\nnegative\tterrible\n", encoding="utf-8")
    row = run_evaluate(bundle, artifact="onnx-fp32", data=file).rows[0]
    assert (row.split, row.n) == ("reviews.tsv", 2)


def test_changed_data_are_refused(finished_run: Path, tmp_path: Path) -> None:
    """Another split of changed data would put training rows into the test set."""
    bundle = Path(shutil.copytree(finished_run / "bundle", tmp_path / "device"))
    manifest = Bundle.open(bundle).manifest
    document = manifest.model_dump(mode="json")
    document["data"]["parts"]["train"][0]["rows"] += 1
    seal(bundle, type(manifest).model_validate_json(json.dumps(document), strict=False))
    with pytest.raises(InputError, match="differs from the one of this model's training"):
        run_evaluate(bundle, artifact="onnx-fp32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"artifact": "onnx-int8"}, "onnx-fp32, onnx-fp16, torch"),
        ({"split": "tset"}, "--split 'tset'"),
        ({"artifact": "onnx-fp32", "threshold": 0.5}, "onnx-fp32 cannot exit early; .* --exit all"),
        ({"threshold": 1.5}, "must be a probability from 0 to 1"),
        ({"label": "stars"}, "add --data FILE"),
    ],
)
def test_bad_options(finished_run: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_evaluate(finished_run, **options)


def test_scores_are_saved_before_a_later_artifact_fails(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    (run / "evaluation.json").unlink(missing_ok=True)
    graph = run / "bundle" / "onnx" / "model_fp16.onnx"
    graph.write_bytes(graph.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="model_fp16"):
        run_evaluate(run, artifact="all")
    assert {row["artifact"] for row in saved_rows(run)} == {"onnx-fp32"}


def test_a_named_runtime_computes_the_runs_own_weights(finished_run: Path) -> None:
    messages, location = Messages(), at(finished_run)
    saved = (finished_run / "evaluation.json").read_bytes()
    row = evaluate(location, EvaluateOptions("torch", runtime="torch-cpu"), messages).rows[0]
    assert (row.artifact, row.provider) == ("torch", "torch-cpu")
    assert messages.lines == ["torch: the weights of the run, computed by torch-cpu"]
    assert (finished_run / "evaluation.json").read_bytes() == saved, "scores of a named runtime are not saved"
    texts = ["a fine film"]
    assert predict(location, texts, "torch", runtime="torch-cpu") == predict(location, texts, "torch")
    with open_predictor(location, "torch", runtime="torch-cpu") as model:
        assert [*model.notes()] == messages.lines
    for runtime, message in (("torch-cuda", "torch finds no CUDA card"), ("openvino", "opens none of torch")):
        if runtime != "torch-cuda" or not torch.cuda.is_available():
            with pytest.raises(InputError, match=f"--runtime {runtime}: {message}"):
                predict(location, texts, "torch", runtime=runtime)


@pytest.fixture(scope="module")
def language_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_language_run(tmp_path_factory)


def read_test_set(run: Path, mode: str) -> TextRows:
    """Read the test set with the run's tokenizer, packed or by paragraphs."""
    recipe = load_recipe(str(run / "recipe.yaml"))
    file = FileTokenizer(kind="file", path=str(run / "model" / "tokenizer.json"))
    tokenizer = load_language_tokenizer(file, vocab_size=WORDS, training_texts=None)
    texts = [*paragraphs(recipe.data, next(name for name in recipe.data.parts if name not in ("train", "validation")))]
    return encode_paragraphs(texts, recipe.data.model_copy(update={"mode": mode}), PlainText(tokenizer))


def single_rows(rows: TextRows) -> Iterator[dict[str, torch.Tensor]]:
    for number in range(len(rows)):
        yield {name: torch.from_numpy(array) for name, array in text_batch(rows, np.array([number]), 0).items()}


def torch_loss(run: Path, mode: str, loop: int) -> tuple[float, int]:
    """Return mean loss and tokens of the test set, computed row by row with torch's cross-entropy."""
    model, total, count = load_model(run), 0.0, 0
    with torch.inference_mode():
        for batch in single_rows(read_test_set(run, mode)):
            state = model(batch["input_ids"], batch.get("positions"))[loop]
            logits = model.head_of(loop)(state)[0].double()
            total += float(torch.nn.functional.cross_entropy(logits, batch["targets"][0], reduction="sum"))
            count += batch["targets"].numel()
    return total / count, count


def test_weights_are_scored_at_every_exit_on_packed_rows(language_run: Path) -> None:
    rows = rows_of(language_run, artifact="torch")
    assert list(rows) == [("torch", None), ("torch", EXIT)]
    for (_, loop), row in rows.items():
        loss, count = torch_loss(language_run, "packed", loop or LOOPS)
        assert (row.split, row.n, row.leaks) == ("reviews", count, False)
        assert row.loss == pytest.approx(loss, abs=1e-5)
        assert row.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
        assert row.ms_per_sample is None, "a pass with all exits is not timed"


def test_graphs_are_scored_by_paragraphs_and_saved_together(language_run: Path) -> None:
    """Graphs take no positions, so packed rows would mix documents."""
    rows = rows_of(language_run, artifact="all")
    graphs = {(f"onnx-{p}{form}", None) for p in ("fp32", "int8") for form in ("", "-step")}
    exits = {(f"onnx-{p}-{form}", EXIT) for p in ("fp32", "int8") for form in (f"exit{EXIT}", "step")}
    assert set(rows) == {*graphs, *exits, ("torch", None), ("torch", EXIT)}
    full, step, step_exit = rows["onnx-fp32", None], rows["onnx-fp32-step", None], rows["onnx-fp32-step", EXIT]
    loss, count = torch_loss(language_run, "paragraphs", LOOPS)
    assert (full.split, full.n, full.provider) == ("reviews", count, "CPUExecutionProvider")
    assert full.loss == pytest.approx(loss, abs=1e-5)
    assert full.ms_per_sample is not None and full.ms_per_sample > 0 and full.batch is not None
    assert step.loss == pytest.approx(full.loss, abs=1e-5) and step.ms_per_sample
    assert step_exit.loss == pytest.approx(rows[f"onnx-fp32-exit{EXIT}", EXIT].loss, abs=1e-5)
    assert step_exit.loss == pytest.approx(torch_loss(language_run, "paragraphs", EXIT)[0], abs=1e-5)
    assert step_exit.loss != pytest.approx(full.loss, abs=1e-3), "else the exits do not differ"
    assert step_exit.ms_per_sample is None
    saved = {(row["artifact"], row["exit"]) for row in saved_rows(language_run) if row["split"] == "reviews"}
    assert saved == set(rows)


@pytest.mark.parametrize("artifact", ["torch", "onnx-fp32-step"])
def test_early_exit_is_swept(language_run: Path, artifact: str) -> None:
    evaluation = run_evaluate(language_run, artifact=artifact, threshold=THRESHOLD)
    rules = [row.rule for row in evaluation.early_exit]
    # Graphs do not return their hidden states, which the cosine rule compares.
    assert rules == sorted(rules) and set(rules) == {"confidence"} | ({"cosine"} if artifact == "torch" else set())
    schedule, *swept = (row for row in evaluation.early_exit if row.rule == "confidence")
    assert schedule.threshold is None and schedule.thresholds == {str(EXIT): pytest.approx(0.92)}
    by_threshold = {row.threshold: row for row in swept}
    assert list(by_threshold) == sorted({*SWEEP, THRESHOLD})
    full = next(row for row in evaluation.rows if row.exit is None)
    for row in evaluation.early_exit:
        assert row.n == full.n and sum(row.share.values()) == pytest.approx(1)
        assert row.mean_loops == pytest.approx(sum(int(loop) * share for loop, share in row.share.items()))
        assert row.perplexity == pytest.approx(math.exp(row.loss)) and row.accuracy is None
    assert by_threshold[0.999].loss == pytest.approx(full.loss, abs=1e-6)
    assert by_threshold[0.999].mean_loops == LOOPS
    assert EXIT < by_threshold[THRESHOLD].mean_loops < LOOPS
    saved = [row for row in saved_rows(language_run, "early_exit") if row["artifact"] == artifact]
    thresholds = [row["threshold"] for row in saved if row["split"] == "reviews"]
    assert thresholds == [row.threshold for row in evaluation.early_exit]


def test_early_exit_equals_leaving_token_by_token(language_run: Path) -> None:
    """Compared with torch's logits, one token at a time."""
    evaluation = run_evaluate(language_run, artifact="onnx-fp32-step", threshold=THRESHOLD)
    (row,) = (row for row in evaluation.early_exit if row.threshold == THRESHOLD)
    model, total, loops, count = load_model(language_run), 0.0, 0, 0
    for batch in single_rows(read_test_set(language_run, "paragraphs")):
        with torch.inference_mode():
            first, last = (model.logits(batch["input_ids"], loop)[0].double().log_softmax(-1) for loop in (EXIT, LOOPS))
        for place, target in enumerate(batch["targets"][0].tolist()):
            leaves = float(first[place].max().exp()) >= THRESHOLD
            total -= float((first if leaves else last)[place, target])
            loops += EXIT if leaves else LOOPS
            count += 1
    assert row.n == count
    assert row.loss == pytest.approx(total / count, abs=1e-4)
    assert row.mean_loops == pytest.approx(loops / count, abs=2 / count), "rounding may move a token at the threshold"
