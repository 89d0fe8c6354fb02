"""Data section of a recipe: sources of each part, number of rows, tokenizer and split protocol."""

import codecs
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, field_validator, model_validator
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen, Recognised


def _amount(value: object) -> object:
    count, fraction = type(value) is int and value >= 1, type(value) is float and 0.0 < value <= 1.0
    if not (count or fraction):
        raise ValueError("must be a number of rows (1 or more) or a fraction with a decimal point (up to 1.0)")
    return value


Amount = Annotated[int | float, BeforeValidator(_amount, json_schema_input_type=int | float)]
"""Number of rows: a whole number is a count, a number with a point is a fraction."""


def _called(column: object) -> object:
    if isinstance(column, (list, tuple)):
        return tuple(map(_called, column))
    return str(column) if type(column) is int and column > 0 else column


ColumnName = Annotated[str, BeforeValidator(_called, json_schema_input_type=str | int)]
"""A column by its name, or by its number from 1 in a file without a header."""
TextColumns = Annotated[
    str | Annotated[tuple[str, ...], Field(min_length=1)],
    BeforeValidator(_called, json_schema_input_type=str | int | list[str | int]),
]


def column_names(columns: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of one column, or of several."""
    return (columns,) if isinstance(columns, str) else columns


def check_encoding(name: str) -> str:
    """Return the name of a text encoding as it is. Raises ValueError for one that Python does not know."""
    try:
        is_text_encoding = getattr(codecs.lookup(name), "_is_text_encoding", True)
    except (LookupError, ValueError):  # ValueError: a null character
        is_text_encoding = False
    if not is_text_encoding:
        raise ValueError("is not a text encoding; examples: utf-8, cp1252, latin-1, utf-16, shift_jis")
    return name


Encoding = Annotated[str, AfterValidator(check_encoding)]  # encoding of a text file: the name of a Python codec


def _texts(value: object) -> object:
    values = value if isinstance(value, (list, tuple)) else [value]
    if not values or not all(isinstance(item, (str, int, float)) for item in values):
        raise ValueError("must be a text or number, or a list of them")
    return tuple(map(str, values))


Choice = Annotated[tuple[str, ...], BeforeValidator(_texts, json_schema_input_type=str | int | list[str | int])]
"""Values of a column, as texts."""

WHERE = "keep only rows with these values: {language: de} or {domain: [books, kitchen]}"
TEXT = "column of the text, or a list of columns whose texts are joined by a space: [title, body]"
ROWS = "number or fraction of rows to use, sampled with split_seed and stratified by label; absent: all rows"


class HubSource(Frozen):
    """A split of a hub data set, read with the ``datasets`` library (a local data set folder works too)."""

    kind: Literal["hub"]
    name: str = Field(description="hub name (nyu-mll/glue) or the folder of a local data set")
    config: str | None = Field(None, description="configuration of the data set, e.g. sst2 of nyu-mll/glue")
    split: str = Field("train", description="split of the data set")
    revision: str | None = Field(None, description="branch, tag or commit; absent: the newest")
    text: TextColumns = Field("text", description=TEXT)
    text_pair: str | None = Field(None, description="column of the second text, if rows are pairs of texts")
    label: str | None = Field("label", description="column of the label, or of a pair's similarity score")
    label_value: str | int | None = Field(None, description="one label for every row, instead of a column")
    skip_unlabelled: bool = Field(False, description="leave out rows without a label instead of refusing them")
    where: dict[str, Choice] = Field({}, description=WHERE)
    rows: Amount | None = Field(None, description=ROWS)

    @property
    def title(self) -> str:
        """Name of the data set and its split, for messages and the places of rows."""
        return f"hub data set {self.name}{f' ({self.config})' if self.config else ''}, split {self.split}"


class FileSource(Frozen):
    """A local file: TSV, CSV, JSONL, Parquet or plain text, also as .xz, .gz or .bz2."""

    kind: Literal["file"]
    path: str = Field(description="absolute, or relative to the recipe or the working directory")
    format: Literal["tsv", "csv", "jsonl", "parquet", "text"] | None = Field(
        None, description="absent: inferred from the file's suffix"
    )
    delimiter: Literal[",", ";", "\t", "|"] | None = Field(
        None, description="column separator of a CSV file; absent: detected from its first lines"
    )
    quote: Literal['"', "'"] | None = Field(
        None, description="quotes around texts of a CSV file; absent: detected from its first lines"
    )
    encoding: Encoding | None = Field(
        None, description="text encoding, e.g. cp1252 or latin-1; absent: UTF-8, or UTF-16 after its byte order mark"
    )
    header: bool = Field(True, description="false: the first line has no column names; columns are numbered from 1")
    text: TextColumns = Field("text", description=TEXT)
    text_pair: ColumnName | None = Field(None, description="column of the second text, if rows are pairs of texts")
    label: ColumnName | None = Field("label", description="column of the label, or of a pair's similarity score")
    label_value: str | int | None = Field(None, description="one label for every row, instead of a column")
    skip_unlabelled: bool = Field(False, description="leave out rows without a label instead of refusing them")
    where: dict[str, Choice] = Field({}, description=WHERE)
    rows: Amount | None = Field(None, description=ROWS)

    @model_validator(mode="after")
    def _fits_format(self) -> Self:
        layout = {"delimiter": self.delimiter is not None, "quote": self.quote is not None, "header": not self.header}
        for key, is_set in layout.items():
            if is_set and self.format in ("jsonl", "parquet", "text"):
                raise ValueError(f"{key} applies to tables of text, but format is {self.format}; set format: csv")
        if self.format == "tsv" and (self.delimiter not in (None, "\t") or self.quote is not None):
            raise ValueError(
                "delimiter and quote do not apply to format: tsv, whose columns are separated by tabs; set format: csv"
            )
        if self.encoding is not None and self.format == "parquet":
            raise ValueError("encoding does not apply to format: parquet; leave it out")
        label = self.label if self.label_value is None else None
        names = (*column_names(self.text), self.text_pair, label)
        columns = [name for name in names if name is not None and not name.isdecimal()]
        if not self.header and columns:
            raise ValueError(
                "with header: false columns have no names; use their numbers from 1 (text: 1, label: 2) instead of "
                f"{columns[0]!r}, or label: null for a file without labels"
            )
        return self


class SpanSource(FileSource):
    """A file of texts with labelled spans of characters: JSON Lines, or CoNLL columns; also as .xz, .gz or .bz2.

    JSON Lines: ``{"text": "Ada in Ulm", "spans": [{"start": 0, "end": 3, "label": "PER"}]}``; offsets count Unicode
    code points. CoNLL: a token and its tag per line, an empty line after a sentence, whose text is its tokens joined by
    spaces.
    """

    format: Literal["conll", "jsonl"] | None = Field(  # type: ignore[assignment]
        None, description="absent: inferred from the file's suffix"
    )
    text: ColumnName = Field("text", description="JSON Lines: key of the text; CoNLL: number of the token's column")
    label: ColumnName | None = Field(
        "spans", description="JSON Lines: key of the spans; CoNLL: number of the tag's column, by default the last"
    )

    @model_validator(mode="after")
    def _has_spans(self) -> Self:
        for key in ("text_pair", "label_value", "delimiter"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: is not for texts with labelled spans; leave it out")
        if self.label is None or self.skip_unlabelled or not self.header:
            raise ValueError("label: names the spans, and a text without any has an empty list; leave out label, "
                             "skip_unlabelled and header")  # fmt: skip
        return self


class SyntheticSource(Frozen):
    """The built-in generator of synthetic product reviews. They are no real text and serve for first trials."""

    text_pair: ClassVar[None] = None  # reviews are single texts

    kind: Literal["synthetic-reviews"]
    rows: Annotated[int, Field(ge=1)] = Field(description="number of reviews")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="seed of the generator")


Source = Annotated[HubSource | FileSource | SyntheticSource, Field(discriminator="kind")]

_LATER = (
    "rows", "where", "encoding", "longest", "shortest", "balance", "prompts", "unlabelled", "unlabelled_unit",
    "label_values", "quote",
)  # fmt: skip
"""Keys that were added after the first version of the recipe format."""


def stated(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dumped ``data`` section or source without later keys at their default, to keep its hash unchanged."""
    reduced = {key: value for key, value in section.items() if key not in _LATER or value not in (None, {}, [])}
    if "unlabelled" in reduced:  # these sources are hashed with all older keys
        sources = section["unlabelled"]
        reduced["unlabelled"] = [{k: v for k, v in source.items() if (k, v) != ("quote", None)} for source in sources]
    else:
        reduced.pop("unlabelled_unit", None)
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
    name: str = Field(description="hub name, e.g. bert-base-uncased")
    revision: str | None = Field(None, description="branch, tag or commit; absent: the newest")


class FileTokenizer(Frozen):
    """A ``tokenizer.json`` on this machine."""

    kind: Literal["file"]
    path: str = Field(description="absolute, or relative to the recipe or the working directory")


class TrainedTokenizer(Frozen):
    """A tokenizer trained on the run's training text.

    It has ``model.vocab_size`` tokens. A short text can yield fewer; then the model's vocabulary is smaller too.
    """

    kind: Literal["trained"]
    algorithm: Literal["wordpiece", "wordpiece-cased", "bpe", "words", "characters"] = Field(
        "wordpiece",
        description="wordpiece lowers texts and removes their accents, wordpiece-cased and bpe do not; for "
        "linear models, words takes whole words without punctuation, and characters single ones, lowered; language "
        "models need bpe",
    )


class SourceTokenizer(Frozen):
    """The tokenizer of a Hugging Face model, as transformers and sentence-transformers build it of all its files."""

    kind: Literal["source"]
    name: str = Field(description="folder of the model, or its hub name")


TokenizerConfig = Annotated[
    HubTokenizer | FileTokenizer | SourceTokenizer | TrainedTokenizer, Field(discriminator="kind")
]


class DataSection(Recognised):
    """Fields that every task's ``data`` section has."""

    parts: Parts = Field(description="part (train, validation, test or another name) → its sources")
    stream: bool = Field(
        False,
        description="keep the training set on disk, as tokens, and read each batch from there, if it is too large for "
        "memory; the other sets stay in memory. Possible splits: stratified, sst-test, and given with train, "
        "validation and test",
    )
    expected_rows: PositiveInt | None = Field(
        None, description="number of training rows, for `plan` before the data is read; training warns if it is wrong"
    )
    called: ClassVar[str] = "a data section"
    length_key: ClassVar[str]  # key of the maximum input length in tokens
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
            f"data.expected_rows: the recipe states {self.expected_rows:,} training rows, but its data has {rows:,}; "
            f"correct it with --set data.expected_rows={rows}, because plan uses it"
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the model's outputs, in order; empty: they have none."""
        return tuple(getattr(self, "labels", ()))

    @property
    def synthetic(self) -> bool:
        """Whether any source is the built-in text generator."""
        return any(source.kind == "synthetic-reviews" for source in self.sources)

    @property
    def sources(self) -> list[HubSource | FileSource | SyntheticSource]:
        """All sources."""
        return [source for sources in (*self.parts.values(), getattr(self, "unlabelled", ())) for source in sources]

    def sampled(self, part: str) -> bool:
        """Return whether a source of the part takes only some of its rows; generated sources do not count."""
        return any(
            source.kind != "synthetic-reviews" and source.rows is not None for source in self.parts.get(part, ())
        )

    @model_validator(mode="after")
    def _samples_labelled_texts(self) -> Self:
        part = next((part for part in self.parts if self.sampled(part)), None)
        if part is not None and self.instead_of_rows is not None:
            raise ValueError(f"parts.{part}: rows: applies to texts with labels; {self.instead_of_rows}")
        return self


IN_MEMORY = "leave stream out; to use less memory, set rows: of a source"

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

    unlabelled: Annotated[tuple[Source, ...], Field(strict=False)] = Field(
        (),
        description="further texts for training, which the teacher of `training.teacher` answers; labels in these "
        "sources are not read. Repeated texts, and texts of other sets, are left out",
    )
    unlabelled_unit: Literal["texts", "sentences"] = Field(
        "texts",
        description="sentences: cut the texts of `unlabelled` into sentences, and use those of 5 to 40 words; `rows` "
        "of a source counts sentences",
    )
    split: SplitProtocol = Field(description="protocol that makes the sets from the parts; see above")
    split_seed: Seed = Field(42, description="seed of the split and of sampling")
    rows: dict[Name, Amount] = Field(
        {},
        description="set → number or fraction of its rows, sampled as for a source; {train: 0.1} keeps the other sets",
    )
    longest: Share | None = Field(
        None, description="fraction of the texts to use: those with the most words after cleaning"
    )
    shortest: Share | None = Field(
        None, description="fraction of the texts to use: those with the fewest words after cleaning"
    )
    balance: Literal["label", "source", "label-and-source"] | None = Field(
        None, description="reduce every set to equal numbers of rows per label, per source, or per label and source"
    )
    labels: Annotated[tuple[str, ...], Field(min_length=2, strict=False)] = Field(
        description="names of the classes, as the label column has them; the column may have their positions from 0"
    )
    label_values: Choice | None = Field(
        None,
        description="values of the label column in the order of `labels`, if they are other than the names: [1, 2, 3]",
    )
    cleaning: Literal["paper", "none"] = Field(
        "paper",
        description="paper: lower case, no HTML tags and URLs, no repeated punctuation and white space, as in paper A",
    )
    max_length: Annotated[int, Field(ge=4)] = Field(
        128, description="longest input in tokens, special tokens included; longer texts are cut"
    )

    @property
    def outputs(self) -> int:
        """Numbers that a model returns for a text or token: one per class, or a single one without classes."""
        return max(1, len(self.classes))

    @property
    def test_set(self) -> str:
        """Name of the protocol's own test set."""
        return "test" if self.split in ("imported", "stratified") else self.split

    def label_names(self, number: int) -> list[str]:
        """Return the names of a row's labels, of the number by which data sets store them."""
        if self.separator is not None:
            return [label for bit, label in enumerate(self.labels) if number >> bit & 1]
        return [self.labels[number]]

    @field_validator("labels", check_fields=False)  # regression has numbers instead
    @classmethod
    def _labels_differ(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(labels)) != len(labels):
            raise ValueError("two labels have the same name; every label needs a different name")
        return labels

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> Self:
        # 1. Labels, reductions and the protocol
        values = self.label_values
        if values is not None and not len({*values}) == len(values) == len(self.labels):
            raise ValueError("label_values: must be different, one for each of labels")
        if self.longest is not None and self.shortest is not None:
            raise ValueError("longest and shortest cannot be combined; leave one of them out")
        # The set of the part test is called given.
        other_parts = [part for part in self.parts if (self.split, part) != ("given", "test")]
        sets = dict.fromkeys(("train", "validation", self.test_set, *other_parts))
        unknown = next((name for name in self.rows if name not in sets), None)
        if unknown is not None:
            raise ValueError(f"rows: split {self.split!r} has no set {unknown!r}; it has {', '.join(sets)}")
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
        # 2. Unlabelled texts
        labelled = [source for sources in self.parts.values() for source in sources]
        is_pair = {source.text_pair is not None for source in (*labelled, *self.unlabelled)}
        if self.unlabelled and self.stream:
            raise ValueError("unlabelled: is not possible with stream: true; leave one of them out")
        if self.unlabelled and len(is_pair) > 1:
            raise ValueError("unlabelled: has pairs of texts where parts has single texts, or the reverse; set "
                             "text_pair: of its sources as in parts")  # fmt: skip
        if self.unlabelled_unit == "sentences" and True in is_pair:
            raise ValueError("unlabelled_unit: sentences is not possible with pairs of texts; set it to texts")
        # 3. Streaming
        if not self.stream:
            return self
        cut = [key for key in ("longest", "shortest", "balance") if getattr(self, key) is not None]
        cut += ["rows.train"] if "train" in self.rows else []
        if cut:
            raise ValueError(
                f"stream: true is not possible with {cut[0]}, which needs all texts of the part train in memory; "
                f"leave {cut[0]} out, or set rows: of a source instead"
            )
        if any(source.text_pair is not None for source in self.parts.get("train", ())):
            raise ValueError(f"stream: true is not possible with pairs of texts (text_pair); {IN_MEMORY}")
        given = self.split in ("given", "imported") and "validation" in self.parts
        if self.split not in ("stratified", "sst-test") and not given:
            raise ValueError(
                f"stream: true is not possible with split: {self.split}, which needs all texts of the part train in "
                "memory; use split: stratified, or split: given with the parts train, validation and test"
            )
        return self


Tag = tuple[str, str]  # position of a token in a span (B, I, E, S, as in BIOES; O: in none), and the span's label

_POSITIONS = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S"}  # L and U are BILOU's names


def parse_tag(name: str) -> Tag:
    """Return position and label of a tag such as ``B-PER``; a name without a position is that of a token inside."""
    if name == "O":
        return "O", ""
    position, dash, label = name.partition("-")
    return (_POSITIONS[position], label) if dash and label and position in _POSITIONS else ("I", name)


class SpanData(DataConfig):
    """Data of a token classifier: texts with labelled spans of characters, which do not overlap.

    Texts that are longer than ``max_length`` are read in windows, which overlap by a quarter of their tokens.
    """

    parts: dict[Name, Annotated[tuple[SpanSource, ...], Field(min_length=1, strict=False)]]  # type: ignore[assignment]
    labels: Annotated[tuple[str, ...], Field(min_length=1, max_length=62, strict=False)] = Field(
        description="labels of spans"
    )
    cleaning: Literal["paper", "none"] = "none"
    scheme: Literal["BIO", "BIOES"] = Field(
        "BIO", description="classes of a token: begin, inside, outside; BIOES: also the end, and a span of one token"
    )
    tags: Annotated[tuple[str, ...], Field(min_length=2, strict=False)] | None = Field(
        None, description="imported models: names of the classes, in order; absent: by labels and scheme"
    )
    pieces: Literal["first", "all"] = Field(
        "first",
        description="first: the first token of a word decides for the word, and punctuation marks are words; all: each "
        "token decides for itself, for spans inside words",
    )

    @property
    def separator(self) -> str | None:
        return ","

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of a token, such as ``B-PER``, in the order of the model's outputs."""
        positions = "BI" if self.scheme == "BIO" else "BIES"
        return self.tags or ("O", *(f"{position}-{label}" for label in self.labels for position in positions))

    @model_validator(mode="after")
    def _fits_spans(self) -> Self:
        if self.stream or self.label_values is not None:
            raise ValueError("stream, label_values: are not possible with labelled spans; leave them out")
        if self.balance in ("label", "label-and-source"):
            raise ValueError("balance: a text with several spans counts for each of them; balance: source is possible")
        if self.tags is not None and ("O" not in self.tags or len({*self.tags}) != len(self.tags)):
            raise ValueError("tags: must be different names, and one of them O, the class of tokens in no span")
        if {label for _, label in map(parse_tag, self.classes)} != {*self.labels, ""}:
            raise ValueError(f"tags: their labels must be those of labels, {', '.join(self.labels)}")
        return self


class TextConfig(DataSection):
    """Running text, one paragraph per line or row, and its layout as rows of tokens.

    ``paragraphs``  one row per paragraph: boundary token, text, boundary token; longer ones are cut; padding is masked
    ``packed``      the same documents end to end in rows of exactly ``sequence_length``, without padding; attention
                    and convolutions do not cross a document boundary; positions restart behind it
    """

    length_key: ClassVar[str] = "sequence_length"
    instead_of_rows: ClassVar[str | None] = "to use fewer texts, set data.first_n"

    parts: Parts = Field(description="train, validation, and any number of test sets by name")
    mode: Literal["paragraphs", "packed"] = Field(description="layout of the rows; see above")
    sequence_length: Annotated[int, Field(ge=8)] = Field(description="tokens per row; the model sees that many at once")
    min_characters: Annotated[int, Field(ge=0)] = Field(50, description="use only paragraphs with more characters")
    first_n: PositiveInt | None = Field(None, description="use only the first n paragraphs for training")

    @field_validator("parts")
    @classmethod
    def _has_both(cls, parts: dict[str, tuple[Source, ...]]) -> dict[str, tuple[Source, ...]]:
        missing = [part for part in ("train", "validation") if part not in parts]
        if missing:
            raise ValueError(f"the parts train and validation are needed; missing: {', '.join(missing)}")
        return parts


Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
"""How vectors are compared: cosine, dot product, or a distance, whose negative is the similarity."""


class PairsConfig(DataSection):
    """Texts for an embedding model, and text pairs with human similarity scores.

    ``train``       texts, or pairs: the vocabulary is trimmed to what they use
    ``validation``  scored pairs on which export judges an artifact; default: those of ``test``
    ``test``        scored pairs; default: those of ``validation``

    A part of another name is a further test set. Without scored pairs, artifacts are judged by the similarity of
    their vectors to those of the FP32 model.
    """

    length_key: ClassVar[str] = "max_length"
    instead_of_rows: ClassVar[str | None] = "all scored pairs are used; leave rows out"

    max_length: Annotated[int, Field(ge=4)] = Field(
        description="longest input in tokens, special tokens included; longer texts are cut"
    )
    prompts: dict[Literal["query", "document", "default"], str] = Field(
        {},
        description="text in front of a query, and of a document that is searched, e.g. `query: ` and `passage: `; "
        "default: of every other text",
    )
    pools_prompt: bool = Field(True, description="imported models: false: tokens of a prompt are read, but not pooled")
    similarity: Similarity = Field("cosine", description="imported models: how the model's vectors are compared")

    @field_validator("stream")
    @classmethod
    def _fits_memory(cls, stream: bool) -> bool:
        if stream:
            raise ValueError(
                "stream: embedding models are not trained, so there is no training set to stream; leave it out"
            )
        return stream


AnyData = Annotated[SerializeAsAny[DataSection], BeforeValidator(DataSection.recognise)]
"""Data section of any task, for manifests."""
