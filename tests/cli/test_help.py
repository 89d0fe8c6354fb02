"""The command line answers without loading anything heavy, and its bars show every figure."""

import copy
import io
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from edgeformer.cli import progress
from edgeformer.cli.app import app, import_model, machines, select_command
from edgeformer.cli.progress import Bars, Lines

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


@pytest.mark.parametrize(
    ("width", "figures", "parts"),
    [
        (80, {"loss": 0.69312, "samples_per_s": 1234.5, "lr": 0.001}, ("loss 0.6931", "samples/s 1,23", "1.0e-03")),
        (140, {"loss": 0.5, "left_s": 3600.0}, (" 1 h 00 min left",)),  # of the whole work
        (140, {"samples_per_s": 0.423}, ("samples/s 0.42",)),
        (140, {"tokens_per_s": 12345.6, "most_left_s": 3600.0}, ("tokens/s 12,346", "at most 1 h 00 min left")),
    ],
)
def test_no_figure_is_cut(width: int, figures: dict[str, float], parts: tuple[str, ...]) -> None:
    bars, output = Bars(), io.StringIO()
    bars._console = Console(file=output, width=width, force_terminal=True, color_system=None)
    bars.start("Epoch 10/10", 67_349, "samples")
    bars.advance(32_000, **figures)
    bars._bars.refresh()  # type: ignore[union-attr]
    bars.finish()
    displayed = output.getvalue()
    for part in ("Epoch 10/10", "32,000/67,349 samples", *parts):
        assert part in displayed and "…" not in displayed and "left_s" not in displayed


def test_lines_come_though_the_work_does_not_advance(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.05)
    lines = Lines()
    lines.start("Predicting the peak memory", None)
    deadline = time.monotonic() + 10
    messages = ""
    while messages.count("Predicting the peak memory: ") < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
        messages += capsys.readouterr().err
    assert messages.count("so far\n") >= 2
    for figures, text in (
        ({"loss": 0.5, "left_s": 7200.0}, "loss 0.5  2 h 00 min left"),
        ({"most_left_s": 7200.0}, "at most 2 h 00 min left"),
    ):
        lines.start("Epoch 1/2", 10, "samples")
        lines.advance(5, **figures)
        time.sleep(0.08)
        lines.finish()
        time.sleep(0.2)
        end = capsys.readouterr().err
        assert f"Epoch 1/2: 5/10 samples  {text}\n" in end and "left_s" not in end
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_time_left_does_not_grow_while_a_unit_takes_longer(monkeypatch, capsys):
    now_s = 0.0
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.02)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))

    def line() -> str:
        capsys.readouterr()
        time.sleep(0.1)
        return capsys.readouterr().err.splitlines()[-1]

    lines = Lines()
    lines.start("Measuring a", 3, "shapes")
    time.sleep(0.05)
    now_s = 10.0
    lines.advance()
    assert line() == "Measuring a: 1/3 shapes  20 s left"
    now_s = 15.0
    assert line() == "Measuring a: 1/3 shapes  15 s left"
    now_s = 500.0
    assert line() == "Measuring a: 1/3 shapes  at least 10 s left"
    lines.start("Comparing a", None, "rounds")
    lines.advance()
    assert line().startswith("Comparing a: 1 round  ")
    lines.finish()
