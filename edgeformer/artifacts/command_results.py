"""JSON that commands print for scripts (`plan`, `verify`, `gate`), and the manifest of `page`."""

from typing import Any, Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.bundle_files import FileCheck, TargetRecord
from edgeformer.artifacts.manifest import Parity, Precision
from edgeformer.artifacts.report import Subject


class MemoryBreakdown(Frozen):
    """Peak memory of training in bytes, by use; the sum is the peak."""

    weights: int = Field(description="parameters and buffers")
    gradients: int = Field(description="gradients of the parameters")
    optimizer: int = Field(description="state of the optimizer: AdamW's two moments")
    activations: int = Field(description="the batch, and results of the forward pass that the backward pass needs")
    temporary: int = Field(description="backward pass (recomputed activations included), half-precision weights")
    reserve: int = Field(description="memory outside of tensors: allocator fragmentation, library workspaces")

    @property
    def peak_bytes(self) -> int:
        """Sum of all parts in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary + self.reserve


class Suggestion(Frozen):
    """Change of a recipe, as ``--set`` takes it, and its predicted effect."""

    set: tuple[str, ...] = Field(description='"key.path=value", one for each --set')
    peak_bytes: int = Field(description="predicted peak of the recipe with this change")
    fits: bool
    note: str = Field(description="cost of the change, in words")


class PlannedTime(Frozen):
    """Predicted duration of training: a range, never a measurement."""

    status: Literal["estimated", "unavailable"]
    low_s: float | None = Field(
        None, description="lower end of the time of all epochs with validation; of `rows` if `steps` is null"
    )
    high_s: float | None = None
    steps: int | None = Field(None, description="optimizer steps of all epochs; null: the number of rows is unknown")
    rows: int = Field(description="training rows that the range covers, over all epochs; 1000 if `steps` is null")
    epochs: int = Field(1, description="epochs that `rows` covers; 1 if `steps` is null")
    rows_from: Literal["data", "recipe", "unknown"] = Field(
        "unknown", description="source of the row count: the data, the recipe's expected_rows, or unknown"
    )
    basis: str = Field(description="how the range was computed; for `unavailable`, the reason")


class Plan(Frozen):
    """JSON of `plan`: parameters, memory and time of training a recipe, compared with a device's memory budget."""

    recipe: str
    device: str
    parameters: int
    precision: str = Field(description="training precision on the device: fp32, bf16 or fp16")
    status: Literal["pass", "fail"]
    fits: bool
    peak_bytes: int = Field(description="predicted peak; the sum of `breakdown`")
    budget_bytes: int = Field(description="memory that a process can use on the device")
    budget_source: str = Field(description="source of the budget")
    breakdown: MemoryBreakdown
    suggestions: tuple[Suggestion, ...] = Field(
        (), description="if it does not fit: first the cheapest change that fits, then single changes"
    )
    larger_batches: tuple[Suggestion, ...] = Field((), description="if it fits: larger batch sizes that fit too")
    time: PlannedTime
    reason: str
    notes: tuple[str, ...] = Field((), description="warnings of training about local data files")


DAMAGED, INCOMPLETE = 2, 3
"""Exit codes: a file differs from the export; an artifact fails parity or could not be checked."""


class ArtifactCheck(Frozen):
    """Result of running one artifact on the golden inputs on this machine."""

    artifact: str
    role: Literal["full", "exit", "step", "decode"]
    precision: Precision
    status: Literal["verified", "failed", "damaged", "unavailable"] = Field(
        description="failed: outside the tolerance; damaged: one of its files is damaged, or it does not load; "
        "unavailable: it cannot run here, or was not built"
    )
    reason: str | None = None
    parity: Parity | None = Field(None, description="parity with torch FP32, measured on this machine")
    tolerance: str | None = Field(None, description="tolerance that was applied")
    notes: tuple[str, ...] = Field((), description="warnings of its portability audit, and why memory was not measured")
    resident_bytes: int | None = Field(None, description="memory measured on this machine, as at export")
    resident_ratio: float | None = Field(None, description="`resident_bytes` over the weights' bytes, each stored once")


