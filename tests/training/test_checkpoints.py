"""Checkpoints: complete in themselves, two of them, and a damaged one costs no run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from edgeformer.formats.errors import ArtifactError, EdgeformerError, InterruptedRun
from edgeformer.formats.files import sha256_of, write_json
from edgeformer.formats.progress import Silent
from edgeformer.formats.recipe import CosineSchedule, OptimizerConfig
from edgeformer.run import read_run
from edgeformer.stages.training import loop, state
from edgeformer.stages.training.checkpoints import Checkpoints, Position, remove
from edgeformer.stages.training.loop import TrainingLoop
from edgeformer.stages.training.optimization import LearningRate, build_optimizer
from edgeformer.stages.training.processes import Processes
from edgeformer.stages.training.stepper import Stepper
from edgeformer.stages.training.train import TrainOptions, train
from edgeformer.tasks.classification.recipe import ClassificationRecipe
from tests.conftest import SMALL, classifier_recipe
from tests.torture.refusals import RunsCode
from tests.training.test_out_of_memory import Messages
from tests.training.test_train import StopAfter, weights

TINY = [*SMALL, "name=tiny", "data.parts.train.0.rows=400", "model.hidden_size=16"]
"""Ten steps of 32 rows in each of three epochs."""


class Killed(BaseException):
    """What no code of the training expects, as a kill is."""


@pytest.fixture(scope="module")
def recipe() -> ClassificationRecipe:
    return classifier_recipe(TINY)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, recipe: ClassificationRecipe) -> Path:
    """The same run, never stopped."""
    return train(recipe, TrainOptions(tmp_path_factory.mktemp("straight"), name="run"))


@pytest.fixture
def stopped(tmp_path: Path, recipe: ClassificationRecipe) -> Path:
    """A run that was interrupted in its third epoch: checkpoints of steps 20 and 23."""
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path, name="run"), StopAfter(23))
    return tmp_path / "run"


def states(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def resumed(run: Path, recipe: ClassificationRecipe, progress: Silent | None = None) -> Path:
    return train(recipe, TrainOptions(run.parent, name=run.name, resume=True), progress or Silent())


def assert_same(run: Path, straight: Path) -> None:
    assert read_run(run).status == "finished"
    assert read_run(run).test == read_run(straight).test
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(run)[name]), name
    logs = [(folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines() for folder in (run, straight)]
    places = [[(record["kind"], record["step"]) for record in map(json.loads, lines)] for lines in logs]
    assert places[0] == places[1]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.unlink()  # another state may share the file
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def test_the_last_two_are_kept_and_no_weights_are_written_twice(stopped: Path) -> None:
    assert [folder.name for folder in states(stopped)] == ["000002-step-20", "000003-step-23"]
    before, last = states(stopped)
    best = (last / "best.safetensors").stat()
    assert best.st_ino == (before / "best.safetensors").stat().st_ino and best.st_nlink >= 2


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", flip),
        ("best.safetensors", flip),
        ("best.safetensors", Path.unlink),
        ("sha256.json", empty),
    ],
)
def test_a_damaged_newest_checkpoint_falls_back_and_says_so(
    stopped: Path, recipe: ClassificationRecipe, straight: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    before, last = states(stopped)
    damage(last / name)
    said = Messages()
    run = resumed(stopped, recipe, said)
    found = [line for line in said.lines if "going on from the checkpoint before" in line]
    assert len(found) == 1 and str(last / name) in found[0] and str(before) in found[0]
    assert_same(run, straight)
    assert last not in states(run)


def test_two_damaged_checkpoints_are_refused_and_both_named(stopped: Path, recipe: ClassificationRecipe) -> None:
    for folder in states(stopped):
        flip(folder / "optimizer.bin")
    with pytest.raises(ArtifactError, match=r"step-23/optimizer.*step-20/optimizer.*no good checkpoint is left"):
        resumed(stopped, recipe)


@pytest.mark.parametrize("name", ["optimizer.bin", "schedule.pt", "random_states_0.pkl"])
def test_a_checkpoint_that_runs_code_is_refused(
    stopped: Path, recipe: ClassificationRecipe, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the right checksum: whoever can put it there can write that as well."""
    monkeypatch.chdir(stopped)
    file = states(stopped)[-1] / name
    file.write_bytes(pickle.dumps(RunsCode()))
    sums = json.loads((file.parent / "sha256.json").read_text(encoding="utf-8"))
    write_json(file.parent / "sha256.json", {**sums, name: sha256_of(file)})
    with pytest.raises(ArtifactError, match=r"step-23: holds more than numbers, which could run code"):
        resumed(stopped, recipe)
    assert not list(stopped.rglob("proof"))
    pickle.loads(file.read_bytes())  # the bomb is a live one
    assert (stopped / "proof").exists()


