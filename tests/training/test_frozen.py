"""Frozen start: vectors of an unchanged encoder are kept, a head is fitted to them, and fine-tuning starts with it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError, InterruptedRun, RecipeError
from edgeformer.artifacts.progress import SILENT
from edgeformer.data.batching import IGNORED
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.models import load_recipe
from edgeformer.models.pretrained.adapter import ADAPTER
from edgeformer.run import read_run
from edgeformer.tasks import get_task
from edgeformer.training.loop import frozen
from edgeformer.training.loop.frozen import FrozenStart, fit_logistic
from edgeformer.training.plan.plan import plan
from edgeformer.training.train import TrainOptions, train
from tests.training.runs import Messages, StopAfter, records, weights
from tests.training.test_distillation import source_overrides, write_source

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

FROZEN = ["data.parts.train.0.rows=300", "training.start=frozen", "training.epochs=0", "training.precision=fp32"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def head(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run without epochs."""
    return train(frozen_recipe(source), TrainOptions(tmp_path_factory.mktemp("artifacts"), name="head"))


def frozen_recipe(source: Path, *changes: str, **model: Any) -> Any:
    return load_recipe("quickstart", [*source_overrides(source, pooling="mean", **model), *FROZEN, *changes])


@pytest.mark.parametrize("kind", ["two classes", "three classes", "several labels"])
def test_fit_equals_scikit_learn(kind: str) -> None:
    generator = np.random.default_rng(1)
    features = generator.normal(size=(300, 8)).astype(np.float32)
    scores = features @ generator.normal(size=(8, 3)) + generator.normal(size=(300, 3))
    model = pytest.importorskip("sklearn.linear_model").LogisticRegression(C=3.0, tol=1e-8, max_iter=1000)
    classes = 2 if kind == "two classes" else 3
    if kind == "several labels":
        labels = (scores > 0).astype(np.int64)
        expected = np.stack([model.fit(features, column).decision_function(features) for column in labels.T], 1)
    else:  # rows without a label change nothing
        labels = scores[:, :classes].argmax(1)
        expected = model.fit(features, labels).decision_function(features)
        features = np.concatenate([features, 5 * np.ones((4, 8), np.float32)])
        labels = np.concatenate([labels, np.full(4, IGNORED)])
    weights = fit_logistic(features, labels, classes, 3.0).numpy()
    logits = features[:300] @ weights[:, :-1].T + weights[:, -1]
    if kind == "two classes":
        logits = logits[:, 1] - logits[:, 0]
    elif kind == "three classes":  # probabilities depend on differences only
        logits, expected = (each - each.mean(1, keepdims=True) for each in (logits, expected))
    np.testing.assert_allclose(logits, expected, atol=0.02)


def test_head_reads_normalised_vectors_of_the_unchanged_encoder(head: Path, source: Path, tmp_path: Path) -> None:
    import transformers

    manifest, recipe = read_run(head), load_recipe(str(head / "recipe.yaml"))
    assert (manifest.status, manifest.steps, manifest.best_epoch) == ("finished", 0, 0)
    assert recipe.model.normalize and recipe.training.select_by == "accuracy"  # type: ignore[attr-defined]
    (epoch,) = records(head, "epoch")
    assert epoch["val_accuracy"] == manifest.validation.accuracy  # type: ignore[union-attr]
    assert epoch["epoch"] == 0 and "train_loss" not in epoch
    stored, encoder = weights(head), transformers.AutoModel.from_pretrained(str(source))
    ids = torch.tensor([[2, 40, 50, 60, 3]])
    with torch.inference_mode():
        model = ADAPTER.build(recipe)
        model.load_state_dict(stored)
        vector = F.normalize(encoder(input_ids=ids).last_hidden_state.mean(1), dim=-1)
        expected = vector @ stored["head.out.weight"].T + stored["head.out.bias"]
        torch.testing.assert_close(model.eval()(ids), expected, atol=1e-4, rtol=1e-4)
    assert "a head fitted to vectors of the unchanged encoder" in (head / "model/README.md").read_text()


