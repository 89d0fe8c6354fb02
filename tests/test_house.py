"""The rules that keep the house: a noun is known in its own room only. There is no list of exceptions."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeformer.runtimes import all_runtimes

PACKAGE = Path(__file__).resolve().parents[1] / "edgeformer"

TYPES = re.compile(
    r"(Recipe|Score|TextConfig|DataConfig|PairsConfig|ModelConfig|EncoderConfig|CRTConfig|CRT|EncoderClassifier"
    r"|Classification\w*|Language\w*|Embedding\w*|Pretrained\w*|Crt\w*)$"
)
"""Recipes, scores and models: what they are, only their task and their family ask."""
FORMATS = {format_ for runtime in all_runtimes() for format_ in runtime.formats} - {"onnx"} | {
    "tensorrt", "tensorrt-rtx", "torch-tensorrt", "openvino"
}  # fmt: skip
"""Formats of artifacts, those of earlier bundles and of runtimes to come among them.

Everybody may know a graph by ``formats.manifest.ONNX``: it is what export writes.
"""
BUNDLE_FILE = "bundle.json"

Rule = Callable[[ast.Module], Iterator[ast.AST]]


def sources(*rooms_left_out: str) -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package outside some rooms: its path in the package, and its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(rooms_left_out or ("\0",)):
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def places(rule: Rule, *rooms_left_out: str) -> list[str]:
    """Where the rule finds something."""
    return [
        f"{name}:{found.lineno}"  # type: ignore[attr-defined]
        for name, tree in sources(*rooms_left_out)
        for found in rule(tree)
    ]


def name_of(node: ast.AST) -> str:
    """``Score`` of ``Score`` and of ``scores.Score``."""
    return getattr(node, "id", getattr(node, "attr", ""))


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """Expressions that only say something."""
    return {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def told_apart_by_type(tree: ast.Module) -> Iterator[ast.AST]:
    """``isinstance``, ``issubclass`` or a ``match`` on a recipe, score or model."""
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and name_of(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
            asked = list(ast.walk(node.args[1]))
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        if any(TYPES.search(name_of(part)) for part in asked):
            yield node


def provider_or_format(tree: ast.Module) -> Iterator[ast.AST]:
    """A literal that names an execution provider or the format of an artifact."""
    said = docstrings(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or node in said:
            continue
        if "ExecutionProvider" in node.value or node.value in FORMATS:
            yield node


def bundle_file(tree: ast.Module) -> Iterator[ast.AST]:
    """Reading or writing bundle.json: ``read_manifest(BundleManifest, …)``, or its name beside something that does."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        names = {name_of(part) for part in ast.walk(node)}
        written = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
        reads = {"read_manifest", "read_text", "read_bytes", "load", "loads", "open", "model_validate_json"}
        writes = {"write_json", "write_text", "write_bytes", "read_json_bytes", "parse_manifest", "read_at_most"}
        if name_of(node.func) in reads | writes and (
            names & {"BUNDLE_FILE", "BundleManifest"} or BUNDLE_FILE in written
        ):
            yield node


def test_recipes_scores_and_models_are_told_apart_by_their_tasks_and_families_alone() -> None:
    assert places(told_apart_by_type, "tasks/", "models/") == []


def test_providers_and_formats_are_named_by_backends_and_formats_alone() -> None:
    assert places(provider_or_format, "runtimes/", "artifacts/") == []


def test_one_file_reads_a_bundles_manifest() -> None:
    assert {place.split(":")[0] for place in places(bundle_file)} == {"bundle.py"}


@pytest.mark.parametrize(
    ("rule", "program"),
    [
        (told_apart_by_type, "isinstance(x, LanguageRecipe)"),
        (told_apart_by_type, "isinstance(x, (int, scores.ClassificationScore))"),
        (told_apart_by_type, "isinstance(x, DataConfig | TextConfig)"),
        (told_apart_by_type, "match x:\n    case CRT():\n        pass"),
        (provider_or_format, "x = 'CUDAExecutionProvider'"),
        (provider_or_format, "f'{y}ExecutionProvider'"),
        (provider_or_format, "x.format == 'tensorrt-rtx'"),
        (bundle_file, "read_manifest(BundleManifest, folder / BUNDLE_FILE)"),
        (bundle_file, "json.loads((folder / 'bundle.json').read_text())"),
        (bundle_file, "read_at_most(folder / BUNDLE_FILE, 9)"),
        (bundle_file, "write_json(folder / BUNDLE_FILE, bundle)"),
    ],
)
def test_the_rules_see_what_they_are_for(rule: Rule, program: str) -> None:
    assert list(rule(ast.parse(program)))


@pytest.mark.parametrize(
    ("rule", "program"),
    [
        (told_apart_by_type, "isinstance(x, PlateauSchedule | str)"),
        (provider_or_format, "def f():\n    'tensorrt'\nx = 'onnx'"),
        (bundle_file, "seal(folder, bundle)\n(folder / BUNDLE_FILE).is_file()"),
    ],
)
def test_the_rules_leave_the_rest_alone(rule: Rule, program: str) -> None:
    assert not list(rule(ast.parse(program)))
