"""What a document shows of a shipped recipe is what stands there."""

from __future__ import annotations

from typing import Any

import pytest

from edgeformer.artifacts.documents import find, read_yaml
from tests.docs.document import ROOT, blocks

DOCUMENT = ROOT / "docs" / "pretrained.md"


def without(shown: Any, whole: Any, path: str = "") -> list[str]:
    """Paths of what is shown and is not in the whole, or is something else there."""
    if not isinstance(shown, dict):
        return [] if shown == whole else [f"{path}: {shown!r}, not {whole!r}"]
    if not isinstance(whole, dict):
        return [path]
    return [odd for key, value in shown.items() for odd in without(value, whole.get(key), f"{path}.{key}")]


@pytest.mark.parametrize("name", ["minilm_sst2", "minilm_folded_sst2"])
def test_lines_of_a_recipe_are_those_of_the_file(name: str, tmp_path: Any) -> None:
    displayed = [block for block in blocks(DOCUMENT) if block.first_line == f"# in recipes/{name}.yaml"]
    assert len(displayed) == 1
    (tmp_path / "shown.yaml").write_text(displayed[0].text, encoding="utf-8")
    content = read_yaml(tmp_path / "shown.yaml").content
    assert content["model"]["kind"] == "pretrained" and "training" in content
    assert without(content, read_yaml(find("recipes", name)).content) == []
