"""Several processes train what one would: the same steps, one writer, and a clear end where one of them is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.training.test_health import two_layers
from tests.training.test_recipe_effects import metrics

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.progress import Silent
from edgeformer.models import load_recipe
from edgeformer.run import read_run
from edgeformer.training.distributed import connect
from edgeformer.training.memory import predict_peak, share_of
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL_LANGUAGE
from tests.torture.children import TINY, begin, ends

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo and POSIX signals")

STEPS = 20
CLASSIFIER = (
    "quickstart",
    [*TINY, "model.dropout=0", "training.batch_size=19", "training.accumulation=2", "training.epochs=3"],
)
"""11 steps of 38 rows an epoch; the last one has 20, so that parts and numbers of micro-batches are uneven."""
WRITER = (
    "crt_mini",
    [*SMALL_LANGUAGE, "model.dropout=0", "training.accumulation=2", "training.checkpointing=loop", "training.epochs=2"],
)
TASKS = pytest.mark.parametrize("task", [CLASSIFIER, WRITER], ids=["classification", "language-modeling"])
LOG = "training.log_every=1"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""A test machine's own name need not lead anywhere."""


class Told(Silent):
    """Writes messages to a file, and interrupts its process after so many steps."""

    def __init__(self, file: Path, stop_after: int | None) -> None:
        self._file, self._left = file, stop_after or -1

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.message(description)

    def advance(self, amount: int = 1, **fields: float) -> None:
        self._left -= "loss" in fields
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGINT)

    def message(self, text: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _one_of(rank: int, count: int, port: int, artifacts: Path, recipe: Any, options: dict[str, Any]) -> None:
    """What a launcher starts, without the seconds that its own start takes."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **LOOPBACK,
    )
    told = Told(artifacts / f"told-{rank}.txt", options.pop("stop_after", None))
    options = {"name": "run", "accelerator": "cpu", **options}
    try:
        train(load_recipe(*recipe), TrainOptions(artifacts, **options), told)
    except EdgeformerError as error:
        (artifacts / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        os._exit(error.exit_code)
    os._exit(0)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(count: int, artifacts: Path, recipe: tuple[str, list[str]], **options: Any) -> list[BaseProcess]:
    artifacts.mkdir(exist_ok=True)
    port = free_port()
    return [begin(_one_of, rank, count, port, artifacts, recipe, options) for rank in range(count)]


def together(count: int, artifacts: Path, recipe: tuple[str, list[str]], **options: Any) -> list[int]:
    return [ends(process) for process in start(count, artifacts, recipe, **options)]


def error(artifacts: Path, rank: int) -> str:
    return (artifacts / f"error-{rank}.txt").read_text(encoding="utf-8")


def losses(run: Path, kind: str = "step", key: str = "loss") -> list[float]:
    return [record[key] for record in metrics(run) if record["kind"] == kind]


def with_log(task: tuple[str, list[str]], *more: str) -> tuple[str, list[str]]:
    return task[0], [*task[1], LOG, *more]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both tasks, trained by one process."""
    artifacts = tmp_path_factory.mktemp("alone")
    return {
        recipe: train(load_recipe(recipe, [*overrides, LOG]), TrainOptions(artifacts, recipe, max_steps=STEPS))
        for recipe, overrides in (CLASSIFIER, WRITER)
    }


def assert_same_training(run: Path, expected: Path) -> None:
    found, wanted = losses(run), losses(expected)
    assert len(found) == len(wanted) == STEPS
    assert found == pytest.approx(wanted, abs=1e-5)
    assert losses(run, key="lr") == losses(expected, key="lr")
    assert losses(run, "epoch", "val_loss") == pytest.approx(losses(expected, "epoch", "val_loss"), abs=1e-5)
    mine, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, expected))
    assert mine.keys() == theirs.keys()
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-4


