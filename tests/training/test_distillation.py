"""A teacher: what its answers and states add to the loss, as the formula says; and which runs cannot be one."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError, RecipeError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.progress import SILENT
from edgeformer.data.sources import load_parts
from edgeformer.data.tokenization import train_tokenizer
from edgeformer.models import load_recipe, model_spec_of, read_recipe_of
from edgeformer.models.adapter import Place, count_parameters
from edgeformer.models.pretrained.adapter import ADAPTER, _of_teacher
from edgeformer.models.weights import load_model
from edgeformer.training.objective import Objective, with_teacher, without_teacher
from edgeformer.training.plan import plan
from edgeformer.training.timing import probe
from edgeformer.training.train import TrainOptions, train

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

STACK = {
    "model_type": "bert", "vocab_size": 150, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32,
}  # fmt: skip
DATA = ["data.parts.train.0.rows=80", "data.max_length=16", "training.epochs=1", "training.batch_size=16"]
CPU = torch.device("cpu")


def overrides(folder: Path, **more: Any) -> list[str]:
    """A tiny pretrained encoder whose source is its own description."""
    model = {"kind": "pretrained", "source": str(folder), "vocab_size": 150, "max_positions": 32, **more}
    tokenizer = {"kind": "file", "path": str(folder / "tokenizer.json")}
    return [*DATA, f"model={ {'architecture': STACK, **model} }", f"tokenizer={tokenizer}"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random encoder as transformers saves it, with a tokenizer that nothing is asked of."""
    import transformers

    folder = tmp_path_factory.mktemp("source")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.BertConfig(**{key: value for key, value in STACK.items() if key != "model_type"})
    torch.manual_seed(3)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    texts = [text for rows in load_parts(load_recipe("quickstart", DATA).data).values() for text in rows.texts]
    train_tokenizer("wordpiece", 150, texts, []).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def teacher(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    artifacts = tmp_path_factory.mktemp("artifacts")
    recipe = load_recipe("quickstart", [*overrides(source), "training.optimizer.lr=0.01"])
    return train(recipe, TrainOptions(artifacts, name="teacher"))


def taught(source: Path, teacher: Path, *changes: str, **model: Any) -> Any:
    return load_recipe(
        "quickstart",
        [*overrides(source, **model), f"tokenizer={ {'kind': 'file', 'path': str(teacher / 'model/tokenizer.json')} }",
         f"training.teacher={teacher}", "training.label_smoothing=0.0", *changes],
    )  # fmt: skip


FOLD = {"layers": 2, "iterations": 2, "own": "norms"}


def test_the_loss_is_the_formulas(source: Path, teacher: Path, tmp_path: Path) -> None:
    how = "training.distillation={weight: 0.6, temperature: 3.0, states: 0.5}"
    objective = Objective(taught(source, teacher, how, fold=FOLD), tmp_path, Place(), SILENT)
    batch, rows = objective.batch(np.arange(7), CPU)
    student, master = objective.model.eval(), load_model(teacher)
    with torch.no_grad():
        found = objective.losses(student, batch)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits, states = student(ids, mask, states=True)
        wanted, reference = master(ids, mask, states=True)
    log_p, log_q = torch.log_softmax(wanted / 3, -1), torch.log_softmax(logits / 3, -1)
    kl = float((log_p.exp() * (log_p - log_q)).sum()) * 9
    right = -float(torch.log_softmax(logits, -1)[torch.arange(7), batch["labels"]].sum())
    apart = 0.0
    for ours, theirs in zip(states, (reference[1], reference[3]), strict=True):
        for row, seen in enumerate(mask):
            apart += float((ours[row] - theirs[row])[seen.bool()].square().mean())
    assert rows == 7 and kl > 1e-3 and apart > 1e-3
    assert float(found.total) == pytest.approx(0.4 * right + 0.6 * kl + 0.5 * apart, rel=1e-4)
    parts = {name: float(value) for name, value in found.parts.items()}
    assert parts == pytest.approx({"cross_entropy": right, "distillation": kl, "states": apart}, rel=1e-4)


def test_answers_are_kept_for_rows_that_come_again(source: Path, teacher: Path, tmp_path: Path) -> None:
    objective = Objective(taught(source, teacher), tmp_path, Place(), SILENT)
    batch, _ = objective.batch(np.arange(6), CPU)
    again, _ = objective.batch(np.arange(5, -1, -1), CPU)
    student = objective.model.eval()
    first = objective.losses(student, batch).total.detach()
    master = next(cell.cell_contents for cell in objective._loss.__closure__ if hasattr(cell.cell_contents, "model"))  # type: ignore[attr-defined]
    master.model.forward = None  # it is not asked again
    assert float(objective.losses(student, again).total.detach()) == pytest.approx(float(first), rel=1e-5)


def test_a_student_comes_closer_to_its_teacher(source: Path, teacher: Path, tmp_path: Path) -> None:
    settings = ["training.distillation={weight: 1.0, temperature: 1.0, states: 1.0}", "training.optimizer.lr=0.01"]
    recipe = taught(source, teacher, *settings, "training.epochs=6", fold=FOLD)
    run = train(recipe, TrainOptions(tmp_path / "artifacts", name="student"))
    objective = Objective(recipe, tmp_path / "cache", Place(), SILENT)
    batch, _ = objective.batch(np.arange(len(objective.prepared.train)), CPU)
    with torch.no_grad():
        before = float(objective.losses(objective.model.eval(), batch).total)
        after = float(objective.losses(load_model(run), batch).total)
    assert after < 0.7 * before


def test_what_cannot_teach_says_why(source: Path, teacher: Path, tmp_path: Path) -> None:
    def begin(*changes: str) -> None:
        Objective(taught(source, teacher, *changes), tmp_path / "cache", Place(), SILENT)

    with pytest.raises(RecipeError, match=r"training.teacher: .*nobody: is no run; name the folder"):
        begin(f"training.teacher={tmp_path / 'nobody'}")
    with pytest.raises(RecipeError, match="its labels are not those of this recipe"):
        begin("data.labels=[no, yes]")
    with pytest.raises(RecipeError, match="reads other tokens"):
        other = tmp_path / "other.json"
        content = (teacher / "model/tokenizer.json").read_text(encoding="utf-8")
        other.write_text(content.replace("[CLS]", "[BOS]"), encoding="utf-8")
        begin(f"tokenizer={ {'kind': 'file', 'path': str(other)} }")
    with pytest.raises(RecipeError, match=r"states can be compared between pretrained encoders only"):
        small = ["hidden_size: 16", "layers: 1", "iterations: 1", "heads: 2", "ffn_size: 16", "residual_scale: 0"]
        begin(f"model={{kind: encoder, vocab_size: 150, {', '.join(small)}}}", "training.distillation.states=1.0")


def test_states_need_a_teacher_of_that_shape(source: Path, teacher: Path, tmp_path: Path) -> None:
    def begin(**model: Any) -> None:
        recipe = taught(source, teacher, "training.distillation.states=1.0", **model)
        model_spec_of(recipe).adapter.loss(nn.Identity(), recipe, None)

    with pytest.raises(RecipeError, match="has 4 stages, of which none stands for each of 3 iterations"):
        begin(fold={"layers": 1, "iterations": 3})
    with pytest.raises(RecipeError, match="its states are 16 wide, the student's 32"):
        begin(architecture={**STACK, "hidden_size": 32})
    with pytest.raises(RecipeError, match=r"takes 32 tokens; set data\.max_length: 32"):
        recipe = taught(source, teacher, "data.max_length=64", max_positions=64, architecture={**STACK, **LONGER})
        model_spec_of(recipe).adapter.loss(nn.Identity(), recipe, None)


LONGER = {"max_position_embeddings": 64}


def test_a_run_says_what_taught_it_and_goes_on_with_no_other(source: Path, teacher: Path, tmp_path: Path) -> None:
    """With what distillation is when nothing is said of it; the teacher is named as any run is."""
    artifacts = tmp_path / "artifacts"
    shutil.copytree(teacher, artifacts / "master")
    recipe = taught(source, teacher, "training.teacher=master")
    train(recipe, TrainOptions(artifacts, name="student", max_steps=2))
    kept: Any = read_recipe_of(artifacts / "student").training
    weights = artifacts / "master/model/model.safetensors"
    assert (kept.teacher, kept.teacher_sha256) == (str(artifacts / "master"), sha256_of(weights))
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(InputError, match="student"):
        train(recipe, TrainOptions(artifacts, name="student", resume=True))
    with pytest.raises(RecipeError, match="teacher_sha256"):
        with_teacher(read_recipe_of(artifacts / "student"), artifacts)


@pytest.mark.parametrize("states", [0.0, 1.0])
def test_memory_is_planned_with_the_teacher_and_without_one_that_is_not_there(
    source: Path, teacher: Path, states: float, tmp_path: Path
) -> None:
    recipe = taught(source, teacher, f"training.distillation.states={states}", fold=FOLD)
    device = load_profile("rtx4050")
    both, alone = plan(recipe, device, teacher.parent), plan(without_teacher(recipe), device)
    extra = both.breakdown.weights - alone.breakdown.weights
    assert extra == 4 * count_parameters(load_model(teacher)) and "alone" not in both.reason
    missing = recipe.model_copy(update={"training": recipe.training.model_copy(update={"teacher": "nobody"})})
    found = plan(missing, device, tmp_path)
    assert found.breakdown == alone.breakdown and "of the student alone" in found.reason and "nobody" in found.reason


def test_steps_are_timed_where_the_layers_of_a_teacher_are_not_there_yet(
    source: Path, teacher: Path, tmp_path: Path
) -> None:
    """As a study does, whose rows are estimated before the first of them is trained."""
    recipe = taught(source, teacher, "training.teacher=nobody", fold={**FOLD, "weights": "teacher"})
    assert probe(recipe, tmp_path, 0.0, time.monotonic()).timed_steps >= 8


def test_what_was_killed_before_its_first_checkpoint_begins_with_the_source_again(source: Path, tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [*overrides(source), "training.optimizer.lr=1e-9"])
    whole = train(recipe, TrainOptions(tmp_path, name="whole"))
    shutil.copytree(whole, tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/checkpoints")
    manifest = tmp_path / "killed/run.json"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace('"finished"', '"running"', 1), encoding="utf-8")
    again = train(recipe, TrainOptions(tmp_path, name="killed", resume=True))
    pairs = zip(load_model(whole).parameters(), load_model(again).parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_an_unfinished_run_teaches_nobody(source: Path, teacher: Path, tmp_path: Path) -> None:
    shutil.copytree(teacher, tmp_path / "half")
    manifest = tmp_path / "half/run.json"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace('"finished"', '"failed"', 1), encoding="utf-8")
    with pytest.raises(
        RecipeError, match=r"training\.teacher: half: .*is failed, not finished; go on with: edgeformer train"
    ):
        with_teacher(taught(source, teacher, "training.teacher=half"), tmp_path)


def test_a_fold_can_begin_with_its_teachers_layers(source: Path, teacher: Path) -> None:
    """Unfolded it would be the teacher: with as many layers and one iteration each it answers the same."""
    whole = {"layers": STACK["num_hidden_layers"], "iterations": 1, "weights": "teacher"}
    for own in ("none", "norms"):
        recipe = taught(source, teacher, fold={**whole, "own": own})
        model, _ = ADAPTER.build(recipe, Place())
        assert ADAPTER.start(model, recipe) == ()
        ids, mask = torch.randint(5, 20, (3, 8)), torch.ones(3, 8, dtype=torch.int64)
        with torch.inference_mode():
            torch.testing.assert_close(model.eval()(ids, mask), load_model(teacher).eval()(ids, mask))


def test_layers_of_which_teachers_can_be_folded(source: Path, teacher: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.fold\.weights: teacher needs training\.teacher"):
        taught(source, teacher, "training.teacher=null", "model.fold.weights=teacher", fold=FOLD)
    recipe = taught(source, teacher, fold={**FOLD, "weights": "teacher"}, pooling="mean")
    model, _ = ADAPTER.build(recipe, Place())
    with pytest.raises(RecipeError, match="is not this source as it is, read with pooling mean"):
        ADAPTER.start(model, recipe)
    recipe = taught(source, teacher, fold={**FOLD, "weights": "teacher"}, weights_sha256="0" * 64)
    with pytest.raises(RecipeError, match="is not this source as it is"):
        _of_teacher(None, recipe)  # type: ignore[arg-type]
