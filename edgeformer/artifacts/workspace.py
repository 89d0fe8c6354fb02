"""Names of the folders and files of runs and bundles; reading of JSON manifests."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from edgeformer.artifacts.base import first_problem
from edgeformer.artifacts.data_config import NAME_PATTERN
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import read_at_most

M = TypeVar("M", bound=BaseModel)

RUN_FILE, BUNDLE_FILE, RECIPE_FILE = "run.json", "bundle.json", "recipe.yaml"
MODEL_FOLDER, BUNDLE_FOLDER, REPORTS_FOLDER = "model", "bundle", "reports"
TOKENIZER_FILE, TOKENIZER_CONFIG, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json", "config.json"
REMEDY = "export the run again, or copy the whole bundle again"
"""Remedy in messages about a bundle whose files differ from the export."""

MOST_JSON_BYTES = 16 << 20
"""Maximum bytes of a manifest, report or configuration: 400 times a large one. Parsed JSON can take 25 times that."""


def read_manifest(model: type[M], path: Path) -> M:
    """Read and validate a JSON manifest. Raises ArtifactError: missing, not JSON, or not valid."""
    return parse_manifest(model, path, read_json_bytes(path))


def read_json_bytes(path: Path) -> bytes:
    """Return the bytes of a manifest. Raises ArtifactError if it is missing or too large."""
    try:
        return read_at_most(path, MOST_JSON_BYTES)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, in which special tokens are texts. Raises ArtifactError if it is damaged."""
    try:
        document = json.loads(read_json_bytes(path))
        return {key: value["content"] if isinstance(value, dict) and "content" in value else value
                for key, value in document.items()}  # fmt: skip
    except (ValueError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{path}: damaged: {error}; {REMEDY}") from None


def parse_manifest(model: type[M], path: Path, content: bytes) -> M:
    """Validate a JSON manifest that was read from ``path``. Raises ArtifactError."""
    try:
        return model.model_validate_json(content, strict=False)
    except ValidationError as error:
        raise ArtifactError(
            f"{path}: damaged or written by another version: {first_problem(error)}; make it again"
        ) from None


NEW_RUN = ".new-run."  # name prefix of the temporary folder of a new run, until it is renamed to its final name


def free_folder(
    artifacts: Path, name: str | None, recipe: str, or_else: str = ", or continue that run with --resume"
) -> Path:
    """Return a new run's folder, which does not exist yet: ``name``, or the recipe's name with the next free number.

    Raises InputError, with the remedy ``or_else``: ``name`` exists or is invalid, or the folder is not writable.
    """
    _require_room(f"--artifacts {artifacts}", artifacts, "choose another folder")
    if name is None:
        for number in range(1, 10_000):
            folder = artifacts / f"{recipe}-{number:03d}"
            if not folder.exists():
                return folder
        raise InputError(f"{artifacts}: has 9,999 runs of {recipe}; add --name NAME")
    check_name(name)
    folder = artifacts / name
    if folder.exists():
        raise InputError(f"--name {name}: {folder} already exists; choose another name{or_else}")
    return folder


def check_name(name: str) -> None:
    """Raise InputError for a ``--name`` that no file or folder should have."""
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise InputError(f"--name {name!r}: use letters, digits, '.', '_' and '-', starting with a letter or digit")


def require_writable(option: str, path: Path) -> None:
    """Raise InputError before long work if the file that ``option`` names cannot be written."""
    if path.is_dir():
        raise InputError(f"{option} {path}: is a folder; name a file in it")
    if not os.access(path, os.W_OK):
        _require_room(f"{option} {path}", path, "name another file")


def _require_room(option: str, path: Path, instead: str) -> None:
    """Raise InputError if ``path`` is not a writable folder, and nothing can be created at it."""
    parent = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"{option}: {parent} is not a writable folder; {instead}, or change its permissions")


def resume_command(folder: Path, flags: Sequence[str] = ()) -> str:
    """Return the command that resumes an unfinished run, quoted for this system's shell.

    ``flags``: options of the run that are not in its recipe.
    """
    words = ["edgeformer", "train", str(folder / RECIPE_FILE), "--resume", "--name", folder.name]
    if folder.parent != Path("artifacts"):
        words += ["--artifacts", str(folder.parent)]
    words += flags
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)
