"""The folder of a run: making it, finding the one to resume, and keeping its manifest up to date."""

from __future__ import annotations

import re
from pathlib import Path

from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.files import write_json, write_text
from edgeformer.formats.manifest import RunManifest
from edgeformer.formats.recipes import AnyRecipe
from edgeformer.formats.shipped import load_recipe
from edgeformer.formats.sources import NAME_PATTERN
from edgeformer.formats.workspace import RECIPE_FILE, RUN_FILE, read_run, run_folders


def new_folder(recipe: AnyRecipe, artifacts: Path, name: str | None) -> Path:
    """A fresh folder: ``name``, or the recipe's name with the next free number.

    Raises:
        InputError: ``name`` is taken; a run is never overwritten.
    """
    artifacts.mkdir(parents=True, exist_ok=True)
    if name is not None:
        folder = artifacts / name
        try:
            folder.mkdir()
        except FileExistsError:
            raise _taken(artifacts, name) from None
        return folder
    for number in range(1, 10_000):
        folder = artifacts / f"{recipe.name}-{number:03d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise InputError(f"{artifacts}: holds 9,999 runs of {recipe.name}; choose a --name")


def check_name(artifacts: Path, name: str) -> None:
    """Refuse a ``--name`` that cannot be a run's folder, before any work is done. Raises InputError."""
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise InputError(f"--name {name!r}: use letters, digits, '.', '_' and '-', starting with a letter or digit")
    if (artifacts / name).exists():
        raise _taken(artifacts, name)


def _taken(artifacts: Path, name: str) -> InputError:
    return InputError(f"--name {name}: {artifacts / name} exists already; choose another name, or go on with --resume")


def folder_to_resume(recipe: AnyRecipe, artifacts: Path, name: str | None) -> Path:
    """The unfinished run of this recipe: ``name``, or the newest one.

    Raises:
        ArtifactError: there is none, it is finished, or it was started from a different recipe.
    """
    candidates = [artifacts / name] if name else list(reversed(run_folders(artifacts)))
    for folder in candidates:
        if not (folder / RUN_FILE).is_file():
            raise ArtifactError(f"--resume: no run {name!r} in {artifacts}")
        manifest = read_run(folder)
        if name is None and (manifest.recipe != recipe.name or manifest.status == "finished"):
            continue
        if manifest.status == "finished":
            raise ArtifactError(f"--resume: {folder} is finished; train again under another --name")
        saved = load_recipe(str(folder / RECIPE_FILE))
        if saved.fingerprint() != recipe.fingerprint():
            raise ArtifactError(
                f"--resume: {folder} was started from a recipe that differs in "
                f"{', '.join(_differences(saved, recipe))}; "
                f"resume it with: edgeformer train {folder / RECIPE_FILE} --resume --name {folder.name}"
            )
        return folder
    raise ArtifactError(f"--resume: no unfinished run of {recipe.name} in {artifacts}; train without --resume")


def _differences(one: AnyRecipe, other: AnyRecipe) -> list[str]:
    left, right = _flat(one.model_dump(mode="json")), _flat(other.model_dump(mode="json"))
    return sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))


def _flat(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}".strip(".")).items()}
    return {path: value}


def write_recipe(folder: Path, recipe: AnyRecipe) -> None:
    """recipe.yaml: the resolved recipe."""
    header = "# The resolved recipe of this run; training it again is the same run.\n"
    write_text(folder / RECIPE_FILE, header + recipe.to_yaml())


def write_run(folder: Path, manifest: RunManifest) -> None:
    """run.json."""
    write_json(folder / RUN_FILE, manifest)
