"""Token classification: span F1, and a model from training to spans in texts of any length."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pyarrow import parquet
from seqeval.metrics import classification_report, f1_score, precision_score, recall_score

import edgeformer
from edgeformer.artifacts.data_config import parse_tag
from edgeformer.artifacts.errors import RecipeError
from edgeformer.bundle import Bundle
from edgeformer.data.rows import LabelledTexts, tag_runs
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.predict import predict
from edgeformer.models import load_recipe
from edgeformer.run import Run, locate
from edgeformer.tasks import get_task
from edgeformer.tasks.token_classification import SpansPrediction, score
from tests.cli.run_cli import edgeformer as command
from tests.data.test_spans import data_of
from tests.personal_data import LABELS, sentences, write_jsonl

GIVEN = {name: [{"kind": "file", "path": "a.jsonl"}] for name in ("train", "validation", "test")}
TASK = get_task("token-classification")
RECIPE = {
    "name": "letters",
    "task": "token-classification",
    "data": {
        "parts": {"train": [{"kind": "file", "path": "letters.jsonl"}]}, "split": "stratified", "labels": [*LABELS],
        "max_length": 24,
    },
    "tokenizer": {"kind": "trained", "algorithm": "wordpiece-cased"},
    "model": {
        "kind": "encoder", "vocab_size": 800, "hidden_size": 48, "layers": 1, "iterations": 2, "heads": 4,
        "ffn_size": 96, "residual_scale": 0.5,
    },
    "training": {
        "epochs": 6, "batch_size": 16, "optimizer": {"lr": 5e-3}, "schedule": {"kind": "one-cycle"}, "select_by": "f1",
    },
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["BIO", "BIOES"])
def test_span_f1_is_that_of_seqeval(scheme: str) -> None:
    """On random tags, most of which are no valid sequence, and on half-right ones."""
    data, generator = data_of("a.jsonl", ("LOC", "ORG", "PER"), scheme=scheme), np.random.default_rng(0)
    for share in (0.0, 0.5, 0.9):
        lengths = generator.integers(1, 12, 200)
        texts = np.repeat(np.arange(200), lengths)
        targets = generator.integers(0, len(data.classes), lengths.sum())
        predicted = np.where(generator.random(len(targets)) < share, targets, generator.permutation(targets))
        measured = score(np.eye(len(data.classes))[predicted], np.stack([targets, texts], axis=1), data)
        right, answers = (
            [[data.classes[number] for number in classes[texts == text]] for text in range(200)]
            for classes in (targets, predicted)
        )
        figures: dict[str, Any] = classification_report(right, answers, output_dict=True, zero_division=0)
        assert measured.f1 == pytest.approx(f1_score(right, answers))
        assert measured.precision == pytest.approx(precision_score(right, answers))
        assert measured.recall == pytest.approx(recall_score(right, answers))
        assert measured.macro_f1 == pytest.approx(figures["macro avg"]["f1-score"])
        assert measured.label_f1 == pytest.approx({label: figures[label]["f1-score"] for label in data.labels})
        assert measured.n == sum(figures[label]["support"] for label in data.labels)


def test_spans_of_tags() -> None:
    tags = [*map(parse_tag, ["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-PER", "S-PER", "E-PER", "U-LOC"])]
    assert tag_runs(tags) == [
        ("PER", 0, 2), ("PER", 2, 3), ("LOC", 4, 5), ("PER", 5, 6), ("PER", 6, 7), ("PER", 7, 8), ("LOC", 8, 9),
    ]  # fmt: skip
    assert parse_tag("PER") == ("I", "PER") and parse_tag("B-A-b") == ("B", "A-b") and parse_tag("X-A") == ("I", "X-A")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream": True, "split": "given", "parts": GIVEN}, "stream, label_values: are not possible with labelled"),
        ({"balance": "label"}, "a text with several spans counts for each"),
        ({"tags": ["B-PER", "I-PER"]}, "one of them O"),
        ({"tags": ["O", "B-PER"]}, "labels must be those of labels, LOC, PER"),
        ({"parts": {"train": [{"kind": "file", "path": "a", "text_pair": "b"}]}}, "text_pair: is not for texts with"),
        ({"parts": {"train": [{"kind": "file", "path": "a", "format": "csv"}]}}, "conll"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_of("a.jsonl", **changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of letters with some missed labels, exported in three precisions."""
    folder = tmp_path_factory.mktemp("letters")
    write_jsonl(folder / "letters.jsonl", [*sentences(300, missed=0.04), *sentences(80, seed=1, each=5, missed=0.04)])
    (folder / "letters.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    trained = edgeformer.train(folder / "letters.yaml", artifacts=folder / "artifacts")
    trained.export(fp16=True, int8=True, vocab_trim=True, joining=False)
    return Path(trained.folder)


@pytest.mark.slow
def test_the_score_survives_fp16_int8_and_trimming(run: Path) -> None:
    """Span F1 stays that of FP32, within three of the spans of 138 texts."""
    bundle = Bundle.open(run / "bundle")
    scored = evaluate(locate(str(run), run.parent), EvaluateOptions(artifact="all")).rows
    rows = {row.artifact: row for row in scored if row.exit is None}
    assert Run.open(run).manifest.validation.f1 > 0.8  # type: ignore[union-attr]
    for precision in ("fp32", "fp16", "int8"):
        artifact = bundle.artifact(f"onnx-{precision}")
        assert artifact.status == "built" and artifact.parity is not None and artifact.validation is not None
        golden = bundle.golden().arrays
        assert artifact.parity.n == (golden["targets"] >= 0).sum() < golden["attention_mask"].sum()
        assert abs(rows[f"onnx-{precision}"].f1 - rows["torch"].f1) <= 0.015  # type: ignore[operator]
    assert json.loads((run / "bundle" / "config.json").read_text())["id2label"]["1"] == "B-ADDRESS"
    report = json.loads(command("verify", str(run), "--json", cwd=run).out)
    assert {check["status"] for check in report["artifacts"]} == {"verified"}
    trimmed = bundle.artifact("onnx-int8-trim")
    assert trimmed.status == "built" and trimmed.validation is not None and trimmed.vocabulary is not None


@pytest.mark.slow
def test_spans_of_long_texts(run: Path) -> None:
    """Windows make the answers of the sentences of a text, each where it is in the text; and no span twice."""
    texts: list[Any] = [" ".join(map(str, sentences(12, seed))) for seed in range(5)]
    parts: list[Any] = [str(text) for seed in range(5) for text in sentences(12, seed)]
    _, answers = predict(locate(str(run), run.parent), [*texts, *parts], "onnx-fp32")
    same = total = 0
    for index, text in enumerate(texts):
        answer = answers[index]
        assert isinstance(answer, SpansPrediction)
        for earlier, later in zip(answer.spans, answer.spans[1:], strict=False):
            assert earlier.end <= later.start
        assert all(text[span.start : span.end] == span.text for span in answer.spans)
        start, expected = 0, []
        for part, single in zip(parts[12 * index :][:12], answers[5 + 12 * index :][:12], strict=True):
            expected += [(start + span.start, start + span.end, span.label) for span in single.spans]  # type: ignore[attr-defined]
            start += len(part) + 1
        whole = {(span.start, span.end, span.label) for span in answer.spans}
        same, total = same + len(whole & {*expected}), total + len(whole | {*expected})
    assert same / total > 0.7  # a sentence is read with others around it


def test_files_are_answered_and_scored(run: Path, tmp_path: Path) -> None:
    texts = [str(text) for text in sentences(30, seed=5)]
    rows = [{"text": text, "number": number} for number, text in enumerate([*texts, ""])]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    expected = [answer.as_dict() for answer in predict(locate(str(run), run.parent), texts, "onnx-fp32")[1]]
    for name in ("out.jsonl", "out.csv", "out.parquet"):
        assert command("predict", str(run), "--file", "in.jsonl", "--output", name, cwd=tmp_path).code == 3
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["spans"] for row in written[:-1]] == [row["spans"] for row in expected]
    assert written[-1]["error"] == "the text is empty" and written[3]["number"] == 3
    table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["spans"] for row in table[:-1]] == [row["spans"] for row in expected] and table[-1]["spans"] is None
    result = command("predict", str(run), texts[0], "", cwd=tmp_path)
    assert result.code == 3 and "characters" in result.out and "the text is empty" in result.out
    write_jsonl(tmp_path / "other.jsonl", labelled := sentences(40, seed=8))
    options = EvaluateOptions("onnx-fp32", data=tmp_path / "other.jsonl")
    (scored, *_) = evaluate(locate(str(run), run.parent), options).rows
    assert scored.n == sum(len(text.spans) for text in labelled) and scored.split == "other.jsonl"
    columns = [f"{word} O" for word in ["Der", "Termin", "ist", "am", "Montag"]]
    (tmp_path / "other.conll").write_text("\n".join([*columns, "Ada B-PERSON", "", "Bob B-PERSON"]), encoding="utf-8")
    result = command("evaluate", str(run), "--artifact", "onnx-fp32", "--data", "other.conll", cwd=tmp_path)
    assert result.code == 0 and "spans" in result.out


