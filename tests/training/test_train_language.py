"""Training a language model: it learns at every exit, resumes exactly, and a model that cheats is stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from edgeformer.artifacts.errors import InputError, InterruptedRun
from edgeformer.models import load_recipe
from edgeformer.models.weights import load_model
from edgeformer.run import read_run
from edgeformer.tasks.language_modeling import LanguageRecipe, LanguageScore
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL_LANGUAGE
from tests.training.test_train import StopAfter, records


def small(*more: str) -> LanguageRecipe:
    recipe = load_recipe("crt_mini", [*SMALL_LANGUAGE, *more])
    assert isinstance(recipe, LanguageRecipe)
    return recipe


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def test_run_holds_what_the_design_promises(fresh_language_run: Path, small_language_recipe: LanguageRecipe) -> None:
    manifest = read_run(fresh_language_run)
    assert (manifest.status, manifest.task, manifest.leaks) == ("finished", "language-modeling", False)
    assert manifest.causality is not None and not manifest.causality.leaks
    test = manifest.test
    assert isinstance(test, LanguageScore)
    assert list(test.exits) == ["2", "4"]
    assert test.perplexity == pytest.approx(math.exp(test.loss)) == pytest.approx(test.exits["4"].perplexity)
    assert test.early_exit is not None and sum(test.early_exit.share.values()) == pytest.approx(1)
    assert test.word_perplexity is not None and test.words is not None
    assert test.word_perplexity == pytest.approx(math.exp(test.loss * test.n / test.words))
    assert manifest.data.tokens["test"] == test.n
    assert load_recipe(str(fresh_language_run / "recipe.yaml")) == small_language_recipe
    config = json.loads((fresh_language_run / "model" / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["leaks"]) == ("edgeformer-crt", False)
    evaluation = json.loads((fresh_language_run / "evaluation.json").read_text(encoding="utf-8"))
    assert {(row["split"], row["exit"]) for row in evaluation["rows"]} == {
        ("validation", None), ("validation", 2), ("test", None), ("test", 2)
    }  # fmt: skip


def test_loss_falls_at_every_exit(fresh_language_run: Path) -> None:
    steps = records(fresh_language_run, "step")
    for name in ("loss", "loss_exit2", "loss_final"):
        assert steps[-1][name] < steps[0][name] - 1
    first, last = records(fresh_language_run, "epoch")
    assert last["val_loss_exit2"] < first["val_loss_exit2"] and last["val_loss_exit4"] < first["val_loss_exit4"]


def test_kept_model_scores_what_the_run_says(fresh_language_run: Path, small_language_recipe: LanguageRecipe) -> None:
    """By a plain loop over the golden tokens of the saved model, against the training's own order of magnitude."""
    model = load_model(fresh_language_run)
    import numpy as np

    with np.load(fresh_language_run / "model" / "golden_inputs.npz") as golden:
        ids, targets = torch.from_numpy(golden["input_ids"]), torch.from_numpy(golden["targets"])
    with torch.inference_mode():
        loss = torch.nn.functional.cross_entropy(model.logits(ids).flatten(0, 1), targets.flatten())
    validation = read_run(fresh_language_run).validation
    assert validation is not None and abs(float(loss) - validation.loss) < 0.5


@pytest.mark.parametrize("steps", [3, 20])
def test_interrupted_and_resumed_is_the_same_run(
    tmp_path: Path, small_language_recipe: LanguageRecipe, fresh_language_run: Path, steps: int
) -> None:
    with pytest.raises(InterruptedRun, match=f"step {steps}"):
        train(small_language_recipe, TrainOptions(tmp_path, name="run"), StopAfter(steps))
    run = train(small_language_recipe, TrainOptions(tmp_path, resume=True))
    for name, tensor in weights(fresh_language_run).items():
        assert torch.equal(tensor, weights(run)[name]), name
    timed = ("samples_per_s", "tokens_per_s")
    for kind in ("step", "epoch"):
        curves = [
            [{k: v for k, v in r.items() if k not in timed} for r in records(folder, kind)]
            for folder in (run, fresh_language_run)
        ]
        assert curves[0] == curves[1]


def test_gradients_do_not_depend_on_how_a_step_is_cut(tmp_path: Path) -> None:
    """Per-token averages over the whole step, not averages of the pieces' averages."""
    options = ("model.dropout=0.0", "training.epochs=1", "data.mode=paragraphs")
    whole = train(small(*options, "training.batch_size=8"), TrainOptions(tmp_path, name="whole", max_steps=5))
    cut = train(
        small(*options, "training.batch_size=2", "training.accumulation=4"),
        TrainOptions(tmp_path, name="cut", max_steps=5),
    )
    for name, tensor in weights(whole).items():
        assert torch.allclose(tensor, weights(cut)[name], atol=2e-5), name


def test_memory_levers_do_not_change_what_is_learned(tmp_path: Path) -> None:
    runs = [
        train(
            small("training.epochs=1", f"training.checkpointing={how}", f"training.chunked_loss={chunked}"),
            TrainOptions(tmp_path, name=f"{how}-{chunked}", max_steps=4),
        )
        for how, chunked in (("none", "false"), ("loop", "true"), ("cycles", "true"))
    ]
    for run in runs[1:]:
        for name, tensor in weights(runs[0]).items():
            assert torch.allclose(tensor, weights(run)[name], atol=2e-5), (run.name, name)


class TestLeaks:
    """The published architecture sees the tokens it is asked to predict."""

    published = ("model.causal=false", "data.mode=paragraphs", "training.score_padding=true", "training.epochs=1")

    def test_is_refused_before_anything_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"sees the tokens it is asked to predict .*--allow-leak"):
            train(small(*self.published), TrainOptions(tmp_path / "artifacts"))
        assert not (tmp_path / "artifacts").exists()

    def test_trains_when_allowed_and_says_so(self, tmp_path: Path) -> None:
        run = train(small(*self.published, "allow_leak=true"), TrainOptions(tmp_path, max_steps=3))
        manifest = read_run(run)
        assert manifest.leaks
        assert manifest.causality is not None and manifest.causality.reach > 1
        assert isinstance(manifest.test, LanguageScore) and manifest.test.word_perplexity is None
        rows = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["rows"]
        assert rows and all(row["leaks"] for row in rows)


def test_as_device_needs_a_card(tmp_path: Path, small_language_recipe: LanguageRecipe) -> None:
    from edgeformer.artifacts.documents import load_profile

    with pytest.raises(InputError, match="--as-device"):
        train(small_language_recipe, TrainOptions(tmp_path, accelerator="cpu", as_device=load_profile("rtx4050")))
