"""The command line answers without loading anything heavy."""

import copy
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from edgeformer.cli.app import app, import_model, machines, select_command

HEAVY = ("torch", "onnxruntime", "datasets", "matplotlib", "onnx", "accelerate", "transformers")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], ("pydantic", *HEAVY)),  # the models of recipes alone would take a third of its time
        (["--version"], ("pydantic", *HEAVY)),
        (["train", "--help"], HEAVY),
        (["list", "recipes"], HEAVY),
    ],
)
def test_loads_neither_torch_nor_a_runtime(arguments: list[str], heavy: tuple[str, ...]) -> None:
    start = f"import sys\nsys.argv = ['edgeformer', *{arguments!r}]\nfrom edgeformer.cli import main\n"
    start += "try:\n    main()\nexcept SystemExit as stop:\n    code = stop.code\n"
    code = f"{start}print('LOADED', code, [m for m in {heavy!r} if m in sys.modules])"
    assert run_python(code).splitlines()[-1] == "LOADED 0 []"


def test_a_command_alone_is_what_it_is_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of the others are not built, its help stays; where no command comes first, all are there."""
    monkeypatch.setenv("COLUMNS", "100")
    names = [str(command.name) for command in app.registered_commands]
    assert len(names) > 15
    for name in names:
        alone = select_command([name])
        assert [command.name for command in alone.registered_commands] == [name] and not alone.registered_groups
        text, target = (CliRunner().invoke(item, [name, "--help"]) for item in (alone, app))
        assert text.exit_code == target.exit_code == 0
        assert text.output == target.output and f"{name} [OPTIONS]" in text.output
    for rest in ([], ["--help"], ["--version"], ["import"], ["trian"], ["--verbose", "train"]):
        assert select_command(rest) is app


def test_a_command_shows_at_most_15_options_outside_the_advanced_panel() -> None:
    commands = [*app.registered_commands, *import_model.app.registered_commands, *machines.app.registered_commands]
    assert {command.rich_help_panel for command in app.registered_commands} >= {"Build", "Use", "Measure", "Check"}
    for command in commands:
        alone = copy.copy(app)
        alone.registered_commands, alone.registered_groups = [command], []
        (parsed,) = typer.main.get_group(alone).commands.values()
        options = [option for option in parsed.params if option.param_type_name == "option"]
        displayed = [option.name for option in options if getattr(option, "rich_help_panel", None) != "Advanced"]
        assert len(displayed) < 15, f"{command.name}: {displayed} and --help"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("edgeformer", HEAVY),
        ("edgeformer.bundle, edgeformer.run; edgeformer.runtimes.all_runtimes()", ("torch", "onnxruntime")),
        ("edgeformer.benchmark.profile, edgeformer.system.worker", ("torch", "onnxruntime", "onnx", "datasets")),
        ("edgeformer.data.prepare, edgeformer.data.batching", ("torch", "datasets", "onnxruntime", "pyarrow")),
        ("edgeformer.inference.evaluate, edgeformer.inference.generate", ("torch", "onnx", "datasets")),
        ("edgeformer.inference.verify, edgeformer.report.tables", ("torch", "onnx", "datasets")),
    ],
)
def test_what_an_edge_device_uses_needs_no_torch(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_without_arguments_three_ways_to_start() -> None:
    printed = CliRunner().invoke(app, [])
    assert printed.exit_code == 0
    assert all(f"edgeformer {line}" in printed.output for line in ("init reviews.csv", "import hf", "plan crt_deep"))
