"""Scores of a language model: of its own weights at every exit, of its graphs, from a run and from a bundle alone."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeformer.artifacts.data_config import FileTokenizer
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.scores import EvaluationRow
from edgeformer.data.batching import text_batch
from edgeformer.data.language import encode_text_file, prepare_text_set
from edgeformer.data.tokenization import load_language_tokenizer
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.predict import predict
from edgeformer.models import load_recipe
from edgeformer.models.weights import load_model
from edgeformer.run import locate
from edgeformer.runtimes.onnxruntime.decode import StepSession
from edgeformer.tasks import language_modeling
from edgeformer.tasks.early_exit import SWEEP
from edgeformer.tasks.language_modeling import LanguageRecipe
from edgeformer.tasks.scoring import cut_batches
from tests.export.language_run import (
    EXIT,
    LOOPS,
    SEQUENCE_LENGTH,
    WORDS,
    exported_language_run,
    language_recipe,
    write_language_run,
)

THRESHOLD = 0.018  # of 300 words that are all about as likely


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_language_run(tmp_path_factory)


def recipe_of(run: Path) -> LanguageRecipe:
    recipe = load_recipe(str(run / "recipe.yaml"))
    assert isinstance(recipe, LanguageRecipe)
    return recipe


def rows_of(run: Path, **options: object) -> dict[tuple[str, int | None], EvaluationRow]:
    found = evaluate(locate(str(run), run.parent), EvaluateOptions(**options)).rows  # type: ignore[arg-type]
    return {(row.artifact, row.exit): row for row in found}


def losses_in_torch(run: Path, mode: str, loop: int) -> tuple[float, int]:
    """Mean loss and tokens of the test set, one row at a time, by torch's own cross-entropy."""
    recipe = recipe_of(run)
    config = recipe.data.model_copy(update={"mode": mode})
    file = FileTokenizer(kind="file", path=str(run / "model" / "tokenizer.json"))
    tokenizer = load_language_tokenizer(file, vocab_size=WORDS, training_texts=None)
    rows = prepare_text_set(config, tokenizer, None, "test")
    model = load_model(run)
    total, count = 0.0, 0
    with torch.inference_mode():
        for number in range(len(rows)):
            batch = {k: torch.from_numpy(v) for k, v in text_batch(rows, np.array([number]), 0).items()}
            state = model(batch["input_ids"], batch.get("positions"))[loop]
            logits = model.head_of(loop)(state)[0].double()
            total += float(torch.nn.functional.cross_entropy(logits, batch["targets"][0], reduction="sum"))
            count += batch["targets"].numel()
    return total / count, count


def test_weights_are_scored_at_every_exit_on_the_rows_that_they_were_trained_on(run: Path) -> None:
    found = rows_of(run, artifact="torch")
    assert list(found) == [("torch", None), ("torch", EXIT)]
    for (_, exit_), row in found.items():
        loss, count = losses_in_torch(run, "packed", exit_ or LOOPS)
        assert (row.split, row.n, row.leaks) == ("reviews", count, False)
        assert row.loss == pytest.approx(loss, abs=1e-5)
        assert row.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
        assert row.ms_per_sample is None, "the time of all exits is nobody's"


def test_a_graph_is_scored_paragraph_by_paragraph(run: Path) -> None:
    """It takes no positions, so packed rows would mix documents."""
    (row,) = rows_of(run, artifact="onnx-fp32").values()
    loss, count = losses_in_torch(run, "paragraphs", LOOPS)
    assert (row.artifact, row.exit, row.split, row.n) == ("onnx-fp32", None, "reviews", count)
    assert row.loss == pytest.approx(loss, abs=1e-5)
    assert row.ms_per_sample is not None and row.ms_per_sample > 0
    assert row.provider == "CPUExecutionProvider" and row.batch is not None


def test_all_artifacts_are_kept_beside_each_other(run: Path) -> None:
    found = rows_of(run, artifact="all", split="validation")
    graphs = {(f"onnx-{p}{form}", None) for p in ("fp32", "int8", "fp16") for form in ("", "-step")}
    exits = {(f"onnx-{p}-{form}", EXIT) for p in ("fp32", "int8", "fp16") for form in (f"exit{EXIT}", "step")}
    assert set(found) == {*graphs, *exits, ("torch", None), ("torch", EXIT)}
    assert found["onnx-fp16", None].loss == pytest.approx(found["onnx-fp32", None].loss, abs=1e-2)
    kept = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["rows"]
    assert {("torch", EXIT, "validation"), ("onnx-fp32", None, "validation")} <= {
        (row["artifact"], row["exit"], row["split"]) for row in kept
    }


