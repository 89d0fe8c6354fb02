"""Names of the files that make up a run and a bundle, and reading a JSON manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import read_at_most

M = TypeVar("M", bound=BaseModel)

RUN_FILE, BUNDLE_FILE, RECIPE_FILE = "run.json", "bundle.json", "recipe.yaml"
MODEL_FOLDER, BUNDLE_FOLDER, REPORTS_FOLDER = "model", "bundle", "reports"
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "config.json"
REMEDY = "export the run again, or copy the whole bundle again"
"""What to do about a bundle whose files are not those that were exported."""

MOST_JSON_BYTES = 16 << 20
"""Of a manifest, report or configuration: 400 times a large one; parsed, JSON can take 25 times its bytes."""


def read_manifest(model: type[M], path: Path) -> M:
    """Read and validate a JSON manifest.

    Raises:
        ArtifactError: missing, not JSON, or not what the manifest must hold.
    """
    return parse_manifest(model, path, read_json_bytes(path))


def read_json_bytes(path: Path) -> bytes:
    """The bytes of a manifest. Raises ArtifactError where it is missing, or too large to be one."""
    try:
        return read_at_most(path, MOST_JSON_BYTES)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None


def parse_manifest(model: type[M], path: Path, content: bytes) -> M:
    """Validate a JSON manifest that was read from ``path``. Raises ArtifactError."""
    try:
        return model.model_validate_json(content, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ArtifactError(
            f"{path}: damaged or written by another version: {place}: {first['msg']}; make it again"
        ) from None
