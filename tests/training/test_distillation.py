"""Distillation: the loss follows the formula, a run records its teacher, and unsuitable teachers are refused."""

import shutil
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
from edgeformer.models import load_recipe, model_spec_of, read_run_recipe
from edgeformer.models.adapter import count_parameters
from edgeformer.models.pretrained.adapter import ADAPTER
from edgeformer.models.weights import load_model
from edgeformer.training.loop.objective import Objective
from edgeformer.training.loop.teacher import with_teacher
from edgeformer.training.plan.plan import plan
from edgeformer.training.train import TrainOptions, train

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

ARCHITECTURE = {
    "model_type": "bert", "vocab_size": 150, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32,
}  # fmt: skip
FOLD = {"layers": 2, "iterations": 2, "own": "norms"}
DATA = ["data.parts.train.0.rows=80", "data.max_length=16", "training.epochs=1", "training.batch_size=16"]
CPU = torch.device("cpu")


def source_overrides(folder: Path, **model: Any) -> list[str]:
    """A tiny pretrained encoder whose source is its own description."""
    fields = {"kind": "pretrained", "source": str(folder), "vocab_size": 150, "max_positions": 32, **model}
    tokenizer = {"kind": "file", "path": str(folder / "tokenizer.json")}
    return [*DATA, f"model={ {'architecture': ARCHITECTURE, **fields} }", f"tokenizer={tokenizer}"]