class Recorded(Frozen):
    """Result of `verify --write`."""

    file: str | None = Field(description="the bundle's targets.json; None: nothing was written")
    reason: str | None = Field(None, description="reason why nothing was written")
    records: tuple[TargetRecord, ...] = ()


class Verification(Frozen):
    """JSON of `verify`: the result for every file and artifact of a bundle."""

    bundle: str
    run: str
    manifest_sha256: str = Field(description="sha256 of bundle.json; only its origin can confirm it")
    wrapped: str | None = Field(None, description="the ONNX file that was imported; None: exported from a run")
    manifest_protected: bool = Field(description="bundle.json has a checksum of itself, and it matches")
    files: tuple[FileCheck, ...]
    artifacts: tuple[ArtifactCheck, ...]
    asked: bool = Field(description="the user chose an artifact or a runtime")
    stale: tuple[str, ...] = Field((), description="unusable records of targets.json, with the reason")
    recorded: Recorded | None = Field(None, description="result of `--write`, if given")

    @property
    def damaged(self) -> tuple[FileCheck, ...]:
        """Files that differ from the export."""
        return tuple(check for check in self.files if check.status != "intact")

    @property
    def exit_code(self) -> int:
        """Exit code: 0 verified, 2 damaged or tampered with, 3 parity failed or a requested check was impossible."""
        statuses = {check.status for check in self.artifacts}
        if self.damaged or "damaged" in statuses:
            return DAMAGED
        # An engine for another card does not fail here; a bundle of which nothing ran is not verified.
        unchecked = statuses != {"verified"} if self.asked else "verified" not in statuses
        return INCOMPLETE if "failed" in statuses or unchecked else 0


GateStatus = Literal["pass", "fail", "undecided", "unknown"]

UNDECIDED = 4
"""Exit code of a gate that could not decide. Not 0: a worse bundle must not pass because the machine was noisy, cannot
run it, or has no rows to score it on. Not 3, because the candidate is not at fault."""


class GateCheck(Frozen):
    """Comparison of one metric of one artifact between candidate and baseline."""

    name: Literal["latency", "memory", "size", "score", "drift", "presence"]
    artifact: str
    status: GateStatus = Field(
        description="undecided: the machine is too noisy, it cannot run the artifact, or there is nothing to "
        "compare; the reason says which. unknown: no longer written; earlier versions passed such checks"
    )
    phase: Literal["steady", "prefill", "decode"] | None = Field(
        None, description="latency and memory: per call or per token"
    )
    batch: int | None = None
    seq: int | None = None
    provider: str | None = Field(None, description="latency, memory and score: runtime of both, if one was chosen")
    unit: str = ""
    baseline: float | None = None
    candidate: float | None = None
    change: float | None = Field(None, description="(candidate - baseline) / baseline; scores: the difference")
    low: float | None = Field(None, description="lower bound of the change: latency over all looks, score with 95%")
    high: float | None = Field(None, description="latency and score: upper bound of the change")
    rows: int = Field(0, description="score: rows (embeddings: pairs) scored with both; 0: scores recorded by export")
    found: Literal["slower", "faster", "no different", "not known"] | None = Field(
        None, description="latency. no different: the interval is within half of the limit; not known: it is wider"
    )
    limit: float | None = Field(None, description="largest allowed change for the worse")
    rounds: int = Field(0, description="latency: pairs of fresh processes that were measured")
    log_ratios: tuple[float, ...] = Field((), description="latency: one per round, in order")
    reason: str = ""


class Gate(Frozen):
    """JSON of `gate`. `fail` if any check fails, else `undecided` if any is, else `pass`."""

    format_version: Literal[1] = 1
    status: GateStatus
    candidate: str = Field(description="bundle under test")
    baseline: str = Field(description="bundle that it is compared with")
    host: dict[str, Any]
    created: str
    seconds: float
    error: float = Field(description="family-wise error: probability that any of all intervals misses")
    checks: tuple[GateCheck, ...]
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Exit code: 0 passed, 3 failed, 4 undecided."""
        return {"pass": 0, "fail": 3, "undecided": UNDECIDED, "unknown": UNDECIDED}[self.status]


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
