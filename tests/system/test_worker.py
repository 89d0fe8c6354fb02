"""Worker processes: messages reach the parent, and every way to end has a reason."""

import os
import sys

import pytest

from edgeformer.artifacts.base import Frozen
from edgeformer.system import nvidia, worker
from edgeformer.system.worker import End, WorkerJob, run_job, worker_environment
from tests.fakes.nvml import JETSON, LAPTOP, UUID

PRELUDE = """
import json, os, signal, sys, time
from edgeformer.system.output import claim_stdout
from edgeformer.system.worker import End
from pydantic import BaseModel
class Question(BaseModel):
    number: int
class Answer(Question):
    pass
channel, number = claim_stdout(), json.loads(sys.stdin.readline())["number"]
def send(message):
    channel.write(f"{type(message).__name__} {message.model_dump_json()}\\n".encode())
    channel.flush()
"""


class Answer(Frozen):
    number: int


class Question(WorkerJob):
    name = "asking"
    messages = (Answer,)
    number: int


def ask(monkeypatch: pytest.MonkeyPatch, program: str, silence_s: float = 60.0) -> tuple[list[int], End]:
    """What a program answers to 20, and how it ends."""
    monkeypatch.setattr(worker, "worker_command", lambda: [sys.executable, "-c", PRELUDE + program])
    heard: list[int] = []
    job = Question(number=20, threads=1)
    return heard, run_job(job, lambda answer: heard.append(answer.number), silence_s)


def test_messages_arrive_in_order_without_what_libraries_print(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "print('noise'); os.write(1, b'more noise\\n')\n" + "send(Answer(number=number + 1)); " * 2
    heard, ending = ask(monkeypatch, program + "send(Answer(number=3)); send(End())")
    assert heard == [21, 21, 3] and ending == End()


@pytest.mark.parametrize(
    ("program", "says", "died"),
    [
        ("sys.stderr.write('one\\ntwo\\n'); sys.exit(3)", "the asking process ended early: exit code 3; last", True),
        ("send(Answer(number=1)); os._exit(0)", "the asking process ended early: exit code 0", True),
        ("send(Question(number=1))", "the asking process wrote an unreadable message: b'Question {", False),
        ("time.sleep(60)", "the asking process gave no sign of life for 2 s and was stopped", False),
    ],
)
def test_other_endings_have_different_reasons(monkeypatch, program, says, died):
    _, ending = ask(monkeypatch, program, 2.0 if "sleep" in program else 60.0)
    assert ending.reason is not None and ending.reason.startswith(says) and ending.died is died
    assert ending.reason.endswith("last line on stderr: two") == ("two" in program)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")
def test_a_killed_worker_may_have_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ending = ask(monkeypatch, "os.kill(os.getpid(), signal.SIGKILL)")
    assert ending.died and "(SIGKILL), as happens when memory runs out" in str(ending.reason)


def test_threads_are_pinned_for_the_worker_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    environment = worker_environment(Question(number=1, threads=2, gpu_uuid="GPU-1"))
    assert environment["OMP_PROC_BIND"] == "true"
    assert environment["OMP_NUM_THREADS"] == "7", "what the user has set is kept"
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert "OMP_PROC_BIND" not in os.environ


@pytest.mark.parametrize("persona", [LAPTOP, JETSON])
def test_a_worker_sees_the_card_with_a_known_uuid(persona, nvml, monkeypatch):
    nvml.answer(persona)
    (card,) = nvidia.gpus()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for already in (None, "0"):
        if already is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", already)
        environment = worker_environment(Question(number=1, threads=2, gpu_uuid=card.uuid))
        assert environment.get("CUDA_VISIBLE_DEVICES") == (UUID if persona is LAPTOP else already)
    instance = Question(number=1, threads=2, gpu_uuid="MIG-1")
    assert worker_environment(instance)["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    foreign = Question(number=1, threads=2, gpu_uuid="ddb8f2c5-4050")
    assert worker_environment(foreign)["CUDA_VISIBLE_DEVICES"] == "0"
