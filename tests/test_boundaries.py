"""Boundaries between packages: types, providers, formats and files that only one package may know."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import grimp
import networkx
import pytest

from edgeformer.runtimes import all_runtimes

PACKAGE = Path(__file__).resolve().parents[1] / "edgeformer"
TYPES = re.compile(
    r"(Recipe|Score|TextConfig|DataConfig|PairsConfig|ModelConfig|EncoderConfig|CRTConfig|CRT|EncoderClassifier"
    r"|Classification\w*|Language\w*|Embedding\w*|Pretrained\w*|Crt\w*)$"
)
"""Recipes, scores and models, which only tasks, models and data may distinguish by type."""
FORMATS = {format_ for runtime in all_runtimes() for format_ in runtime.formats} - {"onnx"} | {
    "tensorrt", "tensorrt-rtx", "torch-tensorrt", "openvino"
}  # fmt: skip
"""Formats that only runtimes may name; every package may name ONNX, which export writes."""
READERS = {
    "read_manifest", "read_text", "read_bytes", "load", "loads", "open", "model_validate_json", "write_json",
    "write_text", "write_bytes", "read_json_bytes", "parse_manifest", "read_at_most",
}  # fmt: skip

Rule = Callable[[ast.AST], bool]


def names_in(node: ast.AST) -> set[str]:
    """``Score`` of ``Score`` and of ``scores.Score``."""
    return {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)}


def distinguishes_types(node: ast.AST) -> bool:
    """``isinstance``, ``issubclass`` or a ``match`` on a recipe, score or model."""
    names: set[str] = set()
    if isinstance(node, ast.Call) and len(node.args) == 2:
        is_check = getattr(node.func, "id", "") in ("isinstance", "issubclass")
        names = names_in(node.args[1]) if is_check else set()
    elif isinstance(node, ast.MatchClass):
        names = names_in(node.cls)
    return any(TYPES.search(name) for name in names)


def names_provider_or_format(node: ast.AST) -> bool:
    """A literal that names an execution provider or the format of an artifact."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and ("ExecutionProvider" in node.value or node.value in FORMATS)  # type: ignore[attr-defined]


def accesses_bundle_file(node: ast.AST) -> bool:
    """A call that reads or writes bundle.json, by its name or as a manifest."""
    if not isinstance(node, ast.Call) or getattr(node.func, "id", getattr(node.func, "attr", "")) not in READERS:
        return False
    literals = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return bool(names_in(node) & {"BUNDLE_FILE", "BundleManifest"}) or "bundle.json" in literals


def matches(rule: Rule, program: str) -> Iterator[int]:
    """Lines that break the rule; docstrings may say anything."""
    tree = ast.parse(program)
    expressions = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    docstrings = {node for node in expressions if isinstance(node, ast.Constant)}
    return (node.lineno for node in ast.walk(tree) if node not in docstrings and rule(node))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rule", "packages"),
    [
        (distinguishes_types, ("tasks/", "models/", "data/")),  # data reads the three kinds of data sections
        (names_provider_or_format, ("runtimes/", "artifacts/")),
        (accesses_bundle_file, ("bundle.py",)),
    ],
)
def test_only_these_packages(rule: Rule, packages: tuple[str, ...]) -> None:
    violations = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name, program = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        if not name.startswith(packages):
            violations += [f"{name}:{line}" for line in matches(rule, program)]
        elif name == "bundle.py":
            assert list(matches(rule, program))
    assert violations == []


@pytest.mark.parametrize(
    ("rule", "violation", "allowed"),
    [
        (distinguishes_types, "isinstance(x, (int, scores.CRTScore))", "isinstance(x, PlateauSchedule | str)"),
        (distinguishes_types, "match x:\n    case CRT():\n        pass", "CRT()"),
        (names_provider_or_format, "f'{y}ExecutionProvider'", "def f():\n    'tensorrt'\nx = 'onnx'"),
        (names_provider_or_format, "x.format == 'tensorrt-rtx'", "x.format"),
        (accesses_bundle_file, "read_manifest(BundleManifest, folder / BUNDLE_FILE)", "seal(folder, bundle)"),
        (accesses_bundle_file, "json.loads((folder / 'bundle.json').read_text())", "(folder / BUNDLE_FILE).is_file()"),
    ],
)
def test_the_rules(rule: Rule, violation: str, allowed: str) -> None:
    assert list(matches(rule, violation)) and not list(matches(rule, allowed))


def test_no_files_import_each_other() -> None:
    """Imports inside of functions count, those for types alone do not."""
    graph = grimp.build_graph("edgeformer", exclude_type_checking_imports=True, cache_dir=None)
    imports = networkx.DiGraph(
        (name, imported) for name in graph.modules for imported in graph.find_modules_directly_imported_by(name)
    )
    assert "edgeformer.training.plan.duration" in imports and imports.number_of_edges() > 1000
    circles = [each for each in networkx.strongly_connected_components(imports) if len(each) > 1]
    assert circles == []


def imported_packages() -> Iterator[str]:
    """Names of all packages that the code imports, of other projects."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [entry.name for entry in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from {name.partition(".")[0] for name in names} - {"edgeformer", *sys.stdlib_module_names}


def test_imported_packages_are_declared() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    project = pytest.importorskip("tomllib").loads(text)["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {re.split(r"[\[><=]", line)[0] for line in lines}
    distributions = metadata.packages_distributions()
    projects = {package: {name.lower().replace("_", "-") for name in distributions.get(package, ())}
                for package in imported_packages()}  # fmt: skip
    undeclared = {package for package, names in projects.items() if names and not names & declared}
    # pydantic, tokenizers, executorch and litert-torch bring these.
    assert undeclared <= {"pydantic_core", "huggingface_hub", "torchao", "ai_edge_quantizer"}
    private = re.compile("executorch|ai-edge-litert|litert-torch|xllamacpp")  # private names of these are used
    assert all(re.search(r">=[\d.]+,<[\d.]+$", line) for line in lines if private.match(line))
