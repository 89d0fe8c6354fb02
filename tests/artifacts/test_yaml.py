"""The YAML writer: what the reader returns is what was written, for every string in every place."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeformer.artifacts.documents import parse_yaml, shipped_folder, to_yaml
from edgeformer.models import load_recipe
from edgeformer.training.init import DraftOptions, draft

NAMES = (
    "5e-3", ".5e3", "1e+3", "1e5", "0o7", "0x1F", "0b11", "1_000", "12:30:45", "190:20:30", "2026-11-28", "017",
    "-.inf", ".nan", "~", "null", "Null", "true", "no", "off", "on", "y", "Y", "NO", "=", "<<", "'", '"', "", " ", "a ",
    " a", "- a",
    "a: b", "a #b", "#", "*a", "&a", "!a", "%a", "@a", "`a", "{a", "[a", "a,b", "|", ">", "?", "? a", "---",
    "...",
    "a\nb", "a\n", "\n", "a\r\nb", "\u0085", "a\u0085b", "\u2028", "a\u2029b", "\ufeffa", "a\u00a0", "\t", "a\tb", "\0",
    "\x1b", "\x7f", "\ud7ff\ue000", "🙂 🙂", "é" * 200, "word " * 60, "a  b " * 40, "中\n  文\n",
)  # fmt: skip

texts = st.text(st.characters(exclude_categories=("Cs",))) | st.sampled_from(NAMES)
"""Every string that a UTF-8 file can hold: all but half surrogates."""
documents = st.recursive(
    texts | st.booleans() | st.none() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(texts, documents, max_size=4), st.booleans(), st.sampled_from([40, 100, 120]))
@example({"name": list(NAMES), **{name: {name: [name]} for name in NAMES}}, True, 100)
@example({"name": list(NAMES), **{name: {name: [name]} for name in NAMES}}, False, 120)
def test_every_document_comes_back_equal(document: dict[str, Any], inline: bool, width: int) -> None:
    text = to_yaml(document, width, inline=inline)
    assert parse_yaml(text)[0] == document
    assert yaml.safe_load(text) == document, "hubs and scripts read YAML 1.1"


@settings(deadline=None, max_examples=50)
@given(st.lists(texts.filter(str.strip), min_size=2, max_size=5, unique=True), texts.filter(str.strip))
@example([name for name in NAMES if name.strip()], ".5e3")
def test_whole_recipes_come_back_equal(labels: list[str], column: str) -> None:
    recipe = load_recipe(str(shipped_folder("recipes") / "quickstart.yaml"))
    source = {"kind": "file", "path": "a.csv", "text": column, "label": "no"}
    data = type(recipe.data).model_validate({"parts": {"train": [source]}, "split": "stratified", "labels": labels})
    named = recipe.model_copy(update={"name": "5e-3", "description": column, "data": data})
    written, _ = parse_yaml(named.to_yaml())
    assert type(recipe).model_validate(written) == named


def test_a_drafted_recipe_with_such_names_is_read_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command opens a run through its recipe; YAML reads unquoted labels as numbers, as nothing or as dates."""
    monkeypatch.chdir(tmp_path)
    odd = ("1e+3", ".5e3", "no", "~", "2026-11-28", "12:30:45")
    rows = [f"{word} {word} number {n},{label}" for n in range(15) for word, label in zip("abcdef", odd, strict=True)]
    Path("5e-3.csv").write_text("\n".join(["1e3,5e-3", *rows]) + "\n", encoding="utf-8")
    drafted = draft(Path("5e-3.csv"), DraftOptions())
    recipe: Any = load_recipe(str(drafted.path))
    assert (recipe.name, sorted(recipe.data.labels)) == ("5e-3", sorted(odd))
    (source,) = recipe.data.parts["train"]
    assert (source.text, source.label) == ("1e3", "5e-3")
