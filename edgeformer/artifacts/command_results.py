"""JSON documents that commands print, which scripts rely on: `plan`, `verify`, `gate`, and the manifest of `page`."""

from typing import Any, Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.bundle_files import FileCheck, TargetRecord
from edgeformer.artifacts.manifest import Parity, Precision
from edgeformer.artifacts.report import Subject


class MemoryBreakdown(Frozen):
    """Bytes at the moment of the peak, by what holds them; their sum is the peak."""

    weights: int = Field(description="parameters and buffers")
    gradients: int = Field(description="gradients of the parameters")
    optimizer: int = Field(description="state of the optimizer: AdamW's two moments")
    activations: int = Field(description="the batch, and what the forward pass made and still holds")
    temporary: int = Field(description="made in the backward pass (recomputed activations too); half-precision weights")
    reserve: int = Field(description="what no tensor accounts for: the allocator's gaps, workspaces of the libraries")

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary + self.reserve


class Suggestion(Frozen):
    """A change of a recipe, as ``--set`` takes it, and what it would bring."""

    set: tuple[str, ...] = Field(description='"key.path=value", one for each --set')
    peak_bytes: int = Field(description="predicted peak of the recipe with this change")
    fits: bool
    note: str = Field(description="what the change costs, in words")


class PlannedTime(Frozen):
    """How long training would take: a range, never a measurement."""

    status: Literal["estimated", "unavailable"]
    low_s: float | None = Field(None, description="of all epochs with validation; of `rows` rows where `steps` is null")
    high_s: float | None = None
    steps: int | None = Field(None, description="optimizer steps of all epochs; null: the number of rows is not known")
    rows: int = Field(description="training rows that the range is for, over all epochs; 1000 where `steps` is null")
    epochs: int = Field(1, description="that `rows` are of; 1 where `steps` is null")
    rows_from: Literal["data", "recipe", "unknown"] = Field(
        "unknown", description="who counted the rows: the data, the recipe's expected_rows, or unknown"
    )
    basis: str = Field(description="what the range is made of; of `unavailable` why there is none")
    low_reason: str | None = Field(None, description="what the low end assumes of the device")
    high_reason: str | None = Field(None, description="what the high end assumes of the device")
    share_of_peak: tuple[float, float] | None = Field(None, description="of the stated rate, at the high and low end")


class Plan(Frozen):
    """The JSON of `plan`: parameters, memory and time of training a recipe, against a device's budget of memory."""

    recipe: str
    device: str
    parameters: int
    precision: str = Field(description="what training would compute in there: fp32, bf16 or fp16")
    status: Literal["pass", "fail"]
    fits: bool
    peak_bytes: int = Field(description="predicted; the sum of the breakdown")
    budget_bytes: int = Field(description="memory that the device leaves to a process")
    budget_source: str = Field(description="where the budget comes from")
    breakdown: MemoryBreakdown
    suggestions: tuple[Suggestion, ...] = Field(
        (), description="where it does not fit: first what fits at the least cost, then single changes"
    )
    larger_batches: tuple[Suggestion, ...] = Field((), description="where it fits: more rows at a time that fit too")
    time: PlannedTime
    reason: str
    notes: tuple[str, ...] = Field((), description="what training would say of its own files of data")


DAMAGED, INCOMPLETE = 2, 3
"""Exit codes: a file is not what was exported; or an artifact computes something else, or could not be checked."""


class ArtifactCheck(Frozen):
    """One artifact, run here on the golden inputs."""

    artifact: str
    role: Literal["full", "exit", "step", "decode"]
    precision: Precision
    status: Literal["verified", "failed", "damaged", "unavailable"] = Field(
        description="failed: outside the tolerance; damaged: a file of it is, or it does not open; unavailable: it "
        "cannot run here, or was not built"
    )
    reason: str | None = None
    parity: Parity | None = Field(None, description="with torch FP32, measured here")
    tolerance: str | None = Field(None, description="what it was held to")
    notes: tuple[str, ...] = Field((), description="what its portability audit says of this machine")


class Recorded(Frozen):
    """What `--write` wrote."""

    file: str | None = Field(description="the bundle's targets.json; None: nothing was written")
    reason: str | None = Field(None, description="why nothing was")
    records: tuple[TargetRecord, ...] = ()


