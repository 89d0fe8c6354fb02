"""Local files in place of the hub: what ``--data DIR`` means for a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeformer.formats.data_config import FileTokenizer
from edgeformer.formats.documents import shipped_folder
from edgeformer.formats.errors import DataError
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.study import LocalData, LocalSource, load_local_data

MAPPING = "local/data.yaml"
_OF_THE_HUB = {"kind", "name", "config", "split", "revision", "text", "text_pair", "label"}
"""Keys of a hub source that its files say themselves; what else a source has (how many rows, say) is kept."""


def shipped_mapping() -> LocalData:
    """Which files below ``--data DIR`` stand in for which data sets of the hub. Raises RecipeError."""
    return load_local_data(shipped_folder("recipes/studies") / MAPPING)


def with_local_data(recipe: Recipe, folders: Sequence[Path], mapping: LocalData) -> Recipe:
    """The recipe on the files below ``folders``: each from the first that has it.

    Raises:
        DataError: the mapping names no file for something that the recipe takes from the hub, or the file is not there.
    """
    content = recipe.model_dump(mode="json")
    content["data"]["parts"] = {
        part: [found for source in sources for found in _files(recipe.name, source, folders, mapping)]
        for part, sources in content["data"]["parts"].items()
    }
    changed = {"data": type(recipe.data).model_validate(content["data"], strict=False)}
    tokenizer: Any = recipe.tokenizer
    if tokenizer.kind == "hub" and (known := _file_of(tokenizer.name, folders, mapping.tokenizers)) is not None:
        changed["tokenizer"] = FileTokenizer(kind="file", path=str(known))  # type: ignore[assignment]
    source = getattr(recipe.model, "source", None)
    if source is not None and (known := _file_of(source, folders, mapping.models)) is not None:
        changed["model"] = recipe.model.model_copy(update={"source": str(known)})  # type: ignore[assignment]
    return recipe.model_copy(update=changed)


def told(recipe: Recipe, mapping: LocalData | None) -> tuple[str, ...]:
    """What a recipe reads, part by part, and how local files differ from the hub's. ``mapping``: None: the hub."""
    lines = []
    for part, sources in recipe.data.parts.items():
        lines += [f"{part}: {_told(source.model_dump(mode='json'), mapping)}" for source in sources]
    return tuple(dict.fromkeys(lines))


def _told(source: Mapping[str, Any], mapping: LocalData | None) -> str:
    if source["kind"] != "hub":
        return Path(source["path"]).name if "path" in source else f"{source['kind']}, {source.get('rows')} rows"
    name = " ".join(str(source[key]) for key in ("name", "config", "split") if source.get(key))
    known = _stand_in(source, mapping) if mapping is not None else None
    if known is None:
        return f"{name} from the hub"
    files = ", ".join(str(file.get("path")) for file in known.files)
    return f"{files} in place of the hub's {name}{': ' if known.note else ''}{known.note}"


def _stand_in(source: Mapping[str, Any], mapping: LocalData) -> LocalSource | None:
    split = (source.get("split") or "").partition("[")[0]  # train[:1000] is of train
    asked = (source["name"], source.get("config"), split)
    return next((known for known in mapping.sources if (known.hub, known.config, known.split) == asked), None)


def _files(recipe: str, source: dict[str, Any], folders: Sequence[Path], mapping: LocalData) -> list[dict[str, Any]]:
    if source["kind"] != "hub":
        return [source]
    known = _stand_in(source, mapping)
    name = " ".join(str(source[key]) for key in ("name", "config", "split") if source.get(key))
    if known is None:
        raise DataError(f"--data: {recipe} reads {name} from the hub, for which no local file is known")
    if "[" in (source.get("split") or "") and not known.all_rows:
        raise DataError(
            f"--data: {recipe} reads {name} from the hub, a part of a split, and its file would be read as a whole; "
            "give the number of rows with the source's rows:"
        )
    left_out = _OF_THE_HUB | ({"rows"} if known.all_rows else set())
    kept = {key: value for key, value in source.items() if key not in left_out}
    found = []
    for file in known.files:
        path = _there(str(file.get("path")), folders, f"the hub's {name}")
        found.append({"kind": "file", **kept, **file, "path": str(path.resolve())})
    return found


def _there(path: str, folders: Sequence[Path], what: str) -> Path:
    for folder in folders:
        if (folder / path).exists():
            return folder / path
    raise DataError(f"--data: no {path}, which stands in for {what}, in {' or '.join(map(str, folders))}")


def _file_of(hub: str, folders: Sequence[Path], known: tuple[Any, ...]) -> Path | None:
    """The local file or folder of something on the hub; None: none is known, and the hub's own is taken."""
    paths = [_there(one.path, folders, f"the hub's {hub}") for one in known if one.hub == hub]
    return next((path.resolve() for path in paths), None)
