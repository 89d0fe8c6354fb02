"""Data of classifiers and embedding models: read, split and encode the sets of a recipe, and summarize them.

A set of scored pairs is flat: rows 2i and 2i + 1 are the texts of pair i. Scores are integers in millionths, because
labels are integers in caches, fingerprints and golden inputs.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import DataConfig, DataSection, Source, SpanData, TokenizerConfig
from edgeformer.artifacts.errors import DataError
from edgeformer.artifacts.manifest import DataFinding, DataSummary, Lengths
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.data import data_warnings, splits
from edgeformer.data.batching import IGNORED
from edgeformer.data.cleaning import count_words
from edgeformer.data.encoding import Encoded, Prepared, decode_labels, encode, states_types
from edgeformer.data.rows import LabelledTexts, Text, comparison_key, join_pair, number_labels, score_of, text_parts
from edgeformer.data.sources import load_part, part_rows, read
from edgeformer.data.spans import TokenRows, encode_spans
from edgeformer.data.storage import StoredRows
from edgeformer.data.streaming import Stream, store_training_set
from edgeformer.data.tokenization import load_tokenizer, special_ids

_SENTENCE_WORDS = range(5, 41)
"""Words of the sentences that unlabelled texts are cut into: shorter ones say little, longer ones are often lists."""
_ROWS_AT_ONCE = 1 << 20
_BINS = 40
_SHOWN_SHARE = 0.99
"""Share of texts in the bins of equal width: a few very long texts would hide the distribution of the rest."""


def prepare(
    data: DataConfig, tokenizer_config: TokenizerConfig, vocab_size: int, cache: Path, progress: Progress = SILENT
) -> Prepared[Encoded]:
    """Read, split and encode the data of a recipe, and count the overlap of its test sets with its training set.

    A trained tokenizer may have fewer tokens than ``vocab_size``. ``cache``: folder of encoded sets.

    Raises:
        DataError: a file, a row, a label, a split or the tokenizer is unusable.
        MissingDependencyError: a hub or Parquet source without the ``datasets`` package.
    """
    # 1. Read and split the texts
    set_sources = splits.set_parts(data)
    if data.split == "imported" and set_sources["test"] and set_sources["validation"] == set_sources["test"]:
        (part,) = set_sources["test"]
        missing, protocol = ("validation", "given") if part == "test" else ("test", "glue-dev")
        raise DataError(
            f"data.split: imported would use the part {part} for validation and for the test, so training would "
            f"select its epoch by the reported set; add the part {missing}, or hold out a tenth of train: --set "
            f"data.split={protocol}"
        )
    skipped: list[str] = []
    with bar(progress, "Reading data", None, "parts"):
        if data.stream:
            set_of_row = cut_pool(data)
            sets = {} if set_of_row is None else _held_out_sets(data, set_of_row)
            others = [part for part in data.parts if part not in set_sources["train"]]
            parts, findings = data_warnings.load_with_findings(data, others)
            sets |= splits.make_sets(data, [name for name in set_sources if name not in {"train", *sets}], parts)
            stream = class_stream(data, set_of_row, skipped)
        else:
            parts, findings = data_warnings.load_with_findings(data)
            sets = splits.split(data, parts)
            findings += data_warnings.seen_findings(data, sets)
            if data.unlabelled:
                further = unlabelled_texts(data, [text for rows in sets.values() for text in rows.texts])
                ignored = np.full(len(further), IGNORED, dtype=np.int64)
                sets["train"] = LabelledTexts.joined([sets["train"], LabelledTexts(further, ignored)])
            stream = Stream.of_texts(sets.pop("train"), len(data.labels), several=data.separator is not None)

    def encode_pieces(
        tokenizer: Tokenizer, pieces: Iterator[LabelledTexts], facts: dict[str, Any]
    ) -> Iterator[Encoded]:
        words = Counter[int]()
        for piece in pieces:
            rows = encode_stored(piece, tokenizer, data)
            words += Counter(count_words(piece.texts, data.cleaning).tolist())
            if kind is Encoded and rows.types is None and states_types(tokenizer, has_pairs):
                rows = replace(rows, types=np.zeros(len(rows.ids), np.int8))  # as pieces with pairs have them
            yield rows
        facts |= {"empty": len(skipped), "text_words": words}

    # 2. Tokenize the training set on disk, then the others
    settings: dict[str, object] = {"cleaning": data.cleaning, "vocab_size": vocab_size, "max_length": data.max_length}
    kind: type[Encoded] = Encoded
    if isinstance(data, SpanData):
        kind = TokenRows
        settings |= {"classes": data.classes, "pieces": data.pieces}
    has_pairs = any(source.text_pair is not None for sources in data.parts.values() for source in sources)
    if has_pairs:
        settings["types"] = True  # earlier versions stored pairs without token types
    load = partial(load_tokenizer, cleaning=data.cleaning, vocab_size=vocab_size)
    tests = {name: [*map(join_pair, rows.texts)] for name, rows in sets.items() if name != "validation"}
    tokenizer, stored = store_training_set(
        stream, tokenizer_config, load, encode_pieces, kind, settings, tests, cache, progress
    )
    train = stored if data.stream else decode_labels(stored.in_memory(), data)
    with bar(progress, "Tokenizing", sum(map(len, sets.values())), "rows"):
        encoded = {
            name: decode_labels(encode_stored(rows, tokenizer, data, progress), data, rows.texts)
            for name, rows in sets.items()
        }
    # 3. Summarize all sets
    words = {name: Counter(count_words(rows.texts, data.cleaning).tolist()) for name, rows in sets.items()}
    tokens: dict[str, Counter[int]] = {}
    for name, rows in {"train": train, **encoded}.items():
        tokens[name] = Counter()
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            numbers = np.arange(start, min(start + _ROWS_AT_ONCE, len(rows)))
            tokens[name] += Counter(rows.sizes(numbers).tolist())
    counts = data_warnings.rows_per_label(data, sets)
    counts = {"train": dict(zip(data.labels, stored.facts.label_rows, strict=True)), **counts}
    inexact = {"train": stored.facts.inexact} | {name: getattr(encoded[name], "inexact", 0) for name in encoded}
    findings = [*data_warnings.empty_texts("train", stored.facts.empty), *findings]
    findings += data_warnings.label_findings(data, counts, inexact)
    summary = summarize(
        data, stored, sets, encoded, split=data.split, label_rows=counts, findings=tuple(findings),
        text_words=lengths_of_sets({"train": stored.facts.text_words, **words}), text_tokens=lengths_of_sets(tokens),
    )  # fmt: skip
    return Prepared(
        tokenizer=tokenizer, pad=special_ids(tokenizer).pad, train=train, validation=encoded["validation"],
        tests={name: rows for name, rows in encoded.items() if name != "validation"}, summary=summary,
        train_texts=None if isinstance(data, SpanData) else lambda: (text for text, _ in stream.pairs()),
    )  # fmt: skip


def unlabelled_texts(data: DataConfig, known: Iterable[Text]) -> list[Text]:
    """Read the texts of ``data.unlabelled``, each once and without the ``known`` ones. Raises DataError."""
    known_keys = set(map(comparison_key, known))
    results: list[Text] = []
    for number, source in enumerate(data.unlabelled):
        texts: Iterable[Text] = (row.text for row in read(source, skipped=[], with_labels=False))
        if data.unlabelled_unit == "sentences":
            texts = (sentence for text in texts for sentence in sentences(text_parts(text)[0]))
        fresh: list[Text] = []
        for text in texts:
            if (key := comparison_key(text)) not in known_keys:
                known_keys.add(key)
                fresh.append(text)
        if source.kind != "synthetic-reviews" and source.rows is not None:
            count = splits.row_count(source.rows, len(fresh), f"data.unlabelled.{number}.rows")
            places = splits.sample(np.zeros(len(fresh), np.int64), count, data.split_seed)
            fresh = [fresh[place] for place in places.tolist()]
        results += fresh
    return results


def sentences(text: str) -> list[str]:
    """Return the sentences of :data:`_SENTENCE_WORDS` words of a text, without markup."""
    plain = " ".join(re.sub(r"<[^>]+>", " ", text).split())
    return [piece for piece in re.split(r"(?<=[.!?]) ", plain) if piece.count(" ") + 1 in _SENTENCE_WORDS]


def encode_stored(texts: LabelledTexts, tokenizer: Tokenizer, data: DataConfig, progress: Progress = SILENT) -> Encoded:
    """Encode texts as they are stored: one row each with its label as a number, or windows with a class per token."""
    if isinstance(data, SpanData):
        return encode_spans(tokenizer, texts, data, progress.advance)
    return encode(texts, tokenizer, data.max_length, progress)


def data_findings(data: DataSection) -> list[DataFinding]:
    """Return the warnings of :func:`prepare` about data in memory, without tokenizing. Raises the same errors."""
    if data.stream or not isinstance(data, DataConfig):
        return []
    parts, findings = data_warnings.load_with_findings(data)
    sets = splits.split(data, parts)
    findings += data_warnings.seen_findings(data, sets)
    return findings + data_warnings.label_findings(data, data_warnings.rows_per_label(data, sets))


def cut_pool(data: DataConfig) -> NDArray[np.int8] | None:
    """Return the set of each row of a streamed pool (:func:`cut_stream`); None: all are training rows."""
    return splits.cut_stream(data, _pool_texts(data, [])) if data.split == "stratified" else None


def class_stream(data: DataConfig, set_of_row: NDArray[np.int8] | None, skipped: list[str]) -> Stream:
    """Return a classifier's training texts as a stream; ``skipped``: as in ``read``, of the last pass."""

    def pairs() -> Iterator[tuple[Text, int]]:
        if set_of_row is None:
            return _pool_texts(data, skipped)
        return (pair for pair, number in _cut_texts(data, set_of_row, skipped) if number == 0)

    parts = splits.set_parts(data)["train"]
    settings: dict[str, object] = {"labels": data.labels, "empty": "left out"}
    settings |= {} if data.label_values is None else {"label_values": data.label_values}
    if set_of_row is not None:
        settings["split"] = data.split
    if set_of_row is not None or any(map(data.sampled, parts)):
        settings["split_seed"] = data.split_seed
    sources = [source for part in parts for source in data.parts[part]]
    return Stream(sources, settings, pairs, len(data.labels), check=partial(splits.check_classes, data))


