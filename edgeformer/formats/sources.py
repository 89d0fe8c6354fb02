"""Where text and tokenizers come from, and the field types that recipes and profiles share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from edgeformer.formats.base import Frozen

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, max_length=80)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class HubSource(Frozen):
    """A split of a hub data set, read with the ``datasets`` library (a local data set folder works too)."""

    kind: Literal["hub"]
    name: str = Field(description="hub name (nyu-mll/glue) or the folder of a local data set")
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    text: str = "text"
    label: str | None = "label"
    label_value: str | int | None = Field(None, description="one label for every row, instead of a column")
    skip_unlabelled: bool = False


class FileSource(Frozen):
    """A local file: TSV, CSV, JSONL, Parquet or plain text, also as .xz, .gz or .bz2."""

    kind: Literal["file"]
    path: str = Field(description="absolute, or relative to the folder edgeformer is started in")
    format: Literal["tsv", "csv", "jsonl", "parquet", "text"] | None = Field(
        None, description="read from the file's suffix when absent"
    )
    text: str = "text"
    label: str | None = "label"
    label_value: str | int | None = Field(None, description="one label for every row, instead of a column")
    skip_unlabelled: bool = False


class SyntheticSource(Frozen):
    """The built-in generator of synthetic product reviews (seeded). Not real text; for trying things out."""

    kind: Literal["synthetic-reviews"]
    rows: PositiveInt
    seed: Seed = 0


Source = Annotated[HubSource | FileSource | SyntheticSource, Field(discriminator="kind")]


class HubTokenizer(Frozen):
    """A tokenizer by hub name."""

    kind: Literal["hub"]
    name: str
    revision: str | None = None


class FileTokenizer(Frozen):
    """A ``tokenizer.json`` on this machine."""

    kind: Literal["file"]
    path: str


class TrainedTokenizer(Frozen):
    """A tokenizer trained on the run's own training text; its size is ``model.vocab_size``."""

    kind: Literal["trained"]
    algorithm: Literal["wordpiece", "bpe"] = "wordpiece"


TokenizerConfig = Annotated[HubTokenizer | FileTokenizer | TrainedTokenizer, Field(discriminator="kind")]