class Verification(Frozen):
    """The JSON of `verify`: every file and artifact of a bundle, checked."""

    bundle: str
    run: str
    manifest_sha256: str = Field(description="of bundle.json as it is; only its origin can confirm it")
    wrapped: str | None = Field(None, description="the ONNX file that the bundle was made of; None: of a run")
    manifest_protected: bool = Field(description="bundle.json has a checksum of itself, and is what that says")
    files: tuple[FileCheck, ...]
    artifacts: tuple[ArtifactCheck, ...]
    asked: bool = Field(description="an artifact or a runtime was named")
    stale: tuple[str, ...] = Field((), description="records of targets.json that say nothing, and why")
    recorded: Recorded | None = Field(None, description="with `--write`")

    @property
    def damaged(self) -> tuple[FileCheck, ...]:
        """Files that are not what was exported."""
        return tuple(check for check in self.files if check.status != "intact")

    @property
    def exit_code(self) -> int:
        """0 fine, 2 damaged or tampered with, 3 parity failed or what was asked for could not be checked."""
        statuses = {check.status for check in self.artifacts}
        if self.damaged or "damaged" in statuses:
            return DAMAGED
        # An engine for another card is no failure of this machine; a bundle of which nothing ran is not verified.
        unchecked = statuses != {"verified"} if self.asked else "verified" not in statuses
        return INCOMPLETE if "failed" in statuses or unchecked else 0


GateStatus = Literal["pass", "fail", "undecided", "unknown"]

UNDECIDED = 4
"""Exit code of a gate that could not decide. Not 0: a worse bundle must not pass because the machine was noisy, cannot
run it, or has no rows to score it on. Not 3, because the candidate is not at fault."""


class GateCheck(Frozen):
    """One figure of one artifact: the candidate's against the baseline's."""

    name: Literal["latency", "memory", "size", "score", "drift", "presence"]
    artifact: str
    status: GateStatus = Field(
        description="undecided: the machine is too noisy to say, cannot run the artifact, or there is nothing to "
        "compare; the reason says which. unknown: no longer written; earlier versions passed such checks"
    )
    phase: Literal["steady", "decode"] | None = Field(None, description="latency and memory: of a call or of a token")
    batch: int | None = None
    seq: int | None = None
    provider: str | None = Field(None, description="latency, memory and score: of both, where a runtime was named")
    unit: str = ""
    baseline: float | None = None
    candidate: float | None = None
    change: float | None = Field(None, description="(candidate - baseline) / baseline; of a score the difference")
    low: float | None = Field(None, description="the change is at least this: latency with all looks, score with 95 %")
    high: float | None = Field(None, description="latency and score: the change is at most this")
    rows: int = Field(0, description="score: rows (embeddings: pairs) that both answered; 0: as export recorded it")
    found: Literal["slower", "faster", "no different", "not known"] | None = Field(
        None, description="of latency. no different: the range is within half of the limit; not known: it is wider"
    )
    limit: float | None = Field(None, description="the largest change for the worse that is allowed")
    rounds: int = Field(0, description="latency: pairs of fresh processes that were measured")
    log_ratios: tuple[float, ...] = Field((), description="latency: one per round, in their order")
    reason: str = ""


class Gate(Frozen):
    """The JSON of `gate`. `fail` if any check fails, else `undecided` if any is, else `pass`."""

    format_version: Literal[1] = 1
    status: GateStatus
    candidate: str = Field(description="the bundle that is judged")
    baseline: str = Field(description="the bundle that it is held against")
    host: dict[str, Any]
    created: str
    seconds: float
    error: float = Field(description="chance that any interval misses, for all that was measured together")
    checks: tuple[GateCheck, ...]
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 passed, 3 failed, 4 undecided."""
        return {"pass": 0, "fail": 3, "undecided": UNDECIDED, "unknown": UNDECIDED}[self.status]


SITE_FILE = "site.json"
"""Of a page that runs and measures a bundle in a browser: a :class:`PageManifest`, which its JavaScript reads."""


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
    weights: tuple[PageWeights, ...] = ()
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
    """site.json: the whole page."""

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
    cautions: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = Field(None, description="None: the page answers no texts")
    thresholds: dict[str, float] | None = Field(None, description="label → probability that gives it; None: likeliest")
    pairs: bool = Field(False, description="it reads two texts at a time")
    silent: str | None = Field(None, description="why the page answers no texts")
    readers: dict[str, PageReader]
    artifacts: tuple[PageArtifact, ...]
    left_out: tuple[LeftOut, ...] = ()
    providers: tuple[PageProvider, ...]
    tokenizers: PageFile | None = Field(None, description="the library that makes tokens")
    versions: dict[str, str] = Field(description="library → version")
    offline: bool = Field(description="the libraries are in the folder")
    shapes: tuple[tuple[int, int], ...] = Field(description="batch size and tokens to measure at first")
    max_positions: int | None = None
    rules: dict[str, Any] = Field(description="by which the page measures")
    subject: Subject
