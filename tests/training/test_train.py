"""Training from a recipe: contents and folder of a run, identical resumptions, refusals, signals, kills."""

import json
import math
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from edgeformer.artifacts.data_config import FileSource, FileTokenizer
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import ArtifactError, DataError, EdgeformerError, InputError, InterruptedRun
from edgeformer.models import load_recipe
from edgeformer.models.encoder.model import SwiGLU
from edgeformer.report.sentences import text_lengths
from edgeformer.run import read_run
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.tasks.language_modeling import LanguageRecipe, LanguageScore
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL_LANGUAGE
from tests.torture.children import OFTEN, TINY, ends, kill, start
from tests.training.runs import AfterSteps, StopAfter, assert_equal_weights, assert_same_run, records, states, weights


def language_recipe(*overrides: str) -> Any:
    return load_recipe("crt_mini", [*SMALL_LANGUAGE, *overrides])


class TestClassifier:
    def test_contents_of_a_run(self, tiny_run: Path, tiny_recipe: ClassificationRecipe) -> None:
        manifest, epochs = read_run(tiny_run), records(tiny_run, "epoch")
        assert manifest.status == "finished" and manifest.data.synthetic
        assert manifest.data.rows == {"train": 320, "validation": 40, "random-split": 40} and manifest.steps == 8
        assert manifest.test == manifest.tests["random-split"] and manifest.tests["random-split"].n == 40
        assert load_recipe(str(tiny_run / "recipe.yaml")) == tiny_recipe
        config = json.loads((tiny_run / "model" / "config.json").read_text(encoding="utf-8"))
        assert config["id2label"] == {"0": "negative", "1": "positive"}
        assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]

    def test_bf16(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every step computes in bf16 and every validation in fp32, also after a resumption."""
        formats: set[tuple[bool, torch.dtype]] = set()
        forward = SwiGLU.forward

        def record_format(self: SwiGLU, x: torch.Tensor) -> torch.Tensor:
            y = forward(self, x)
            formats.add((self.training, y.dtype))
            return y

        monkeypatch.setattr(SwiGLU, "forward", record_format)
        recipe = load_recipe("quickstart", [*TINY, "training.precision=bf16"])
        expected = train(recipe, TrainOptions(tmp_path, name="expected", accelerator="cpu"))
        messages = StopAfter(5)
        with pytest.raises(InterruptedRun):
            train(recipe, TrainOptions(tmp_path, name="run", accelerator="cpu"), messages)
        run = train(recipe, TrainOptions(tmp_path, name="run", resume=True, accelerator="cpu"))
        assert_same_run(run, expected)
        (line,) = messages.containing("train: texts of ")
        assert line.startswith(f"train: texts of {text_lengths(read_run(run).data.text_words['train'], 'words')}; ")
        assert " tokens, half of them at most " in line and f"% of batches of {recipe.training.batch_size} is" in line
        assert read_run(run).precision == "bf16"
        assert formats == {(True, torch.bfloat16), (False, torch.float32)}


class TestLanguageModel:
    def test_contents_of_a_run(self, fresh_language_run: Path, small_language_recipe: LanguageRecipe) -> None:
        manifest = read_run(fresh_language_run)
        assert (manifest.status, manifest.task, manifest.leaks) == ("finished", "language-modeling", False)
        assert manifest.causality is not None and not manifest.causality.leaks
        test = manifest.test
        assert isinstance(test, LanguageScore) and list(test.exits) == ["2", "4"]
        assert test.perplexity == pytest.approx(math.exp(test.loss)) == pytest.approx(test.exits["4"].perplexity)
        assert test.early_exit is not None and sum(test.early_exit.share.values()) == pytest.approx(1)
        assert test.word_perplexity == pytest.approx(math.exp(test.loss * test.n / test.words))
        assert manifest.data.tokens["test"] == test.n
        assert load_recipe(str(fresh_language_run / "recipe.yaml")) == small_language_recipe
        config = json.loads((fresh_language_run / "model" / "config.json").read_text(encoding="utf-8"))
        assert (config["model_type"], config["leaks"]) == ("edgeformer-crt", False)
        evaluation = json.loads((fresh_language_run / "evaluation.json").read_text(encoding="utf-8"))
        rows = {(row["split"], row["exit"]) for row in evaluation["rows"]}
        assert rows == {("validation", None), ("validation", 2), ("test", None), ("test", 2)}
        steps = records(fresh_language_run, "step")
        assert all(steps[-1][name] < steps[0][name] - 1 for name in ("loss", "loss_exit2", "loss_final"))

    def test_micro_batches_and_memory_options_change_no_result(self, tmp_path: Path) -> None:
        """The loss is a mean over all tokens of a step, not a mean of the micro-batches' means."""
        base = ("model.dropout=0.0", "training.epochs=1", "data.mode=paragraphs", "data.parts.train.0.rows=80")
        variants = {
            "full": ("training.checkpointing=none", "training.chunked_loss=false"),
            "pieces": ("training.batch_size=2", "training.accumulation=4"),
            "cycles": ("training.checkpointing=cycles", "training.chunked_loss=true"),
        }
        for variant, changes in variants.items():
            train(language_recipe(*base, *changes), TrainOptions(tmp_path, name=variant, max_steps=4))
            for name, tensor in weights(tmp_path / "full").items():
                assert torch.allclose(tensor, weights(tmp_path / variant)[name], atol=2e-5), (variant, name)

    def test_model_that_sees_future_tokens(self, tmp_path: Path) -> None:
        """As the published architecture does: refused unless it is allowed, and then marked."""
        padded = ("data.mode=paragraphs", "training.score_padding=true", "training.epochs=1")
        published = ("model.causal=false", *padded)
        with pytest.raises(InputError, match=r"sees the tokens that it predicts .*--allow-leak"):
            train(language_recipe(*published), TrainOptions(tmp_path / "artifacts"))
        assert not (tmp_path / "artifacts").exists()
        run = train(language_recipe(*published, "allow_leak=true"), TrainOptions(tmp_path, max_steps=3))
        manifest = read_run(run)
        assert manifest.leaks and manifest.causality is not None and manifest.causality.reach > 1
        assert manifest.test.word_perplexity is None  # type: ignore[union-attr]
        rows = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["rows"]
        assert rows and all(row["leaks"] for row in rows)


def test_refused_resumes(tmp_path: Path, stopped_run: Path, tiny_run: Path, tiny_recipe: ClassificationRecipe) -> None:
    with pytest.raises(ArtifactError, match="differs in seed"):
        train(tiny_recipe.model_copy(update={"seed": 7}), TrainOptions(stopped_run.parent, resume=True))
    with pytest.raises(ArtifactError, match="no unfinished run of tiny"):
        train(tiny_recipe, TrainOptions(tmp_path / "empty", resume=True))
    with pytest.raises(ArtifactError, match="has already finished"):
        train(tiny_recipe, TrainOptions(tiny_run.parent, name="run", resume=True))
    with pytest.raises(InputError, match=r"--name run: .* already exists"):
        train(tiny_recipe, TrainOptions(tiny_run.parent, name="run"))


def test_refusals_write_nothing(tmp_path: Path, tiny_recipe: ClassificationRecipe) -> None:
    artifacts, device = tmp_path / "artifacts", load_profile("rtx4050")
    for name in ("../x", ""):
        with pytest.raises(InputError, match="--name"):
            train(tiny_recipe, TrainOptions(artifacts, name=name))
    with pytest.raises(InputError, match="--as-device"):
        train(tiny_recipe, TrainOptions(artifacts, accelerator="cpu", as_device=device))
    parts = {"train": (FileSource(kind="file", path=str(tmp_path / "absent.tsv")),)}
    recipe = tiny_recipe.model_copy(update={"data": tiny_recipe.data.model_copy(update={"parts": parts})})
    with pytest.raises(DataError, match=r"absent\.tsv"):
        train(recipe, TrainOptions(artifacts))
    assert not list(tmp_path.glob("artifacts/[!.]*"))


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_signals_end_training_resumably(
    tmp_path: Path, tiny_recipe: ClassificationRecipe, tiny_run: Path, request: pytest.FixtureRequest
) -> None:
    """After the current step; a second signal ends it at once, with nothing saved yet."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, hangup))
    for numbers, message in (([signal.SIGTERM], "after step 3"), ([signal.SIGHUP] * 2, "--resume --name SIGHUP-2")):
        name = f"{numbers[0].name}-{len(numbers)}"
        progress = AfterSteps(3, lambda numbers=numbers: [*map(signal.raise_signal, numbers)])
        with pytest.raises(InterruptedRun, match=message):
            train(tiny_recipe, TrainOptions(tmp_path, name=name, accelerator="cpu"), progress)
        assert read_run(tmp_path / name).status == "interrupted"
    assert [path.name for path in states(tmp_path / "SIGTERM-1")] == ["000001-step-3"]
    assert not (tmp_path / "SIGHUP-2" / "checkpoints").exists()
    resumed = train(tiny_recipe, TrainOptions(tmp_path, name="SIGHUP-2", resume=True, accelerator="cpu"))
    assert_equal_weights(resumed, tiny_run)


def test_removed_folder(tmp_path: Path, tiny_recipe: ClassificationRecipe) -> None:
    with pytest.raises(EdgeformerError, match="was removed during training"):
        train(tiny_recipe, TrainOptions(tmp_path, name="run"), AfterSteps(2, lambda: shutil.rmtree(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


needs_fork = pytest.mark.skipif("not hasattr(__import__('os'), 'fork')", reason="kills by POSIX signals")


@needs_fork
def test_run_that_is_being_trained_is_locked(tmp_path: Path) -> None:
    child = start(tmp_path, overrides=[*OFTEN, "training.epochs=5000"])
    options = TrainOptions(tmp_path, name="run", resume=True, max_steps=1)
    try:
        while not list(tmp_path.glob("run/checkpoints/*")):
            time.sleep(0.05)
            assert child.is_alive()
        recipe = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
        log = tmp_path / "run" / "metrics.jsonl"
        inode = log.stat().st_ino
        with pytest.raises(ArtifactError, match=f"is being trained by process {child.pid} on "):
            train(recipe, options)
        assert child.is_alive() and log.stat().st_ino == inode
    finally:
        kill(child)
    train(recipe, options)
    assert not (tmp_path / "run" / ".lock").exists()


def test_changed_tokenizer_is_refused(tmp_path: Path, tiny_run: Path, tiny_recipe: ClassificationRecipe) -> None:
    file = tmp_path / "tokenizer.json"
    shutil.copy(tiny_run / "model" / "tokenizer.json", file)
    recipe = tiny_recipe.model_copy(update={"tokenizer": FileTokenizer(kind="file", path=str(file))})
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path, name="run"), StopAfter(3))
    content = json.loads(file.read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    first, second = [word for word in words if len(word) == 2 and word.isalpha()][:2]
    words[first], words[second] = words[second], words[first]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match="tokenizer changed since this run began"):
        train(recipe, TrainOptions(tmp_path, name="run", resume=True))


def test_leftovers_are_removed(stopped_run: Path, tiny_recipe: ClassificationRecipe) -> None:
    checkpoints = stopped_run / "checkpoints"
    for folder in (checkpoints / ".000009-step-9.abc.tmp", stopped_run / ".model.abc.old"):
        folder.mkdir()
        (folder / "file").write_bytes(b"x")
    (stopped_run.parent / ".new-run.abc").mkdir()
    temporary = [stopped_run / f".{name}.abc.tmp.json" for name in ("run.json", "evaluation.json")]
    for file in (checkpoints / ".best.safetensors.abc.tmp.safetensors", *temporary):
        file.write_bytes(b"x")
    foreign = [stopped_run / ".bundle.abc.tmp", checkpoints / "mine"]
    for folder in foreign:
        folder.mkdir()
    train(tiny_recipe, TrainOptions(stopped_run.parent, name="run", resume=True))
    assert list(stopped_run.rglob(".*")) == [foreign[0]] and foreign[1].is_dir()
    assert sorted(path.name for path in stopped_run.parent.iterdir()) == [".cache", "run"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saves after every step."""
    artifacts = tmp_path_factory.mktemp("uninterrupted")
    assert ends(start(artifacts, overrides=OFTEN)) == 0
    return artifacts / "run"


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("share", [0.02, 0.6])
def test_killed_at_a_change_on_disk(tmp_path: Path, uninterrupted: Path, share: float) -> None:
    changes = int((uninterrupted.parent / "changes.txt").read_text(encoding="utf-8"))
    assert changes > 100
    assert ends(start(tmp_path, overrides=OFTEN, kill_at=round(share * changes))) == -9
    run = tmp_path / "run"
    assert ends(start(tmp_path, overrides=OFTEN, resume=run.exists())) == 0
    assert_same_run(run, uninterrupted)
    assert not [path for path in run.rglob(".*") if path.name.endswith(("tmp", "old"))]
