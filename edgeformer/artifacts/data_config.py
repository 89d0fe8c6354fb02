"""Data section of a recipe: sources of each part, number of rows, tokenizer and split protocol."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, field_validator, model_validator
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen, Recognised


def _amount(value: object) -> object:
    count, fraction = type(value) is int and value >= 1, type(value) is float and 0.0 < value <= 1.0
    if not (count or fraction):
        raise ValueError("must be a count of rows (a whole number from 1) or a fraction (with a point, up to 1.0)")
    return value


Amount = Annotated[int | float, BeforeValidator(_amount, json_schema_input_type=int | float)]
"""Number of rows: a whole number is a count, a number with a point is a fraction."""


def _called(column: object) -> object:
    return str(column) if type(column) is int and column > 0 else column


ColumnName = Annotated[str, BeforeValidator(_called, json_schema_input_type=str | int)]
"""A column by its name, or by its number from 1 in a file without a header."""


def check_encoding(name: str) -> str:
    """Return the name of a text encoding as it is. Raises ValueError for one that Python does not know."""
    try:
        is_text_encoding = getattr(codecs.lookup(name), "_is_text_encoding", True)
    except (LookupError, ValueError):  # ValueError: a null character
        is_text_encoding = False
    if not is_text_encoding:
        raise ValueError("is no known text encoding; examples: utf-8, cp1252, latin-1, utf-16, shift_jis")
    return name


Encoding = Annotated[str, AfterValidator(check_encoding)]
"""Encoding of a text file: the name of a Python codec."""

ROWS = "count or fraction of rows, sampled by split_seed and stratified by label, in order; absent: all rows"


class HubSource(Frozen):
    """A split of a hub data set, read with the ``datasets`` library (a local data set folder works too)."""

    kind: Literal["hub"]
    name: str = Field(description="hub name (nyu-mll/glue) or the folder of a local data set")
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    text: str = "text"
    text_pair: str | None = Field(None, description="column of the second text, where rows are pairs of texts")
    label: str | None = Field("label", description="column of the label, or of a pair's similarity score")
    label_value: str | int | None = Field(None, description="one label for every row, instead of a column")
    skip_unlabelled: bool = False
    rows: Amount | None = Field(None, description=ROWS)


class FileSource(Frozen):
    """A local file: TSV, CSV, JSONL, Parquet or plain text, also as .xz, .gz or .bz2."""

    kind: Literal["file"]
    path: str = Field(description="absolute, or relative to the recipe, else to the working directory")
    format: Literal["tsv", "csv", "jsonl", "parquet", "text"] | None = Field(
        None, description="absent: inferred from the file's suffix"
    )
    delimiter: Literal[",", ";", "\t", "|"] | None = Field(
        None, description="column separator of a CSV file; absent: detected from its first lines"
    )
    encoding: Encoding | None = Field(None, description="text encoding, e.g. cp1252, latin-1 or utf-16; absent: UTF-8")
    header: bool = Field(True, description="false: the first line names no columns; they are numbered from 1")
    text: ColumnName = "text"
    text_pair: ColumnName | None = Field(None, description="column of the second text, where rows are pairs of texts")
    label: ColumnName | None = Field("label", description="column of the label, or of a pair's similarity score")
    label_value: str | int | None = Field(None, description="one label for every row, instead of a column")
    skip_unlabelled: bool = False
    rows: Amount | None = Field(None, description=ROWS)

    @model_validator(mode="after")
    def _fits_format(self) -> Self:
        for key, is_set in (("delimiter", self.delimiter is not None), ("header", not self.header)):
            if is_set and self.format in ("jsonl", "parquet", "text"):
                raise ValueError(f"{key}: is for tables of text, and format is {self.format}; set format: csv")
        if self.format == "tsv" and self.delimiter not in (None, "\t"):
            raise ValueError("delimiter: the columns of format: tsv are parted by tabs; set format: csv")
        if self.encoding is not None and self.format == "parquet":
            raise ValueError("encoding: is for files of text, and format is parquet; leave it out")
        label = self.label if self.label_value is None else None
        columns = [name for name in (self.text, self.text_pair, label) if name is not None and not name.isdecimal()]
        if not self.header and columns:
            raise ValueError(
                f"header: false: such a file names no columns, so they are given by their numbers from 1 (text: 1, "
                f"label: 2), not as {columns[0]!r}; label: null where there is none"
            )
        return self


class SyntheticSource(Frozen):
    """The built-in generator of synthetic product reviews (seeded). Not real text; for trying things out."""

    kind: Literal["synthetic-reviews"]
    rows: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


Source = Annotated[HubSource | FileSource | SyntheticSource, Field(discriminator="kind")]

_LATER = ("rows", "encoding", "longest", "shortest", "balance")
"""Keys that were added after the first version of the recipe format."""


def stated(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dumped ``data`` section or source without later keys at their default, to keep its hash unchanged."""
    reduced = {key: value for key, value in section.items() if key not in _LATER or value not in (None, {})}
    if "parts" in section:
        reduced["parts"] = {part: [stated(source) for source in rows] for part, rows in section["parts"].items()}
    return reduced


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=80)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Parts = dict[Name, Annotated[tuple[Source, ...], Field(min_length=1, strict=False)]]


