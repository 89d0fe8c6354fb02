"""Manifest of a page that runs and measures a bundle in a browser, read by its JavaScript."""

from typing import Any, Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.report import Subject

SITE_FILE = "site.json"
"""Manifest of a page that runs and measures a bundle in a browser: a :class:`PageManifest`, read by its JavaScript."""


class PageFile(Frozen):
    """A file that the page downloads. The browser refuses one with another checksum."""

    url: str = Field(description="relative to the page, or an absolute URL")
    integrity: str = Field(description="subresource integrity: sha256-… or sha384-…")
    size_bytes: int


class PageWeights(Frozen):
    """External weights of a graph."""

    name: str = Field(description="file name in the graph")
    file: PageFile


class PageReader(Frozen):
    """Tokenizer of the model, and real inputs to measure with."""

    tokenizer: PageFile | None = Field(None, description="tokenizer.json; None: the page takes no text")
    config: PageFile | None = Field(None, description="tokenizer_config.json")
    golden: PageFile = Field(description="JSON: `rows`, the token ids of each golden input without padding")
    max_tokens: int = Field(description="longest text in tokens, special tokens included")
    suffix: int = Field(0, description="special tokens at the end of a text, kept by truncation")
    types: bool = Field(False, description="the tokenizer states token types other than 0")


class PageCache(Frozen):
    """Keys, values or convolution inputs of earlier tokens: an output of a decode graph that is its next input."""

    input: str
    output: str
    type: Literal["float32", "float16"]
    shape: tuple[int, ...] = Field(description="for one text without tokens")


class PageArtifact(Frozen):
    """A graph of the bundle."""

    id: str
    precision: str
    role: Literal["full", "exit", "decode"] = Field(description="decode: writes texts, and is not measured")
    exit: int | None = None
    size_bytes: int
    graph: PageFile
    weights: tuple[PageWeights, ...] = ()
    masked: bool = Field(description="the graph takes attention_mask beside input_ids")
    typed: bool = Field(False, description="the graph takes token_type_ids beside input_ids")
    positions: bool = Field(False, description="decode graphs: takes position_ids beside input_ids")
    caches: tuple[PageCache, ...] = ()
    reader: str = Field(description="key of `readers`")


class PageWriting(Frozen):
    """How a language model writes."""

    boundary: int = Field(description="token in front of an empty text without `begin`")
    begin: tuple[int, ...] = Field(description="tokens in front of a text")
    ends: tuple[int, ...] = Field(description="tokens that end a text")


class PageProvider(Frozen):
    """Execution provider in the browser, and the library files that it needs."""

    name: str = Field(description="name in ONNX Runtime Web")
    label: str
    short: str = Field(description="label for tables")
    script: PageFile
    glue: PageFile
    binary: PageFile
    counts_threads: bool


class LeftOut(Frozen):
    """Artifact that a browser cannot run, or that was not requested."""

    artifact: str
    reason: str


class PageManifest(Frozen):
    """Contents of site.json."""

    format: Literal["edgeformer-page"] = "edgeformer-page"
    format_version: Literal[1] = 1
    run: str
    noun: str = Field(description="kind of model: classifier, language model…")
    parameters: int
    created: str
    code_version: str
    bundle: str
    synthetic: bool
    leaks: bool
    cautions: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = Field(None, description="None: the page takes no text")
    pieces: Literal["first", "all"] | None = Field(
        None, description="token classifiers, whose `labels` are classes of tokens: tokens of a word that count"
    )
    thresholds: dict[str, float] | None = Field(None, description="label → least probability; None: likeliest label")
    pairs: bool = Field(False, description="the model reads pairs of texts")
    silent: str | None = Field(None, description="reason why the page takes no text")
    writing: PageWriting | None = Field(None, description="language models with decode graphs")
    readers: dict[str, PageReader]
    artifacts: tuple[PageArtifact, ...]
    left_out: tuple[LeftOut, ...] = ()
    providers: tuple[PageProvider, ...]
    tokenizers: PageFile | None = Field(None, description="tokenizer library")
    versions: dict[str, str] = Field(description="library → version")
    offline: bool = Field(description="the libraries are in the page's folder")
    shapes: tuple[tuple[int, int], ...] = Field(description="(batch size, tokens) of the first measurements")
    max_positions: int | None = None
    rules: dict[str, Any] = Field(description="measurement rules of the page")
    subject: Subject
