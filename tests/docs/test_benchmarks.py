"""The scripts of benchmarks/ name only what there is in the package; most are too slow to be run here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.__main__ import SCRIPTS as SCRIPTS_LISTED
from benchmarks.__main__ import main
from tests.docs.document import ROOT

SCRIPTS = [path for folder in ("", "gpu") for path in sorted((ROOT / "benchmarks" / folder).glob("*.py"))]


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


def test_the_list_has_every_script() -> None:
    folder = ROOT / "benchmarks"
    files = [*folder.glob("[a-z]*.py"), *folder.glob("*/__main__.py")]
    started = {file for file in files if 'if __name__ == "__main__":' in file.read_text(encoding="utf-8")}
    assert {file.stem if file.parent == folder else file.parent.name for file in started} == SCRIPTS_LISTED.keys()
    keys = {"question", "machine", "target", "results", "page", "resume"}
    for name, script in SCRIPTS_LISTED.items():
        assert {"question", "machine"} <= script.keys() <= keys
        assert "page" not in script or (ROOT / "docs" / script["page"]).is_file(), name


def test_a_script_is_run_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert "waiting " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no benchmark 'nothing'; there are bench"):
        main(["nothing"])
    main(["waiting", "--help"])
    assert capsys.readouterr().out.startswith("question  how long")