@TASKS
@pytest.mark.parametrize("sharded", [False, True], ids=["copies", "shards"])
def test_two_processes_train_what_one_does(
    tmp_path: Path, alone: dict[str, Path], task: tuple[str, list[str]], sharded: bool
) -> None:
    assert together(2, tmp_path, with_log(task), max_steps=STEPS, sharded=sharded) == [0, 0]
    assert_same_training(tmp_path / "run", alone[task[0]])
    manifest = read_run(tmp_path / "run")
    assert (manifest.processes, manifest.effective_batch) == (2, read_run(alone[task[0]]).effective_batch)
    told = (tmp_path / "told-0.txt").read_text(encoding="utf-8")
    assert f"2 processes train it together, each with a {'part' if sharded else 'copy'} of the model" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache", "run", "told-0.txt"]  # one writes and reports


@TASKS
def test_resumed_by_two_then_one_then_two_in_shards(
    tmp_path: Path, alone: dict[str, Path], task: tuple[str, list[str]]
) -> None:
    recipe = with_log(task)
    # --max-steps finishes a run; a checkpoint that is resumed from must be of one that was interrupted.
    assert together(2, tmp_path, recipe, stop_after=5) == [130, 130]
    assert together(1, tmp_path, recipe, stop_after=11, resume=True) == [130]
    assert together(2, tmp_path, recipe, max_steps=STEPS, resume=True, sharded=True) == [0, 0]
    assert_same_training(tmp_path / "run", alone[task[0]])
    assert "going on with 1 processes instead of 2; the steps are the same" in (tmp_path / "told-0.txt").read_text(
        "utf-8"
    )


def test_a_parameter_without_gradient_is_not_waited_for(tmp_path: Path) -> None:
    assert together(2, tmp_path, with_log(WRITER, "training.exit_weight=0"), max_steps=3) == [0, 0]


def test_one_that_is_killed_stops_the_other_and_the_run_goes_on(tmp_path: Path, alone: dict[str, Path]) -> None:
    recipe = with_log(CLASSIFIER, "training.checkpoint_minutes=1e-9", "training.epochs=500")
    for victim, survivor in ((1, 0), (0, 1)):
        artifacts = tmp_path / str(victim)
        processes = start(2, artifacts, recipe)
        while not list(artifacts.glob("run/checkpoints/00001*")):
            assert all(process.is_alive() for process in processes)
            time.sleep(0.05)
        processes[victim].kill()
        began = time.monotonic()
        assert ends(processes[survivor]) == 1
        assert time.monotonic() - began < 60
        assert f"process {survivor} of 2: lost the connection to another process" in error(artifacts, survivor)
        assert "--resume --name run" in error(artifacts, survivor)
        if survivor == 0:
            assert read_run(artifacts / "run").status == "failed"
        done = losses(artifacts / "run")
        assert together(2, artifacts, recipe, resume=True, max_steps=len(done) + 3) == [0, 0]
        assert len(losses(artifacts / "run")) == len(done) + 3


def test_one_that_is_killed_before_the_first_step(tmp_path: Path) -> None:
    processes, told = start(2, tmp_path, CLASSIFIER), tmp_path / "told-0.txt"
    while not (told.exists() and "Reading data" in told.read_text(encoding="utf-8")):  # before that they are connected
        assert processes[0].is_alive()
        time.sleep(0.005)
    processes[1].kill()
    assert ends(processes[0]) == 1
    assert "lost the connection to another process" in error(tmp_path, 0)
    assert error(tmp_path, 0).endswith("; start again when it is known why")


def test_a_stop_signal_to_one_stops_all_after_the_same_step(tmp_path: Path) -> None:
    recipe = with_log(CLASSIFIER, "training.epochs=500")
    processes = start(2, tmp_path, recipe)
    while len(list(tmp_path.glob("run/checkpoints/*"))) < 2:
        assert all(process.is_alive() for process in processes)
        time.sleep(0.05)
    for number in (signal.SIGINT, signal.SIGTERM):  # as a launcher sends it on after the terminal
        os.kill(processes[1].pid or 0, number)
    assert [ends(process) for process in processes] == [130, 130]
    assert error(tmp_path, 0).startswith("InterruptedRun: interrupted after step ")
    assert error(tmp_path, 1).startswith("ToldElsewhere: ")
    run = read_run(tmp_path / "run")
    assert run.status == "interrupted" and len(losses(tmp_path / "run")) == run.steps
    assert together(2, tmp_path, recipe, resume=True, max_steps=run.steps + 1) == [0, 0]


