"""Regression: data with numbers, scores, rankings, limits of a score drop, and a model from training to predictions."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

import edgeformer
from edgeformer.artifacts.errors import DataError
from edgeformer.data.encoding import Encoded, decode_labels
from edgeformer.data.rows import LabelledTexts, query_numbers
from edgeformer.data.sources import Columns, load_parts
from edgeformer.data.splits import split
from edgeformer.imports.encoder import HfOptions, import_hf
from edgeformer.models import load_recipe
from edgeformer.run import Run
from edgeformer.tasks import get_task
from edgeformer.tasks.regression import RegressionData, ranking_scores, score
from edgeformer.training.train import TrainOptions, train
from tests.cli.run_cli import edgeformer as command
from tests.cli.run_cli import run_json
from tests.tasks.tiny import train_tiny

TASK: Any = get_task("regression")


def data_of(folder: Path, content: str, name: str = "a.csv", **changes: Any) -> RegressionData:
    (folder / name).write_text(content, encoding="utf-8")
    source = {"kind": "file", "path": str(folder / name), "label": "score", **changes.pop("source", {})}
    section = {"parts": {"train": [source]}, "split": "stratified", **changes}
    return RegressionData.model_validate(section, strict=False)


def test_labels_are_numbers(tmp_path: Path) -> None:
    data = data_of(tmp_path, "text,score\na,4\nb,-0.25\nc,1e3\n")
    rows = load_parts(data)["train"]
    assert rows.texts == ["a", "b", "c"] and rows.labels.tolist() == [4_000_000, -250_000, 10**9]
    assert data.label_names(-250_000) == ["-0.25"]
    for value in ("good", "nan", "1e7", ""):
        with pytest.raises(DataError, match=r"line 2: (the score .* is not a number between −1e\+06|has no label)"):
            load_parts(data_of(tmp_path, f"text,score\na,{value}\n"))
    constant = data_of(tmp_path, "text,score\n" + "".join(f"text {n},3\n" for n in range(30)))
    with pytest.raises(DataError, match="all 24 rows have the same score; there is nothing to learn"):
        split(constant, load_parts(constant))
    with pytest.raises(ValueError, match="balance: rows with numbers have no labels"):
        data_of(tmp_path, "text,score\n", balance="label")
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        data_of(tmp_path, "text,score\n", labels=["a", "b"])


def ranking_table(queries: int, documents: int) -> str:
    lines = [f"query {q},document {q} {d},{(q + d) % 3}" for q in range(queries) for d in range(documents)]
    return "\n".join(["query,document,relevance", *lines, ""])


PAIRS = {"text": "query", "text_pair": "document", "label": "relevance"}


@pytest.mark.parametrize("protocol", ["stratified", "glue-dev"])
def test_documents_of_a_query_are_in_one_set(tmp_path: Path, protocol: str) -> None:
    data = data_of(tmp_path, ranking_table(40, 5), source=PAIRS)
    if protocol == "glue-dev":
        parts = {"train": data.parts["train"], "validation": data.parts["train"]}
        data = data.model_copy(update={"split": protocol, "parts": parts})
    sets = split(data, load_parts(data))
    queries = {name: {text[0] for text in rows.texts} for name, rows in sets.items() if name != "glue-dev"}
    assert len(queries) > 1 and all(len(sets[name]) == 5 * len(queries[name]) > 0 for name in queries)
    assert sum(map(len, queries.values())) == 40


def test_rows_of_a_sample_do_not_follow_the_order_of_the_file(tmp_path: Path) -> None:
    """As labels, different numbers would each be a group of one, of which the first groups would be taken."""
    lines = "".join(f"text {n},{n}\n" for n in range(100))
    numbers = load_parts(data_of(tmp_path, f"text,score\n{lines}", source={"rows": 20}))["train"].labels // 10**6
    assert len(numbers) == 20 and numbers.max() > 80


def test_queries_are_recognised_by_repeated_first_texts() -> None:
    numbers = query_numbers([("a", "b"), ("a", "c"), ("d", "e")])
    assert numbers is not None and numbers.tolist() == [0, 0, 1]
    assert query_numbers([("a", "b"), ("c", "d"), ("c", "e"), ("f", "g"), ("h", "i")]) is None  # 2 of 5 rows
    assert query_numbers(["a", "a"]) is None and query_numbers([]) is None


def test_scores_equal_scikit_learn() -> None:
    generator = np.random.default_rng(3)
    outputs = generator.normal(size=(300, 1)).astype(np.float32)
    targets = np.round(outputs[:, 0] * 0.5 + generator.normal(size=300), 1)
    labels = np.rint(targets * 1e6).astype(np.int64)
    result = score(outputs, labels, SimpleNamespace(activation="identity"))
    predicted = outputs[:, 0].astype(np.float64)
    assert result.spearman == pytest.approx(stats.spearmanr(predicted, targets).statistic)
    assert result.pearson == pytest.approx(stats.pearsonr(predicted, targets).statistic)
    assert result.r2 == pytest.approx(metrics.r2_score(targets, predicted))
    assert result.rmse**2 == pytest.approx(metrics.mean_squared_error(targets, predicted)) == pytest.approx(result.loss)
    assert (result.ndcg, result.mrr, result.queries) == (None, None, None)
    squashed = score(outputs, labels, SimpleNamespace(activation="sigmoid"))
    assert squashed.spearman == result.spearman
    assert squashed.loss == pytest.approx(metrics.mean_squared_error(targets, 1 / (1 + np.exp(-predicted))))
    constant = score(np.zeros((3, 1)), np.array([1, 2, 3]), SimpleNamespace(activation="identity"))
    assert (constant.spearman, constant.pearson) == (0, 0)


def test_ranking_scores_equal_scikit_learn() -> None:
    generator = np.random.default_rng(4)
    scores, relevance = generator.normal(size=(30, 25)), generator.integers(0, 4, (30, 25)).astype(np.float64)
    relevance[7] = 0  # a query without a relevant document has no score
    shuffled = generator.permutation(30 * 25)
    queries = np.repeat(np.arange(30), 25)[shuffled]
    ndcg, reciprocal = ranking_scores(scores.reshape(-1)[shuffled], relevance.reshape(-1)[shuffled], queries)
    used = np.arange(30) != 7
    assert len(ndcg) == 29 and ndcg.mean() == pytest.approx(metrics.ndcg_score(relevance[used], scores[used], k=10))
    ranks = [next((n for n in range(10) if row[n] > 0), None) for row in np.take_along_axis(
        relevance[used], np.argsort(-scores[used], axis=1), axis=1)]  # fmt: skip
    assert reciprocal.tolist() == pytest.approx([0 if rank is None else 1 / (rank + 1) for rank in ranks])
    relevance = np.array([1.0, *[0.0] * 19])  # equal scores get no credit for the order of the file
    ndcg, reciprocal = ranking_scores(np.zeros(20), relevance, np.zeros(20, dtype=np.int64))
    assert (ndcg.tolist(), reciprocal.tolist()) == ([0], [0])


def test_a_score_drop_has_limits() -> None:
    labels = np.stack([np.tile([2, 0, 1, 0], 200) * 10**6, np.repeat(np.arange(200), 4)], axis=1)
    outputs = labels[:, :1] / 1e6
    data, generator = SimpleNamespace(activation="identity"), np.random.default_rng(0)
    noisy = outputs + generator.normal(scale=0.8, size=outputs.shape)
    single = labels[:, 0]
    reference, ranked_reference = score(outputs, single, data), score(outputs, labels, data)
    assert TASK.lost(reference, reference, "fp32", trimmed=False) is None
    assert TASK.lost(score(noisy, single, data), reference, "int8", trimmed=False).startswith("Spearman 0.")
    # The order is the same, the numbers are not: for a ranking that is enough.
    assert TASK.lost(score(2 * outputs, single, data), reference, "int8", trimmed=False).startswith("R² ")
    assert TASK.lost(score(2 * outputs, labels, data), ranked_reference, "int8", trimmed=False) is None
    worst = ranked_reference.model_copy(update={"ndcg": 0.97})
    assert "nDCG@10 0.9700 is 0.0300 below FP32's" in TASK.lost(worst, ranked_reference, "int8", trimmed=False)


def test_parity_counts_rows_that_keep_their_rank() -> None:
    reference = np.array([[0.0], [3.0], [1.0], [2.0]], dtype=np.float32)
    swapped = np.array([[0.0], [3.0], [2.1], [2.0]], dtype=np.float32)
    assert TASK.parity(reference, reference, "fp32", "cpu").top1_agreement == 1
    assert TASK.parity(swapped, reference, "fp32", "cpu").top1_agreement == 0.75


def test_golden_inputs_hold_whole_queries() -> None:
    texts: Any = [(f"q{n % 30}", f"d{n}") for n in range(120)]
    ids, offsets = np.arange(120, dtype=np.int32), np.arange(121, dtype=np.int64)
    labels = np.arange(120, dtype=np.int64)
    rows = decode_labels(Encoded(ids, offsets, labels, 0), RegressionData.model_construct(), texts)
    prepared: Any = SimpleNamespace(validation=rows, pad=0)
    golden = TASK.golden_inputs(prepared, SimpleNamespace(seed=1, model=SimpleNamespace(reads_types=True)))
    assert not golden["token_type_ids"].any() and golden["token_type_ids"].shape == golden["input_ids"].shape
    _, counts = np.unique(golden["labels"][:, 1], return_counts=True)
    assert golden["labels"].shape == (64, 2) and counts.tolist() == [4] * 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a trained run: queries and documents, whose relevance depends on two words of theirs."""
    folder, generator = tmp_path_factory.mktemp("relevance"), random.Random(1)
    words = ["pizza", "soup", "waiter", "cheap", "loud"]
    lines = ["query,document,relevance"]
    for number in range(80):
        query = generator.sample(words, 2)
        for place in range(5):
            document = generator.sample(words, 3)
            relevance = 2 * ("soup" in document) + ("pizza" in document)
            lines.append(f"{' '.join(query)} {number},{' '.join(document)} {place},{relevance}")
    (folder / "judged.csv").write_text("\n".join(lines), encoding="utf-8")
    data = {"parts": {"train": [{"kind": "file", "path": str(folder / "judged.csv"), **PAIRS}]}, "max_length": 20}
    return train_tiny(folder, "regression", data, epochs=10, select_by="spearman")


