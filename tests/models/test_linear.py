"""Linear models: the fit is scikit-learn's optimum, look-ups are exact, and a run goes through every command."""

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError, InterruptedRun
from edgeformer.artifacts.progress import SILENT
from edgeformer.bundle import Bundle
from edgeformer.data.batching import collate
from edgeformer.data.rows import Row
from edgeformer.data.tokenization import train_tokenizer
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.verify import verify
from edgeformer.models import load_recipe, read_run_recipe
from edgeformer.models.linear import LinearConfig
from edgeformer.models.linear.adapter import ADAPTER, _to_torch
from edgeformer.models.linear.fitting import minimize, squared_hinge
from edgeformer.models.linear.model import PRIMES, LinearClassifier, NgramTable
from edgeformer.models.weights import load_model
from edgeformer.run import locate, read_run
from edgeformer.training.loop.objective import Objective
from edgeformer.training.plan.plan import plan
from edgeformer.training.train import TrainOptions, train
from tests.data.conftest import write_jsonl
from tests.training.runs import Messages, StopAfter, records

EXACT = 2**24
"""Up to here FP32 has every integer."""


def linear_recipe(*changes: str, rows: int = 3000) -> Any:
    data = f"data={{parts: {{train: [{{kind: synthetic-reviews, rows: {rows}, seed: 3}}]}}, split: random-split, "
    return load_recipe("linear_sst2", [data + "labels: [negative, positive], max_length: 32}", *changes])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(linear_recipe(), TrainOptions(tmp_path_factory.mktemp("artifacts"), name="lin"))


def test_fit_is_the_optimum_of_scikit_learn(tmp_path: Path) -> None:
    """On n-grams counted in plain Python. With a minimum count of 1 all training n-grams are stored."""
    changes = ("model.minimum_count=1", "training.tolerance=1e-12", "training.regularization=2.0")
    objective = Objective(linear_recipe(*changes), tmp_path, SILENT)
    model: Any = objective.model
    ADAPTER.fit(model, objective.recipe, objective.prepared, 2000, lambda loss: True)
    train_rows: Any = objective.prepared.train
    counts = []
    for row in map(train_rows.row, range(len(train_rows))):
        ids = row.tolist()
        counts.append(Counter([(token,) for token in ids] + [*itertools.pairwise(ids)]))
    columns = {ngram: number for number, ngram in enumerate({ngram for row in counts for ngram in row})}
    table: NDArray[np.float64] = np.zeros((len(counts), len(columns)))
    for number, row in enumerate(counts):
        for ngram, count in row.items():
            table[number, columns[ngram]] = count
    idf = np.log((1 + len(table)) / (1 + (table > 0).sum(axis=0))) + 1
    idf /= np.sqrt((table @ idf**2).sum() / table.sum())
    features = table * idf / np.sqrt(table.sum(axis=1, keepdims=True))
    labels = train_rows.labels
    expected = LogisticRegression(C=2.0, max_iter=5000, tol=1e-8).fit(features, labels).decision_function(features)
    batch = collate(train_rows, np.arange(len(train_rows)), objective.prepared.pad)
    with torch.inference_mode():
        logits = model(*(torch.from_numpy(batch[name]) for name in ("input_ids", "attention_mask"))).numpy()
    assert np.abs(logits[:, 1] - logits[:, 0] - expected).max() < 2e-3 * np.abs(expected).max()
    assert model.slots >= len(columns)


def test_look_up_finds_stored_ngrams_only() -> None:
    draw = np.random.default_rng(0)
    pairs = torch.from_numpy(np.unique(draw.integers(1, 60_000, (5000, 2)), axis=0))
    residues, _ = LinearClassifier(LinearConfig(kind="linear", ngrams=(2, 2)), 2, 1).residues(pairs, None)
    table = NgramTable.build(residues[:, 0].numpy().astype(np.int64))
    assert len(table.fingerprints) <= 1.2 * len(pairs)
    model = LinearClassifier(LinearConfig(kind="linear", ngrams=(2, 2), slots=len(table.fingerprints)), 2, 1)
    model.fill(table)
    slots, is_stored = model.look_up(*model.residues(pairs, None))
    # Of every row of two tokens, the pair at the first position; the second one starts with the last token.
    assert is_stored[:, 0].all() and len(slots[:, 0].unique()) == len(pairs) and not is_stored[:, 1].any()
    others = torch.from_numpy(draw.integers(60_000, 250_000, (20_000, 2)))
    assert 1 / 400 < float(model.look_up(*model.residues(others, None))[1][:, 0].float().mean()) < 1 / 180
    assert int(table.displacements.max()) * (PRIMES[0] - 1) + model.slots < EXACT
    assert max(residues.amax(dim=(0, 1)).tolist()) < max(PRIMES) and PRIMES[0] * PRIMES[1] < EXACT


