"""Schemas and the reference of keys: what is shipped passes, slips do not, and the document is what the models say."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from edgeformer.artifacts.documents import find, read_yaml, shipped_names
from edgeformer.report.schema import Document, reference, schema_of

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


def test_slips_do_not_pass() -> None:
    recipe, checks = read_yaml(find("recipes", "quickstart")).content, validator("recipe")
    slips = {"training": {"epochs": -1, "epoch": 3, "layer_decay": "0.9"}, "model": {"kind": "encodr"}}
    for section, changes in {**slips, "data": {"split": "mine"}}.items():
        for key, value in changes.items():
            assert not checks.is_valid({**recipe, section: {**recipe[section], key: value}}), key
    profile = read_yaml(find("profiles", "rtx4050")).content
    for size, valid in (("5.4 GiB", True), (5_798_205_849, True), ("much", False)):
        usable = {**profile["usable_memory_bytes"], "value": size}
        assert validator("profile").is_valid({**profile, "usable_memory_bytes": usable}) is valid


def test_a_bundle_is_what_its_schema_says() -> None:
    manifest = json.loads((OLD / "bundle" / "bundle.json").read_text(encoding="utf-8"))
    checks = validator("bundle")
    complete = set(checks.schema["properties"]) - set(manifest)
    assert not [error for error in checks.iter_errors(manifest) if error.validator != "required"], complete
    assert not checks.is_valid({**manifest, "artifacts": "none"})


def test_links_and_code_of_the_reference() -> None:
    written = reference("recipe")
    headings = [line[3:].lower().replace(" ", "-") for line in written.splitlines() if line.startswith("## ")]
    anchors = {"".join(c for c in heading if c.isalnum() or c in "-_") for heading in headings}
    assert {part.split(")")[0] for part in written.split("](#")[1:]} <= anchors
    row = next(line for line in reference("recipe").splitlines() if line.startswith("| `kernels` |"))
    assert " (`fused`)" in row and "\\`" not in row