def test_damaged_best_weights_that_both_share_cost_no_run(stopped: Path, recipe: ClassificationRecipe) -> None:
    best = states(stopped)[-1] / "best.safetensors"
    with best.open("rb+") as file:
        file.write(b"x")
    assert_found_again(stopped, recipe)


def assert_found_again(run: Path, recipe: ClassificationRecipe) -> None:
    """The third epoch, which the run goes on in, is the best that it knows of."""
    said = Messages()
    resumed(run, recipe, said)
    assert any(line.endswith("the best weights are looked for again from there on") for line in said.lines)
    assert (read_run(run).status, read_run(run).best_epoch) == ("finished", 3)
    last = load_file(max(run.glob("checkpoints/*-step-30")) / "model.safetensors")
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, last[name]), name


@pytest.mark.parametrize("epoch", [1, 2])
def test_killed_between_the_best_weights_and_their_checkpoint(
    tmp_path: Path, recipe: ClassificationRecipe, straight: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    """Nothing of the run is written in the save after the validation of ``epoch``."""
    save, saves = Checkpoints.save, iter(range(1, 99))

    def killed(self: Checkpoints, *arguments: Any, **named: Any) -> None:
        if next(saves) == epoch:
            raise Killed
        save(self, *arguments, **named)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Checkpoints, "save", killed)
        train(recipe, TrainOptions(tmp_path, name="run"))
    assert_same(resumed(tmp_path / "run", recipe), straight)


def as_written_before(run: Path) -> None:
    """Turn the newest state into what the version before wrote: ``last/``, with the best weights beside it."""
    before, newest = states(run)
    shutil.rmtree(before)
    last = newest.rename(newest.parent / "last")
    (last / "best.safetensors").rename(last.parent / "best.safetensors")
    state = json.loads((last / "state.json").read_text(encoding="utf-8"))
    del state["records"]
    write_json(last / "state.json", state)
    sums = json.loads((last / "sha256.json").read_text(encoding="utf-8"))
    write_json(last / "sha256.json", {**sums, "state.json": sha256_of(last / "state.json")})


@pytest.mark.parametrize("aside", [False, True])
def test_checkpoints_of_earlier_versions_are_read(
    stopped: Path, recipe: ClassificationRecipe, straight: Path, aside: bool
) -> None:
    as_written_before(stopped)
    folder = stopped / "checkpoints"
    if aside:  # killed between the two renames of a replacement
        (folder / ".last.abc.old").mkdir()
        (folder / "last").rename(folder / ".last.abc.old" / "last")
    assert_same(resumed(stopped, recipe), straight)
    assert "000001-step-30" in [path.name for path in states(stopped)]


def test_best_weights_newer_than_the_state_of_an_earlier_version_are_no_damage(
    stopped: Path, recipe: ClassificationRecipe
) -> None:
    """The version before replaced best.safetensors first; killed then, it refused to go on."""
    as_written_before(stopped)
    newer = stopped / "checkpoints" / "best.safetensors"
    newer.unlink()
    shutil.copy(stopped / "checkpoints" / "last" / "model.safetensors", newer)
    assert_found_again(stopped, recipe)


