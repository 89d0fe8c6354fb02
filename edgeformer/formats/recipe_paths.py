"""Relative paths in a recipe: found from the recipe's own folder, and made absolute, so that they hold in the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeformer.formats.yaml_text import KeyPath, YamlDocument


def resolve_paths(document: YamlDocument, folder: Path, folders: Mapping[str, Sequence[str]]) -> list[str]:
    """Make the paths in a recipe absolute, in place.

    A relative path starts at the recipe's folder; where nothing is found there, at the folder that edgeformer was
    started in, if it is found there. One that came with ``--set`` starts at the latter only. What could be the name of
    a hub's model or of a run is left alone where there is no such folder.

    Args:
        document: as it was written, not validated yet; it may hold anything.
        folder: of the recipe.
        folders: section → its keys that name a folder, or something else.

    Returns:
        What the user should know: paths that were not found beside the recipe, but where edgeformer was started.
    """
    notes = []
    for path, holder, is_path in _places(document.content, folders):
        key = str(path[-1])
        value = holder.get(key)
        if isinstance(value, str) and value:
            typed = any(path[:length] in document.overridden for length in range(len(path) + 1))
            starts = [Path.cwd()] if typed else [folder, Path.cwd()]
            holder[key] = found = _absolute(value, starts, is_path=is_path)
            if not typed and not Path(value).is_absolute() and _elsewhere(found, value, folder):
                notes.append(f"{'.'.join(map(str, path))}: {value} is not beside the recipe; taken: {found}")
    return notes


def _elsewhere(found: str, value: str, folder: Path) -> bool:
    """Whether a path was found, and not from the recipe's folder."""
    return found != value and Path(found).exists() and found != str((folder / value).resolve())


def _places(content: Any, folders: Mapping[str, Sequence[str]]) -> Iterator[tuple[KeyPath, dict[str, Any], bool]]:
    """Where paths can stand: the key, the mapping that holds it, and whether it can be nothing else than a path."""
    for path, source in _sources(content.get("data")):
        yield (*path, "path"), source, True
        if source.get("kind") == "hub":
            yield (*path, "name"), source, False
    if isinstance(tokenizer := content.get("tokenizer"), dict):
        yield ("tokenizer", "path"), tokenizer, True
    for section, keys in folders.items():
        if isinstance(holder := content.get(section), dict):
            yield from (((section, key), holder, False) for key in keys)


def _sources(data: Any) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    parts = data.get("parts") if isinstance(data, dict) else None
    for part, sources in parts.items() if isinstance(parts, dict) else ():
        for number, source in enumerate(sources if isinstance(sources, list) else ()):
            if isinstance(source, dict):
                yield ("data", "parts", part, number), source


def _absolute(value: str, starts: Sequence[Path], *, is_path: bool) -> str:
    try:
        given = Path(value)
        if given.is_absolute():
            return value
        for start in starts:
            found = start / given
            if found.exists() if is_path else found.is_dir():
                return str(found.resolve())
        return str((starts[0] / given).resolve()) if is_path else value
    except (OSError, ValueError):  # too long, or no path at all; whoever opens it says so
        return value
