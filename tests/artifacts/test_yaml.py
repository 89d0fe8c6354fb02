"""YAML: what is written comes back equal; what is built to take for ever is refused, with file and line."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeformer.artifacts import documents
from edgeformer.artifacts.documents import DEEPEST, MOST_BYTES, MOST_NODES, parse_yaml, shipped_folder, to_yaml
from edgeformer.artifacts.errors import RecipeError
from edgeformer.models import load_recipe
from edgeformer.training.init import DraftOptions, draft
from tests.cli.measure_cli import measured, refused

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
any_values = st.recursive(
    texts | st.booleans() | st.none() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(texts, any_values, max_size=4), st.booleans(), st.sampled_from([40, 100, 120]))
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


QUICKSTART = (documents.shipped_folder("recipes") / "quickstart.yaml").read_text(encoding="utf-8")
BOMB = "a0: &a0 [x, x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 99))
HOSTILE = {
    "alias": ("a: &a [x, x]\nb:\n  - *a\n", 3, "an alias (*) is not supported; write the value"),
    "alias inside itself": ("name: x\nloop: &loop [1, *loop]\n", 2, "an alias (*) is not supported"),
    "alias bomb": (BOMB, 2, "an alias (*) is not supported"),
    "merge": ("m: &m {k: 1}\nn:\n  <<: *m\n", 3, "an alias (*) is not supported"),
    "deep flow": (f"name: x\ndeep: {'[' * 5000}\n", 2, f"more than {DEEPEST} levels deep"),
    "deep block": ("".join(f"{' ' * n}k:\n" for n in range(500)), DEEPEST + 1, f"more than {DEEPEST} levels deep"),
    "many values": ("values: [" + "1," * MOST_NODES + "]\n", 1, f"{MOST_NODES:,} keys and values"),
    "too large": ("# comment\n" * (MOST_BYTES // 10 + 1), MOST_BYTES // 10 + 1, "KiB"),
    "key that is a list": ("name: x\n? [a, b]\n: 1\n", 2, "a key must be a plain word"),
    "tag that does not fit": ("name: x\nseed: !!int many\n", 2, "does not fit its type int"),
    "date that is none": ("name: x\nseed: !!timestamp many\n", 2, "does not fit its type timestamp"),
    "Python object": ("name: x\nseed: !!python/object/apply:os.system [ls]\n", 2, "could not determine a constructor"),
    "number without end": (f"name: x\nseed: {'9' * 5000}\n", 2, "does not fit its type int"),
    "task that is a list": ("task: [1]\n", 1, "task"),
    "kind that is a mapping": ("kind: {a: 1}\n", 1, "kind"),
    "control character": ("name: x\nseed: \x07\n", 2, "special characters are not allowed"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("read", [load_recipe, documents.load_profile])
def test_refused_with_file_and_line(tmp_path: Path, kind: str, read: object) -> None:
    text, line, reason = HOSTILE[kind]
    path = tmp_path / "hostile.yaml"
    path.write_text(text, encoding="utf-8")
    started = time.process_time()
    with pytest.raises(RecipeError) as caught:
        read(str(path))  # type: ignore[operator]
    assert time.process_time() - started < 4
    assert f"hostile.yaml:{line}: " in str(caught.value)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("kind", ["alias inside itself", "deep flow", "tag that does not fit"])
def test_value_of_set(kind: str) -> None:
    document = documents.read_yaml(documents.shipped_folder("recipes") / "quickstart.yaml")
    with pytest.raises(RecipeError, match=r"(?s)^--set data=.*not valid YAML") as caught:
        documents.apply_overrides(document, ["data=" + HOSTILE[kind][0]])
    assert HOSTILE[kind][2] in str(caught.value)
    assert len(str(caught.value)) < 500


def test_command_ends_with_2_in_bounded_time_and_memory(tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(BOMB, encoding="utf-8")
    (tmp_path / "deep.yaml").write_text(HOSTILE["deep block"][0], encoding="utf-8")
    refused(measured("train", "bomb.yaml", cwd=tmp_path), "bomb.yaml:2:")
    refused(measured("plan", "quickstart", "--device", "deep.yaml", cwd=tmp_path), f"deep.yaml:{DEEPEST + 1}:")
    refused(measured("train", "quickstart", "--set", "model={a: &a [*a]}", cwd=tmp_path), "--set model=")


def test_thousands_of_problems_or_steps_are_not_all_said(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="steps"):
        load_recipe("quickstart", [f"{'a.' * 50_000}a=1"])
    path = tmp_path / "recipe.yaml"
    path.write_text(QUICKSTART + "".join(f"key{n}: 1\n" for n in range(5000)), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"and 4,980 more problems") as caught:
        load_recipe(str(path))
    assert "unknown key 'key0'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-5", 3e-5), ("3.0e-5", 3e-5), ("1e3", 1000.0), ("-.5", -0.5), ("7", 7), ("on", "on"), ("no", "no"),
        ("true", True), ("2026-11-21", "2026-11-21"), ("null", None), ("e5", "e5"), ("010", 10), ("0o10", 8),
        ("1:30", "1:30"), ("1_000", "1_000"),
    ],
)  # fmt: skip
def test_scalars_are_read_as_yaml_1_2_does(text: str, value: object) -> None:
    parsed, _ = documents.parse_yaml(text)
    assert parsed == value and type(parsed) is type(value)
