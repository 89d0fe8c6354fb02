"""``python -m benchmarks`` lists every script and runs it by its name; mypy checks what they take of the package."""

import pytest

from benchmarks.__main__ import SCRIPTS, main
from tests.docs.document import ROOT


def test_the_list_has_every_script() -> None:
    folder = ROOT / "benchmarks"
    files = [*folder.glob("[a-z]*.py"), *folder.glob("*/__main__.py")]
    started = {file for file in files if 'if __name__ == "__main__":' in file.read_text(encoding="utf-8")}
    assert {file.stem if file.parent == folder else file.parent.name for file in started} == SCRIPTS.keys()
    keys = {"question", "machine", "target", "results", "page", "resume"}
    for name, script in SCRIPTS.items():
        assert {"question", "machine"} <= script.keys() <= keys
        assert "page" not in script or (ROOT / "docs" / script["page"]).is_file(), name


def test_a_script_is_run_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert "waiting " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no benchmark 'nothing'; there are bench"):
        main(["nothing"])
    main(["waiting", "--help"])
    assert capsys.readouterr().out.startswith("question  how long")
