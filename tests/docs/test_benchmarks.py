"""The scripts of benchmarks/ name only what there is in the package; most are too slow to be run here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.document import ROOT

SCRIPTS = [path for folder in ("", "gpu") for path in sorted((ROOT / "benchmarks" / folder).glob("*.py"))]
README = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")


def imported(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that is imported from the package, wherever in the script; no name: the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            results = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            results = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from (pair for pair in results if pair[0].split(".")[0] == "edgeformer")


def missing(source: str) -> tuple[list[str], list[str]]:
    """Names that are imported from the package and are not there; other packages that it needs and that are absent."""
    wrong, absent = [], []
    for module, name in imported(source):
        try:
            results = import_module(module)
            if name and not hasattr(results, name):
                import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:
            if str(error.name).split(".")[0] == "edgeformer":
                wrong.append(f"{module} {name}".strip())
            else:
                absent.append(str(error.name))
    return wrong, absent


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_name_of_the_package_is_there(script: Path) -> None:
    wrong, absent = missing(script.read_text(encoding="utf-8"))
    assert wrong == []
    if absent:
        pytest.skip(f"needs {absent[0]}")


def test_wrong_names_are_noticed() -> None:
    source = """
import edgeformer.run, edgeformer.runs
from edgeformer import bundle, bundles
def inside():
    from edgeformer.bundle import Bundle, Bindle
    from edgeformer.models.building import build
    import edgeform
"""
    wrong = ["edgeformer.runs", "edgeformer bundles", "edgeformer.bundle Bindle", "edgeformer.models.building build"]
    assert missing(source) == (wrong, [])


def test_what_another_package_lacks_is_no_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_torch(module: str) -> object:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setitem(globals(), "import_module", without_torch)
    assert missing("from edgeformer.models.weights import load_model") == ([], ["torch"])


def test_the_table_has_every_script() -> None:
    children = {
        "_peer.py",
        "_decode.py",
        "_named_runs.py",
        "_torch_rates.py",
        "_torch_routes.py",
        "judging.py",
        "ways.py",
        "__init__.py",
        "__main__.py",
        "session.py",
        "timing.py",
    }
    children |= {"recipes.py", "rows.py", "tables.py"}
    assert [script.name for script in SCRIPTS if script.name not in children and f"`{script.name}`" not in README] == []
