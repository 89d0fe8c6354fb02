"""What a first recipe gets for so many rows: length, vocabulary, width, epochs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import NAME_PATTERN, DataConfig
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import DataFinding
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.workspace import require_writable
from edgeformer.data.cleaning import normalizers
from edgeformer.data.column_detection import Guess, guess
from edgeformer.data.data_warnings import label_findings, load_and_look, rows_per_label
from edgeformer.data.encoding import encode_texts
from edgeformer.data.records import COMPRESSIONS, FORMATS
from edgeformer.data.rows import LabelledTexts, in_one
from edgeformer.data.sources import Columns
from edgeformer.data.splits import split
from edgeformer.data.tokenization import SPECIAL_TOKENS, tokenizer_from_file, tokens_of, train_tokenizer
from edgeformer.models import load_recipe
from edgeformer.models.pretrained.source import Source, open_source

_MOST_TEXTS = 50_000
"""From which the vocabulary's size is taken; more words than these have are no use to a small model."""
_MEASURED_TEXTS = 5_000
_VOCABULARY = 8_000
_LENGTHS = (16, 256)
"""Tokens of the shortest and the longest text that a first recipe reads."""
_NOT_CUT = 0.98
_PATIENCE = 5
_MANY = 20_000
"""Rows from which on a wider model learns more."""


@dataclass(frozen=True)
class Sizes:
    """The sections of a recipe that depend on the rows."""

    max_length: int
    model: dict[str, Any]
    training: dict[str, Any]


def from_scratch(train: LabelledTexts) -> Sizes:
    """For a small recurrent encoder whose tokenizer is trained on ``train``, too."""
    tokenizer = train_tokenizer("wordpiece", _VOCABULARY, map(in_one, islice(train.texts, _MOST_TEXTS)), normalizers())
    rows, many = len(train), len(train) >= _MANY
    width = {"hidden_size": 256, "layers": 3} if many else {"hidden_size": 128, "layers": 2}
    model = {
        "kind": "encoder",
        "vocab_size": _reachable(tokenizer),
        **width,
        "iterations": 2,
        "heads": 4,
        "ffn_size": 4 * width["hidden_size"],
        "residual_scale": 0.5,
    }
    training: dict[str, Any] = {
        "epochs": _epochs(rows, 100_000, 4, 30),
        "batch_size": 16 if rows < 1_000 else 32 if not many else 64,
        "precision": "auto",
        "optimizer": {"lr": 1e-3, "weight_decay": 0.05},
        "schedule": {"kind": "cosine"},
    }
    if training["epochs"] > 2 * _PATIENCE:
        training["early_stopping"] = {"patience": _PATIENCE}
    return Sizes(_length(tokenizer, train, _LENGTHS[1]), model, training)


def fine_tuned(train: LabelledTexts, tokenizer: Tokenizer, longest: int) -> Sizes:
    """For a pretrained encoder, which takes texts of ``longest`` tokens; the model's section is left to its source."""
    rows = len(train)
    training = {
        "epochs": _epochs(rows, 20_000, 2, 8),
        "batch_size": 16 if rows < 1_000 else 32,
        "precision": "auto",
        "optimizer": {"lr": 5e-5},
        "schedule": {"kind": "linear"},
    }
    return Sizes(_length(tokenizer, train, min(longest, _LENGTHS[1])), {}, training)


def _reachable(tokenizer: Tokenizer) -> int:
    """Tokens that a tokenizer of nearly the same texts has, too: all letters, and three quarters of the rest."""
    size = tokens_of(tokenizer)
    if size >= _VOCABULARY:
        return size
    letters = sum(len(token.removeprefix("##")) == 1 for token in tokenizer.get_vocab()) + len(SPECIAL_TOKENS)
    return letters + (size - letters) * 3 // 4


