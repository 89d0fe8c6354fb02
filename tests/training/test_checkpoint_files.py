"""The files of a checkpoint: what is written, in which order, and what is read, refused and left of them."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError
from edgeformer.artifacts.files import sha256_of, write_json
from edgeformer.artifacts.recipe import CosineSchedule, OptimizerConfig
from edgeformer.training import checkpoint
from edgeformer.training.checkpoint import Checkpoints, Position, remove
from edgeformer.training.distributed import Processes
from edgeformer.training.optimizer import LearningRate, build_optimizer
from tests.training.test_checkpoints import as_written_before, flip, states


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
        found = checkpoint.gather(made.processes, made.model, made.optimizer)
        made.checkpoints.save(found, made.rate, position, best=best)

    def restore(self, made: SimpleNamespace, say: Callable[[str], None]) -> Position | None:
        found = made.checkpoints.find(say)
        if found is None:
            return None

        def restore(folder: Path) -> None:
            checkpoint.load(folder, made.processes, made.model, made.optimizer)

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
        found = checkpoint.gather(made.processes, made.model, made.optimizer)
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
            patch.setattr(checkpoint, "write", full)
            with pytest.raises(EdgeformerError, match=rf"000001-step-1: cannot .* \({reason}.*B free.*begins anew"):
                self.save(made, 1)
        self.save(made, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "write", full)
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
