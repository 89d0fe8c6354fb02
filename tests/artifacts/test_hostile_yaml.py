"""YAML that is built to take for ever is refused, with file and line, in bounded time and memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from edgeformer.artifacts.documents import (
    DEEPEST,
    MOST_BYTES,
    MOST_VALUES,
    apply_overrides,
    load_profile,
    parse_value,
    read_yaml,
    shipped_folder,
)
from edgeformer.artifacts.errors import RecipeError
from edgeformer.models import load_recipe
from tests.cli.measure_cli import measured, refused

QUICKSTART = (shipped_folder("recipes") / "quickstart.yaml").read_text(encoding="utf-8")
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGE_BOMB = "m0: &m0 {k0: 1, k1: 2}\n" + "".join(
    f"m{n}: &m{n}\n  <<: [{', '.join([f'*m{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
HOSTILE = {
    "self in a list": ("name: x\nloop: &loop [1, *loop]\n", 2, "inside the value that it stands for"),
    "self in a mapping": ("name: x\nloop: &loop\n  deeper:\n    again: *loop\n", 4, "inside the value"),
    "alias bomb": (BOMB, 5, f"{MOST_VALUES:,} values"),
    "merge bomb": (MERGE_BOMB, 8, f"{MOST_VALUES:,} values"),
    "deep flow": (f"name: x\ndeep: {'[' * 5000}\n", 2, f"more than {DEEPEST} deep"),
    "deep block": ("".join(f"{' ' * n}k:\n" for n in range(500)), DEEPEST + 1, f"more than {DEEPEST} deep"),
    "deep by aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 60)), 32, f"more than {DEEPEST} deep"
    ),
    "many values": ("values: [" + "1," * (MOST_VALUES + 1) + "]\n", 1, f"{MOST_VALUES:,} values"),
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
@pytest.mark.parametrize("read", [load_recipe, load_profile])
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


@pytest.mark.parametrize("kind", ["self in a list", "alias bomb", "deep flow", "tag that does not fit"])
def test_value_of_set(kind: str) -> None:
    document = read_yaml(shipped_folder("recipes") / "quickstart.yaml")
    with pytest.raises(RecipeError, match=r"(?s)^--set data=.*not valid YAML") as caught:
        apply_overrides(document, ["data=" + HOSTILE[kind][0]])
    assert HOSTILE[kind][2] in str(caught.value)
    assert len(str(caught.value)) < 500


def test_path_of_set_is_not_endless() -> None:
    with pytest.raises(RecipeError, match="steps"):
        load_recipe("quickstart", [f"{'a.' * 50_000}a=1"])


def test_command_ends_with_2_in_bounded_time_and_memory(tmp_path: Path) -> None:
    (tmp_path / "bomb.yaml").write_text(BOMB, encoding="utf-8")
    (tmp_path / "self.yaml").write_text(HOSTILE["self in a mapping"][0], encoding="utf-8")
    refused(measured("train", "bomb.yaml", cwd=tmp_path), "bomb.yaml:5:")
    refused(measured("plan", "self.yaml", "--device", "host", cwd=tmp_path), "self.yaml:4:")
    refused(measured("plan", "quickstart", "--device", "bomb.yaml", cwd=tmp_path), "bomb.yaml:5:")
    refused(measured("train", "quickstart", "--set", "model={a: &a [*a]}", cwd=tmp_path), "--set model=")


def test_thousands_of_problems_are_not_all_said(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(QUICKSTART + "".join(f"key{n}: 1\n" for n in range(5000)), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"and 4,980 more problems") as caught:
        load_recipe(str(path))
    assert "unknown key 'key0'" in str(caught.value)


class TestOrdinaryAliases:
    def test_anchor_and_merge_are_what_they_stand_for(self, tmp_path: Path) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_text("a: &a {x: 1, y: [2, 3]}\nb: *a\nc:\n  <<: *a\n  x: 4\n", encoding="utf-8")
        expected = {"x": 1, "y": [2, 3]}
        assert read_yaml(path).content == {"a": expected, "b": expected, "c": {"x": 4, "y": [2, 3]}}

    def test_override_changes_one_place_and_not_its_alias(self, tmp_path: Path) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_text("a: &a {x: 1}\nb: *a\n", encoding="utf-8")
        document = read_yaml(path)
        apply_overrides(document, ["a.x=2"])
        assert document.content == {"a": {"x": 2}, "b": {"x": 1}}

    def test_as_many_as_the_limit_allows(self) -> None:
        row = "[" + "1," * 98 + "]"
        assert len(parse_value(f"[&a {row}, {', '.join(['*a'] * 99)}]")) == 100

    def test_recipe_with_an_alias_trains_the_same(self, tmp_path: Path) -> None:
        path = tmp_path / "quickstart.yaml"
        text = QUICKSTART.replace("seed: ", "seed: &seed ", 1)
        assert "&seed" in text
        path.write_text(text, encoding="utf-8")
        assert load_recipe(str(path)) == load_recipe("quickstart")
