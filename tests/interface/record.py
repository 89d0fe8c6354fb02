"""Snapshot of the public interface: options of the commands, keys of their JSON documents, exit codes.

Three files hold it: ``options.json``, ``json_keys.json`` and ``exit_codes.json``. Additions are allowed; nothing that a
file holds may disappear. To record what is new, run

    python -m tests.interface.record

It runs every command line of the files, adds new options, keys and types, and prints what disappeared. To record
another command, add it with no ``keys`` to ``json_keys.json``, or with the exit code ``null`` to ``exit_codes.json``.

An option is described by words: ``flag`` or ``value``, ``repeatable``, ``required``. A key is described by the JSON
types of its values; ``empty`` stands for an empty object or array, ``optional`` (added by hand) for a key that not
every machine reports. ``*`` stands for every key of an object whose keys are data, such as label names.
"""

import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import typer

from edgeformer.cli.app import app
from tests.cli.run_cli import Outcome, edgeformer
from tests.conftest import GOLDEN

Words = dict[str, str]
"""Option or key path → the words that describe it, sorted."""

DATA_KEYS = {
    "tests", "inputs", "outputs", "parts", "ops_in_fp32", "rounded", "probabilities", "thresholds", "share",
    "guarantees", "pays", "versions", "built_with", "dynamic", "peaks", "budgets", "other_operators", "control_flow",
    "quantized", "left_out", "artifacts",
}  # fmt: skip
"""Objects whose keys are data."""
UNKNOWN = {"null", "empty"}
"""Values that say nothing about the type."""


def load(name: str) -> Any:
    return json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


def read_commands() -> dict[str, Words]:
    """Return the arguments (by position) and options of every command, ``import hf`` by both words."""
    return dict(_walk_commands(typer.main.get_command(app), "", None))


def _walk_commands(command: Any, name: str, parent: Any) -> Iterator[tuple[str, Words]]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    described: Words = {}
    position = 0
    for parameter in command.get_params(context):
        is_option = parameter.param_type_name == "option"
        words = {("flag" if parameter.is_flag else "value") if is_option else "argument"}
        words |= {"required"} if parameter.required else set()
        words |= {"repeatable"} if parameter.nargs == -1 or (is_option and parameter.multiple) else set()
        position += not is_option
        names = [*parameter.opts, *parameter.secondary_opts] if is_option else [f"argument {position}"]
        described |= dict.fromkeys(names, " ".join(sorted(words)))
    yield name or "edgeformer", described
    for child in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from _walk_commands(command.get_command(context, child), f"{name} {child}".strip(), context)


def missing_options(recorded: Words, current: Words) -> list[str]:
    """Return what a recorded command line can no longer rely on."""
    problems = [f"{name} ({words})" for name, words in recorded.items() if name not in current]
    for name, words in current.items():
        old_words, new_words = set(recorded.get(name, "").split()), set(words.split())
        if missing := old_words - new_words - {"required"}:
            problems.append(f"{name}: no longer {' '.join(sorted(missing))}")
        if "required" in new_words - old_words:
            problems.append(f"{name}: is now required")
    return problems


def key_paths(document: Any) -> Words:
    """Return the path of every key of a JSON document, and the types of its values: ``rows[].batch``: number."""
    paths: dict[str, set[str]] = {}

    def walk(value: Any, path: str) -> None:
        kinds = {dict: "object", list: "array", bool: "boolean", int: "number", float: "number", str: "string"}
        paths.setdefault(path, set()).add("empty" if value in ({}, []) else kinds.get(type(value), "null"))
        if isinstance(value, dict):
            for key, child in value.items():
                walk(child, f"{path}.{'*' if path.rpartition('.')[2] in DATA_KEYS else key}".removeprefix("."))
        if isinstance(value, list):
            for child in value:
                walk(child, f"{path}[]")

    walk(document, "")
    return {path: " ".join(sorted(words)) for path, words in paths.items() if path}


def missing_keys(recorded: Words, current: Words) -> list[str]:
    """Return the recorded keys that are gone or have another type.

    A type of which only null or empty values were recorded is unknown, and keys below such a value cannot be checked.
    """
    problems = []
    for path, words in recorded.items():
        types = set(words.split())
        if path in current:
            if not types <= UNKNOWN and (other := set(current[path].split()) - types):
                problems.append(f"{path}: {' '.join(sorted(other))} instead of {words}")
        elif "optional" not in types:
            parents = [path[:end] for end in range(len(path) - 1, 0, -1) if path[end] in ".["]
            nearest = next((current[parent] for parent in parents if parent in current), "")
            if not nearest or not set(nearest.split()) <= UNKNOWN:
                problems.append(f"{path} ({words})")
    return problems


def run_documents(folder: Path, omitted: Collection[str] = ()) -> dict[str, Outcome]:
    """Run the commands of ``json_keys.json`` in order and prepare what those of ``exit_codes.json`` need.

    ``omitted`` names documents whose commands do not run; without ``train`` the golden run is exported.
    """
    texts = [("a warm and funny film", "positive"), ("dull and far too long", "negative")]
    rows = "".join(f"{text}, part {number}\t{label}\n" for number in range(10) for text, label in texts)
    (folder / "reviews.tsv").write_text(f"sentence\tlabel\n{rows}", encoding="utf-8")
    ambiguous = "".join(f"film {number} is fine,{number % 2},{number % 3}\n" for number in range(60))
    (folder / "ambiguous.csv").write_text(f"text,mood,genre\n{ambiguous}", encoding="utf-8")
    (folder / "broken.yaml").write_text("name: [unclosed\n", encoding="utf-8")
    if "train" in omitted:
        shutil.copytree(GOLDEN / "small", folder / "artifacts" / "small")
    outcomes = {}
    for name, entry in load("json_keys.json").items():
        if name not in omitted:
            outcomes[name] = edgeformer(*shlex.split(entry["command"]), "--json", cwd=folder)
    shutil.copytree(folder / "artifacts" / "small" / "bundle", folder / "damaged")
    with (folder / "damaged" / "onnx" / "model.onnx").open("ab") as graph:
        graph.write(b"more")
    return outcomes


def record() -> None:
    """Add what is new to the snapshot files and print what disappeared."""
    options, documents, codes = (load(name) for name in ("options.json", "json_keys.json", "exit_codes.json"))
    commands = read_commands()
    problems = [f"command {name}" for name in options if name not in commands]
    for command, current in commands.items():
        problems += [f"{command}: {line}" for line in missing_options(options.setdefault(command, {}), current)]
        options[command] |= current
    with tempfile.TemporaryDirectory() as folder:
        for name, outcome in run_documents(Path(folder)).items():
            if outcome.code != documents[name]["exit_code"]:
                sys.exit(f"{name}: exit code {outcome.code}\n{outcome.err}")
            current, recorded = key_paths(json.loads(outcome.out)), documents[name]["keys"]
            problems += [f"{name}: {line}" for line in missing_keys(recorded, current)]
            for path, words in current.items():
                recorded[path] = " ".join(sorted({*recorded.get(path, "").split(), *words.split()}))
        for line, code in codes.items():
            exit_code = edgeformer(*shlex.split(line), cwd=Path(folder)).code
            if code is None:
                codes[line] = exit_code
            elif code != exit_code:
                problems.append(f"edgeformer {line}: exit code {exit_code} instead of {code}")
    for name, content in (("options", options), ("json_keys", documents), ("exit_codes", codes)):
        path = Path(__file__).parent / f"{name}.json"
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n".join(problems) or "nothing disappeared")


if __name__ == "__main__":
    record()
