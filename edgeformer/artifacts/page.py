"""site.json: what a page that runs and measures a bundle in a browser consists of. The page's JavaScript reads it."""

from typing import Any, Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.report import Subject

SITE_FILE = "site.json"


class PageFile(Frozen):
    """A file that the page downloads. The browser refuses one with another checksum."""

    url: str = Field(description="relative to the page, or a whole address")
    integrity: str = Field(description="subresource integrity: sha256-… or sha384-…")
    size_bytes: int


class PageWeights(Frozen):
    """Weights beside a graph."""

    name: str = Field(description="as the graph calls it")
    file: PageFile


class PageReader(Frozen):
    """How text becomes the model's inputs, and real inputs to measure with."""

    tokenizer: PageFile | None = Field(None, description="tokenizer.json; None: the page answers no texts")
    config: PageFile | None = Field(None, description="tokenizer_config.json")
    golden: PageFile = Field(description="JSON: `rows`, the token ids of each golden input without padding")
    max_tokens: int = Field(description="of a text, special tokens included")
    suffix: int = Field(0, description="special tokens at the end of a text, which cutting keeps")


class PageArtifact(Frozen):
    """A graph of the bundle."""

    id: str
    precision: str
    role: Literal["full", "exit"]
    exit: int | None = None
    size_bytes: int
    graph: PageFile
    weights: tuple[PageWeights, ...] = Field((), strict=False)
    masked: bool = Field(description="it takes attention_mask beside input_ids")
    reader: str = Field(description="key of `readers`")


class PageProvider(Frozen):
    """What computes in the browser, and the library that it needs."""

    name: str = Field(description="as ONNX Runtime calls it there")
    label: str
    short: str = Field(description="label for tables")
    script: PageFile
    glue: PageFile
    binary: PageFile
    counts_threads: bool


class LeftOut(Frozen):
    """An artifact that a browser cannot run, or that was not asked for."""

    artifact: str
    reason: str


class PageManifest(Frozen):
    """The whole page."""

    format: Literal["edgeformer-page"] = "edgeformer-page"
    format_version: Literal[1] = 1
    run: str
    noun: str = Field(description="what the model is: classifier, language model…")
    parameters: int
    created: str
    code_version: str
    bundle: str
    synthetic: bool
    leaks: bool
    cautions: tuple[str, ...] = Field((), strict=False)
    labels: tuple[str, ...] | None = Field(None, strict=False, description="None: the page answers no texts")
    thresholds: dict[str, float] | None = Field(
        None, description="label → probability from which on it is given; None: the likeliest one is"
    )
    pairs: bool = Field(False, description="it reads two texts at a time")
    silent: str | None = Field(None, description="why the page answers no texts")
    readers: dict[str, PageReader]
    artifacts: tuple[PageArtifact, ...] = Field(strict=False)
    left_out: tuple[LeftOut, ...] = Field((), strict=False)
    providers: tuple[PageProvider, ...] = Field(strict=False)
    tokenizers: PageFile | None = Field(None, description="the library that makes tokens")
    versions: dict[str, str] = Field(description="library → version")
    offline: bool = Field(description="the libraries are in the folder")
    shapes: tuple[tuple[int, int], ...] = Field(strict=False, description="batch size and tokens to measure at first")
    max_positions: int | None = None
    rules: dict[str, Any] = Field(description="by which the page measures")
    subject: Subject
