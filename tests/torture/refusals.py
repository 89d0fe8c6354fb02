"""Hostile files of every kind, each given to the command that reads it."""

import json
import lzma
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import external_data_helper

from edgeformer.artifacts.files import sha256_of
from tests.artifacts.test_hostile_yaml import BOMB
from tests.data.test_bombs import bomb, train
from tests.torture.children import OFTEN, TINY
from tests.torture.flipped_bytes import OLD

BUNDLE = OLD / "classifier-v1" / "bundle"
CASE = Callable[[Path], tuple[str, ...]]
"""Writes a hostile file into a folder; the command that reads it."""


class RunsCode:
    """Unpickled, it makes the file ``proof`` where the process runs."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch proof",)


def imported(folder: Path, content: Callable[[Path], object]) -> tuple[str, ...]:
    content(folder / "hostile.pt")
    return ("import", "crt", "hostile.pt", "--tokenizer", str(BUNDLE / "tokenizer.json"))


def resumed(folder: Path) -> tuple[str, ...]:
    """A stopped training whose optimizer, schedule and random states run code, with checksums that fit them."""
    sets = [part for override in (*TINY, *OFTEN, "training.epochs=4000") for part in ("--set", override)]
    command = [sys.executable, "-m", "edgeformer", "train", "quickstart", "--name", "run", *sets]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not list(folder.glob("artifacts/run/checkpoints/000002-*")) and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
    for state in (folder / "artifacts" / "run" / "checkpoints").iterdir():
        sums = json.loads((state / "sha256.json").read_text(encoding="utf-8"))
        for name in ("optimizer.bin", "schedule.pt", "random_states_0.pkl"):
            (state / name).write_bytes(pickle.dumps(RunsCode()))
            sums[name] = sha256_of(state / name)
        (state / "sha256.json").write_text(json.dumps(sums), encoding="utf-8")
    return ("train", "artifacts/run/recipe.yaml", "--resume", "--name", "run")


def escaping(folder: Path) -> tuple[str, ...]:
    """A bundle whose manifest names a file beside the bundle, with the right checksum."""
    bundle = Path(shutil.copytree(BUNDLE, folder / "bundle"))
    shutil.copy(bundle / "onnx" / "model.onnx", folder / "x.onnx")
    text = (bundle / "bundle.json").read_text(encoding="utf-8")
    (bundle / "bundle.json").write_text(text.replace('"onnx/model.onnx"', '"../x.onnx"'), encoding="utf-8")
    return ("predict", "bundle", "a text", "--artifact", "onnx-fp32")


def outside(folder: Path) -> tuple[str, ...]:
    """A bundle whose graph reads its weights from a file of the machine; its checksum in the manifest is right."""
    bundle = Path(shutil.copytree(BUNDLE, folder / "bundle"))
    path = bundle / "onnx" / "model.onnx"
    model, start = onnx.load(path), sha256_of(path)
    table = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    (folder / "secret.bin").write_bytes(table.raw_data)
    external_data_helper.set_external_data(table, "../../secret.bin", offset=0, length=len(table.raw_data))
    table.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())
    text = (bundle / "bundle.json").read_text(encoding="utf-8").replace(start, sha256_of(path))
    (bundle / "bundle.json").write_text(text, encoding="utf-8")
    return ("predict", "bundle", "a text", "--artifact", "onnx-fp32")


def written(text: str) -> CASE:
    def case(folder: Path) -> tuple[str, ...]:
        (folder / "recipe.yaml").write_text(text, encoding="utf-8")
        return ("train", "recipe.yaml")

    return case


def packed(folder: Path) -> tuple[str, ...]:
    """Data of 4 GB in 600 kB."""
    bomb(folder / "bomb.tsv.xz", ".xz")
    return train(folder, "bomb.tsv.xz")


def line(folder: Path) -> tuple[str, ...]:
    """Data of 4 GB in one line."""
    (folder / "line.tsv.xz").write_bytes(lzma.compress(b"label\ttext\n1\t") + lzma.compress(b" " * 2**24) * 256)
    return train(folder, "line.tsv.xz")


CASES: dict[str, CASE] = {
    "checkpoint: a pickle that runs code": lambda f: imported(f, lambda p: p.write_bytes(pickle.dumps(RunsCode()))),
    "checkpoint: the same inside a state dict": lambda f: imported(
        f, lambda p: torch.save({"model": {"tokens.weight": RunsCode()}}, p)
    ),
    "training's own checkpoints run code": resumed,
    "bundle: a file ../x.onnx": escaping,
    "bundle: ONNX weights in ../../secret.bin": outside,
    "YAML: alias bomb": written(BOMB),
    "YAML: an alias inside itself": written("name: x\nloop: &loop [1, *loop]\n"),
    "data: 4 GB of lines in an .xz": packed,
    "data: a line of 4 GB in an .xz": line,
}
STARTS: dict[str, CASE] = {
    "import": lambda folder: ("import", "crt", "absent.pt"),
    "train": lambda folder: train(folder, "absent.tsv"),
    "recipe": lambda folder: ("train", "absent.yaml"),
    "predict": lambda folder: ("predict", "absent", "a text"),
}
"""What a command costs that comes as far and finds nothing: Python and, but for recipes and predict, torch."""