def test_bundle_alone_scores_a_text_file_with_words(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "bundle", tmp_path / "device")
    text = tmp_path / "text.txt"
    lines = ["the battery lasts long and the screen is bright", "a short one that is long enough to be counted"]
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    location = locate(str(tmp_path / "device"), tmp_path)
    (row,) = evaluate(location, EvaluateOptions(artifact="onnx-fp32", data=text)).rows
    tokenizer = load_language_tokenizer(
        FileTokenizer(kind="file", path=str(tmp_path / "device" / "tokenizer.json")),
        vocab_size=WORDS,
        training_texts=None,
    )
    rows = encode_text_file(text, recipe_of(run).data.model_copy(update={"mode": "paragraphs"}), tokenizer)
    assert rows.truncated == 0
    assert (row.split, row.n) == ("text.txt", rows.tokens)
    words = sum(len(line.split()) + 1 for line in lines)
    assert row.word_perplexity == pytest.approx(math.exp(row.loss * row.n / words), rel=1e-6)


def test_a_cut_paragraph_leaves_no_word_perplexity(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("word after word " * SEQUENCE_LENGTH + "\n", encoding="utf-8")
    location = locate(str(run), run.parent)
    (graph,) = evaluate(location, EvaluateOptions(artifact="onnx-fp32", data=text)).rows
    assert (graph.n, graph.word_perplexity) == (SEQUENCE_LENGTH, None)
    torch_row = evaluate(location, EvaluateOptions(artifact="torch", data=text)).rows[0]
    assert torch_row.n > SEQUENCE_LENGTH and torch_row.word_perplexity is not None, "packed rows cut nothing"


def test_scores_do_not_depend_on_the_batch(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (together,) = rows_of(run, artifact="onnx-fp32", split="validation").values()
    monkeypatch.setattr(language_modeling, "LOGITS_BYTES", 4 * WORDS * 100)
    (apart,) = rows_of(run, artifact="onnx-fp32", split="validation").values()
    assert together.batch is not None and apart.batch is not None and apart.batch < together.batch
    assert apart.loss == pytest.approx(together.loss, abs=1e-6)
    assert apart.n == together.n


def test_batches_hold_as_many_rows_as_fit_and_every_row_once() -> None:
    lengths = np.array([10, 40, 3, 100, 25, 3, 3])
    batches = cut_batches(lengths, max_rows=3, tokens=50)
    assert [lengths[batch].tolist() for batch in batches] == [[100], [40], [25, 10], [3, 3, 3]]
    assert sorted(np.concatenate(batches).tolist()) == list(range(7))


def test_a_step_artifact_is_scored_at_every_exit(run: Path) -> None:
    """Each exit's loss is that of the graph that was cut there, and of torch."""
    found = rows_of(run, artifact="all")
    assert found["onnx-fp32-step", None].loss == pytest.approx(found["onnx-fp32", None].loss, abs=1e-5)
    at_exit = found["onnx-fp32-step", EXIT]
    assert at_exit.loss == pytest.approx(found[f"onnx-fp32-exit{EXIT}", EXIT].loss, abs=1e-5)
    assert at_exit.loss == pytest.approx(losses_in_torch(run, "paragraphs", EXIT)[0], abs=1e-5)
    assert at_exit.loss != pytest.approx(found["onnx-fp32", None].loss, abs=1e-3), "else the exits tell nothing apart"
    assert at_exit.ms_per_sample is None, "the time of all exits is nobody's"
    assert found["onnx-fp32-step", None].ms_per_sample


@pytest.mark.parametrize("artifact", ["torch", "onnx-fp32-step"])
def test_early_exit_is_swept(run: Path, artifact: str) -> None:
    options = EvaluateOptions(artifact=artifact, threshold=THRESHOLD)
    found = evaluate(locate(str(run), run.parent), options)
    rules = [row.rule for row in found.early_exit]
    known = {"confidence", "cosine"} if artifact == "torch" else {"confidence"}  # graphs do not give their states
    assert set(rules) == known and rules == sorted(rules)
    paper, *swept = (row for row in found.early_exit if row.rule == "confidence")
    assert paper.threshold is None and paper.thresholds == {str(EXIT): pytest.approx(0.92)}
    by_threshold = {row.threshold: row for row in swept}
    assert list(by_threshold) == sorted({*SWEEP, THRESHOLD})
    rows = {row.exit: row for row in found.rows}
    for row in found.early_exit:
        assert row.n == rows[None].n and sum(row.share.values()) == pytest.approx(1)
        assert row.mean_loops == pytest.approx(sum(int(loop) * share for loop, share in row.share.items()))
        assert row.perplexity == pytest.approx(math.exp(row.loss)) and row.accuracy is None
    # 300 words are about as likely: nobody reaches 0.999, and some THRESHOLD.
    assert by_threshold[0.999].loss == pytest.approx(rows[None].loss, abs=1e-6)
    assert by_threshold[0.999].mean_loops == LOOPS
    assert EXIT < by_threshold[THRESHOLD].mean_loops < LOOPS
    kept = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["early_exit"]
    kept = [row["threshold"] for row in kept if (row["artifact"], row["split"]) == (artifact, "reviews")]
    assert kept == [row.threshold for row in found.early_exit]


def test_early_exit_is_what_leaving_token_by_token_gives(run: Path) -> None:
    """Against torch's logits, one row and one token at a time."""
    options = EvaluateOptions(artifact="onnx-fp32-step", threshold=THRESHOLD)
    (found,) = (row for row in evaluate(locate(str(run), run.parent), options).early_exit if row.threshold == THRESHOLD)
    recipe, model = recipe_of(run), load_model(run)
    config = recipe.data.model_copy(update={"mode": "paragraphs"})
    file = FileTokenizer(kind="file", path=str(run / "model" / "tokenizer.json"))
    rows = prepare_text_set(config, load_language_tokenizer(file, vocab_size=WORDS, training_texts=None), None, "test")
    total, loops, count = 0.0, 0, 0
    for number in range(len(rows)):
        batch = {k: torch.from_numpy(v) for k, v in text_batch(rows, np.array([number]), 0).items()}
        with torch.inference_mode():
            first, last = (model.logits(batch["input_ids"], loop)[0].double().log_softmax(-1) for loop in (EXIT, LOOPS))
        for place, target in enumerate(batch["targets"][0].tolist()):
            leaves = float(first[place].max().exp()) >= THRESHOLD
            total -= float((first if leaves else last)[place, target])
            loops += EXIT if leaves else LOOPS
            count += 1
    assert found.n == count
    assert found.loss == pytest.approx(total / count, abs=1e-4)
    assert found.mean_loops == pytest.approx(loops / count, abs=2 / count), "rounding may move a token at the edge"


def test_a_model_goes_over_the_set_once_for_all_thresholds(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = StepSession.run

    def counted(session: StepSession, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = real(session, inputs)
        calls.append("exits" if "logits" not in outputs else "last")
        return outputs

    monkeypatch.setattr(StepSession, "run", counted)
    found = evaluate(locate(str(run), run.parent), EvaluateOptions(artifact="onnx-fp32-step", batch=1000))
    assert len(found.early_exit) > 10
    assert calls == ["last", "last", "exits"], "to warm up, timed, and at every exit"


def test_a_threshold_needs_exits(run: Path) -> None:
    with pytest.raises(InputError, match=r"onnx-fp32 cannot leave early; .*edgeformer export tiny --exit all"):
        rows_of(run, artifact="onnx-fp32", threshold=0.5)
    with pytest.raises(InputError, match="a probability is in 0…1"):
        EvaluateOptions(threshold=1.5)


def test_a_leak_is_on_every_row(tmp_path: Path) -> None:
    leaking = write_language_run(tmp_path / "leak", language_recipe(mode="paragraphs", causal=False))
    assert all(row.leaks for row in rows_of(leaking).values())


def test_unknown_split_and_artifact(run: Path) -> None:
    with pytest.raises(InputError, match="validation, reviews"):
        rows_of(run, split="tset")
    with pytest.raises(InputError, match=r"onnx-fp32, .*onnx-fp16.*, torch"):
        rows_of(run, artifact="onnx-int4")


def test_predict_says_what_to_use_instead(run: Path) -> None:
    with pytest.raises(InputError, match=r"tiny: is a language model.*edgeformer generate"):
        predict(locate(str(run), run.parent), ["a text"])