@pytest.mark.slow
def test_interruption_keeps_vectors(source: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call goes on with the vectors that exist, and ends with the same weights; a third one computes none."""
    monkeypatch.setattr(frozen, "_ROWS_AT_ONCE", 64)
    compute, pieces = FrozenStart._compute, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal pieces
        for piece in compute(*arguments):
            yield piece
            pieces += 1
            if pieces == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(FrozenStart, "_compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(frozen_recipe(source), TrainOptions(tmp_path, name="head"))
    (path,) = (tmp_path / ".cache/tokens").glob("vectors-*.npz")
    with np.load(path) as arrays:
        assert 64 < len(arrays["keys"]) <= 128 and arrays["outputs"].shape == (len(arrays["keys"]), 16)
    run = train(frozen_recipe(source), TrainOptions(tmp_path, name="head"))
    assert pieces > 4
    for name, tensor in weights(head).items():
        torch.testing.assert_close(weights(run)[name], tensor, atol=1e-3, rtol=1e-3)
    computed = pieces
    train(frozen_recipe(source), TrainOptions(tmp_path, name="again"))
    assert pieces == computed
    train(frozen_recipe(source, normalize=False), TrainOptions(tmp_path, name="other"))  # other vectors
    assert pieces > computed and len([*path.parent.glob("vectors-*.npz")]) == 2


def test_fine_tuning_keeps_the_head_if_no_epoch_is_better(source: Path, head: Path, tmp_path: Path) -> None:
    messages = Messages()
    recipe = frozen_recipe(source, "training.epochs=1", "training.optimizer.lr=30.0")
    run = train(recipe, TrainOptions(tmp_path, name="ruined"), messages)
    manifest = read_run(run)
    assert (manifest.epochs, manifest.best_epoch) == (1, 0) and manifest.steps > 0
    assert [record["epoch"] for record in records(run, "epoch")] == [0, 1]
    assert manifest.validation == read_run(head).validation
    assert messages.containing("epoch 0: validation loss") and not messages.containing("at random")


def test_interrupted_fine_tuning_is_not_fitted_again(source: Path, tmp_path: Path) -> None:
    recipe = frozen_recipe(source, "training.epochs=2", "training.encoder_rate=0.1")
    whole = train(recipe, TrainOptions(tmp_path, name="whole"))
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path, name="cut"), StopAfter(9))
    messages = Messages()
    run = train(recipe, TrainOptions(tmp_path, name="cut", resume=True), messages)
    assert not messages.containing("head fitted")
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in weights(whole).items())


@pytest.mark.slow
def test_plan_of_a_head(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no step, and its vectors must fit into memory."""
    recipe = frozen_recipe(source)
    result = plan(recipe, load_profile("host"), tmp_path)
    assert result.fits and result.breakdown.gradients == result.breakdown.optimizer == 0
    assert (result.time.status, result.time.steps) == ("estimated", 0) and 0 < result.time.low_s < 60
    assert "vectors and the head" in result.time.basis
    other = plan(recipe, load_profile("raspberry-pi-5"), tmp_path)
    assert other.time.status == "unavailable" or (other.time.low_s or 0) > 0
    with_steps = plan(frozen_recipe(source, "training.epochs=2"), load_profile("host"), tmp_path)
    assert with_steps.peak_bytes > result.peak_bytes and "steps timed" in with_steps.time.basis
    monkeypatch.setattr(frozen, "host_free_bytes", lambda: (1000, "free"))
    with pytest.raises(InputError, match="frozen start takes"):
        train(recipe, TrainOptions(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["training.start=source"], "training.epochs: 0 trains nothing"),
        (["model={kind: encoder, vocab_size: 300, hidden_size: 16, layers: 1, iterations: 2, heads: 2, ffn_size: 16, "
          "residual_scale: 0.5}"],
         "training.start: frozen fits the head of a pretrained encoder"),
        (["model.pooling=null"], "training.start: frozen needs model.pooling"),
    ],
)  # fmt: skip
def test_settings_without_meaning_are_refused(source: Path, changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        frozen_recipe(source, *changes)


@pytest.mark.slow
def test_real_encoder(data_folder: Path, minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tweets suffice for more than the largest class, in INT8 too; the run teaches a linear model."""
    monkeypatch.setenv("EDGEFORMER_CACHE", str(minilm.parents[1]))
    tweets = data_folder / "own" / "tweet_emotion_train.csv"
    if not tweets.is_file():
        pytest.skip(f"{tweets} is missing")
    data = f"data={{parts: {{train: [{{kind: file, path: {tweets}, rows: 500}}]}}, split: stratified, "
    data += "labels: [anger, joy, optimism, sadness]}"
    changes = [data, "tokenizer={kind: source, name: minilm}", "model={kind: pretrained, source: minilm}", *FROZEN[1:],
               "data.max_length=64", "data.cleaning=none"]  # fmt: skip
    recipe: Any = load_recipe("quickstart", changes)
    assert (recipe.model.source, recipe.model.pooling, recipe.model.normalize) == ("minilm", "mean", True)
    run = train(recipe, TrainOptions(tmp_path, name="head"))
    assert read_run(run).test.accuracy > 0.6  # type: ignore[union-attr]
    export(run, ExportOptions(int8=True))
    student: Any = load_recipe("linear_sst2", [data, f"training.teacher={run}"])
    assert len(get_task(student.task).rows.prepare(student, tmp_path / "cache", SILENT).train) > 300
    assert read_run(train(student, TrainOptions(tmp_path, name="student"))).status == "finished"