class HubTokenizer(Frozen):
    """A tokenizer by hub name."""

    kind: Literal["hub"]
    name: str
    revision: str | None = None


class FileTokenizer(Frozen):
    """A ``tokenizer.json`` on this machine."""

    kind: Literal["file"]
    path: str = Field(description="absolute, or relative to the recipe, else to the working directory")


class TrainedTokenizer(Frozen):
    """A tokenizer trained on the run's training text. It has ``model.vocab_size`` tokens, or fewer if the text yields
    fewer; the model's vocabulary then has the same size."""

    kind: Literal["trained"]
    algorithm: Literal["wordpiece", "bpe"] = "wordpiece"


TokenizerConfig = Annotated[HubTokenizer | FileTokenizer | TrainedTokenizer, Field(discriminator="kind")]


class DataSection(Recognised):
    """Fields that every task's ``data`` section has."""

    parts: Parts
    stream: bool = Field(
        False,
        description="keep the training set on disk, as tokens, and read each batch from there: for sets that are too "
        "large for memory. The other sets stay in memory. Splits: stratified, sst-test, and given with train, "
        "validation and test",
    )
    expected_rows: PositiveInt | None = Field(
        None,
        description="training rows of an epoch, for `plan` before the data is read; training warns about a wrong count",
    )
    called: ClassVar[str] = "a data section"
    length_key: ClassVar[str]
    """Key of the maximum input length in tokens."""
    instead_of_rows: ClassVar[str | None] = None
    """Advice for error messages of tasks whose sources cannot be sampled, because there are no labels to sample by."""

    @property
    def tokens_at_once(self) -> int:
        """Maximum length of a model input in tokens."""
        return int(getattr(self, self.length_key))

    def row_count_warning(self, rows: int) -> str | None:
        """Return a warning if ``expected_rows`` is not the number of training rows that were read."""
        if self.expected_rows in (None, rows):
            return None
        return (
            f"data.expected_rows: the recipe states {self.expected_rows:,} training rows, and its data has {rows:,}; "
            f"a plan made without the data is off by that; correct it with --set data.expected_rows={rows}"
        )

    @property
    def synthetic(self) -> bool:
        """Whether any source is the built-in text generator."""
        return any(source.kind == "synthetic-reviews" for sources in self.parts.values() for source in sources)

    def sampled(self, part: str) -> bool:
        """Return whether a source of the part takes only some of its rows; generated sources do not count."""
        return any(
            source.kind != "synthetic-reviews" and source.rows is not None for source in self.parts.get(part, ())
        )

    @model_validator(mode="after")
    def _samples_labelled_texts(self) -> Self:
        part = next((part for part in self.parts if self.sampled(part)), None)
        if part is not None and self.instead_of_rows is not None:
            raise ValueError(f"parts.{part}: rows: is for texts with labels; {self.instead_of_rows}")
        return self


IN_MEMORY = "Leave stream out; to use less memory, set rows: of a source"

SplitProtocol = Literal["random-split", "stratified", "glue-dev", "sst-test", "given", "imported"]