class Mirrored(nn.Module):
    """A table and the same numbers the other way round, of which Accelerate stores one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.register_buffer("mirrored", self.table.data.t())


class TestFiles:
    """States of a model of a few numbers, saved and loaded without a training."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        (tmp_path / "run").mkdir()
        return tmp_path / "run"

    def start(self, run: Path, seed: int = 0, model: nn.Module | None = None) -> SimpleNamespace:
        """What a process has that trains: everything drawn from ``seed``."""
        torch.manual_seed(seed)
        model = nn.Linear(3, 2) if model is None else model
        optimizer = build_optimizer(model, OptimizerConfig(lr=1.0))
        processes = Processes(Accelerator(cpu=True), "fp32")
        prepared, optimizer = processes.prepare(model, optimizer)
        rate = LearningRate(optimizer, CosineSchedule(kind="cosine", warmup=0.0, final=0.0), 10)
        return SimpleNamespace(
            processes=processes, model=prepared, optimizer=optimizer, rate=rate, checkpoints=Checkpoints(run)
        )

    def step(self, made: SimpleNamespace) -> None:
        made.model(torch.rand(1, 3)).sum().backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
        made.rate.after_step()

    def save(self, made: SimpleNamespace, step: int, best: bool = True, **changes: Any) -> None:
        position = Position(step=step, validation={"loss": 1.0}, **changes)
        found = state.gather(made.processes, made.model, made.optimizer)
        made.checkpoints.save(found, made.rate, position, best=best)

    def restore(self, made: SimpleNamespace, say: Callable[[str], None]) -> Position | None:
        found = made.checkpoints.find(say)
        if found is None:
            return None

        def restore(folder: Path) -> None:
            state.load(folder, made.processes, made.model, made.optimizer)

        return made.checkpoints.load(found[0], restore, made.rate, best=found[1])

    def test_everything_comes_back_and_goes_on_as_it_would_have(self, run: Path) -> None:
        made = self.start(run)
        self.step(made)
        self.save(made, 1, epoch=2, batch=7, losses=[0.5], best_value=0.25, window={"a": 1.0})
        self.step(made)
        other, said = self.start(run, seed=1), []
        position = self.restore(other, said.append)
        assert position == Position(
            step=1, epoch=2, batch=7, losses=[0.5], best_value=0.25, window={"a": 1.0}, validation={"loss": 1.0}
        )
        assert said == [] and other.rate.current != made.rate.current
        self.step(other)
        assert other.rate.current == made.rate.current
        for name, tensor in made.model.state_dict().items():
            assert torch.equal(tensor, other.model.state_dict()[name]), name

    def test_nothing_saved_is_nothing_to_restore(self, run: Path) -> None:
        made = self.start(run)
        assert self.restore(made, pytest.fail) is None
        with pytest.raises(ArtifactError, match="holds no best weights"):
            _ = made.checkpoints.best

    def test_the_last_two_stay_and_numbers_go_on_in_another_process(self, run: Path) -> None:
        made = self.start(run)
        for step in (3, 5, 9):
            self.save(made, step)
        assert [folder.name for folder in states(run)] == ["000002-step-5", "000003-step-9"]
        other = self.start(run)
        self.restore(other, pytest.fail)
        self.save(other, 10)
        assert [folder.name for folder in states(run)] == ["000003-step-9", "000004-step-10"]
        (run / "checkpoints" / "notes-step-x").mkdir()
        (run / "checkpoints" / "1a-step-3").mkdir()  # no state of ours has such a name, and none is its number
        self.save(other, 11)
        assert (run / "checkpoints" / "notes-step-x").is_dir()
        assert states(run)[-2].name == "000005-step-11"

    def test_best_weights_are_those_of_the_state_until_there_are_better_ones(self, run: Path) -> None:
        made = self.start(run)
        self.save(made, 1)
        best = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
        first = states(run)[0]
        assert (first / "best.safetensors").samefile(first / "model.safetensors")
        self.step(made)
        self.save(made, 2, best=False)
        assert made.checkpoints.best == states(run)[1] / "best.safetensors"
        assert made.checkpoints.best.samefile(first / "best.safetensors")
        for name, tensor in load_file(made.checkpoints.best).items():
            assert torch.equal(tensor, best[name])
        assert not torch.equal(load_file(states(run)[1] / "model.safetensors")["weight"], best["weight"])

    def test_before_the_first_validation_there_are_no_best_weights(self, run: Path) -> None:
        made = self.start(run)
        found = state.gather(made.processes, made.model, made.optimizer)
        made.checkpoints.save(found, made.rate, Position(step=1), best=False)
        assert not (states(run)[0] / "best.safetensors").exists()

    def test_weights_that_are_stored_under_other_names_are_written_out(self, run: Path) -> None:
        made = self.start(run, model=Mirrored())
        self.save(made, 1)
        (folder,) = states(run)
        assert set(load_file(folder / "best.safetensors")) == {"table", "mirrored"}
        assert not (folder / "best.safetensors").samefile(folder / "model.safetensors")

    def test_file_systems_without_links_have_copies(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(Path, "hardlink_to", refuse)
        self.save(self.start(run), 1)
        (folder,) = states(run)
        assert not (folder / "best.safetensors").samefile(folder / "model.safetensors")
        assert (folder / "best.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()

    def test_every_file_is_summed_and_on_the_disk_before_it_is_named(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[tuple[bool, str]] = []
        fsync = os.fsync

        def watched(handle: int) -> None:
            named = any((run / "checkpoints").glob("[0-9]*"))
            synced.append((named, Path(f"/proc/self/fd/{handle}").readlink().name))
            fsync(handle)

        monkeypatch.setattr(os, "fsync", watched)
        self.save(self.start(run), 1)
        (folder,) = states(run)
        files = {path.name for path in folder.iterdir()}
        assert files >= {"model.safetensors", "optimizer.bin", "schedule.pt", "state.json", "random_states_0.pkl"}
        before = {name for named, name in synced if not named}
        assert files <= before and any(name.endswith(".tmp") for name in before), "the files and their folder"
        assert [name for named, name in synced if named] == ["checkpoints"], "and the name"
        sums = json.loads((folder / "sha256.json").read_text(encoding="utf-8"))
        assert sums == {name: sha256_of(folder / name) for name in files - {"sha256.json"}}

    @pytest.mark.parametrize("damage", ["{}", "[]", "no json", '{"state.json": "0"}', None])
    def test_a_state_without_its_sums_is_damaged(self, run: Path, damage: str | None) -> None:
        made = self.start(run)
        self.save(made, 1)
        sums = states(run)[0] / "sha256.json"
        sums.unlink() if damage is None else sums.write_text(damage, encoding="utf-8")
        with pytest.raises(ArtifactError, match=r"000001-step-1/sha256\.json: damaged .*no good checkpoint is left"):
            self.restore(made, pytest.fail)

    @pytest.mark.parametrize("name", ["state.json", "optimizer.bin", "best.safetensors"])
    def test_the_file_that_is_damaged_is_named_and_the_best_weights_last(self, run: Path, name: str) -> None:
        made = self.start(run)
        self.save(made, 1)
        self.step(made)
        self.save(made, 2)
        last = states(run)[1]
        for damaged in {name, "best.safetensors"}:
            flip(last / damaged)
        said: list[str] = []
        position = self.restore(made, said.append)
        assert position is not None and position.step == 1
        damage = f"{last / name}: damaged (not what its checksum says)"
        assert said == [f"{damage}; going on from the checkpoint before: {states(run)[0]}"]
        assert made.checkpoints.best.parent == states(run)[0]

    def test_best_weights_that_are_gone_everywhere_are_looked_for_again(self, run: Path) -> None:
        made = self.start(run)
        for step in (1, 2):
            self.save(made, step, best_epoch=1, best_value=0.5)
            (states(run)[-1] / "best.safetensors").unlink()
        said: list[str] = []
        position = self.restore(made, said.append)
        assert position == Position(step=2) and position.best_epoch is None
        assert said[0].endswith(f"going on from {states(run)[1]}; the best weights are looked for again from there on")

    def test_what_cannot_be_loaded_is_named(self, run: Path) -> None:
        made = self.start(run)
        self.save(made, 1)
        folder = states(run)[0]
        (folder / "state.json").write_text('{"steps": 1}', encoding="utf-8")
        sums = json.loads((folder / "sha256.json").read_text(encoding="utf-8"))
        write_json(folder / "sha256.json", {**sums, "state.json": sha256_of(folder / "state.json")})
        with pytest.raises(ArtifactError, match=r"000001-step-1: cannot be loaded: TypeError: .*'steps'"):
            self.restore(made, pytest.fail)

    def test_what_cannot_be_written_is_said_in_one_line_also_where_the_folder_is_gone(self, run: Path) -> None:
        made, path = self.start(run), run / "checkpoints" / "000001-step-1"
        for gone in (False, True):
            with pytest.raises(EdgeformerError) as refused, made.checkpoints._explained(path):
                shutil.rmtree(run) if gone else None
                raise RuntimeError("no room for the archive\nFrame 0: …")
            free = "nothing" if gone else r"\d[\d.]* [KMGT]?i?B"
            assert re.fullmatch(
                rf"{re.escape(str(path))}: cannot be written \(no room for the archive; {free} free on the disk\); "
                "--resume begins anew",
                str(refused.value),
            )

    def test_what_somebody_else_removed_is_removed(self, run: Path) -> None:
        remove(run / "never there")
        (run / "file").write_text("", encoding="utf-8")
        (run / "folder" / "deep").mkdir(parents=True)
        for name in ("file", "folder"):
            remove(run / name)
        assert not any(run.iterdir())

    def test_of_several_lines_of_an_error_the_first_is_told(self, run: Path) -> None:
        made = self.start(run)
        self.save(made, 1)

        def refuse(folder: Path) -> None:
            raise RuntimeError("sizes differ\nof weight\nof bias")

        with pytest.raises(ArtifactError, match=r"cannot be loaded: RuntimeError: sizes differ$"):
            made.checkpoints.load(states(run)[0], refuse, made.rate, best=True)

        def runs_code(folder: Path) -> None:
            raise pickle.UnpicklingError("a class")

        with pytest.raises(
            ArtifactError, match="holds more than numbers, which could run code, so it is not read; train"
        ):
            made.checkpoints.load(states(run)[0], runs_code, made.rate, best=True)

    def test_random_states_that_are_not_taken_over_are_refused(self, run: Path) -> None:
        made = self.start(run)
        self.save(made, 1)
        folder = states(run)[0]
        torch.save({"random_state": [1]}, folder / "random_states_0.pkl")
        sums = json.loads((folder / "sha256.json").read_text(encoding="utf-8"))
        sums["random_states_0.pkl"] = sha256_of(folder / "random_states_0.pkl")
        write_json(folder / "sha256.json", sums)
        with pytest.raises(ArtifactError, match=r"000001-step-1: cannot be loaded: "):
            self.restore(made, pytest.fail)

    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), RuntimeError("\nno room\nat line 3")])
    def test_who_cannot_write_says_why_and_what_is_left(self, run: Path, error: Exception) -> None:
        made, reason = self.start(run), "No space left" if isinstance(error, OSError) else "no room"

        def full(*given: Any, **named: Any) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, "write", full)
            with pytest.raises(EdgeformerError, match=rf"000001-step-1: cannot .* \({reason}.*B free.*begins anew"):
                self.save(made, 1)
        self.save(made, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, "write", full)
            with pytest.raises(EdgeformerError, match="--resume goes on from 000001-step-1"):
                self.save(made, 2)
        assert [folder.name for folder in states(run)] == ["000001-step-1"]

    def test_a_folder_that_was_removed_is_told(self, run: Path) -> None:
        made = self.start(run)
        run.rmdir()
        with pytest.raises(FileNotFoundError, match="was removed") as raised:
            self.save(made, 1)
        assert raised.value.filename == str(run) and not run.exists()

    def test_leftovers_of_killed_processes_go_and_a_state_that_was_set_aside_stays(self, run: Path) -> None:
        folder = run / "checkpoints"
        for name in (".000001-step-1.x.tmp/model", ".000001-step-1.y.old", ".last.z.old/last", "000001-step-1"):
            (folder / name).mkdir(parents=True)
        (folder / ".best.safetensors.q.tmp.safetensors").write_bytes(b"half")
        Checkpoints(run).remove_leftovers()
        assert {path.name for path in folder.iterdir()} == {".last.z.old", "000001-step-1"}

    @pytest.mark.parametrize("aside", [False, True])
    @pytest.mark.parametrize("newer_best", [False, True])
    def test_a_state_of_an_earlier_version_has_its_best_weights_beside_it(
        self, run: Path, aside: bool, newer_best: bool
    ) -> None:
        made = self.start(run)
        for step in (1, 2):
            self.save(made, step, best_epoch=1)
        as_written_before(run)
        folder, said = run / "checkpoints", []
        if aside:
            (folder / ".last.abc.old").mkdir()
            (folder / "last").rename(folder / ".last.abc.old" / "last")
        if newer_best:
            flip(folder / "best.safetensors")
        position = self.restore(made, said.append)
        assert position is not None and position.step == 2
        assert position.best_epoch == (None if newer_best else 1) and bool(said) == newer_best
        assert made.checkpoints.best == folder / "best.safetensors"
        for step in (3, 4):
            self.save(made, step)
        assert [path.name for path in states(run) if not path.name.startswith(".")] == [
            "000001-step-3", "000002-step-4"
        ]  # fmt: skip


