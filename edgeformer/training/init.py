"""Command init: draft a recipe from a file of texts with labels. This module does not import torch."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import DataConfig, SpanData
from edgeformer.artifacts.documents import to_yaml
from edgeformer.artifacts.errors import InputError, needs_extra
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import DataFinding
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.workspace import check_name, require_writable
from edgeformer.data.batching import describe_lengths, length_of_most
from edgeformer.data.cleaning import count_words, normalizers
from edgeformer.data.column_detection import DetectedColumns, detect_columns, detect_spans
from edgeformer.data.data_warnings import label_findings, load_with_findings, rows_per_label
from edgeformer.data.encoding import Encoded, encode_texts
from edgeformer.data.prepare import lengths_of_sets
from edgeformer.data.records import COMPRESSIONS, FORMATS
from edgeformer.data.rows import join_pair
from edgeformer.data.sources import Columns
from edgeformer.data.splits import split
from edgeformer.data.tokenization import SPECIAL_TOKENS, embedding_rows, train_tokenizer
from edgeformer.models import load_recipe
from edgeformer.models.pretrained.source import open_source
from edgeformer.report.sentences import text_lengths
from edgeformer.run import read_run

_TOKENIZER_TEXTS = 50_000
"""Texts that determine the vocabulary size: a small model does not use more words than these contain."""
_MEASURED_TEXTS = 5_000
_VOCABULARY = 8_000
_MAX_LENGTH = 256
"""Largest ``data.max_length`` in tokens."""
_PATIENCE = 4
"""Epochs without a better validation score that end a training of more than twice as many."""
_EARLY_STOPPING = {"early_stopping": {"patience": _PATIENCE}}
_COMPARED_ROWS, _COMPARED_S = 2_000, 30.0
"""Rows of a comparison, and seconds after which the encoder begins no further epoch: a busy machine is slower."""
LINEAR_TOKENIZER = {"kind": "trained", "algorithm": "characters"}
LINEAR_LENGTH = 4096
"""``data.max_length`` of a linear model, in characters."""
_MANY_LABELS = 30
"""Labels from which on the table of weights is too small for long n-grams as well as short ones."""
_LARGE_ROWS = 20_000
"""Rows from which on a wider model learns more."""
_LINE_LENGTH = 100


@dataclass(frozen=True)
class DraftOptions:
    """Choices of the user."""

    out: Path | None = None  # the recipe's file; None: in the working folder, with the name of the data file
    columns: Columns = field(default_factory=Columns)
    source: str | None = None  # a pretrained encoder to start from, a folder or a name on the hub
    family: Literal["linear", "encoder"] | None = "encoder"  # without a source; None: the better one of a comparison
    name: str | None = None  # of the recipe; None: the name of the data file
    force: bool = False  # replace an existing file
    test: Path | None = None  # file of test rows, with the same columns; None: a tenth of the data


@dataclass(frozen=True)
class Draft:
    """The recipe that was written, and what was detected in the data."""

    path: Path
    name: str
    text: str
    guess: DetectedColumns
    rows: dict[str, int]
    findings: tuple[DataFinding, ...]
    notes: tuple[str, ...]
    lengths: str  # of the texts, the padding of a batch and what max_length cuts
    comparison: tuple[ComparedFamily, ...] = ()


class ComparedFamily(Frozen):
    """A family of models, trained on a part of the rows."""

    family: str
    score: float = Field(description="accuracy on validation rows of that part")
    rows: int = Field(description="training rows")
    validation_rows: int
    seconds: float = Field(description="of training")


def compare_families(data: Path, options: DraftOptions, progress: Progress = SILENT) -> tuple[ComparedFamily, ...]:
    """Train a linear model and a small encoder on at most 2,000 rows of a file of labelled texts, the better one first.

    The smaller one goes before an equal one. Raises MissingDependencyError: training is not installed.
    """
    with needs_extra("train", "init without --model, which compares two models"):
        from edgeformer.training.train import TrainOptions, train
    compared = []
    with TemporaryDirectory() as folder:
        for family in ("linear", "encoder"):
            path = Path(folder) / f"{family}.yaml"
            drafted = draft(data, replace(options, out=path, name=family, family=family), progress)
            learned = sum(count for name, count in drafted.rows.items() if name != "given")  # the test file's rows
            sets = [
                f"data.parts.train.0.rows={min(_COMPARED_ROWS, learned)}",
                *(["training.epochs=10", "training.early_stopping={patience: 3}"] if family == "encoder" else []),
            ]
            recipe = load_recipe(str(path), sets)
            with bar(progress, f"Comparing: {family}", None):
                manifest = read_run(
                    train(recipe, TrainOptions(Path(folder) / "runs", accelerator="cpu", max_s=_COMPARED_S))
                )
            score: Any = manifest.validation
            seconds = round(manifest.seconds or 0.0, 1)
            compared.append(ComparedFamily(family=family, score=score.accuracy, rows=manifest.data.rows["train"],
                                           validation_rows=score.n, seconds=seconds))  # fmt: skip
    return tuple(sorted(compared, key=lambda entry: -entry.score))


def draft(data: Path, options: DraftOptions, progress: Progress = SILENT) -> Draft:
    """Write a recipe for a file of texts with labels.

    Raises:
        InputError: the recipe exists already, its name is invalid, or the data cannot be used; nothing was written.
    """
    # 1. Check names
    stem = _stem(data)
    out = options.out or Path(f"{stem}.yaml")
    name = options.name or recipe_name(data)
    check_name(name)
    require_writable("-o", out)
    if out.exists() and not options.force:
        raise InputError(f"{out}: already exists; write another file with -o FILE, or replace it with --force")
    if data.is_dir():
        raise InputError(
            f"{data}: is a folder; give one file of it, or train a recipe on the folder: edgeformer train RECIPE "
            f"--data {data}"
        )

    # 2. Read the data
    with bar(progress, "Reading the data", None, "rows"):
        spans = detect_spans(data, options.columns)
        if spans is not None and options.columns.label_names is not None:
            raise InputError(f"{data}: --labels names the labels of whole texts; leave it out for spans")
        detected = spans or detect_columns(data, options.columns)
        source: Any = detected.source
        data_type = DataConfig if spans is None else SpanData
        labels: dict[str, Any] = {"labels": [*detected.labels], "label_values": [*detected.label_values] or None}
        files = {"train": data, **({} if options.test is None else {"test": options.test})}
        protocol: Any = "stratified" if options.test is None else "given"
        sources: Any = {
            part: (source.model_copy(update={"path": str(file.resolve())}),) for part, file in files.items()
        }
        config = data_type(parts=sources, split=protocol, **labels)
        parts, findings = load_with_findings(config)
        sets = split(config, parts)
    findings += label_findings(config, rows_per_label(config, sets))

    # 3. Choose model, tokenizer and training
    # Names are known by their capitals, too.
    trained = {"kind": "trained", **({"algorithm": "wordpiece-cased"} if spans is not None else {})}
    select_by = "f1" if spans is not None or is_uneven(detected.labels) else "accuracy"
    comparison: tuple[ComparedFamily, ...] = ()
    family: str | None = "encoder" if spans is not None else options.family
    if options.source is None and family is None:
        comparison = compare_families(data, options, progress)
        family = comparison[0].family
    model: dict[str, Any]
    training: dict[str, Any] = {}
    encoded: Encoded | None = None
    sample = [*sets["train"].texts[:: max(1, len(sets["train"]) // _MEASURED_TEXTS)]]
    if options.source is None and family == "linear":
        trained, max_length, model = LINEAR_TOKENIZER, LINEAR_LENGTH, linear_model(len(detected.labels))
    elif options.source is None:
        train, algorithm = sets["train"], trained.get("algorithm", "wordpiece")
        texts = [join_pair(text) for text in islice(train.texts, _TOKENIZER_TEXTS)]
        cleaning = normalizers() if algorithm == "wordpiece" else ()
        tokenizer = train_tokenizer(algorithm, _VOCABULARY, texts, cleaning)
        vocabulary = embedding_rows(tokenizer)
        if vocabulary < _VOCABULARY:
            # A tokenizer of slightly different texts has all letters too, but perhaps not all words: keep 3/4 of them.
            letters = sum(len(token.removeprefix("##")) == 1 for token in tokenizer.get_vocab()) + len(SPECIAL_TOKENS)
            vocabulary = letters + (vocabulary - letters) * 3 // 4
            tokenizer = train_tokenizer(algorithm, vocabulary, texts, cleaning)  # the lengths that training will have
        is_large = len(train) >= _LARGE_ROWS
        width = {"hidden_size": 256, "layers": 3} if is_large else {"hidden_size": 128, "layers": 2}
        model = {
            "kind": "encoder", "vocab_size": vocabulary, **width, "iterations": 2, "heads": 4,
            "ffn_size": 4 * width["hidden_size"], "residual_scale": 0.5,
        }  # fmt: skip
        encoded, _ = encode_texts(tokenizer, sample, _MAX_LENGTH)
        max_length = min(_MAX_LENGTH, length_of_most(encoded.lengths))
        training = encoder_training(len(sets["train"]), select_by, is_pretrained=False)
    else:
        pretrained = open_source(options.source)
        training = encoder_training(len(sets["train"]), select_by, is_pretrained=True)
        longest = min(pretrained.max_positions, _MAX_LENGTH)
        encoded, _ = encode_texts(pretrained.tokenizer, sample, longest)
        max_length = min(longest, length_of_most(encoded.lengths))
        folder = Path(pretrained.name)
        model = {"kind": "pretrained", "source": _path_from(folder, out) if folder.is_dir() else pretrained.name}
        if pretrained.pooling is not None and spans is None:  # as its embeddings are made
            model["pooling"] = pretrained.pooling
        if detected.source.text_pair is not None and int(pretrained.config.get("type_vocab_size") or 0) > 1:
            model["pairs"] = True

    # 4. Write the recipe
    # Users see which columns are read, also by default.
    keys = {"text": source.text, "label": source.label}
    shown = source.model_dump(exclude_defaults=True)
    sections: dict[str, Any] = {
        "name": name,
        "task": "classification" if spans is None else "token-classification",
        "data": {
            "parts": {part: [{**shown, "path": _path_from(file, out), **keys}] for part, file in files.items()},
            "split": protocol,
            **{key: value for key, value in labels.items() if value is not None},
            **({"cleaning": "none"} if options.source is not None and spans is None else {}),
            "max_length": max_length,
        },
        **({"tokenizer": trained} if options.source is None else {}),
        "model": model,
        **({"training": training} if training else {}),
    }
    split_text = "for validation" if options.test else "of each label for validation, another tenth for the test"
    body = to_yaml(sections, _LINE_LENGTH, inline=True)
    text = (
        f"# {len(parts['train']):,} rows with {len(detected.labels)} labels; drafted by edgeformer init, change it as "
        f"you like\n# split: a tenth of the texts {split_text}\n# "
        f"max_length: tokens; longer texts are {'cut' if spans is None else 'read in windows'}\n{body}"
    )
    with replacing(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
        drafted = load_recipe(str(temporary)).training

    # 5. Describe lengths and doubts about the data
    counts = Counter(count_words(sample, config.cleaning).tolist())
    lengths = text_lengths(lengths_of_sets({"train": counts})["train"], "words")
    if encoded is not None:
        bucketed, uncut = drafted.batching == "bucketed", float(np.mean(encoded.lengths <= max_length))
        tokens = describe_lengths(encoded, drafted.batch_size, bucketed=bucketed, max_length=max_length)
        lengths += f"; {tokens}; max_length {max_length} reads {uncut:.1%} of them whole"
    spellings_of: dict[str, list[str]] = {}
    for label in detected.labels:
        spellings_of.setdefault(" ".join(label.casefold().split()), []).append(label)
    notes = []
    for spellings in spellings_of.values():
        if len(spellings) > 1:
            listed = ", ".join(f"{label!r} ({detected.labels[label]:,} rows)" for label in spellings)
            notes.append(
                f"labels {listed} differ only in capitals or spaces, and the recipe treats them as different labels; "
                "if they are the same, correct the file"
            )
    labelled = sum(detected.labels.values())
    if labelled < detected.rows and spans is None:
        notes.append(f"{detected.rows - labelled:,} rows without a label: left out (skip_unlabelled: true)")
    texts = [fact.name for fact in detected.columns if fact.name != source.label and fact.holds_texts(detected.rows)]
    if options.columns.text is None and source.text_pair is None and source.text in texts and len(texts) > 1:
        option = f'"{",".join(texts)}"' if " " in "".join(texts) else ",".join(texts)
        notes.append(f"columns {' and '.join(texts)} hold texts; to join them: --text {option}")
    if any(fact.name == source.label and fact.has_booleans for fact in detected.columns):
        notes.append(f"column {source.label!r} has false and true: labels 0 and 1, which --labels A,B names")
    rows = {part: len(texts) for part, texts in sets.items()}
    return Draft(out, name, text, detected, rows, (*findings,), (*notes,), lengths, comparison)


def is_uneven(labels: Mapping[str, int]) -> bool:
    """Return whether there are more than two labels, and the rarest has less than half of an even share of the rows."""
    return len(labels) > 2 and min(labels.values()) < sum(labels.values()) / len(labels) / 2


def linear_model(labels: int) -> dict[str, Any]:
    """Return the model section of a linear classifier of that many labels."""
    return {"kind": "linear", "ngrams": [1, 8 if labels < _MANY_LABELS else 5]}


def encoder_training(rows: int, select_by: str, *, is_pretrained: bool) -> dict[str, Any]:
    """Return the training section of an encoder for that many training rows.

    For a pretrained one, small sets of many labels need 10 to 20 epochs; the validation score decides when it ends.
    """
    is_large = rows >= _LARGE_ROWS and not is_pretrained
    epochs, fewest, most = (80_000 / rows, 2, 20) if is_pretrained else (100_000 / rows, 4, 30)
    optimizer = {"lr": 6e-4, "weight_decay": 0.1} if is_large else {"lr": 1e-3, "weight_decay": 0.05}
    return {
        "epochs": min(most, max(fewest, round(epochs))),
        "batch_size": 16 if rows < 1_000 else 64 if is_large else 32, "precision": "auto",
        "optimizer": {"lr": 6e-5} if is_pretrained else optimizer,
        "schedule": {"kind": "linear", "warmup": 0.1} if is_pretrained else {"kind": "cosine"}, "select_by": select_by,
        **(_EARLY_STOPPING if epochs > 2 * _PATIENCE else {}),
    }  # fmt: skip


def _stem(data: Path) -> str:
    """Return ``reviews`` of reviews.csv.gz."""
    stem = data.name
    for endings in (COMPRESSIONS, tuple(FORMATS)):
        if stem.lower().endswith(endings):
            stem = stem.rpartition(".")[0]
    return stem


def recipe_name(data: Path) -> str:
    """Return the default name of a recipe for a data file: its stem without characters that a name cannot have."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", _stem(data)).strip("._-")[:60] or "own-data"


def _path_from(path: Path, out: Path) -> str:
    """Return ``path`` relative to the recipe ``out``, with slashes, which every system reads."""
    try:
        return Path(os.path.relpath(path.resolve(), out.resolve().parent)).as_posix()
    except ValueError:  # another drive
        return path.resolve().as_posix()
