"""What stands in our documents and can be run: programs, blocks of code, command lines."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import SMALL

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_PROGRAM = re.compile(r"(?:#|//) (\w+\.(?:py|mjs)) ")
_FENCE = re.compile(r"^ *```(\w*)$")
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def programs(document: Path) -> dict[str, str]:
    """Name → text of every block whose first line is a comment with its name."""
    named = ((_PROGRAM.match(block.text), block.text) for block in blocks(document))
    return {match[1]: text for match, text in named if match}


@dataclass(frozen=True)
class Block:
    """A block of code: fenced, or indented by four spaces and more.

    ``language``  what stands behind the fence: ``bash`` are commands, ``text`` is output; empty: nothing, or indented
    """

    document: str
    line: int
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0]

    def commands(self) -> list[str]:
        lines = (" ".join(_without_comment(line).split()) for line in self.text.splitlines())
        return [line for line in lines if line]


def _without_comment(line: str) -> str:
    """``edgeformer doctor   # what works?`` → ``edgeformer doctor``; a # inside quotes is no comment."""
    return re.sub(r"""^((?:[^"'#]|"[^"]*"|'[^']*')*?)(?:(?:^|\s)#.*)?$""", r"\1", line)


def blocks(document: Path) -> list[Block]:
    results: list[Block] = []
    lines = [*document.read_text(encoding="utf-8").splitlines(), ""]
    number, previous = 0, ""
    while number < len(lines):
        fence, start = _FENCE.match(lines[number]), number
        if fence is not None:
            number += 1
            while not _FENCE.match(lines[number]):
                number += 1
            results.append(_block(document, start, fence[1], lines[start + 1 : number]))
        elif lines[number].startswith("    ") and not previous.strip():
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            results.append(_block(document, start, "", lines[start:number]))
            number -= 1
        previous = lines[number]
        number += 1
    return results


def _block(document: Path, line: int, language: str, lines: list[str]) -> Block:
    name = document.relative_to(ROOT).as_posix()
    return Block(name, line + 1, language, textwrap.dedent("\n".join(lines)).strip("\n") + "\n")


def inline_code(document: Path) -> Iterator[str]:
    """What stands between single backticks inside sentences and tables."""
    text = document.read_text(encoding="utf-8")
    for line in (line for block in blocks(document) for line in block.text.splitlines()):
        text = text.replace(line, "")
    for span in _INLINE.findall(text):
        yield span.replace(r"\|", "|")


def words(command: str) -> list[str]:
    program, *arguments = shlex.split(command)
    assert program == "edgeformer", command
    return arguments


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
"""Command line → options that are added, so that it takes seconds: smaller models, fewer rows, one artifact.

The tests run these lines as they stand, and let the command line read all others. Paths in them (``path/to/sst2``) are
made before, in the folder that a line runs in.
"""

NOT_OURS = {
    "llama-cli", "curl", "docker", "cp", "make", "source", "ssh", "ssh-copy-id", "scp", "torchrun", "accelerate", "npm",
    "python",
}  # fmt: skip
"""First words of the other command lines."""

NOT_SHELL = {"#!/bin/bash"}
"""First lines of blocks of shell that are no command lines of a reader: a job for Slurm."""