def test_padding_and_other_rows_change_nothing(run: Path) -> None:
    model: Any = load_model(run)
    ids = torch.randint(1, 300, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    assert torch.equal(model(ids, mask)[1:2], model(ids[1:2, :4]))


@pytest.mark.slow
def test_run_goes_through_every_command(run: Path) -> None:
    manifest, recipe = read_run(run), read_run_recipe(run)
    assert manifest.status == "finished" and manifest.steps == len(records(run, "step")) > 5
    assert manifest.memory is not None and manifest.memory.measured_peak_bytes
    assert manifest.parameters == recipe.model.slots + 2  # type: ignore[attr-defined]
    assert manifest.test is not None and manifest.test.accuracy > 0.75  # type: ignore[union-attr]
    assert "fitted in" in (run / "model/README.md").read_text(encoding="utf-8")
    bundle = export(run, ExportOptions(int8=True, int4=True, keep_going=True))
    entries = {entry.id: entry for entry in bundle.artifacts}
    assert [entries[f"onnx-{name}"].reason for name in ("fp32", "int8")] == [None] * 2
    assert "INT4" in str(entries["onnx-int4"].reason) and "--int8" in str(entries["onnx-int4"].reason)
    sizes = {name: entries[f"onnx-{name}"].size_bytes or 0 for name in ("fp32", "int8")}
    assert sizes["fp32"] - sizes["int8"] > 2.5 * manifest.parameters
    graph = onnx.load(str(run / "bundle" / str(entries["onnx-int8"].file)))
    assert {node.domain for node in graph.graph.node} == {""}
    location = locate("lin", run.parent)
    assert verify(Bundle.open(location.require_bundle())).exit_code == 0
    (row, *_) = evaluate(location, EvaluateOptions(split="test")).rows
    assert row.accuracy == manifest.test.accuracy  # type: ignore[union-attr]
    with pytest.raises(InputError, match="--vocab-trim: the vocabulary of this model cannot be trimmed"):
        export(run, ExportOptions(vocab_trim=True))


def test_plan_says_what_a_fit_takes() -> None:
    result = plan(linear_recipe(), load_profile("raspberry-pi-5"))
    assert result.fits and result.time.status == "estimated" and "10 iterations" in result.time.basis
    unread = plan(load_recipe("linear_sst2"), load_profile("host")).time
    assert unread.status == "unavailable" and "hub" in unread.basis
    assert plan(linear_recipe(rows=9000), load_profile("host")).peak_bytes > result.peak_bytes


def characters_recipe(*changes: str) -> Any:
    settings = ("data.max_length=512", "tokenizer.algorithm=characters", "model.ngrams=[1, 6]", "training={}")
    return linear_recipe(*settings, *changes)


def test_planned_time_is_that_of_the_fit(tmp_path: Path) -> None:
    recipe = characters_recipe()
    predicted = plan(recipe, load_profile("host")).time
    started = time.perf_counter()
    train(recipe, TrainOptions(tmp_path, name="timed"))
    assert predicted.low_s / 3 < time.perf_counter() - started < 3 * predicted.high_s


@pytest.mark.slow
def test_values_are_chosen_and_a_graph_of_characters_answers_alike(tmp_path: Path) -> None:
    folder = train(characters_recipe(), TrainOptions(tmp_path, name="letters"))
    manifest = read_run(folder)
    assert manifest.chosen is not None and manifest.chosen["regularization"] in (1, 4, 16, 64, 256)
    assert manifest.chosen["svm_share"] in (0, 0.5, 1)
    assert read_run_recipe(folder).training.regularization == "auto"  # type: ignore[attr-defined]
    export(folder, ExportOptions(int8=True))
    assert verify(Bundle.open(folder / "bundle")).exit_code == 0
    location = locate("letters", tmp_path)
    scores = {row.artifact: row.accuracy for row in evaluate(location, EvaluateOptions(split="test")).rows}  # type: ignore[union-attr]
    assert scores["onnx-fp32"] == manifest.test.accuracy  # type: ignore[union-attr]


def test_long_ngrams_stay_in_a_word_and_the_most_frequent_are_kept(tmp_path: Path) -> None:
    objective = Objective(characters_recipe("model.ngrams=[5, 5]"), tmp_path, SILENT)
    model: Any = objective.model
    tokenizer = objective.prepared.tokenizer
    ids = torch.tensor([tokenizer.encode("the food is good").ids])
    _, is_stored = model.look_up(*model.residues(ids, None))
    texts = ["".join(tokenizer.id_to_token(number) for number in ids[0, start : start + 5]) for start in range(14)]
    stored = {text for text, each in zip(texts, is_stored[0].tolist(), strict=False) if each}
    assert not [text for text in stored if "▁" in text[1:-1]] and any("▁" in text[1:-1] for text in texts)
    wide = Objective(characters_recipe("model.ngrams=[5, 5]", "model.crossing=5"), tmp_path, SILENT)
    assert wide.model.slots > model.slots  # type: ignore[operator]
    limited = Objective(characters_recipe("model.max_ngrams=1000"), tmp_path, SILENT)
    assert 1000 <= limited.model.slots <= 1200  # type: ignore[operator]
    by_weights = Objective(characters_recipe("model.max_weights=500"), tmp_path, SILENT)
    assert 500 <= by_weights.model.slots <= 600  # type: ignore[operator]


@pytest.mark.parametrize("classes", (2, 3))
def test_support_vector_machine_is_that_of_scikit_learn(classes: int) -> None:
    draw = np.random.default_rng(classes)
    labels = draw.choice(classes, 300, p=[0.7, 0.3] if classes == 2 else [0.6, 0.3, 0.1])
    features = (draw.standard_normal((300, 8)) + np.eye(8)[labels]).astype(np.float32)
    table = sparse.csr_array(features)
    zeros = torch.zeros(8, classes), torch.zeros(classes)
    loss = squared_hinge(torch.eye(classes)[torch.from_numpy(labels)])
    data = _to_torch(table), _to_torch(sparse.csr_array(table.T))
    weights, bias = minimize(data, loss, 1 / 300, zeros, 1e-9, lambda value: True)
    logits = features @ weights.numpy() + bias.numpy()
    # Its intercept is part of the penalty; the factor makes that part small.
    reference = LinearSVC(class_weight="balanced", intercept_scaling=1000, tol=1e-6, max_iter=100_000)
    expected = reference.fit(features, labels).decision_function(features)
    found = (logits[:, 1] - logits[:, 0]) / 2 if classes == 2 else logits
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


def test_a_stated_share_of_the_support_vector_machine_is_taken(tmp_path: Path) -> None:
    objective = Objective(characters_recipe("training.svm_share=1"), tmp_path, SILENT)
    fit = ADAPTER.fit(objective.model, objective.recipe, objective.prepared, 500, lambda loss: True)
    assert fit["svm_share"] == 1
    stated = Objective(characters_recipe("training.regularization=4"), tmp_path, SILENT)
    fit = ADAPTER.fit(stated.model, stated.recipe, stated.prepared, 500, lambda loss: True)
    assert fit == {"regularization": 4, "svm_share": 0}


def test_interrupted_fit_begins_again(tmp_path: Path) -> None:
    recipe = linear_recipe()
    with pytest.raises(InterruptedRun, match="--resume"):
        train(recipe, TrainOptions(tmp_path, name="cut"), StopAfter(3))
    messages = Messages()
    folder = train(recipe, TrainOptions(tmp_path, name="cut", resume=True), messages)
    assert messages.containing("begins again") and read_run(folder).status == "finished"
    assert records(folder, "step")[0]["step"] == 1
    short = train(recipe, TrainOptions(tmp_path, name="short", max_steps=4))
    assert read_run(short).steps == 4 and "--max-steps 4" in str(read_run(short).reason)


def test_a_fit_on_a_card_is_refused() -> None:
    with pytest.raises(InputError, match="--accelerator cuda: linear_sst2 is fitted on the CPU"):
        train(linear_recipe(), TrainOptions(Path("unused"), accelerator="cuda"))


def test_several_labels(tmp_path: Path) -> None:
    """Binary cross-entropy of every label, whose optimum has the labels' rates where texts say nothing."""
    rows = [Row(f"word{n % 3} filler", ["a", "b", "a+b"][n % 3], "") for n in range(120)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    data = {"parts": {"train": [{"kind": "file", "path": str(path)}]}, "split": "random-split", "labels": ["a", "b"],
            "label_separator": "+"}  # fmt: skip
    recipe = load_recipe("linear_sst2", ["task=multi-label-classification", f"data={data}"])
    folder = train(recipe, TrainOptions(tmp_path / "artifacts", name="tags"))
    assert read_run(folder).test.f1 == 1.0  # type: ignore[union-attr]


def test_words_are_whole_and_characters_are_lowered() -> None:
    tokenizer = train_tokenizer("words", 100, ["Schöne Grüße, 漢字!", "schöne grüße 😡 can't", "can't 😡 stop"], [])
    assert tokenizer.encode("SCHÖNE can't, 😡 schön").tokens == ["[CLS]", "schöne", "can", "t", "😡", "[UNK]", "[SEP]"]
    assert {"漢", "stop"}.isdisjoint(tokenizer.get_vocab())  # seen once
    tokenizer = train_tokenizer("characters", 100, ["Straße  in\tUlm", "ΣΑΣ 😡"], [])
    assert tokenizer.encode(" ULM\n\u00a0ΣΑΣ x").tokens == [*"▁ulm▁σασ▁", "[UNK]", "▁"]
    assert tokenizer.decode(tokenizer.encode("Ulm in").ids) == " ulm in "
    assert len(train_tokenizer("characters", 9, ["abcabd"], []).get_vocab()) == 9


def test_prepared_is_unchanged(tmp_path: Path) -> None:
    """Counting twice gives the same table."""
    objective = Objective(linear_recipe(), tmp_path, SILENT)
    first, second = (ADAPTER.sized(objective.recipe, objective.prepared)[1].state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
