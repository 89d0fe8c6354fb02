"""The command line without a process of its own, for tests of what it says: an import of everything less."""

import sys
from collections.abc import Callable

import pytest

from edgeformer.cli import main

Edgeformer = Callable[..., str]


def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Edgeformer:
    """Return a function that runs a command, checks its exit code, and returns stdout; with code 1 or 2 also stderr."""

    def run(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["edgeformer", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        assert stop.value.code == code, f"{arguments}\n{printed.out}\n{printed.err}"
        return printed.out + printed.err if code in (1, 2) else printed.out

    return run
