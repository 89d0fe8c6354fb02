"""docs/results.md is what its template and the committed JSON give; no figure in it, nor in README, is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

import benchmarks.results_page.__main__ as results_page
from benchmarks.results_page.facts import facts, minutes
from benchmarks.results_page.studies import studies
from benchmarks.results_page.tables import TABLES
from tests.docs.document import ROOT

TEMPLATE = results_page.TEMPLATE.read_text(encoding="utf-8")
PLACEHOLDER = re.compile(r"\{\{.*?\}\}|\{%.*?%\}")


def test_the_page_is_what_the_json_says() -> None:
    page = results_page.PAGE.read_text(encoding="utf-8")
    assert page == results_page.page(), "run: make results"


def test_no_table_is_typed() -> None:
    assert [line for line in TEMPLATE.splitlines() if line.startswith("|")] == []
    used = " ".join(PLACEHOLDER.findall(TEMPLATE))
    assert [name for name in TABLES if f"table.{name} " not in used] == []
    assert [name for name in facts() if f"{{{{ {name} }}}}" not in used] == []


STATED = {
    "its Table 6": "of the paper",
    "its own 8k BPE tokenizer on WikiText-2": "a setting",
    "at this length of 128": "a setting",
    "max(0.80, 0.92 · 0.98^step)": "the paper's",
    "The 92M CRT-Deep": "the size of the model",
    "The 92M `": "the size of the model",
    "the 92M model trained": "the size of the model",
    "float32, one token at a context of 512": "a setting",
    "for an RTX 4050": "a device",
    "came within 15 % of what was measured": "how near an estimate is wanted",
    "refused with a 503": "a status of HTTP",
}
"""What is no measurement → what it is."""
NAMES = re.compile(r"SST-2|FP32|FP16|INT8|AVX2|float32|fp32|p50|\blog2\b")


def prose() -> str:
    """The sentences alone: no blocks, nothing that is filled in, nothing between backticks."""
    kept = " ".join(line for line in TEMPLATE.splitlines() if not line.startswith("    "))
    kept = re.sub(r"`[^`]*`", "`", PLACEHOLDER.sub("", kept))
    return " ".join(re.sub(r"\]\([^)]*\)", "]", kept).split())


def test_no_figure_in_a_sentence_is_typed() -> None:
    text = prose()
    for existing in STATED:
        assert existing in text, f"docs/results.md does not say: {existing}"
        text = text.replace(existing, "")
    remaining = re.findall(r".{0,40}\d.{0,20}", NAMES.sub("", text))
    assert remaining == [], "figures without a JSON"


def test_what_the_template_names_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_page, "facts", dict)
    with pytest.raises(UndefinedError, match="random_split_error"):
        results_page.page()


def committed(folder: Path, **changes: Any) -> Path:
    """A table of the study table6 with one row."""
    cell = {"mean": 0.91, "sd": None, "n": 1, "low": None, "high": None, "published": 0.9061}
    row = {"run": "baseline", "label": "Baseline", "at": "random-split", "origin": "here"}
    bubble = {"ms_per_sample": {**cell, "published": None}, "megabytes": {**cell, "published": None}}
    row |= {"cells": {"accuracy": cell, **bubble}, "leaks": True, "note": "one seed"}
    table = {"study": "table6", "title": "SST-2", "element": "Table 6", "protocol": "three\nepochs", "minutes": 80.0}
    path = folder / "table6.json"
    path.write_text(json.dumps({**table, "columns": ["accuracy"], "rows": [row], **changes}), encoding="utf-8")
    return path


def test_committed_studies_are_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    committed(tmp_path, notes=["drawn by *chance*"])
    (tmp_path / "0a1b.json").write_text(json.dumps({"key": "a run"}), encoding="utf-8")
    displayed = studies(tmp_path, tmp_path / "pictures")
    assert displayed.startswith("### SST-2\n\n`make study NAME=table6`: Table 6. three epochs\n\nCounted in the files ")
    assert "what code.\n\n|" in displayed
    assert "0.9100" in displayed and "0.9061" in displayed and "a run" not in displayed
    remarks = displayed.rpartition("\n\n")[2].splitlines()
    assert remarks == [
        r"- drawn by \*chance\*",
        "- Baseline, random-split: LEAKS FUTURE TOKENS – scores are void; one seed",
    ]


def test_pictures_are_drawn_again_only_where_they_show_something_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = tmp_path / "pictures"
    path = committed(tmp_path)
    start = studies(tmp_path, pictures)
    (picture,) = pictures.rglob("*.png")
    assert b"atplotlib" not in picture.read_bytes()
    picture.write_bytes(b"by another version of matplotlib")
    assert studies(tmp_path, pictures) == start and picture.read_bytes() == b"by another version of matplotlib"
    path.write_text(path.read_text(encoding="utf-8").replace("0.91,", "0.92,"), encoding="utf-8")
    studies(tmp_path, pictures)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_minutes_that_readme_quotes() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    measured = minutes()
    assert f"the light model took {measured['recurrent_sst2_fast-001']:.0f} minutes on two CPU cores" in text
    assert "a quarter of an hour on two CPU cores" in text and measured["crt_mini"] == pytest.approx(15, abs=1)