def write_source(folder: Path) -> Path:
    """Write a random encoder as transformers saves it, with a tokenizer."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.BertConfig(**{key: value for key, value in ARCHITECTURE.items() if key != "model_type"})
    torch.manual_seed(3)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    texts = [text for rows in load_parts(load_recipe("quickstart", DATA).data).values() for text in rows.texts]
    train_tokenizer("wordpiece", 150, texts, []).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def teacher(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = load_recipe("quickstart", [*source_overrides(source), "training.optimizer.lr=0.01"])
    return train(recipe, TrainOptions(tmp_path_factory.mktemp("artifacts"), name="teacher"))


def student_recipe(source: Path, teacher: Path, *changes: str, **model: Any) -> Any:
    return load_recipe(
        "quickstart",
        [*source_overrides(source, **model),
         f"tokenizer={ {'kind': 'file', 'path': str(teacher / 'model/tokenizer.json')} }",
         f"training.teacher={teacher}", "training.label_smoothing=0.0", *changes],
    )  # fmt: skip


def test_loss_follows_the_formula(source: Path, teacher: Path, tmp_path: Path) -> None:
    settings = "training.distillation={weight: 0.6, temperature: 3.0, states: 0.5}"
    objective = Objective(student_recipe(source, teacher, settings, fold=FOLD), tmp_path, SILENT)
    batch, rows = objective.batch(np.arange(7), CPU)
    student = objective.model.eval()
    with torch.no_grad():
        result = objective.losses(student, batch)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits, states = student(ids, mask, states=True)
        teacher_logits, teacher_states = load_model(teacher)(ids, mask, states=True)
    log_p, log_q = torch.log_softmax(teacher_logits / 3, -1), torch.log_softmax(logits / 3, -1)
    kl = float((log_p.exp() * (log_p - log_q)).sum()) * 9
    cross_entropy = -float(torch.log_softmax(logits, -1)[torch.arange(7), batch["labels"]].sum())
    distance = 0.0
    for student_state, teacher_state in zip(states, (teacher_states[1], teacher_states[3]), strict=True):
        for row, row_mask in enumerate(mask):
            distance += float((student_state[row] - teacher_state[row])[row_mask.bool()].square().mean())
    assert rows == 7 and kl > 1e-3 and distance > 1e-3
    assert float(result.total) == pytest.approx(0.4 * cross_entropy + 0.6 * kl + 0.5 * distance, rel=1e-4)
    assert [*result.parts] == ["cross_entropy", "distillation", "states"]


def test_student_approaches_its_teacher(source: Path, teacher: Path, tmp_path: Path) -> None:
    """The run records the teacher, by name and checksum, and is not resumed with other weights of it."""
    artifacts = tmp_path / "artifacts"
    shutil.copytree(teacher, artifacts / "master")
    settings = ["training.distillation={weight: 1.0, temperature: 1.0, states: 1.0}", "training.optimizer.lr=0.01"]
    recipe = student_recipe(source, teacher, *settings, "training.teacher=master", "training.epochs=6", fold=FOLD)
    run = train(recipe, TrainOptions(artifacts, name="student"))
    objective = Objective(with_teacher(recipe, artifacts), tmp_path / "cache", SILENT)
    batch, _ = objective.batch(np.arange(len(objective.prepared.train)), CPU)
    with torch.no_grad():
        initial_loss = float(objective.losses(objective.model.eval(), batch).total)
        final_loss = float(objective.losses(load_model(run), batch).total)
    assert final_loss < 0.7 * initial_loss
    saved: Any = read_run_recipe(run)
    weights = artifacts / "master/model/model.safetensors"
    assert (saved.training.teacher, saved.training.teacher_sha256) == (str(artifacts / "master"), sha256_of(weights))
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(InputError, match="student"):
        train(recipe, TrainOptions(artifacts, name="student", resume=True))
    with pytest.raises(RecipeError, match="teacher_sha256"):
        with_teacher(saved, artifacts)


def test_unsuitable_teachers(source: Path, teacher: Path, tmp_path: Path) -> None:
    other_tokenizer = tmp_path / "other.json"
    content = (teacher / "model/tokenizer.json").read_text(encoding="utf-8")
    other_tokenizer.write_text(content.replace("[CLS]", "[BOS]"), encoding="utf-8")
    encoder = "kind: encoder, vocab_size: 150, hidden_size: 16, layers: 1, iterations: 1, heads: 2, ffn_size: 16"
    states = "training.distillation.states=1.0"
    for changes, message in (
        (["data.labels=[no, yes]"], "its labels differ from those of this recipe"),
        ([f"tokenizer={ {'kind': 'file', 'path': str(other_tokenizer)} }", states], "tokenizes differently"),
        ([f"model={{{encoder}, residual_scale: 0}}", states], "only the states of pretrained encoders can be compared"),
    ):
        with pytest.raises(RecipeError, match=message):
            Objective(student_recipe(source, teacher, *changes), tmp_path / "cache", SILENT)
    recipe = student_recipe(source, teacher, states, architecture={**ARCHITECTURE, "hidden_size": 32})
    with pytest.raises(RecipeError, match="its 4 states of width 16 do not match 4 of width 32"):
        model_spec_of(recipe).adapter.loss(nn.Identity(), recipe, None)
    shutil.copytree(teacher, tmp_path / "half")
    manifest = tmp_path / "half/run.json"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace('"finished"', '"failed"', 1), encoding="utf-8")
    message = r"training\.teacher: half: .*training is not finished \(status: failed\); continue with: edgeformer train"
    with pytest.raises(RecipeError, match=message):
        with_teacher(student_recipe(source, teacher, "training.teacher=half"), tmp_path)
    with pytest.raises(RecipeError, match=r"training\.teacher: nobody: .*; give a finished run or its folder"):
        with_teacher(student_recipe(source, teacher, "training.teacher=nobody"), tmp_path)


def test_planned_memory(source: Path, teacher: Path, tmp_path: Path) -> None:
    recipe = student_recipe(source, teacher, "training.distillation.states=1.0", fold=FOLD)
    device = load_profile("rtx4050")
    missing = recipe.model_copy(update={"training": recipe.training.model_copy(update={"teacher": "nobody"})})
    both, alone = plan(recipe, device, teacher.parent), plan(missing, device, tmp_path)
    teacher_bytes = both.breakdown.weights - alone.breakdown.weights
    assert teacher_bytes == 4 * count_parameters(load_model(teacher)) and "without the teacher" not in both.reason
    assert "without the teacher" in alone.reason and "nobody" in alone.reason


def test_fold_starts_from_its_teachers_layers(source: Path, teacher: Path) -> None:
    """With as many layers and one iteration each, it answers as the teacher does."""
    unfolded = {"layers": ARCHITECTURE["num_hidden_layers"], "iterations": 1, "weights": "teacher"}
    for trained in ("none", "norms"):
        recipe = student_recipe(source, teacher, fold={**unfolded, "own": trained})
        model = ADAPTER.build(recipe)
        assert ADAPTER.start(model, recipe) == ()
        ids, mask = torch.randint(5, 20, (3, 8)), torch.ones(3, 8, dtype=torch.int64)
        with torch.inference_mode():
            torch.testing.assert_close(model.eval()(ids, mask), load_model(teacher).eval()(ids, mask))
