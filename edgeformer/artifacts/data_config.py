"""A recipe's sources: where the rows of a part come from, and how many of them are taken."""

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
"""Of rows: a whole number is a count, a number with a point is a fraction."""


def _called(column: object) -> object:
    return str(column) if type(column) is int and column > 0 else column


ColumnName = Annotated[str, BeforeValidator(_called, json_schema_input_type=str | int)]
"""A column by its name, or by its number from 1 in a file whose first line names none."""


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
"""Of a text file, by the name of a Python codec."""

ROWS = "count or fraction that is drawn by split_seed, with the same shares of labels, in order; all when absent"


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
    path: str = Field(description="absolute, or relative to the recipe; else to the folder edgeformer is started in")
    format: Literal["tsv", "csv", "jsonl", "parquet", "text"] | None = Field(
        None, description="read from the file's suffix when absent"
    )
    delimiter: Literal[",", ";", "\t", "|"] | None = Field(
        None, description="between the columns of a CSV file; seen in its first lines when absent"
    )
    encoding: Encoding | None = Field(
        None, description="of the text, e.g. cp1252, latin-1 or utf-16; UTF-8 when absent"
    )
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
"""Keys that recipes did not always have."""


def stated(section: Mapping[str, Any]) -> dict[str, Any]:
    """A dumped ``data`` section, or a source, without later keys at their default: its hash stays as it was."""
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
    path: str = Field(description="absolute, or relative to the recipe; else to the folder edgeformer is started in")


class TrainedTokenizer(Frozen):
    """A tokenizer trained on the run's own training text; its size is ``model.vocab_size``, or less where
    the text has less to learn: the model then gets as many tokens."""

    kind: Literal["trained"]
    algorithm: Literal["wordpiece", "bpe"] = "wordpiece"


TokenizerConfig = Annotated[HubTokenizer | FileTokenizer | TrainedTokenizer, Field(discriminator="kind")]


class DataSection(Recognised):
    """What every task's ``data`` has."""

    parts: Parts
    stream: bool = Field(
        False,
        description="keep the training set on disk, as tokens, and read each batch from there: for one that is too "
        "large for memory; the other sets stay in memory",
    )
    expected_rows: PositiveInt | None = Field(
        None,
        description="training rows of an epoch, for `plan` before the data is read; training reports a wrong count",
    )
    called: ClassVar[str] = "a data section"
    length_key: ClassVar[str]
    """The key that says how many tokens the model reads at once."""
    instead_of_rows: ClassVar[str | None] = None
    """What to do where sources cannot be sampled, because there are no labels to draw by."""

    @property
    def tokens_at_once(self) -> int:
        """Tokens of the longest row that the model is given."""
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
        """Whether any of the text is made up by the built-in generator."""
        return any(source.kind == "synthetic-reviews" for sources in self.parts.values() for source in sources)

    def sampled(self, part: str) -> bool:
        """Whether only some rows of a source of the part are taken; a generator makes as many as are wanted."""
        return any(
            source.kind != "synthetic-reviews" and source.rows is not None for source in self.parts.get(part, ())
        )

    @model_validator(mode="after")
    def _samples_labelled_texts(self) -> Self:
        part = next((part for part in self.parts if self.sampled(part)), None)
        if part is not None and self.instead_of_rows is not None:
            raise ValueError(f"parts.{part}: rows: is for texts with labels; {self.instead_of_rows}")
        return self


SplitProtocol = Literal["random-split", "stratified", "glue-dev", "sst-test", "given", "imported"]


class DataConfig(DataSection):
    """Where the text comes from and which protocol cuts it into train, validation and test.

    ``random-split``  parts ``train`` + ``validation`` pooled, shuffled by ``split_seed``, cut 80/10/10
    ``stratified``    parts ``train`` + ``validation`` pooled; a tenth of each label's rows validates, another tenth
                      tests; rows with the same text stay together
    ``glue-dev``      trains on part ``train`` less a tenth held out as validation; tests on part ``validation``
    ``sst-test``      parts ``train``, ``validation``; tests on part ``sst-test``
    ``given``         parts ``train``, ``validation`` (else a tenth of train), ``test``
    ``imported``      a model that was trained elsewhere: whatever there is of the parts ``train`` (to which its
                      vocabulary is trimmed), ``validation`` and ``test``, each of which replaces the other if missing

    A part that the protocol does not use is scored as a further test set under its own name.

    Fewer rows, in this order: ``rows`` of a source, when it is read; ``longest`` or ``shortest``, then ``balance``, of
    all rows that sets are drawn from (pooled parts as one, every other part separately), and of each set;
    ``rows`` of a set, once the protocol has drawn it: where it is balanced, as many as go evenly.
    """

    length_key: ClassVar[str] = "max_length"

    @property
    def separator(self) -> str | None:
        """What stands between the labels of a row that can have several; None: a row has one."""
        return None

    split: SplitProtocol
    split_seed: Seed = 42
    rows: dict[Name, Amount] = Field(
        {}, description="set → count or fraction of its rows, drawn as a source's: train: 0.1 leaves test sets whole"
    )
    longest: Share | None = Field(None, description="only this share of the texts: those of most words, once cleaned")
    shortest: Share | None = Field(None, description="the same, those of fewest words; ties in the order of the rows")
    balance: Literal["label", "source", "label-and-source"] | None = Field(
        None, description="as many rows of each label, of each source, or of each label of each source, in every set"
    )
    labels: Annotated[tuple[str, ...], Field(min_length=2, strict=False)]
    cleaning: Literal["paper", "none"] = "paper"
    max_length: Annotated[int, Field(ge=4)] = Field(128, description="tokens, special tokens included")

    @property
    def test_set(self) -> str:
        """What the protocol's own test set is called."""
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
                f"stream: true reads the part train once from beginning to end, and {cut[0]} needs all of its texts in "
                "memory; set stream: false, or take fewer rows of a source (its rows:), which can be streamed"
            )
        if any(getattr(source, "text_pair", None) is not None for source in self.parts.get("train", ())):
            raise ValueError("stream: true reads single texts, not pairs (text_pair); set stream: false")
        if self.split != "sst-test" and (self.split not in ("given", "imported") or "validation" not in self.parts):
            drawn = "validation and test sets" if self.split in ("random-split", "stratified") else "the validation set"
            raise ValueError(
                f"stream: true reads the part train as a whole, and split {self.split!r} would draw {drawn} from its "
                "texts, for which all of them must be in memory; use split: given with the parts train, validation "
                "and test"
            )
        return self


class TextConfig(DataSection):
    """Running text, one paragraph per line or row, and how it becomes rows of tokens.

    ``paragraphs``  one row per paragraph: boundary token, text, boundary token; longer ones are cut; padding is masked
    ``packed``      the same documents end to end in rows of exactly ``sequence_length``, without padding; attention
                    and convolutions do not look across the boundary of a document, positions start again behind it
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
    """Texts for an embedding model, and pairs of texts with a score of how similar people found them.

    ``train``       texts, or pairs: the vocabulary is trimmed to what they use
    ``validation``  scored pairs, by which export judges an artifact; else those of ``test``
    ``test``        scored pairs; else those of ``validation``

    A part of another name is a further test set. Where there are no scored pairs, artifacts are judged by how close
    their vectors are to those of the model in FP32.
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
"""The data section of any task, in a manifest."""