def _pool_texts(data: DataConfig, skipped: list[str]) -> Iterator[tuple[Text, int]]:
    """Yield the texts that the training set is drawn from, with their labels."""
    skipped.clear()
    parts = (part_rows(data, part, skipped) for part in splits.set_parts(data)["train"])
    return number_labels(chain.from_iterable(parts), data.labels, data.label_values or ())


def _cut_texts(
    data: DataConfig, set_of_row: NDArray[np.int8], skipped: list[str]
) -> Iterator[tuple[tuple[Text, int], int]]:
    """Yield :func:`_pool_texts` with the set of each. Raises DataError if the number of rows has changed."""
    for pair, number in zip_longest(_pool_texts(data, skipped), set_of_row.data):
        if pair is None or number is None:
            raise DataError("data.parts: a file changed while it was read; start again when nothing writes to it")
        yield pair, number


def _held_out_sets(data: DataConfig, set_of_row: NDArray[np.int8]) -> dict[str, LabelledTexts]:
    """Read validation and test set of a streamed pool into memory."""
    names = [*splits.set_parts(data)][:3]
    pairs: list[list[tuple[Text, int]]] = [[] for _ in names]
    for pair, number in _cut_texts(data, set_of_row, []):
        if number > 0:
            pairs[number].append(pair)
    return {name: LabelledTexts.of(rows) for name, rows in zip(names[1:], pairs[1:], strict=True)}


