"""The committed runs are what today's code writes; if a change is intended: ``python -m tests.golden.write``."""

import json
from pathlib import Path
from typing import Any

import pytest

from edgeformer.run import read_run
from tests.conftest import GOLDEN
from tests.golden.write import OMITTED

FROM_MACHINE = {"versions", "host", "cpu_flags", "files"}
"""Objects whose keys depend on the machine, its packages or, for ``files``, on the file names compared here."""


def file_names(run: Path) -> set[str]:
    files = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    return {file.as_posix() for file in files if file.parts[0] not in OMITTED and not file.name.startswith(".")}


def key_paths(value: Any, prefix: str = "") -> set[str]:
    """Return the path of every key in a JSON document. The elements of a list share one path."""
    if isinstance(value, list):
        return set().union(*(key_paths(element, f"{prefix}[]") for element in value))
    if not isinstance(value, dict):
        return set()
    paths = {f"{prefix}.{key}" for key in value}
    return paths.union(*(key_paths(v, f"{prefix}.{key}") for key, v in value.items() if key not in FROM_MACHINE))


def read_json(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "small-language"])
def test_todays_code_writes_the_golden_run(name: str, request: pytest.FixtureRequest) -> None:
    fresh: Path = request.getfixturevalue("fresh_run" if name == "small" else "fresh_language_run")
    golden = GOLDEN / name
    assert file_names(fresh) == file_names(golden)
    for file in file_names(golden):
        if file.endswith((".json", ".jsonl")) and not file.endswith("tokenizer.json"):
            assert key_paths(read_json(fresh / file)) == key_paths(read_json(golden / file)), file
        elif file.endswith(("tokenizer.json", "recipe.yaml")):
            assert (fresh / file).read_bytes() == (golden / file).read_bytes(), file
    manifest, expected = read_run(fresh), read_run(golden)
    assert manifest.data.fingerprints == expected.data.fingerprints
    assert manifest.parameters == expected.parameters and manifest.steps == expected.steps
    assert manifest.test.loss == pytest.approx(expected.test.loss, rel=0.05)  # processors round differently
