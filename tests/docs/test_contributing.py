"""What .github/CONTRIBUTING.md says of the house is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from edgeformer import __version__
from tests.docs.document import ROOT

PACKAGE = ROOT / "edgeformer"
TEXT = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")


def imports_torch(file: Path) -> bool:
    """At module level: what an import of the file loads."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.split(".")[0] == "torch" for name in names):
            return True
    return False


def test_every_room_is_in_the_table() -> None:
    label = set(re.findall(r"`(\w+)(?:/|\.py)`", TEXT[: TEXT.index("## Rules")]))
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    files = {path.stem for path in PACKAGE.glob("[a-z]*.py")}
    assert len(folders) > 8 and folders | files <= label


def test_torch_is_where_it_says_and_nowhere_else() -> None:
    (paragraph,) = (part for part in TEXT.split("\n\n") if part.startswith("torch is imported by"))
    places = [place.rstrip("/") for place in re.findall(r"`([\w/.]+)`", paragraph)]
    assert len(places) >= 5
    results = [file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py") if imports_torch(file)]
    assert len(results) > 20
    elsewhere = [name for name in results if not any(name == place or name.startswith(f"{place}/") for place in places)]
    assert elsewhere == [], "named nowhere in CONTRIBUTING"
    unused = [place for place in places if not any(name == place or name.startswith(f"{place}/") for name in results)]
    assert unused == [], "CONTRIBUTING names places without torch"


def test_the_wheel_has_the_name_that_documents_give_it() -> None:
    files = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    text = "\n".join([TEXT, *(file.read_text(encoding="utf-8") for file in files)])
    wheels = set(re.findall(r"edgeformer-[\w.]+-py3-none-any\.whl", text))
    assert wheels == {f"edgeformer-{__version__}-py3-none-any.whl"}
