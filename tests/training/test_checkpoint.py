"""Checkpoints: which files are written, verified, refused and removed, and what a run does with damaged ones."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.recipe import CosineSchedule, OptimizerConfig
from edgeformer.run import read_run
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.loop import checkpoint
from edgeformer.training.loop.checkpoint import Checkpoints, Position, collect_state
from edgeformer.training.loop.distributed import Processes
from edgeformer.training.loop.optimizer import build_optimizer, build_schedule
from edgeformer.training.train import TrainOptions, train
from tests.torture.refusals import RunsCode
from tests.training.runs import Messages, assert_same_run, states, update_checksum, weights, write_damaged


class Trainer:
    """The objects that a checkpoint saves, of a model with few parameters drawn from ``seed``."""

    def __init__(self, run: Path, seed: int = 0, model: nn.Module | None = None) -> None:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2) if model is None else model
        self.processes = Processes(Accelerator(cpu=True), "fp32")
        self.model, self.optimizer = self.processes.prepare(model, build_optimizer(model, OptimizerConfig(lr=1.0)))
        self.schedule: Any = build_schedule(self.optimizer, CosineSchedule(kind="cosine", warmup=0.0, final=0.0), 10)
        self.checkpoints = Checkpoints(run)

    def step(self) -> None:
        self.model(torch.rand(1, 3)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def save(self, step: int, *, best: bool = True, **position: Any) -> Path:
        position = {"validation": {"loss": 1.0}, **position}
        state = collect_state(self.processes, self.model, self.optimizer)
        self.checkpoints.save(state, self.schedule, Position(step=step, **position), best=best)
        return states(self.checkpoints._run)[-1]

    def restore(self, report: Callable[[str], None] = pytest.fail) -> Position | None:
        result, parts = self.checkpoints.find(report), (self.processes, self.model, self.optimizer, self.schedule)
        return None if result is None else self.checkpoints.load(result[0], *parts, has_best=result[1])


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_last_two_states_are_kept(tmp_path: Path, trainer: Trainer) -> None:
    for step in (3, 5, 9):
        trainer.save(step)
    assert [folder.name for folder in states(tmp_path)] == ["000002-step-5", "000003-step-9"]
    foreign = {tmp_path / "checkpoints" / name for name in ("notes-step-x", "1a-step-3")}
    for folder in foreign:
        folder.mkdir()
    other = Trainer(tmp_path)
    other.restore()
    other.save(10)
    assert {folder.name for folder in {*states(tmp_path)} - foreign} == {"000003-step-9", "000004-step-10"}


def test_best_weights(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trainer.save(1)
    expected = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    assert (first / "best.safetensors").samefile(first / "model.safetensors")
    trainer.step()
    second = trainer.save(2, best=False)
    assert trainer.checkpoints.best == second / "best.safetensors"
    assert trainer.checkpoints.best.samefile(first / "best.safetensors")
    for name, tensor in load_file(trainer.checkpoints.best).items():
        assert torch.equal(tensor, expected[name])
    assert not torch.equal(load_file(second / "model.safetensors")["weight"], expected["weight"])
    # A file system without hard links.
    monkeypatch.setattr(Path, "hardlink_to", lambda *_: os.link("missing", "missing"))
    copied = trainer.save(3) / "best.safetensors"
    assert not copied.samefile(copied.with_name("model.safetensors"))
    assert copied.read_bytes() == copied.with_name("model.safetensors").read_bytes()


def test_best_weights_with_shared_storage(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("mirrored", model.weight.data.t())  # Accelerate stores one of both
    folder = Trainer(tmp_path, model=model).save(1)
    assert set(load_file(folder / "best.safetensors")) == {"weight", "bias", "mirrored"}
    assert not (folder / "best.safetensors").samefile(folder / "model.safetensors")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads the names of open files from /proc")
def test_files_are_synced_before_the_rename(tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[bool, str]] = []
    fsync = os.fsync

    def record_fsync(handle: int) -> None:
        is_renamed = any((tmp_path / "checkpoints").glob("[0-9]*"))
        synced.append((is_renamed, Path(f"/proc/self/fd/{handle}").readlink().name))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record_fsync)
    folder = trainer.save(1)
    files = {path.name for path in folder.iterdir()}
    assert files >= {"model.safetensors", "optimizer.bin", "schedule.pt", "state.json", "random_states_0.pkl"}
    before_rename = {name for is_renamed, name in synced if not is_renamed}
    assert files <= before_rename and any(name.endswith(".tmp") for name in before_rename)
    assert [name for is_renamed, name in synced if is_renamed] == ["checkpoints"]
    checksums = json.loads((folder / "sha256.json").read_text(encoding="utf-8"))
    assert checksums == {name: sha256_of(folder / name) for name in files - {"sha256.json"}}


@pytest.mark.parametrize("name", ["state.json", "best.safetensors"])
def test_damaged_file_is_named(trainer: Trainer, name: str) -> None:
    first = trainer.save(1)
    trainer.step()
    second = trainer.save(2)
    for damaged in {name, "best.safetensors"}:
        write_damaged(second / damaged)
    messages = Messages()
    position = trainer.restore(messages.message)
    assert position is not None and position.step == 1
    damage = f"{second / name}: damaged (its checksum differs)"
    assert messages.lines == [f"{damage}; continuing from the previous checkpoint: {first}"]
    assert trainer.checkpoints.best.parent == first
    write_damaged(second / "random_states_0.pkl")
    write_damaged(first / "optimizer.bin")
    with pytest.raises(ArtifactError, match=r"step-2/.*damaged.*step-1/optimizer.*no intact checkpoint is left"):
        trainer.restore()
    (first / "sha256.json").write_text("no json", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"step-1/sha256\.json: damaged .*no intact checkpoint is left"):
        trainer.restore()


def test_unloadable_files(tmp_path: Path, trainer: Trainer) -> None:
    folder = trainer.save(1)
    with pytest.raises(ArtifactError, match=r"cannot be loaded: RuntimeError: Error\(s\) in loading.*:$"):
        Trainer(tmp_path, model=nn.Linear(4, 2)).restore()
    (folder / "state.json").write_text('{"steps": 1}', encoding="utf-8")
    update_checksum(folder / "state.json")
    with pytest.raises(ArtifactError, match=r"000001-step-1: cannot be loaded: TypeError: .*'steps'"):
        trainer.restore()


def test_pickled_code_is_refused(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = trainer.save(1) / "random_states_0.pkl"
    file.write_bytes(pickle.dumps(RunsCode()))
    update_checksum(file)
    with pytest.raises(ArtifactError, match=r"step-1: could run code"):
        trainer.restore()
    assert not (tmp_path / "proof").exists()
    pickle.loads(file.read_bytes())
    assert (tmp_path / "proof").exists(), "the file does run code when it is unpickled"


def test_write_error(tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("\nNo space\nat line 3")

    for expected in ("--resume starts from the beginning", "--resume continues from 000001-step-1"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save_object", fail)
            with pytest.raises(EdgeformerError, match=rf"cannot be written \(No space; .*B free .*\); {expected}"):
                trainer.save(2)
        trainer.save(1)
    assert {folder.name for folder in states(tmp_path)} == {"000001-step-1", "000002-step-1"}


def test_fp16_scaler(trainer: Trainer) -> None:
    accelerator = trainer.processes.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer.save(1)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    trainer.restore()
    assert accelerator.scaler.state_dict()["scale"] == 8.0


def resume(run: Path, recipe: ClassificationRecipe, messages: Messages) -> Path:
    return train(recipe, TrainOptions(run.parent, name=run.name, resume=True, accelerator="cpu"), messages)


def test_run_resumes_from_the_undamaged_state(
    stopped_run: Path, stopped_template: Path, tiny_recipe: ClassificationRecipe, tiny_run: Path
) -> None:
    earlier, latest = (state / "best.safetensors" for state in states(stopped_template / "run"))
    assert latest.samefile(earlier), "no weights are written twice"
    earlier, latest = states(stopped_run)
    assert [earlier.name, latest.name] == ["000001-step-4", "000002-step-7"]
    write_damaged(latest / "model.safetensors")
    messages = Messages()
    run = resume(stopped_run, tiny_recipe, messages)
    (message,) = messages.containing("continuing from the previous checkpoint")
    assert str(latest / "model.safetensors") in message and str(earlier) in message
    assert_same_run(run, tiny_run)
    assert latest not in states(run)


def test_run_resumes_without_best_weights(stopped_run: Path, tiny_recipe: ClassificationRecipe) -> None:
    for state in states(stopped_run):  # which share the file where links are supported
        write_damaged(state / "best.safetensors")
    messages = Messages()
    run = resume(stopped_run, tiny_recipe, messages)
    assert messages.containing("the best weights are selected again from there on")
    assert read_run(run).best_epoch == 2, "the epoch in which it was resumed"
    final = load_file(states(run)[-1] / "model.safetensors")
    assert all(torch.equal(tensor, final[name]) for name, tensor in weights(run).items())
