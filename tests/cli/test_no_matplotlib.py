"""Without matplotlib, commands end well: the picture that is left out is said, not found missing at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.children import TINY

PROGRAM = """
import sys
sys.modules["matplotlib"] = None

from edgeformer.cli import main
sys.argv = ["edgeformer", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_training_and_exporting(tmp_path: Path) -> None:
    sets = [part for override in TINY for part in ("--set", override)]
    for arguments, messages in (
        (["train", "quickstart", "--name", "run", "--max-steps", "1", *sets], "learning curve"),
        (["export", "run"], "plot  "),
    ):
        command = [sys.executable, "-c", PROGRAM, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{messages} matplotlib is not installed: python -m pip install" in done.stdout
    assert not (tmp_path / "artifacts" / "run" / "plots").exists()
