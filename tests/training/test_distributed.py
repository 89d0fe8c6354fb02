"""Several processes train what one would: the same steps, one writer, and a clear end if one of them is killed."""

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

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.models import load_recipe
from edgeformer.run import read_run
from edgeformer.training.loop.distributed import connect
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL_LANGUAGE
from tests.torture.children import TINY, begin, ends
from tests.training.runs import StopAfter, losses, weights

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo and POSIX signals")

Task = tuple[str, list[str]]
STEPS = 14
LOG_EVERY_STEP = "training.log_every=1"
CLASSIFIER: Task = (
    "quickstart",
    [*TINY, "model.dropout=0", "training.batch_size=19", "training.accumulation=2", "training.epochs=3"],
)
"""9 steps of 38 rows an epoch, of which the last has 16: parts and numbers of micro-batches are uneven."""
LANGUAGE_MODEL: Task = (
    "crt_mini",
    [*SMALL_LANGUAGE, "model.dropout=0", "training.accumulation=2", "training.checkpointing=loop"],
)
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""The name of a test host may have no address."""


class FileMessages(StopAfter):
    """Writes messages to a file, and sends Ctrl-C to its process after some steps."""

    def __init__(self, file: Path, stop_after: int | None) -> None:
        super().__init__(stop_after or -1)
        self._file = file

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.message(description)

    def message(self, text: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _train_rank(rank: int, count: int, port: int, artifacts: Path, task: Task, options: dict[str, Any]) -> None:
    """Train as a process of a launcher, without the seconds that the launcher takes."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **LOOPBACK,
    )  # fmt: skip
    progress = FileMessages(artifacts / f"messages-{rank}.txt", options.pop("stop_after", None))
    options = {"name": "run", "accelerator": "cpu", **options}
    try:
        train(load_recipe(*task), TrainOptions(artifacts, **options), progress)
    except EdgeformerError as error:
        (artifacts / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        os._exit(error.exit_code)
    os._exit(0)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def start(artifacts: Path, *tasks: Task, **options: Any) -> list[BaseProcess]:
    """Start a process for each task, which must be the same."""
    artifacts.mkdir(exist_ok=True)
    port, count = free_port(), len(tasks)
    return [begin(_train_rank, rank, count, port, artifacts, task, options) for rank, task in enumerate(tasks)]


def run_processes(artifacts: Path, *tasks: Task, **options: Any) -> list[int]:
    return [ends(process) for process in start(artifacts, *tasks, **options)]


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def with_log(task: Task, *changes: str) -> Task:
    return task[0], [*task[1], LOG_EVERY_STEP, *changes]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    artifacts = tmp_path_factory.mktemp("single")
    return {
        task[0]: train(load_recipe(*with_log(task)), TrainOptions(artifacts, task[0], max_steps=STEPS))
        for task in (CLASSIFIER, LANGUAGE_MODEL)
    }


def assert_same_training(run: Path, expected: Path) -> None:
    assert len(losses(run)) == len(losses(expected)) == STEPS
    assert losses(run) == pytest.approx(losses(expected), abs=1e-5)
    assert losses(run, key="lr") == losses(expected, key="lr")
    assert losses(run, "epoch", "val_loss") == pytest.approx(losses(expected, "epoch", "val_loss"), abs=1e-5)
    actual_weights, expected_weights = weights(run), weights(expected)
    assert actual_weights.keys() == expected_weights.keys()
    assert all(float((actual_weights[name] - tensor).abs().max()) < 1e-4 for name, tensor in expected_weights.items())


@pytest.mark.slow
@pytest.mark.parametrize(("task", "sharded"), [(CLASSIFIER, False), (LANGUAGE_MODEL, True)], ids=["copies", "shards"])
def test_two_processes(tmp_path: Path, single: dict[str, Path], task: Task, sharded: bool) -> None:
    assert run_processes(tmp_path, *[with_log(task)] * 2, max_steps=STEPS, sharded=sharded) == [0, 0]
    assert_same_training(tmp_path / "run", single[task[0]])
    manifest = read_run(tmp_path / "run")
    assert (manifest.processes, manifest.effective_batch) == (2, read_run(single[task[0]]).effective_batch)
    portion = "part" if sharded else "copy"
    assert f"2 processes train it together; each has a {portion} of the model" in text_of(tmp_path / "messages-0.txt")
    # Only the main process writes and reports.
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache", "messages-0.txt", "run"]


@pytest.mark.slow
def test_resumed_by_another_number_of_processes(tmp_path: Path, single: dict[str, Path]) -> None:
    # --max-steps finishes a run; only an interrupted one can be resumed. The classifier's first epoch has 9 steps: a
    # resumed process validates first.
    task = with_log(CLASSIFIER)
    assert run_processes(tmp_path, task, task, stop_after=9, sharded=True) == [130, 130]
    assert read_run(tmp_path / "run").steps == 9
    assert run_processes(tmp_path, task, stop_after=2, resume=True) == [130]
    assert run_processes(tmp_path, task, task, max_steps=STEPS, resume=True, sharded=True) == [0, 0]
    assert_same_training(tmp_path / "run", single[task[0]])
    message = "continuing with 1 processes instead of 2; the optimizer steps stay the same"
    assert message in text_of(tmp_path / "messages-0.txt")


@pytest.mark.slow
def test_parameter_without_gradient(tmp_path: Path) -> None:
    task = with_log(LANGUAGE_MODEL, "training.exit_weight=0")
    assert run_processes(tmp_path, task, task, max_steps=3) == [0, 0]


@pytest.mark.slow
def test_killed_process_ends_the_other(tmp_path: Path) -> None:
    task = with_log(CLASSIFIER, "training.checkpoint_minutes=1e-9", "training.epochs=500")
    processes = start(tmp_path, task, task)
    while not list(tmp_path.glob("run/checkpoints/00001*")):
        assert all(process.is_alive() for process in processes)
        time.sleep(0.05)
    processes[1].kill()
    killed = time.monotonic()
    assert ends(processes[0]) == 1
    assert time.monotonic() - killed < 60
    error = text_of(tmp_path / "error-0.txt")
    assert "process 0 of 2: the connection to another process" in error and "--resume --name run" in error
    assert read_run(tmp_path / "run").status == "failed"
    steps = len(losses(tmp_path / "run"))
    assert run_processes(tmp_path, task, task, resume=True, max_steps=steps + 3) == [0, 0]
    assert len(losses(tmp_path / "run")) == steps + 3


def test_signal_to_one_process_stops_all_after_the_same_step(tmp_path: Path) -> None:
    task = with_log(CLASSIFIER, "training.epochs=500")
    processes = start(tmp_path, task, task)
    while len(list(tmp_path.glob("run/checkpoints/*"))) < 2:
        assert all(process.is_alive() for process in processes)
        time.sleep(0.05)
    for number in (signal.SIGINT, signal.SIGTERM):  # the terminal's, and what a launcher sends then
        os.kill(processes[1].pid or 0, number)
    assert [ends(process) for process in processes] == [130, 130]
    assert text_of(tmp_path / "error-0.txt").startswith("InterruptedRun: interrupted after step ")
    assert text_of(tmp_path / "error-1.txt").startswith("AlreadyReported: ")
    run = read_run(tmp_path / "run")
    assert run.status == "interrupted" and len(losses(tmp_path / "run")) == run.steps


def test_main_process_reports_errors(tmp_path: Path) -> None:
    other = (CLASSIFIER[0], [*CLASSIFIER[1], "training.optimizer.lr=1e-4"])
    diverging = with_log(CLASSIFIER, "training.optimizer.lr=1e30")
    for tasks, name, code, message in (
        ((CLASSIFIER, other), "run", 2, "process 1 of 2: the recipe's fingerprint is "),
        ((CLASSIFIER, CLASSIFIER), "../x", 2, "--name"),
        ((diverging, diverging), "run", 1, "training diverged at step "),
    ):
        assert not (tmp_path / "run").exists()
        assert run_processes(tmp_path, *tasks, name=name) == [code, code]
        assert text_of(tmp_path / "error-0.txt").partition(": ")[2].startswith(message)
        assert text_of(tmp_path / "error-1.txt").startswith(f"AlreadyReported: {message}")


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """The launcher itself, with the command line."""
    name, overrides = CLASSIFIER
    flags = [part for override in (*overrides, LOG_EVERY_STEP) for part in ("--set", override)]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *address]
    command = ["-m", "edgeformer", "train", name, "--name", "run", "--max-steps", "3", *flags, "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", **LOOPBACK}
    done = subprocess.run([*launcher, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3  # one JSON document: only the main process reports
    assert read_run(tmp_path / "artifacts" / "run").processes == 2


def test_what_a_launcher_must_not_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, sharded, message in (
        ("ACCELERATE_USE_DEEPSPEED", False, "ACCELERATE_USE_DEEPSPEED: not supported"),
        ("ACCELERATE_USE_FSDP", False, "--shard: needs several processes"),
        ("UNRELATED", True, "--shard: needs several processes"),
    ):
        with monkeypatch.context() as patch, pytest.raises(InputError, match=message):
            patch.setenv(variable, "true")
            connect(load_recipe(*CLASSIFIER), "cpu", sharded=sharded)
