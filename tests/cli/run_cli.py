"""Running the real command in a process of its own."""

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Importing torch takes longer than most commands that are tested here: where the system can fork, a server imports it
# once, and each command runs in a fresh copy of the server.
_FORKS = "forkserver" in multiprocessing.get_all_start_methods()
_CONTEXT = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
_SETTINGS = {"HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
if _FORKS:
    heavy = ["edgeformer.cli", "edgeformer.training.train", "edgeformer.export.export"]
    _CONTEXT.set_forkserver_preload(heavy)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def edgeformer(*arguments: str, cwd: Path, stdin: str = "") -> Outcome:
    os.environ.update(_SETTINGS)  # libraries read them when they are imported: before the server starts
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("in", "out", "err")]
        streams[0].write_text(stdin, encoding="utf-8")
        process = _CONTEXT.Process(target=_command, args=(arguments, cwd, dict(os.environ), streams))
        process.start()
        process.join(timeout=300)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"edgeformer {' '.join(arguments)}: no end within 300 s")
        out, err = (stream.read_text(encoding="utf-8") for stream in streams[1:])
        return Outcome(process.exitcode, out, err)


def run_json(*arguments: str, cwd: Path, code: int = 0) -> Any:
    """The document of ``edgeformer ARGUMENTS --json``, which must end with this exit code."""
    outcome = edgeformer(*arguments, "--json", cwd=cwd)
    assert outcome.code == code, outcome.err
    return json.loads(outcome.out)


def _command(arguments: tuple[str, ...], cwd: Path, environment: Mapping[str, str], streams: list[Path]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, (stream, mode) in enumerate(zip(streams, ("r", "w", "w"), strict=True)):
        with stream.open(mode) as file:
            os.dup2(file.fileno(), number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)  # multiprocessing put /dev/null into its place
    sys.argv = ["edgeformer", *arguments]
    from edgeformer.cli import main

    main()
