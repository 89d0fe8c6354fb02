"""The command lines of README and docs that the tests run; they let the command line read all of them.

A documented line is run as it stands, with options added that make it take seconds: smaller models, fewer rows, one
artifact. Paths in it (``path/to/sst2``) are made before, in the folder that it runs in.
"""

from tests.conftest import SMALL


def _set(*overrides: str) -> tuple[str, ...]:
    return tuple(word for override in overrides for word in ("--set", override))


_TINY = tuple(item for item in SMALL if not item.startswith("name="))
_ONE_SHAPE = ("--artifact", "onnx-fp16", "--batch", "1", "--seq", "16")
_FEW = ("--max-tokens", "5")

RUN: dict[str, tuple[str, ...]] = {
    "edgeformer train quickstart": ("--max-steps", "2", *_set(*_TINY)),
    "edgeformer train quickstart --set training.epochs=2 --set model.iterations=3": (
        "--max-steps", "2", *_set(*(item for item in _TINY if not item.startswith("training.epochs"))),
    ),
    "edgeformer train recurrent_sst2_fast --data path/to/sst2 --tokenizer path/to/bert-base-uncased/tokenizer.json": (
        "--max-steps", "2", "--set", "model.hidden_size=32", "--set", "model.ffn_size=64",
    ),
    "edgeformer export --fp16": (),
    'edgeformer predict "the staff was friendly but overall the food was not good"': (),
    "edgeformer export --fp16 --trt": (),
    "edgeformer profile --device rtx4050": _ONE_SHAPE,
    'edgeformer generate "The history of the town"': _FEW,
    'edgeformer generate "The history of the town" --exit 4': _FEW,
    'edgeformer generate "The history of the town" --confidence': _FEW,
    "edgeformer verify bundle": (),
    "edgeformer verify bundle --write": (),
    "edgeformer compare before.json after.json": (),
    "edgeformer init letters.jsonl": (),
    "edgeformer train letters.yaml": _set("model.hidden_size=16", "model.ffn_size=16", "training.epochs=1"),
    'edgeformer predict "Frau Käthe Bachmann wohnt seit dem 1.2.1999 in der Lindstraße 7."': (),
    "edgeformer predict --file mails.csv --output spans.jsonl": (),
    "edgeformer evaluate --data held-out.conll": (),
    "edgeformer import crt best_model.pt --tokenizer gpt2/tokenizer.json": (),
}  # fmt: skip
"""Command line → options that are added."""

NOT_OURS = {
    "llama-cli", "curl", "docker", "cp", "make", "source", "ssh", "ssh-copy-id", "scp", "torchrun", "accelerate", "npm",
    "python",
}  # fmt: skip
"""First words of the other command lines."""

NOT_SHELL = {"#!/bin/bash"}
"""First lines of blocks of shell that are no command lines of a reader: a job for Slurm."""
