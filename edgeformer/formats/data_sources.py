"""A recipe's sources: where the rows of a part come from, and how many of them are taken."""

import codecs
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import Self

from edgeformer.formats.base import Frozen


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
    def _is_a_table(self) -> Self:
        for key, stated in (("delimiter", self.delimiter is not None), ("header", not self.header)):
            if stated and self.format in ("jsonl", "parquet", "text"):
                raise ValueError(f"{key}: is for tables of text, and format is {self.format}; set format: csv")
        if self.format == "tsv" and self.delimiter not in (None, "\t"):
            raise ValueError("delimiter: the columns of format: tsv are parted by tabs; set format: csv")
        if self.encoding is not None and self.format == "parquet":
            raise ValueError("encoding: is for files of text, and format is parquet; leave it out")
        return self

    @model_validator(mode="after")
    def _columns_have_numbers(self) -> Self:
        label = self.label if self.label_value is None else None
        named = [name for name in (self.text, self.text_pair, label) if name is not None and not name.isdecimal()]
        if not self.header and named:
            raise ValueError(
                f"header: false: such a file names no columns, so they are given by their numbers from 1 (text: 1, "
                f"label: 2), not as {named[0]!r}; label: null where there is none"
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
    """A dumped ``data`` section, or a source, without the later keys that say nothing.

    So what is named by a hash of it keeps its name.
    """
    return {key: _stated(value) for key, value in section.items() if key not in _LATER or value not in (None, {})}


def _stated(value: object) -> object:
    if isinstance(value, Mapping):
        return stated(value)
    return [_stated(one) for one in value] if isinstance(value, (list, tuple)) else value
