"""The command line answers without loading anything heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    code = (
        "import sys\n"
        f"sys.argv = ['edgeformer', *{arguments!r}]\n"
        "from edgeformer.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    code = stop.code\n"
        f"print('LOADED', code, [m for m in {heavy!r} if m in sys.modules])"
    )
    assert run_python(code).splitlines()[-1] == "LOADED 0 []"


def test_package_itself_loads_nothing() -> None:
    code = f"import sys, edgeformer; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize(
    "module",
    [
        "edgeformer.stages.profiling.profile",
        "edgeformer.stages.evaluating.evaluate",
        "edgeformer.stages.generating.generate",
        "edgeformer.stages.verifying.verify",
        "edgeformer.reporting.tables",
    ],
)
def test_what_an_edge_device_uses_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'onnx', 'datasets') if m in sys.modules])"
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize(
    ("command", "default"),
    [("profile", "Default: onnxruntime; of --search all."), ("exits", "Default: what profile --search found faster")],
)
def test_a_runtime_that_is_not_named_is_what_the_help_says(command: str, default: str) -> None:
    code = f"import sys; sys.argv = ['edgeformer', '{command}', '--help']; from edgeformer.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert default in " ".join(done.stdout.replace("│", " ").split())