@pytest.mark.slow
def test_a_trained_model_is_scored_as_a_ranking_and_ranks_documents(trained: Path, tmp_path: Path) -> None:
    run = Run.open(trained)
    validation: Any = run.manifest.validation
    assert validation.n == 40 and validation.queries <= 8 and validation.spearman > 0.6 and validation.ndcg > 0.8
    assert run.manifest.data.label_rows["train"] == {}
    config = json.loads((trained / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["problem_type"] == "regression" and config["id2label"] == {"0": "score"}
    assert config["sentence_transformers"] == {"activation_fn": "torch.nn.modules.linear.Identity"}
    file = TASK.file_texts(run.data, trained.parents[1] / "judged.csv", Columns())
    assert isinstance(file, LabelledTexts) and file.texts[0][0].endswith(" 0") and len(file) == 400
    row = run_json("evaluate", str(trained), "--artifact", "torch", cwd=trained)["rows"][0]
    assert row["ndcg"] == pytest.approx(run.manifest.test.ndcg, abs=1e-6) and row["mrr"] > 0.5  # type: ignore[union-attr]
    table = command("evaluate", str(trained), "--artifact", "torch", cwd=trained)
    assert "nDCG@10" in table.out and "accuracy" not in table.out
    documents = "id,text\n7,waiter loud cheap 3\n8,pizza soup cheap 3\n9,pizza loud waiter 3\n"
    (tmp_path / "documents.csv").write_text(documents, encoding="utf-8")
    options = ("--file", "documents.csv", "--top", "2")
    ranked = run_json("predict", str(trained), "--query", "pizza soup 3", *options, cwd=tmp_path)
    documents = ranked["rankings"][0]["documents"]
    assert [(document["row"], document["values"]["id"]) for document in documents] == [(2, "8"), (3, "9")]
    assert documents[0]["score"] > documents[1]["score"]
    alone = run_json("predict", str(trained), "pizza soup 3", "--pair", "pizza soup cheap 3", cwd=tmp_path)
    assert alone["predictions"][0]["score"] == pytest.approx(documents[0]["score"], abs=1e-5)
    shown = command("predict", str(trained), "pizza soup 3", "--pair", "pizza soup cheap 3", cwd=tmp_path)
    assert "score" in shown.out and "probability" not in shown.out


@pytest.mark.slow
def test_an_imported_model_with_one_output_is_trained_further(tmp_path: Path) -> None:
    """Training starts from the imported head, and improves on it."""
    pytest.importorskip("transformers")
    from tests.export.hf_models import make_model

    make_model(tmp_path / "source", "bert", ("LABEL_0",))
    (tmp_path / "data").mkdir()
    generator = random.Random(2)
    for part, rows in (("train", 120), ("validation", 30), ("test", 30)):
        lines = [f"{generator.choice(['warm', 'cold'])} soup {part} {number}" for number in range(rows)]
        table = "".join(f"{line},{float('warm' in line)}\n" for line in lines)
        (tmp_path / "data" / f"{part}.csv").write_text("text,score\n" + table, encoding="utf-8")
    imported = import_hf(str(tmp_path / "source"), HfOptions(tmp_path, "imported", data=tmp_path / "data"))
    losses = []
    for name, rate in (("unchanged", 1e-12), ("tuned", 3e-3)):
        recipe = load_recipe(str(imported / "recipe.yaml"), [f"training.optimizer.lr={rate}", "training.batch_size=8"])
        manifest = Run.open(train(recipe, TrainOptions(tmp_path, name=name))).manifest
        assert manifest.task == "regression" and manifest.test is not None
        losses.append(manifest.test.loss)
    before = run_json("evaluate", str(imported), "--artifact", "torch", cwd=tmp_path)
    loss = next(row["loss"] for row in before["rows"] if row["split"] == "test" and row["exit"] is None)
    assert losses[0] == pytest.approx(loss, rel=1e-4) and losses[1] < losses[0] / 2


@pytest.mark.slow
def test_every_precision_is_judged(trained: Path) -> None:
    bundle = edgeformer.open(trained).export(int8=True, fp16=True)
    artifacts = {artifact.id: artifact for artifact in bundle.artifacts}
    assert {"onnx-fp32", "onnx-int8", "onnx-fp16"} <= artifacts.keys()
    full: Any = artifacts["onnx-fp32"].validation
    for artifact in artifacts.values():
        lost = TASK.lost(artifact.validation, full, artifact.precision, trimmed=False)
        assert (artifact.status == "built") == (lost is None), artifact.reason
    ranked = bundle.rank("pizza soup 3", ["waiter loud cheap 3", "pizza soup cheap 3"], 1)
    assert [(document.row, document.rank) for document in ranked] == [(2, 1)]
