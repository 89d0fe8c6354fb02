"""Schemas and the reference of keys: what is shipped passes, slips do not, and the document is what the models say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from edgeformer.artifacts.documents import find, read_yaml, shipped_names
from edgeformer.report.schema import Document, reference, schema_of
from tests.cli.run_cli import edgeformer
from tests.docs.document import ROOT

OLD = Path(__file__).parent.parent / "old_format" / "classifier-v1"


def validator(document: Document) -> Any:
    schema = schema_of(document)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize(("folder", "document"), [("recipes", "recipe"), ("profiles", "profile")])
def test_what_is_shipped_passes(folder: Any, document: Document) -> None:
    checks = validator(document)
    names = shipped_names(folder)
    assert len(names) > 5
    for name in names:
        assert list(checks.iter_errors(read_yaml(find(folder, name)).content)) == [], name


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "epochs", 0),
        ("training", "epoch", 3),
        ("model", "kind", "encodr"),
        ("data", "split", "mine"),
        ("training", "layer_decay", "0.9"),
    ],
)
def test_slips_in_a_recipe_do_not_pass(section: str, key: str, value: object) -> None:
    recipe = read_yaml(find("recipes", "quickstart")).content
    assert not validator("recipe").is_valid({**recipe, section: {**recipe[section], key: value}})


@pytest.mark.parametrize(("size", "valid"), [("5.4 GiB", True), (5_798_205_849, True), ("much", False)])
def test_sizes_of_a_profile_have_units(size: object, valid: bool) -> None:
    profile = read_yaml(find("profiles", "rtx4050")).content
    usable = {**profile["usable_memory_bytes"], "value": size}
    assert validator("profile").is_valid({**profile, "usable_memory_bytes": usable}) is valid


def test_a_bundle_is_what_its_schema_says() -> None:
    manifest = json.loads((OLD / "bundle" / "bundle.json").read_text(encoding="utf-8"))
    checks = validator("bundle")
    complete = set(checks.schema["properties"]) - set(manifest)
    assert not [error for error in checks.iter_errors(manifest) if error.validator != "required"], complete
    assert not checks.is_valid({**manifest, "artifacts": "none"})


def test_the_document_is_what_the_models_say() -> None:
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == reference("recipe") + "\n", (
        "print it anew: edgeformer schema recipe --format markdown > docs/recipes.md"
    )


def test_every_section_that_is_linked_is_there() -> None:
    written = reference("recipe")
    anchors = {
        "".join(c for c in line[3:].lower().replace(" ", "-") if c.isalnum() or c in "-_")
        for line in written.splitlines()
        if line.startswith("## ")
    }
    linked = {part.split(")")[0] for part in written.split("](#")[1:]}
    assert linked and linked <= anchors


def test_the_command_prints_one_document(tmp_path: Path) -> None:
    printed = edgeformer("schema", "report", cwd=tmp_path)
    assert printed.code == 0 and json.loads(printed.out)["title"] == "A report of edgeformer profile"
    assert edgeformer("schema", "run", cwd=tmp_path).code == 2