def summarize(
    config: DataSection, train: StoredRows[Any], texts: Mapping[str, LabelledTexts], rows: Mapping[str, Any],
    **fields: Any,
) -> DataSummary:  # fmt: skip
    """Return the summary of the sets; ``texts`` and ``rows``: every set but train, in order, and encoded."""
    fingerprints = {"train": train.facts.fingerprint} | {name: texts[name].fingerprint() for name in texts}
    counts = {"train": train.facts.texts} | {name: len(texts[name]) for name in texts}
    lines = (f"{name} {counts[name]} {fingerprint}\n" for name, fingerprint in fingerprints.items())
    return DataSummary(
        synthetic=config.synthetic, rows={"train": len(train)} | {name: len(rows[name]) for name in rows},
        fingerprint=hashlib.sha256("".join(lines).encode()).hexdigest(), fingerprints=fingerprints,
        truncated_rows={"train": train.facts.truncated} | {name: rows[name].truncated for name in rows},
        overlap=train.facts.overlap, **fields,
    )  # fmt: skip


def lengths_of_sets(counts: Mapping[str, Mapping[int, int]]) -> dict[str, Lengths]:
    """Return set → distribution of its text lengths, in the same bins for all sets."""
    arrays = {name: np.array(sorted(texts.items()), dtype=np.int64).T for name, texts in counts.items() if texts}
    longest = 1
    for lengths, texts in arrays.values():
        cumulative = np.cumsum(texts)
        longest = max(longest, int(lengths[np.searchsorted(cumulative, _SHOWN_SHARE * cumulative[-1])]) + 1)
    widths = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    width = next(width for width in widths if width * _BINS >= longest)
    edges = tuple(range(0, longest + width, width))
    distributions = {}
    for name, (lengths, texts) in arrays.items():
        cumulative, total = np.cumsum(texts), int(texts.sum())
        middle = lengths[np.searchsorted(cumulative, [(total - 1) // 2, total // 2], side="right")]
        bins = np.minimum(np.searchsorted(edges, lengths, side="right") - 1, len(edges) - 2)
        histogram = np.bincount(bins, weights=texts, minlength=len(edges) - 1)
        distributions[name] = Lengths(
            min=int(lengths[0]), median=float(middle.mean()), mean=round(float(lengths @ texts) / total, 3),
            max=int(lengths[-1]), edges=edges, texts=tuple(int(count) for count in histogram),
        )  # fmt: skip
    return distributions


def set_texts(config: DataConfig, name: str) -> LabelledTexts:
    """Read one set of a model's data, not encoded. Raises InputError (no such set) or DataError."""
    sets = splits.set_parts(config)
    if name not in sets:
        raise splits.unknown_set(name, sets)
    set_of_row = cut_pool(config) if config.stream and sets[name] == sets["train"] else None
    if set_of_row is not None and name != "train":
        return _held_out_sets(config, set_of_row)[name]
    return splits.make_sets(config, (name,), {part: load_part(config, part) for part in sets[name]})[name]


def read_pairs(sources: Iterable[Source], name: str) -> LabelledTexts:
    """Read scored pairs as flat rows of the set ``name``. Raises DataError."""
    texts: list[str] = []
    scores: list[int] = []
    for row in (row for source in sources for row in read(source)):
        if isinstance(row.text, str):
            raise DataError(
                f"{row.where}: has one text, not a pair; set text_pair: of the source to the column of the second text"
            )
        texts += row.text
        scores.append(score_of(row))
    if len(set(scores)) < 2:
        raise DataError(f"{name}: all {len(scores)} pairs have the same score; scores must differ to be ranked")
    return LabelledTexts([*texts], np.repeat(np.array(scores, dtype=np.int64), 2))


def read_texts(sources: Iterable[Source]) -> LabelledTexts:
    """Read texts without scores; each text of a pair is a row. Raises DataError."""
    rows = (row for source in sources for row in read(source, with_labels=False))
    return LabelledTexts.unlabelled([text for row in rows for text in text_parts(row.text)])
