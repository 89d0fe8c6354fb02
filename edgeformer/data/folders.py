"""``--data DIR``: the parts of a recipe are found by name among the files of a folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeformer.artifacts.data_config import DataConfig, FileSource, Source, TextConfig
from edgeformer.artifacts.errors import DataError
from edgeformer.data.records import COMPRESSIONS
from edgeformer.data.sources import file_source, pairs_source

IMPORTED_PARTS = ("train", "validation", "test")
_OTHER_STEMS = {"validation": ("dev", "valid"), "sst-test": ("test",)}
_LABELLED = ("tsv", "csv", "jsonl", "parquet")
_TEXT = ("txt", *_LABELLED)


def local_parts(config: DataConfig, folder: Path) -> tuple[DataConfig, list[str]]:
    """``--data DIR``: the same protocol on the files of a folder.

    Every part is read from ``DIR/<part>.<tsv|csv|jsonl|parquet>`` (compressed too; ``validation`` is also
    found as ``dev`` or ``valid``, ``sst-test`` also as ``test``) instead of its own sources. Of a model that
    was trained elsewhere, which may have been imported without any, and of a recipe that cuts all its sets from one
    file, the files train, validation and test are the parts; where there is no test or no validation file, a tenth of
    train is held out.

    Returns:
        The changed config, and a note for each choice or left-out part that the user should know of.

    Raises:
        DataError: no such folder, no file for a part that the protocol uses, or no usable columns in one.
    """
    # Parts whose absence would change what the protocol means ("given" does without validation).
    used = {"given": ("train", "test"), "sst-test": ("train", "validation", "sst-test")}
    used |= {"imported": (), "stratified": ("train",)}
    needed = dict.fromkeys(used.get(config.split, ("train", "validation")), f"split {config.split!r}")
    more: Iterable[str] = IMPORTED_PARTS if config.split == "imported" else ()
    if config.split == "stratified":  # whoever has a test set means to be tested on it
        more = [part for part in IMPORTED_PARTS if _files_of(folder, part, _LABELLED)]
    names = dict.fromkeys((*config.parts, *more))
    files, notes = _part_files(folder, names, _LABELLED, needed)
    if not files:
        raise DataError(f"{folder}: has none of the files {', '.join(names)} ({', '.join(_LABELLED)})")
    known = next(iter(config.parts.values()), (None,))
    parts = {part: (file_source(path, config.parts.get(part, known)[0]),) for part, path in files.items()}
    whole = ((part, path) for part, path in files.items() if config.sampled(part))
    notes += [
        f"part {part}: all rows of {path.name} are read; rows: of the recipe's sources is theirs"
        for part, path in whole
    ]
    unread = (path for part in IMPORTED_PARTS if part not in names for path in _files_of(folder, part, _LABELLED)[:1])
    notes += [
        f"{path.name} is left alone: split {config.split} of this recipe has no such part"
        for path in unread
        if path.resolve() not in files.values()
    ]
    protocol = config.split
    if protocol in ("imported", "stratified") and "train" in parts and ("validation" in parts) != ("test" in parts):
        # One part for validation and test would be selected by and reported.
        protocol = "given" if "test" in parts else "glue-dev"
        notes.append(f"split {protocol}: a tenth of train is held out as validation set")
    elif protocol == "stratified" and "test" in parts:
        protocol = "given"
        notes.append("split given: the sets are the folder's files, none is cut from train")
    return config.model_copy(update={"parts": parts, "split": protocol}), notes


def local_text_parts(config: TextConfig, folder: Path) -> tuple[TextConfig, list[str]]:
    """``--data DIR`` for a language model: as :func:`local_parts`, without labels, and ``DIR/<part>.txt`` first.

    Raises:
        DataError: no such folder, no file for train or validation, or no text column in one.
    """
    needed = dict.fromkeys(("train", "validation"), "a language model")
    files, notes = _part_files(folder, config.parts, _TEXT, needed)
    parts = {part: (file_source(path, config.parts[part][0], labelled=False),) for part, path in files.items()}
    return config.model_copy(update={"parts": parts}), notes


def imported_parts(folder: Path, *, scored: bool) -> tuple[dict[str, tuple[Source, ...]], list[str]]:
    """The files train, validation and test of a folder, as many as there are, for a model that was trained elsewhere.

    Args:
        scored: they are pairs of texts with scores, and ``train`` is any text; else all are labelled.

    Returns:
        The sources of each part, and a note for each part that is not there.

    Raises:
        DataError: no such folder, no file of any part in it, or no usable columns in one.
    """
    kinds = _TEXT if scored else _LABELLED
    files, notes = _part_files(folder, IMPORTED_PARTS, kinds, {})
    if not files:
        raise DataError(f"{folder}: has none of the files train, validation and test ({', '.join(kinds)})")

    def source(part: str, path: Path) -> FileSource:
        if not scored:
            return file_source(path)
        return file_source(path, labelled=False) if part == "train" else pairs_source(path)

    return {part: (source(part, path),) for part, path in files.items()}, notes


def _part_files(
    folder: Path, parts: Iterable[str], kinds: Sequence[str], needed: Mapping[str, str]
) -> tuple[dict[str, Path], list[str]]:
    """The file of each part, and notes; ``needed``: part → what cannot do without it."""
    folder = folder.resolve()  # what is found is saved with the run
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; --data needs a folder with the files of the recipe's parts")
    files: dict[str, Path] = {}
    notes: list[str] = []
    for part in parts:
        if found := _files_of(folder, part, kinds):
            if len(found) > 1:
                notes.append(f"part {part}: read from {found[0].name}; {found[1].name} is left alone")
            files[part] = found[0]
        elif part in needed:
            looked = ", ".join(f"{part}.{kind}" for kind in kinds)
            others = "".join(f" (or {stem}.{kinds[0]} …)" for stem in _OTHER_STEMS.get(part, ()))
            have = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "nothing"
            raise DataError(
                f"{folder}: no file for part {part!r}, which {needed[part]} uses; looked for "
                f"{looked}{others}, also as .xz, .gz, .bz2; the folder has: {have}"
            )
        else:
            notes.append(f"part {part}: no file in {folder}; left out")
    return files, notes


def _files_of(folder: Path, part: str, kinds: Sequence[str]) -> list[Path]:
    """The files of a folder that are named like a part, the preferred one first."""
    suffixes = [f".{kind}{end}" for kind in kinds for end in (("",) if kind == "parquet" else ("", *COMPRESSIONS))]
    stems = (part, *_OTHER_STEMS.get(part, ()))
    return [path for stem in stems for suffix in suffixes if (path := folder / f"{stem}{suffix}").is_file()]


# Data of a model that was trained elsewhere: whatever labelled files, or scored pairs, are at hand for it.


def imported_data(path: Path | None, labels: Sequence[str] | None, max_length: int) -> tuple[dict[str, Any], list[str]]:
    """A recipe's ``data`` on a file, on the files of a folder, or on nothing; and notes for the user.

    Args:
        path: a file is the test set, which stands in for the validation set; of a folder the files train, validation
            and test.
        labels: of a classifier; None: an embedding model.
        max_length: tokens.

    Raises:
        DataError: no such file or folder, or no usable columns in one.
    """
    path = path.resolve() if path is not None else None
    section: dict[str, Any] = {"parts": {}, "max_length": max_length}
    notes: list[str] = []
    if path is not None and path.is_dir():
        parts, notes = imported_parts(path, scored=labels is None)
        section["parts"] = {part: [source.model_dump() for source in sources] for part, sources in parts.items()}
    elif path is not None:
        source = pairs_source(path) if labels is None else file_source(path)
        section["parts"] = {"test": [source.model_dump()]}
    if labels is not None:
        section |= {"split": "imported", "labels": list(labels), "cleaning": "none"}
    return section, notes
