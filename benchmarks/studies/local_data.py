"""Local files in place of the hub: what ``--data DIR`` means for a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from benchmarks.studies.specification import FOLDER
from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import FileTokenizer
from edgeformer.artifacts.documents import read_yaml, validate
from edgeformer.artifacts.errors import DataError
from edgeformer.artifacts.recipe import Recipe

_HUB_KEYS = {"kind", "name", "config", "split", "revision", "text", "text_pair", "label"}
"""Keys of a hub source that its files replace; other keys of the source, such as ``rows``, are kept."""


class LocalSource(Frozen):
    """Files that replace a split of a hub data set.

    Attributes:
        files: file sources as in a recipe; ``path`` is relative to the folder of ``--data``.
        all_rows: the files have fewer rows than recipes ask for; a source's ``rows`` is left out.
        note: how they differ from the hub's split.
    """

    hub: str
    config: str | None = None
    split: str = "train"
    files: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, strict=False)]
    all_rows: bool = False
    note: str = ""


class LocalFile(Frozen):
    """A file or folder that replaces a tokenizer or a model of the hub."""

    hub: str
    path: str


class LocalData(Frozen):
    """Files below ``--data DIR`` by what they replace."""

    sources: Annotated[tuple[LocalSource, ...], Field(strict=False)] = ()
    tokenizers: Annotated[tuple[LocalFile, ...], Field(strict=False)] = ()
    models: Annotated[tuple[LocalFile, ...], Field(strict=False)] = ()


@cache
def load_local_data() -> LocalData:
    """Read and validate local/data.yaml. Raises RecipeError."""
    return validate(LocalData, read_yaml(FOLDER / "local" / "data.yaml"))


def with_local_data(recipe: Recipe, folders: Sequence[Path], mapping: LocalData) -> Recipe:
    """Return the recipe on the files below ``folders``, each from the first folder that has it.

    Raises:
        DataError: the mapping has no file for something that the recipe reads from the hub, or the file is missing.
    """
    content = recipe.model_dump(mode="json")
    content["data"]["parts"] = {
        part: [file for source in sources for file in _files(recipe.name, source, folders, mapping)]
        for part, sources in content["data"]["parts"].items()
    }
    changed: dict[str, Any] = {"data": type(recipe.data).model_validate(content["data"], strict=False)}
    if recipe.tokenizer.kind == "hub" and (path := _stand_in(recipe.tokenizer.name, folders, mapping.tokenizers)):
        changed["tokenizer"] = FileTokenizer(kind="file", path=str(path))
    source = getattr(recipe.model, "source", None)
    if source is not None and (path := _stand_in(source, folders, mapping.models)):
        changed["model"] = recipe.model.model_copy(update={"source": str(path)})
    return recipe.model_copy(update=changed)


def source_notes(recipe: Recipe, mapping: LocalData | None) -> tuple[str, ...]:
    """Describe what a recipe reads, part by part. ``mapping``: None: it reads the hub."""
    lines = []
    for part, sources in recipe.data.parts.items():
        for source in (source.model_dump(mode="json") for source in sources):
            if source["kind"] != "hub":
                text = Path(source["path"]).name if "path" in source else f"{source['kind']}, {source.get('rows')} rows"
            elif mapping is None or (local := _local_source(source, mapping)) is None:
                text = f"{_hub_name(source)} from the hub"
            else:
                files = ", ".join(str(file.get("path")) for file in local.files)
                text = f"{files} in place of the hub's {_hub_name(source)}{': ' if local.note else ''}{local.note}"
            lines.append(f"{part}: {text}")
    return tuple(dict.fromkeys(lines))


def _hub_name(source: Mapping[str, Any]) -> str:
    return " ".join(str(source[key]) for key in ("name", "config", "split") if source.get(key))


def _local_source(source: Mapping[str, Any], mapping: LocalData) -> LocalSource | None:
    split = (source.get("split") or "").partition("[")[0]  # train[:1000] is a part of train
    hub = (source["name"], source.get("config"), split)
    return next((local for local in mapping.sources if (local.hub, local.config, local.split) == hub), None)


def _files(recipe: str, source: dict[str, Any], folders: Sequence[Path], mapping: LocalData) -> list[dict[str, Any]]:
    if source["kind"] != "hub":
        return [source]
    local, name = _local_source(source, mapping), _hub_name(source)
    if local is None:
        raise DataError(
            f"--data: {recipe} reads {name} from the hub, for which no local file is known; add it to "
            f"{FOLDER / 'local' / 'data.yaml'}"
        )
    if "[" in (source.get("split") or "") and not local.all_rows:
        raise DataError(
            f"--data: {recipe} reads {name} from the hub, a part of a split, and its file would be read as a whole; "
            "give the number of rows with the source's rows:"
        )
    dropped = _HUB_KEYS | ({"rows"} if local.all_rows else set())
    kept = {key: value for key, value in source.items() if key not in dropped}
    paths = [_existing(str(file.get("path")), folders, f"the hub's {name}") for file in local.files]
    return [{"kind": "file", **kept, **file, "path": str(path)} for file, path in zip(local.files, paths, strict=True)]


def _existing(path: str, folders: Sequence[Path], purpose: str) -> Path:
    for folder in folders:
        if (folder / path).exists():
            return (folder / path).resolve()
    raise DataError(f"--data: no {path}, which replaces {purpose}, in {' or '.join(map(str, folders))}")


def _stand_in(hub: str, folders: Sequence[Path], files: Sequence[LocalFile]) -> Path | None:
    paths = [_existing(file.path, folders, f"the hub's {hub}") for file in files if file.hub == hub]
    return paths[0] if paths else None