@pytest.mark.parametrize("sharded", [False, True], ids=["copies", "shards"])
def test_stopped_after_the_last_step_of_an_epoch(tmp_path: Path, alone: dict[str, Path], sharded: bool) -> None:
    """Validation is the first thing that a resumed process does."""
    recipe = with_log(CLASSIFIER)
    assert together(2, tmp_path, recipe, stop_after=9, sharded=sharded) == [130, 130]
    assert read_run(tmp_path / "run").steps == 9  # 320 rows in steps of 38
    assert together(2, tmp_path, recipe, max_steps=STEPS, resume=True, sharded=sharded) == [0, 0]
    assert_same_training(tmp_path / "run", alone["quickstart"])


def test_all_must_train_the_same(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    port, other = free_port(), (CLASSIFIER[0], [*CLASSIFIER[1], "training.optimizer.lr=1e-4"])
    processes = [begin(_one_of, rank, 2, port, tmp_path, recipe, {}) for rank, recipe in enumerate((CLASSIFIER, other))]
    assert [ends(process) for process in processes] == [2, 2]
    assert error(tmp_path, 0).startswith("InputError: process 1 of 2: the recipe's fingerprint is ")
    assert not (tmp_path / "run").exists()


def test_an_error_of_one_ends_all_and_is_told_once(tmp_path: Path) -> None:
    assert together(2, tmp_path, CLASSIFIER, name="../x") == [2, 2]
    assert error(tmp_path, 0).startswith("InputError: --name")
    assert error(tmp_path, 1).startswith("ToldElsewhere: --name")
    diverging = with_log(CLASSIFIER, "training.optimizer.lr=1e30")
    assert together(2, tmp_path, diverging) == [1, 1]
    assert error(tmp_path, 0).startswith("EdgeformerError: training diverged at step ")
    assert error(tmp_path, 1).startswith("ToldElsewhere: training diverged at step ")


def test_torchrun(tmp_path: Path) -> None:
    """The launcher itself, with the command and without a word changed."""
    name, overrides = CLASSIFIER
    sets = [part for override in (*overrides, LOG) for part in ("--set", override)]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *meeting]
    command = ["-m", "edgeformer", "train", name, "--name", "run", "--max-steps", "3", *sets, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", **LOOPBACK}
    done = subprocess.run(
        [*launcher, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3  # one JSON document: one process reports
    assert read_run(tmp_path / "artifacts" / "run").processes == 2


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"])
def test_other_engines_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "true")
    with pytest.raises(InputError, match=f"{variable}: edgeformer does not train with"):
        connect(load_recipe(*CLASSIFIER), "cpu", sharded=False)


@pytest.mark.parametrize("launched", [False, True])
def test_shards_need_several_processes(monkeypatch: pytest.MonkeyPatch, launched: bool) -> None:
    """``accelerate launch --use_fsdp`` asks for them as well."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(launched).lower())
    with pytest.raises(InputError, match="--shard: there is one process only"):
        connect(load_recipe(*CLASSIFIER), "cpu", sharded=not launched)


def test_the_norm_is_of_all_gradients_that_there_are_before_they_are_clipped() -> None:
    processes, model = connect(load_recipe(*CLASSIFIER), "cpu", sharded=False), two_layers()
    assert processes.clip(model, None) == pytest.approx(5.0)
    assert processes.clip(model, 1.0) == pytest.approx(5.0)
    assert processes.clip(model, None) == pytest.approx(1.0)


def test_what_each_of_several_processes_needs() -> None:
    recipe = load_recipe("crt_mini", ["training.batch_size=8", "training.accumulation=3"])
    share = share_of(recipe, 5)
    assert (share.training.batch_size, share.training.accumulation) == (5, 1)  # of 24 rows
    assert share_of(recipe, 2).training.batch_size == 8 and share_of(recipe, 2).training.accumulation == 2
    whole = predict_peak(recipe, device_kind="cpu", precision="fp32")
    shard = predict_peak(recipe, device_kind="cpu", precision="fp32", processes=4, sharded=True)
    assert shard.optimizer == whole.optimizer // 4
    assert shard.weights == whole.weights * 5 // 4
