"""Recipes, progress classes and readers of run folders for the tests of training."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from edgeformer.artifacts.files import sha256_of, write_json
from edgeformer.artifacts.progress import Progress
from edgeformer.run import read_run


class Messages(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)

    def containing(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]


class AfterSteps(Messages):
    """Calls ``action`` after some optimizer steps."""

    def __init__(self, steps: int, action: Callable[[], object]) -> None:
        super().__init__()
        self._remaining, self._action = steps, action

    def advance(self, amount: int = 1, **fields: float) -> None:
        self._remaining -= "loss" in fields
        if self._remaining == 0:
            self._remaining = -1
            self._action()


class StopAfter(AfterSteps):
    """Sends Ctrl-C after some optimizer steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, lambda: signal.raise_signal(signal.SIGINT))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def losses(run: Path, kind: str = "step", key: str = "loss") -> list[float]:
    return [record[key] for record in records(run, kind)]


def states(run: Path) -> list[Path]:
    """Folders of the checkpoints, oldest first."""
    return sorted((run / "checkpoints").iterdir())


def write_damaged(file: Path) -> None:
    """Flip one bit of a file, whose content another checkpoint may share."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.unlink()
    file.write_bytes(content)


def update_checksum(file: Path) -> None:
    sums = json.loads((file.parent / "sha256.json").read_text(encoding="utf-8"))
    write_json(file.parent / "sha256.json", {**sums, file.name: sha256_of(file)})


def assert_equal_weights(run: Path, expected: Path) -> None:
    for name, tensor in weights(expected).items():
        assert torch.equal(tensor, weights(run)[name]), name


def assert_same_run(run: Path, expected: Path) -> None:
    """Weights, scores and log are those of ``expected``, but for speeds."""
    assert read_run(run).status == "finished" and read_run(run).test == read_run(expected).test
    assert_equal_weights(run, expected)
    logs = []
    for folder in (run, expected):
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        logs.append([{k: v for k, v in json.loads(line).items() if not k.endswith("_per_s")} for line in lines])
    assert logs[0] == logs[1]
