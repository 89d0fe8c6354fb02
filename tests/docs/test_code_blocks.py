"""Every block of code, command line and workflow in README and docs is known, and the command line takes it."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from edgeformer.benchmark.gate_result import UNDECIDED
from edgeformer.cli.app import app
from tests.docs.document import DOCUMENTS, NOT_OURS, NOT_SHELL, ROOT, RUN, Block, blocks, inline_code, programs, words

BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
SHELL = [block for block in BLOCKS if block.language in ("", "bash") and block.first_line not in NOT_SHELL]
COMMANDS = sorted({command for block in SHELL for command in block.commands()})
OURS = [command for command in COMMANDS if command.startswith("edgeformer ")]
SPANS = sorted({span for document in DOCUMENTS for span in inline_code(document)})
INLINE = [span for span in SPANS if span.startswith("edgeformer ")]
"""Lines inside sentences and tables, where names in capitals stand for the reader's own."""


class UsageRefused(Exception):
    """The command line does not take these arguments."""


def command_and_arguments(arguments: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and what is left for it. Raises UsageRefused."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not arguments or arguments[0] not in command.commands:
            raise UsageRefused(f"{arguments[:1]} is none of {sorted(command.commands)}")
        command, arguments = command.commands[arguments[0]], arguments[1:]
    return command, arguments


def parse(arguments: list[str]) -> None:
    """Let the real command line read them, without running anything. Raises UsageRefused."""
    command, rest = command_and_arguments(arguments)
    try:
        command.make_context(command.name, list(rest))
    except Exception as error:
        if hasattr(error, "format_message"):  # click's usage errors, wherever typer keeps click
            raise UsageRefused(error.format_message()) from None
        raise


def filled_in(command: str) -> list[str]:
    """``edgeformer export [RUN] --exit N|all`` → what a reader would write."""
    plain = re.sub(r"\[(RUN|BUNDLE)\]", r"\1", command).replace("…", "")
    return [re.sub(r"^([\w-]+)\|[\w|-]+$", r"\1", word).replace("TIME", "5ms") for word in words(plain)]


def test_the_blocks_are_found_and_the_lists_are_theirs() -> None:
    assert len(BLOCKS) > 25 and len(OURS) > 20 and len(INLINE) > 15
    assert {block.language for block in BLOCKS} == {"bash", "text", "python", "js", "yaml", "kotlin", "swift"}
    assert {*RUN} <= {*OURS} and {block.first_line for block in BLOCKS} >= NOT_SHELL
    assert {command.split()[0] for command in COMMANDS} == {"edgeformer", *NOT_OURS}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.document}:{block.line}")
def test_every_program_has_a_name_by_which_a_test_runs_it(block: Block) -> None:
    """tests/test_api.py runs the reference of Python, tests/docs/test_deploy.py the other programs."""
    if block.language in ("python", "js") and block.document != "docs/reference/python.md":
        assert block.text in programs(ROOT / block.document).values(), "say the program's name in a comment, and run it"


@pytest.mark.parametrize("command", OURS)
def test_the_command_line_takes_every_documented_line(command: str) -> None:
    parse(words(command))


@pytest.mark.parametrize("command", INLINE)
def test_the_command_line_takes_what_sentences_quote(command: str) -> None:
    arguments = filled_in(command)
    if command_and_arguments(arguments)[1]:  # else only the command is named
        parse(arguments)


def test_sentences_quote_only_options_that_there_are() -> None:
    """``export --exit 2`` without ``edgeformer``, and often without all its arguments."""
    commands = typer.main.get_command(app).commands
    checked = 0
    for span in SPANS:
        name, *rest = span.split()
        options = [word.partition("=")[0] for word in rest if word.startswith("--")]
        if name in commands and options:
            duration = {option for parameter in commands[name].params for option in parameter.opts}
            assert set(options) <= duration, span
            checked += 1
    assert checked > 5


@pytest.mark.parametrize(
    "line",
    ["edgeformer export --fp17", "edgeformer trian quickstart", "edgeformer plan", "edgeformer generate x --exit two"],
)
def test_a_wrong_line_is_noticed(line: str) -> None:
    with pytest.raises(UsageRefused):
        parse(words(line))


def test_the_command_line_takes_its_own_examples() -> None:
    lines: list[str] = []
    remaining: list[Any] = [typer.main.get_command(app)]
    while remaining:
        command = remaining.pop()
        remaining += getattr(command, "commands", {}).values()
        text = f"{command.help or ''}\n{command.epilog or ''}"
        lines += re.findall(r"^ +(edgeformer [^<\n]+)", text.replace("\b", ""), re.MULTILINE)
    assert len(lines) > 20
    for line in lines:
        parse(words(line.strip()))


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith(("make ", "python benchmarks/"))])
def test_other_documented_programs_exist(command: str) -> None:
    program, label, *_ = command.split()
    if program == "make":
        assert re.search(rf"^{label}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    else:
        assert (ROOT / label).is_file()


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