class DataConfig(DataSection):
    """Sources of the text, and the protocol that splits it into train, validation and test.

    ``random-split``  parts ``train`` + ``validation`` pooled, shuffled by ``split_seed``, cut 80/10/10
    ``stratified``    parts ``train`` + ``validation`` pooled; a tenth of each label's rows validates, another tenth
                      tests; rows with the same text stay together
    ``glue-dev``      trains on part ``train`` less a tenth held out as validation; tests on part ``validation``
    ``sst-test``      parts ``train``, ``validation``; tests on part ``sst-test``
    ``given``         parts ``train``, ``validation`` (else a tenth of train), ``test``
    ``imported``      a model that was trained elsewhere: any of the parts ``train`` (to which its vocabulary is
                      trimmed), ``validation`` and ``test``; each of the last two replaces the other if missing

    A part that the protocol does not use is scored as a further test set under its own name.

    Rows are reduced in this order: ``rows`` of a source, at reading; ``longest`` or ``shortest``, then ``balance``, on
    the rows that sets are drawn from (pooled parts together, every other part separately) and on each set; ``rows``
    of a set, after the split: a balanced set keeps the largest number of rows that divides evenly.
    """

    length_key: ClassVar[str] = "max_length"

    @property
    def separator(self) -> str | None:
        """Separator between several labels of a row; None: a row has one label."""
        return None

    split: SplitProtocol
    split_seed: Seed = 42
    rows: dict[Name, Amount] = Field(
        {}, description="set → count or fraction of its rows, sampled as for a source; train: 0.1 keeps test sets whole"
    )
    longest: Share | None = Field(None, description="only this share of the texts: those with most words, cleaned")
    shortest: Share | None = Field(None, description="only this share: those with fewest words; ties in row order")
    balance: Literal["label", "source", "label-and-source"] | None = Field(
        None, description="equal numbers of rows per label, per source, or per label and source, in every set"
    )
    labels: Annotated[tuple[str, ...], Field(min_length=2, strict=False)]
    cleaning: Literal["paper", "none"] = "paper"
    max_length: Annotated[int, Field(ge=4)] = Field(128, description="tokens, special tokens included")

    @property
    def test_set(self) -> str:
        """Name of the protocol's own test set."""
        return "test" if self.split in ("imported", "stratified") else self.split

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(labels)) != len(labels):
            raise ValueError("label names must differ from each other")
        return labels

    @model_validator(mode="after")
    def _fits_split(self) -> Self:
        if self.longest is not None and self.shortest is not None:
            raise ValueError("longest and shortest: leave one of them out")
        # The set of the part test is called given.
        other_parts = [part for part in self.parts if (self.split, part) != ("given", "test")]
        sets = dict.fromkeys(("train", "validation", self.test_set, *other_parts))
        unknown = next((name for name in self.rows if name not in sets), None)
        if unknown is not None:
            raise ValueError(f"rows: no set is called {unknown!r}; split {self.split!r} has {', '.join(sets)}")
        needs = {
            "random-split": ("train",),
            "stratified": ("train",),
            "glue-dev": ("train", "validation"),
            "sst-test": ("train", "validation", "sst-test"),
            "given": ("train", "test"),
            "imported": (),
        }[self.split]
        missing = [part for part in needs if part not in self.parts]
        if missing:
            raise ValueError(f"split {self.split!r} needs the parts {', '.join(needs)}; missing: {', '.join(missing)}")
        return self

    @model_validator(mode="after")
    def _can_stream(self) -> Self:
        if not self.stream:
            return self
        cut = [key for key in ("longest", "shortest", "balance") if getattr(self, key) is not None]
        cut += ["rows.train"] if "train" in self.rows else []
        if cut:
            raise ValueError(
                f"stream: true is not possible with {cut[0]}, which needs all texts of the part train in memory. Leave "
                f"{cut[0]} out, or set rows: of a source instead"
            )
        if any(getattr(source, "text_pair", None) is not None for source in self.parts.get("train", ())):
            raise ValueError(f"stream: true is not possible with pairs of texts (text_pair). {IN_MEMORY}")
        given = self.split in ("given", "imported") and "validation" in self.parts
        if self.split not in ("stratified", "sst-test") and not given:
            raise ValueError(
                f"stream: true is not possible with split: {self.split}, which needs all texts of the part train in "
                "memory. Use split: stratified, or split: given with the parts train, validation and test"
            )
        return self


class TextConfig(DataSection):
    """Running text, one paragraph per line or row, and its layout as rows of tokens.

    ``paragraphs``  one row per paragraph: boundary token, text, boundary token; longer ones are cut; padding is masked
    ``packed``      the same documents end to end in rows of exactly ``sequence_length``, without padding; attention
                    and convolutions do not cross a document boundary; positions restart behind it
    """

    length_key: ClassVar[str] = "sequence_length"
    instead_of_rows: ClassVar[str | None] = (
        "a language model takes the first paragraphs of its training text with data.first_n"
    )

    parts: Parts = Field(description="train, validation, and any number of test sets by name")
    mode: Literal["paragraphs", "packed"]
    sequence_length: Annotated[int, Field(ge=8)] = Field(description="tokens that the model reads at once")
    min_characters: Annotated[int, Field(ge=0)] = Field(50, description="only paragraphs with more characters are used")
    first_n: PositiveInt | None = Field(None, description="train on the first n paragraphs only")

    @field_validator("parts")
    @classmethod
    def _has_both(cls, parts: dict[str, tuple[Source, ...]]) -> dict[str, tuple[Source, ...]]:
        missing = [part for part in ("train", "validation") if part not in parts]
        if missing:
            raise ValueError(f"needs the parts train and validation; missing: {', '.join(missing)}")
        return parts


class PairsConfig(DataSection):
    """Texts for an embedding model, and text pairs with human similarity scores.

    ``train``       texts, or pairs: the vocabulary is trimmed to what they use
    ``validation``  scored pairs on which export judges an artifact; default: those of ``test``
    ``test``        scored pairs; default: those of ``validation``

    A part of another name is a further test set. Without scored pairs, artifacts are judged by the similarity of
    their vectors to those of the FP32 model.
    """

    length_key: ClassVar[str] = "max_length"
    instead_of_rows: ClassVar[str | None] = "pairs with a score are all read; leave it out"

    max_length: Annotated[int, Field(ge=4)] = Field(description="tokens, special tokens included")

    @field_validator("stream")
    @classmethod
    def _fits_memory(cls, stream: bool) -> bool:
        if stream:
            raise ValueError("an embedding model is not trained here, so there is no training set to stream")
        return stream


AnyData = Annotated[SerializeAsAny[DataSection], BeforeValidator(DataSection.recognise)]
"""Data section of any task, for manifests."""
