"""JSON Schemas of the files that edgeformer reads and writes, and a Markdown reference of their keys."""

import json
import re
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.manifest import BundleManifest
from edgeformer.artifacts.report import Report
from edgeformer.artifacts.units import markdown
from edgeformer.models import REGISTRY, recipe_type
from edgeformer.tasks import RowSource, all_tasks

Document = Literal["recipe", "profile", "bundle", "report"]
Schema = dict[str, Any]
_TITLES: dict[Document, str] = {
    "recipe": "A recipe of edgeformer",
    "profile": "A device profile of edgeformer",
    "bundle": "bundle.json: the manifest of a bundle",
    "report": "A report of edgeformer profile",
}
_MODELS: dict[Document, type[BaseModel]] = {"profile": DeviceProfile, "bundle": BundleManifest, "report": Report}
_INTRODUCTION = """Printed by `edgeformer schema {0} --format markdown`.
`edgeformer schema {0}` prints the same as JSON Schema, for editors and other programs."""
_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def schema_of(document: Document) -> Schema:
    """Return the JSON Schema (2020-12) of a file. A recipe has an alternative per task and model family."""
    if document != "recipe":
        mode: Literal["validation", "serialization"] = "validation" if document == "profile" else "serialization"
        schema = _MODELS[document].model_json_schema(mode=mode, by_alias=True)
    else:
        tasks = [task for task in all_tasks() if isinstance(task, RowSource)]
        pairs = [(task, spec) for task in tasks for spec in REGISTRY.all() if spec.serves(task)]
        models: list[Any] = [recipe_type(task.name, spec.kind) for task, spec in pairs]
        schema = {"type": "object", **TypeAdapter(reduce(or_, models)).json_schema(mode="validation")}
        sections = schema["$defs"]
        alternatives = schema.get("anyOf") or [{"$ref": schema["$ref"]}]
        for (_, spec), alternative in zip(pairs, alternatives, strict=True):
            recipe = sections[_reference(alternative)]
            parts = {"": recipe, "model": sections[_reference(recipe["properties"]["model"])]}
            for key in spec.completed:  # the family fills in these keys
                section, _, name = key.rpartition(".")
                parts[section]["required"] = [key for key in parts[section]["required"] if key != name]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": _TITLES[document]}


def _reference(schema: Schema) -> str:
    """Return the name of the section that a schema refers to; empty if it is no reference."""
    reference = schema.get("$ref")
    return reference.removeprefix("#/$defs/") if isinstance(reference, str) else ""


def _references(schema: Any) -> list[str]:
    """Return the names of all sections that a part of a schema refers to, in order."""
    if isinstance(schema, list):
        return [name for entry in schema for name in _references(entry)]
    if not isinstance(schema, dict):
        return []
    name = _reference(schema)
    nested = [name for key, entry in schema.items() if key != "discriminator" for name in _references(entry)]
    return [name, *nested] if name else nested


def reference(document: Document) -> str:
    """Return Markdown with a table for the file and a table per section, in the order of their first reference."""
    schema = schema_of(document)
    sections: Mapping[str, Schema] = schema.get("$defs", {})
    written = [name for entry in schema.get("anyOf", []) if (name := _reference(entry))]
    alternatives = [sections[name] for name in written] or [schema]
    parts = [f"# {schema['title']}", _INTRODUCTION.format(document), _table(alternatives, sections)]
    pending = _references(alternatives)
    while pending:
        name = pending.pop(0)
        section = sections[name]
        if name in written or "properties" not in section:
            continue
        written.append(name)
        # Docstrings become Markdown: "``name``  meaning" is a list entry.
        paragraphs = section.get("description", "").replace("``", "`").split("\n\n")
        paragraphs = [re.sub(r"^(`[^`]+`)  +", r"- \1: ", text, flags=re.MULTILINE) for text in paragraphs]
        description = "\n\n".join(re.sub(r"\n +", "\n  ", text) for text in paragraphs)
        parts.append(f"## {_title(name, sections)}\n\n{description}\n\n{_table([section], sections)}")
        pending = [*_references([section]), *pending]
    return "\n\n".join(parts)


def _title(name: str, sections: Mapping[str, Schema]) -> str:
    """Return the section's class, with its kind if sections are chosen by kind."""
    section = sections[name]
    kind = section.get("properties", {}).get("kind", {}).get("const")
    title = str(section.get("title", name))
    return f"{title} (kind: {kind})" if kind is not None else title


def _table(alternatives: list[Schema], sections: Mapping[str, Schema]) -> str:
    """Return the keys of a section, or of several alternatives together."""
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key in dict.fromkeys(key for section in alternatives for key in section.get("properties", {})):
        fields = [section["properties"][key] for section in alternatives if key in section["properties"]]
        types = dict.fromkeys(_type(field, sections) for field in fields)
        is_required = all(key in section.get("required", []) for section in alternatives)
        default = "must be given" if is_required else "depends on the kind"
        if "default" in fields[0]:
            default = _value(fields[0]["default"])
        words = re.split(r"(`[^`]+`)", " ".join(fields[0].get("description", "").split()))
        meaning = "".join(word if word.startswith("`") else markdown(word) for word in words)
        rows.append(f"| `{key}` | {' or '.join(types)} | {default} | {meaning} |")
    return "\n".join(rows)


def _type(field: Schema, sections: Mapping[str, Schema]) -> str:
    """Describe the values that a field takes."""
    if name := _reference(field):
        if "properties" not in sections[name]:
            return _type(sections[name], sections)
        title = _title(name, sections)
        anchor = "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")
        return f"[{title}](#{anchor})"
    for union in ("anyOf", "oneOf", "allOf"):
        if union in field:
            return " or ".join(dict.fromkeys(_type(entry, sections) for entry in field[union]))
    if "const" in field:
        return _value(field["const"])
    if "enum" in field:
        return ", ".join(_value(value) for value in field["enum"])
    kind = field.get("type", "anything")
    if kind == "array":
        if "prefixItems" in field:
            return " and ".join(_type(item, sections) for item in field["prefixItems"])
        return f"list of {_type(field.get('items', {}), sections)}"
    if kind == "object":
        values = field.get("additionalProperties") or next(iter(field.get("patternProperties", {}).values()), None)
        return f"names, each with {_type(values, sections)}" if isinstance(values, dict) else "keys and values"
    words = {"null": "`null`", "boolean": "`true`, `false`", "integer": "whole number", "string": "text"}
    limits = " and ".join(f"{sign} {field[key]:,}" for key, sign in _LIMITS.items() if key in field)
    return f"{words.get(kind, kind)} {limits}".strip()


def _value(value: object) -> str:
    if value is None:
        return "`null`"
    if isinstance(value, dict):
        return "its own defaults"
    if isinstance(value, str) and value and not value.strip():
        return f"`{json.dumps(value)}`"  # a tab
    text = str(value).lower() if isinstance(value, bool) else str(value).replace("|", "\\|")
    return f"`{text}`" if text else "empty"
