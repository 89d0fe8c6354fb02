"""The workflow of docs/guides/ci-gate.md is YAML as GitHub reads it, and edgeformer takes its command line; ours."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from edgeformer.benchmark.gate_result import UNDECIDED
from tests.docs.document import ROOT, blocks, words
from tests.docs.test_code_blocks import parse

(WORKFLOW,) = [block.text for block in blocks(ROOT / "docs" / "guides" / "ci-gate.md") if block.language == "yaml"]
STEPS = yaml.safe_load(WORKFLOW)["jobs"]["gate"]["steps"]
(GATE,) = [step["run"] for step in STEPS if step.get("name") == "gate"]


def test_the_command_line_is_taken() -> None:
    (line,) = [line.strip() for line in GATE.splitlines() if "edgeformer " in line]
    command = line.removesuffix(" || code=$?")
    assert command != line
    parse(words(command))
    assert all("uses" in step or "run" in step for step in STEPS)


@pytest.mark.parametrize(("code", "passes"), [(0, True), (2, False), (3, False), (UNDECIDED, True)])
def test_only_undecided_is_waved_through_with_a_warning(tmp_path: Path, code: int, passes: bool) -> None:
    if shutil.which("bash") is None:
        pytest.skip("the workflow's script is for bash")
    (tmp_path / "edgeformer").write_text(f"#!/bin/sh\nexit {code}\n", encoding="utf-8")
    (tmp_path / "edgeformer").chmod(0o755)
    script = f'export PATH="{tmp_path}:$PATH"\n{GATE}'
    done = subprocess.run(["bash", "-e", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is passes
    assert ("::warning::" in done.stdout) is (code == UNDECIDED)


def test_our_workflows_pin_their_actions() -> None:
    workflows = [path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    actions = re.findall(r"uses: (\S+)", "".join(workflows))
    assert len(actions) > 8 and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) for action in actions)
    done = subprocess.run([ROOT / ".ci" / "run", "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "parts: tests lint types docs" in done.stdout