def test_the_gate_compares_spans_per_text(run: Path) -> None:
    """Figures of the texts' windows add up to F1 on whole texts."""
    bundle = Bundle.open(run / "bundle")
    data: Any = bundle.data
    texts = LabelledTexts.unlabelled(sentences(60, seed=3, each=4))
    rows, reader = TASK.encode_rows(data, bundle.reader(), texts), bundle.reader()
    numbers = np.random.default_rng(0).permutation(len(rows))
    batch = TASK.batch(rows, numbers, reader.pad)
    with bundle.session(bundle.artifact("onnx-fp32")) as session:
        outputs = session.run(batch)
    answers = np.empty((len(rows), 3))
    answers[numbers] = TASK.row_answers(outputs, batch, data)
    meter = TASK.meter(data=data)
    meter.add(outputs, batch)
    figures = TASK.row_figures(answers, rows, data)
    assert len(figures) == 60 < len(rows)
    assert TASK.metric_of(figures) == pytest.approx(meter.score().f1, abs=0.02)


@pytest.mark.slow
def test_every_exit_answers_for_tokens(run: Path) -> None:
    bundle = edgeformer.Run.open(run).export(exits="all", joining=False)
    for name in ("onnx-fp32-exit1", "onnx-fp32-step"):
        parity = bundle.manifest.artifacts[[artifact.id for artifact in bundle.manifest.artifacts].index(name)].parity
        assert parity is not None and parity.max_abs_error is not None and parity.max_abs_error < 1e-4
    rows = evaluate(locate(str(run), run.parent), EvaluateOptions("onnx-fp32-step")).rows
    assert [row.exit for row in rows] == [None, 1]


def test_a_recipe_names_what_does_not_fit(tmp_path: Path) -> None:
    recipe = {**RECIPE, "model": {**RECIPE["model"], "kind": "crt"}}  # type: ignore[dict-item]
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    message = r"model\.kind must be one of 'encoder', 'pretrained' for token-classification"
    with pytest.raises(RecipeError, match=message):
        load_recipe(str(tmp_path / "a.yaml"))
