"""YAML that is built to take for ever is refused, with file and line, in bounded time and memory."""

import time
from pathlib import Path

import pytest

from edgeformer.artifacts import documents
from edgeformer.artifacts.documents import DEEPEST, MOST_BYTES, MOST_NODES
from edgeformer.artifacts.errors import RecipeError
from edgeformer.models import load_recipe
from tests.cli.measure_cli import measured, refused

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
