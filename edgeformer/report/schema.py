"""JSON Schemas of what edgeformer reads and writes, and the reference of every key that is made of one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.manifest import BundleManifest
from edgeformer.artifacts.report import Report
from edgeformer.artifacts.units import markdown
from edgeformer.models import REGISTRY, recipe_type
from edgeformer.tasks import all_tasks

Document = Literal["recipe", "profile", "bundle", "report"]
Schema = dict[str, Any]
_REFERENCE = "#/$defs/"
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
    """The JSON Schema (2020-12) of a kind of file, as editors take it.

    Of a recipe it is one alternative for each task and family of models that go together.
    """
    found = _schema(document)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **found,
        "title": _TITLES[document],
    }


def _schema(document: Document) -> Schema:
    if document == "recipe":
        return _recipe_schema()
    mode: Literal["validation", "serialization"] = "validation" if document == "profile" else "serialization"
    return _MODELS[document].model_json_schema(mode=mode, by_alias=True)


def _recipe_schema() -> Schema:
    pairs = [(t, f) for t in all_tasks() if t.trained for f in REGISTRY.all() if t.name in f.tasks]
    models: list[Any] = [recipe_type(task.name, model_spec.kind) for task, model_spec in pairs]
    made = TypeAdapter(reduce(or_, models)).json_schema(mode="validation")
    alternatives = made.get("anyOf") or [{"$ref": made["$ref"]}]
    for (_, model_spec), alternative in zip(pairs, alternatives, strict=True):
        whole = made["$defs"][_section(alternative)]
        parts = {"": whole, "model": made["$defs"][_section(whole["properties"]["model"])]}
        for key in model_spec.completed:
            section, _, name = key.rpartition(".")
            parts[section]["required"] = [one for one in parts[section]["required"] if one != name]
    return {"type": "object", **made}


def reference(document: Document) -> str:
    """Markdown: a table for the whole file, and one for each kind of section in it, in the order of their mention."""
    whole = schema_of(document)
    sections: Mapping[str, Schema] = whole.get("$defs", {})
    tops = [sections[name] for name in _named(whole.get("anyOf", []))] or [whole]
    shown = _named(whole.get("anyOf", []))
    pending = [name for name in _mentioned(tops) if name not in shown]
    parts = [f"# {whole['title']}", _INTRODUCTION.format(document), _table(tops, sections)]
    while pending:
        name = pending.pop(0)
        if name in shown:
            continue
        shown.append(name)
        section = sections[name]
        if "properties" not in section:
            continue
        about = _prose(section.get("description", ""))
        parts.append(f"## {_title(name, sections)}\n\n{about}\n\n{_table([section], sections)}")
        pending = [*_mentioned([section]), *pending]
    return "\n\n".join(parts)


def _prose(text: str) -> str:
    """A docstring as Markdown: lists of names and what they mean become lists."""
    paragraphs = text.replace("``", "`").split("\n\n")
    listed = [re.sub(r"^(`[^`]+`)  +", r"- \1: ", paragraph, flags=re.MULTILINE) for paragraph in paragraphs]
    return "\n\n".join(re.sub(r"\n +", "\n  ", paragraph) for paragraph in listed)


def _named(alternatives: Iterable[Schema]) -> list[str]:
    return [_section(one) for one in alternatives if "$ref" in one]


def _section(mention: Schema) -> str:
    return str(mention["$ref"]).removeprefix(_REFERENCE)


def _mentioned(schema: Any) -> list[str]:
    """Names of the sections that a part of a schema refers to, in order."""
    if isinstance(schema, list):
        return [name for one in schema for name in _mentioned(one)]
    if not isinstance(schema, dict):
        return []
    own = [_section(schema)] if isinstance(schema.get("$ref"), str) else []
    return own + [name for key, one in schema.items() if key != "discriminator" for name in _mentioned(one)]


def _title(name: str, sections: Mapping[str, Schema]) -> str:
    """What a section is called: its class; of those that are chosen by their kind, the kind behind it."""
    section = sections[name]
    kind = section.get("properties", {}).get("kind", {}).get("const")
    title = str(section.get("title", name))
    return f"{title} (kind: {kind})" if kind is not None else title


def _table(alternatives: list[Schema], sections: Mapping[str, Schema]) -> str:
    """The keys of one section; those of several alternatives are shown together."""
    rows = []
    for key in dict.fromkeys(key for one in alternatives for key in one.get("properties", {})):
        found = [one["properties"][key] for one in alternatives if key in one["properties"]]
        kinds = dict.fromkeys(_type(field, sections) for field in found)
        needed = all(key in one.get("required", []) for one in alternatives)
        otherwise = "must be given" if needed else "depends on the kind"
        default = _value(found[0]["default"]) if "default" in found[0] else otherwise
        about = markdown(" ".join(found[0].get("description", "").split()))
        rows.append(f"| `{key}` | {' or '.join(kinds)} | {default} | {about} |")
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows])


def _type(field: Schema, sections: Mapping[str, Schema]) -> str:
    """What may stand there, in words."""
    if "$ref" in field:
        name = _section(field)
        if "properties" not in sections[name]:
            return _type(sections[name], sections)
        title = _title(name, sections)
        anchor = "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")
        return f"[{title}](#{anchor})"
    for union in ("anyOf", "oneOf", "allOf"):
        if union in field:
            return " or ".join(dict.fromkeys(_type(one, sections) for one in field[union]))
    if "const" in field:
        return _value(field["const"])
    if "enum" in field:
        return ", ".join(_value(value) for value in field["enum"])
    return _plain(field, sections)


def _plain(field: Schema, sections: Mapping[str, Schema]) -> str:
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
    shown = str(value).lower() if isinstance(value, bool) else str(value).replace("|", "\\|")
    return f"`{shown}`" if shown else "empty"