def test_no_more_than_checkpoint_minutes_is_ever_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right before a state gets its name everything since the one before was drawn is lost: 9 steps and one save."""
    now, kept = [0.0], []
    take, save = Stepper.take, Checkpoints.save

    def a_second(self: Stepper, *given: Any) -> Any:
        now[0] += 1
        return take(self, *given)

    def two_seconds(self: Checkpoints, *given: Any, **named: Any) -> None:
        began = now[0]
        now[0] += 2
        kept.append((began, now[0]))
        save(self, *given, **named)

    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(Stepper, "take", a_second)
    monkeypatch.setattr(Checkpoints, "save", two_seconds)
    recipe = classifier_recipe([*TINY, "training.batch_size=5", f"training.checkpoint_minutes={10 / 60}"])
    train(recipe, TrainOptions(tmp_path, max_steps=40))
    lost = [end - began for (began, _), (_, end) in pairwise(kept)]
    assert len(lost) >= 4 and max(lost[1:]) == 10.0


def test_saves_that_take_long_leave_time_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the end of the last save, where as much as that cannot be begun early."""
    made = TrainingLoop.__new__(TrainingLoop)
    made._config = SimpleNamespace(checkpoint_minutes=10 / 60)  # type: ignore[assignment]
    now = [100.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made._saved_at, made._saving_s = 0.0, 95.0  # it ended five seconds ago
    assert not made._is_late(1.0)
    now[0] = 105.0
    assert made._is_late(1.0)


@pytest.mark.parametrize(("stop", "limit"), [(30, None), (15, 15)])
def test_a_stop_after_the_last_step_of_all(
    tmp_path: Path, recipe: ClassificationRecipe, stop: int, limit: int | None
) -> None:
    """Its weights are validated when the run goes on."""
    straight = train(recipe, TrainOptions(tmp_path / "straight", name="run", max_steps=limit))
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path, name="run", max_steps=limit), StopAfter(stop))
    assert read_run(tmp_path / "run").steps == stop
    done = train(recipe, TrainOptions(tmp_path, name="run", resume=True, max_steps=limit))
    assert_same(done, straight)
    assert read_run(done).validation == read_run(straight).validation
