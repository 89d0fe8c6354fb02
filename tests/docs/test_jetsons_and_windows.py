"""What the documents say of Jetsons is what doctor says there; what PowerShell cannot do is said where it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgeformer.runtimes.tensorrt.state import jetson_capability
from tests.docs.document import DOCUMENTS, ROOT, blocks

RELEASE = "# R{} (release), REVISION: {}.0, GCID: 1, BOARD: generic, EABI: aarch64, DATE: Wed Sep 11 2025\n"


def jetpacks() -> list[list[str]]:
    """The rows of the table of docs/devices.md: JetPack, L4T, Python, TensorRT, graphs, engines."""
    lines = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    starts = [place for place, row in enumerate(cells) if row[0] == "JetPack"]
    return [row for start in starts for row in cells[start + 2 :] if re.match(r"\d", row[0])]


def test_the_table_of_jetpacks_is_there() -> None:
    assert [row[0] for row in jetpacks()] == ["5", "6.0", "6.1, 6.2", "7"]


@pytest.mark.parametrize("row", jetpacks(), ids=lambda row: row[0])
def test_doctor_says_on_a_jetson_what_the_documents_say(row: list[str], tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for release in row[1].split(", "):
        number, _, revision = release.partition(".")
        text = RELEASE.format(number, revision or "4")
        (tmp_path / "etc" / "nv_tegra_release").write_text(text, encoding="utf-8")
        (results,) = jetson_capability(tmp_path)
        assert results.detail.startswith("JetPack ") and row[0].split(", ")[0] in results.detail
        assert (results.status == "unavailable") == row[5].startswith("no"), (row, results)


def test_what_powershell_cannot_do_is_said_where_it_stands() -> None:
    """It has no ``<``; a reader of that line must not have to find out."""
    redirected = [
        (block.document, line)
        for document in DOCUMENTS
        for block in blocks(document)
        if not block.language
        for line in block.text.splitlines()
        if re.search(r"^\s*edgeformer [^#\"]* < ", line)
    ]
    assert redirected
    for name, line in redirected:
        assert "PowerShell" in line, f"{name}: {line}"
        assert "PowerShell has no `<`" in (ROOT / name).read_text(encoding="utf-8"), name