def _length(tokenizer: Tokenizer, train: LabelledTexts, most: int) -> int:
    """Tokens that all but a few texts have at most, special tokens included; a multiple of 8."""
    texts: Sequence[Any] = train.texts[:: max(1, len(train) // _MEASURED_TEXTS)]
    encoded, _ = encode_texts(tokenizer, list(texts), most)
    wanted = int(np.ceil(np.quantile(encoded.lengths, _NOT_CUT) / 8)) * 8
    return min(most, max(_LENGTHS[0], wanted))


def _epochs(rows: int, seen: int, fewest: int, most: int) -> int:
    """So many that about ``seen`` rows are seen in all."""
    return min(most, max(fewest, round(seen / rows)))


# init: a file of texts with labels becomes a recipe of a dozen lines, which trains as it stands.


_WIDTH = 100
"""Characters of a line of the recipe."""
_ALWAYS = ("text", "label")
"""Keys of the source that are written though they could be left out: so that they are seen, and changed."""
_SAID = ("encoding", "delimiter", "format", "header", "text", "text_pair", "label", "skip_unlabelled")


@dataclass(frozen=True)
class DraftOptions:
    """What is not to be guessed.

    Attributes:
        out: the recipe's file; None: called as the data, in the folder that the command was started in.
        columns: named ones.
        source: a pretrained encoder to start from, a folder or a name of the hub's.
        name: of the recipe; None: as the data.
        force: replace a file that is there.
    """

    out: Path | None = None
    columns: Columns = field(default_factory=Columns)
    source: str | None = None
    name: str | None = None
    force: bool = False


@dataclass(frozen=True)
class Draft:
    """The recipe that was written, and what it was made of."""

    path: Path
    name: str
    text: str
    guess: Guess
    rows: dict[str, int]
    findings: tuple[DataFinding, ...]
    notes: tuple[str, ...]


def draft(data: Path, options: DraftOptions, progress: Progress = SILENT) -> Draft:
    """Write a recipe from a file of texts with labels.

    Raises:
        InputError: the recipe is there already, the name cannot be one, or the data cannot be used; nothing was
            written.
    """
    stem = _stem(data)
    out = options.out or Path(f"{stem}.yaml")
    name = options.name or re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("._-")[:60] or "own-data"
    if not re.fullmatch(NAME_PATTERN, name):
        raise InputError(f"--name {name!r}: letters, digits, dots, dashes and underscores, a letter or digit first")
    require_writable("-o", out)
    if out.exists() and not options.force:
        raise InputError(f"{out}: is there already; give another name with -o, or replace it with --force")
    if data.is_dir():
        raise InputError(f"{data}: is a folder; name one file of it, or train a recipe on all of it: --data {data}")
    with bar(progress, "Looking at the data", None, "rows"):
        found = guess(data, options.columns)
        config = _data(found, data)
        parts, findings = load_and_look(config)
        sets = split(config, parts)
    findings += label_findings(config, rows_per_label(config, sets))
    pretrained = open_source(options.source) if options.source is not None else None
    sizes = _sizes(sets["train"], pretrained)
    text = _text(name, found, _sections(found, data, out, sizes, pretrained), len(parts["train"]))
    with replacing(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
        load_recipe(str(temporary))
    rows = {part: len(texts) for part, texts in sets.items()}
    return Draft(out, name, text, found, rows, (*findings,), _notes(found))


def _stem(data: Path) -> str:
    """``reviews`` of reviews.csv and reviews.csv.gz."""
    name = data.name
    for known in (COMPRESSIONS, tuple(FORMATS)):
        if name.lower().endswith(known):
            name = name.rpartition(".")[0]
    return name


def _data(found: Guess, path: Path) -> DataConfig:
    source = found.source.model_copy(update={"path": str(path.resolve())})
    return DataConfig(parts={"train": (source,)}, split="stratified", labels=tuple(found.labels))


def _sizes(train: LabelledTexts, pretrained: Source | None) -> Sizes:
    if pretrained is None:
        return from_scratch(train)
    tokenizer = tokenizer_from_file(pretrained.tokenizer)
    tokenizer.no_padding()
    return fine_tuned(train, tokenizer, pretrained.max_positions)


def _sections(
    found: Guess, data: Path, out: Path, sizes: Sizes, pretrained: Source | None
) -> dict[str, dict[str, Any]]:
    """Values of the recipe as they are written, by their place in it."""
    default = type(found.source).model_fields
    told = {key: getattr(found.source, key) for key in _SAID}
    told = {key: value for key, value in told.items() if key in _ALWAYS or value != default[key].default}
    model = sizes.model
    if pretrained is not None:
        place = Path(pretrained.name)
        model = {"kind": "pretrained", "source": _relative(place, out) if place.is_dir() else pretrained.name}
        if found.source.text_pair is not None and int(pretrained.config.get("type_vocab_size") or 0) > 1:
            model["pairs"] = True
    source = {"kind": "file", "path": _relative(data, out), **told}
    return {"source": source, "model": model, "training": sizes.training, "data": {"max_length": sizes.max_length}}


def _relative(path: Path, out: Path) -> str:
    """A path as it is written in a recipe, from where that lies; with slashes, which every system reads."""
    try:
        return Path(os.path.relpath(path.resolve(), out.resolve().parent)).as_posix()
    except ValueError:  # another drive
        return path.resolve().as_posix()


def _text(name: str, found: Guess, sections: dict[str, dict[str, Any]], rows: int) -> str:
    """The recipe, with what a reader would ask beside it."""
    model, length = sections["model"], sections["data"]["max_length"]
    scratch = model["kind"] != "pretrained"
    lines = [
        f"# {rows:,} rows with {len(found.labels)} labels; guessed by edgeformer init, to be changed as you like",
        f"name: {_flow(name)}",
        "task: classification",
        "data:",
        "  parts:",
        "    train:",
        f"      - {_flow(sections['source'])}",
        "  split: stratified  # of each label a tenth of the texts validates, another tenth tests",
        f"  labels: {_flow(list(found.labels))}",
        *([] if scratch else ["  cleaning: none"]),
        f"  max_length: {length}  # tokens; longer texts are cut",
        *(["tokenizer: {kind: trained}"] if scratch else []),
        *_packed("model", model),
        *_packed("training", sections["training"]),
    ]
    return "\n".join(lines) + "\n"


def _packed(section: str, values: dict[str, Any]) -> list[str]:
    """A section on as few lines as hold its keys."""
    items = [f"{key}: {_flow(value)}" for key, value in values.items()]
    lines = [f"{section}:", f"  {{{items[0]}"]
    for item in items[1:]:
        if len(lines[-1]) + len(item) > _WIDTH:
            lines[-1] += ","
            lines.append(f"   {item}")
        else:
            lines[-1] += f", {item}"
    return [*lines[:-1], lines[-1] + "}"]


def _flow(value: object) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    odd = isinstance(value, str) and not value.isprintable()  # a line end in the name of a column, say
    told: dict[str, Any] = {"default_style": '"'} if odd else {}
    # In a list, where commas and brackets are quoted.
    listed = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=float("inf"), **told)
    return str(listed).strip()[1:-1]


def _notes(found: Guess) -> tuple[str, ...]:
    """What the user should know of the labels that were found."""
    alike: dict[str, list[str]] = {}
    for label in found.labels:
        alike.setdefault(" ".join(label.casefold().split()), []).append(label)
    twins = [same for same in alike.values() if len(same) > 1]
    notes = []
    for spellings in twins:
        rows = ", ".join(f"{label!r} ({found.labels[label]:,} rows)" for label in spellings)
        usual = max(spellings, key=lambda label: (label == label.strip(), found.labels[label]))
        merged = ", ".join(f"{label!r} → {usual!r}" for label in spellings if label != usual)
        notes.append(
            f"labels {rows} differ in capitals or spaces only, and each is a label of its own in the recipe; if they "
            f"are one, change them in the file: {merged}"
        )
    filled = sum(found.labels.values())
    if filled < found.rows:
        notes.append(f"{found.rows - filled:,} rows without a label: left out (skip_unlabelled: true)")
    return tuple(notes)
