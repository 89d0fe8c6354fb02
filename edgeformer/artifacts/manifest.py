"""Manifests on disk: run.json, bundle.json, and the audits and guarantees in them."""

from typing import Any, Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import AnyData
from edgeformer.artifacts.scores import AnyScore


class LoopDrift(Frozen):
    """Drift after one loop: error of the state against torch FP32's, on the golden inputs. None if it is not finite."""

    loop: int
    rms_error: float | None = Field(description="root mean square of the difference over that of the reference")
    max_error: float | None = Field(description="largest difference over the reference's root mean square")
    rms_interval: tuple[float, float] | None = Field(
        None, description="95% interval of rms_error, by bootstrap over the golden inputs"
    )


class Drift(Frozen):
    """Drift of an artifact's states from torch FP32's, loop by loop."""

    tolerance: float = Field(description="limit of rms_error")
    loops: tuple[LoopDrift, ...]
    first_beyond: int | None = Field(None, description="first loop beyond the tolerance")


class Lengths(Frozen):
    """Length distribution of the texts of one set, in words or tokens."""

    min: int
    median: float
    mean: float
    max: int
    edges: tuple[int, ...] = Field(description="bins from edges[i] up to edges[i + 1]; the last one is open")
    texts: tuple[int, ...] = Field(description="number of texts in each bin")


# First ONNX Runtime release of each opset, format version and operator. Later releases read all earlier ones.
_FIRST_OPSET = {17: "1.12", 18: "1.14", 19: "1.15", 20: "1.17", 21: "1.18", 22: "1.21"}
_FIRST_FORMAT = {8: "1.10", 9: "1.16", 10: "1.18"}
_FIRST_OPERATOR = {"com.microsoft:MatMulNBits": "1.17", "com.microsoft:GatherBlockQuantized": "1.20"}


class Denormals(Frozen):
    """Counts of FP32 numbers below 1.2e-38, with which many processors compute 10 to 100 times slower."""

    weights: int = Field(description="stored FP32 numbers that are denormal")
    of_weights: int = Field(description="stored FP32 numbers")
    activations: int | None = Field(None, description="on golden inputs, in up to 64 tensors; None: not measured")
    of_activations: int | None = None


class Saturation(Frozen):
    """Sums of two u8×s8 products, which x86 processors with AVX2 and without VNNI clip to 16 bits."""

    pairs: int = Field(description="neighbouring weights of one sum, in all u8×s8 products")
    at_risk: int = Field(description="predicted: pairs whose sum exceeds 16 bits for some activations")
    sums: int | None = Field(None, description="measured: sums of pairs at risk on golden inputs; None: none are")
    saturated: int | None = Field(None, description="measured: of these, sums beyond 16 bits")


class Portability(Frozen):
    """Portability audit over all graphs of an artifact."""

    opset: int = Field(description="highest opset of the standard operators")
    ir_version: int = Field(description="version of the file format")
    other_operators: dict[str, int] = Field({}, description="operator outside of the ONNX standard → nodes")
    control_flow: dict[str, int] = Field({}, description="Loop, If, Scan → nodes: runtimes differ most in these")
    dynamic: dict[str, tuple[str, ...]] = Field({}, description="input → axes of any size")
    fixed: tuple[str, ...] = Field((), description="inputs of a single fixed size")
    denormals: Denormals
    saturation: Saturation | None = Field(None, description="None: no u8×s8 products")

    @property
    def needs(self) -> str | None:
        """Oldest ONNX Runtime that reads the artifact; None: its versions are not in the tables above."""
        if self.opset not in _FIRST_OPSET or self.ir_version not in _FIRST_FORMAT:
            return None
        operators = [_FIRST_OPERATOR[name] for name in self.other_operators if name in _FIRST_OPERATOR]
        return max(_FIRST_OPSET[self.opset], _FIRST_FORMAT[self.ir_version], *operators, key=release)


def release(version: str) -> tuple[int, ...]:
    """Return ``"1.18.0"`` as (1, 18), for comparing versions."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


class ExitTime(Frozen):
    """Latency of single texts, one per call, alternating between early exit and all loops.

    All loops run in the step artifact, and in the full graph of the same precision if the bundle has one.
    """

    provider: str = Field(description="execution provider")
    host: str = Field(description="the processor")
    threads: int
    rows: int = Field(description="texts that were timed, drawn from the held-out ones")
    early_ms: dict[str, float] = Field(description="mean, p50, p90… as far as the number of texts allows")
    full_ms: dict[str, float] = Field(description="time of the same texts with all loops")
    ratio: float = Field(description="mean with early exit over mean with all loops of the step artifact")
    full_graph: str | None = Field(None, description="artifact id of the full graph; None: none was timed")
    full_graph_ms: dict[str, float] = Field({}, description="time of the same texts in the full graph")
    quickest: str | None = Field(None, description="artifact that runs all loops fastest; None: not compared")
    quickest_ratio: float | None = Field(None, description="mean with early exit over the mean of `quickest`")
    ratio_low: float | None = Field(None, description="95% interval of `quickest_ratio`, over the texts")
    ratio_high: float | None = None

    @property
    def pays(self) -> bool | None:
        """Whether early exit is faster than the fastest artifact with all loops; None: undecided."""
        if self.ratio_low is None or self.ratio_high is None or self.ratio_low < 1 <= self.ratio_high:
            return None
        return self.ratio_high < 1


class ExitGuarantee(Frozen):
    """Guarantee: with ``confidence``, accuracy drops by at most ``max_drop`` on texts like the held-out rows."""

    max_drop: float = Field(description="ε: largest drop in accuracy from all loops to early exit")
    confidence: float = Field(description="1 − δ: share of held-out samples whose thresholds keep max_drop")
    method: str = Field(description="method that chose the thresholds")
    thresholds: dict[str, float] = Field(description="loop → smallest top probability that lets a text leave there")
    split: str = Field(description="held-out set or file")
    reused: bool | None = Field(
        None, description="whether the rows also selected weights or scored the artifact, so confidence is inexact"
    )
    rows: int = Field(description="held-out rows that the thresholds were chosen on")
    lost: int = Field(description="rows correct with all loops and wrong with early exit")
    won: int = Field(description="rows wrong with all loops and correct with early exit")
    p_value: float = Field(description="probability of such or better results if the true drop exceeds max_drop")
    level: float = Field(description="limit of p_value: (1 − confidence) / number of threshold sequences")
    accuracy: float = Field(description="accuracy on these rows with early exit")
    full_accuracy: float = Field(description="accuracy on these rows with all loops")
    mean_loops: float
    share: dict[str, float] = Field(description="loop → share of the held-out rows that leave there; sums to 1")
    time: ExitTime
    created: str


RunStatus = Literal["running", "finished", "failed", "interrupted"]
Precision = Literal["fp32", "fp16", "int8", "int4"]
Role = Literal["full", "exit", "step", "decode"]
ONNX = "onnx"  # format of the graphs that export writes, and from which all other artifacts are built


def client_dtype(precision: Precision) -> str:
    """Return the name of a precision in Hugging Face ONNX repositories: part of file names and client options."""
    return "q4" if precision == "int4" else precision


class OverlapCount(Frozen):
    """Number of test texts that are also in the training set, after cleaning."""

    test_set: str
    test_rows: int
    duplicates: int = Field(description="test texts that are equal to a training text")
    contained: int = Field(
        description="further test texts that are inside a training text, or that contain one of three or more words"
    )


class DataFinding(Frozen):
    """Data warning for the owner of the data."""

    kind: Literal[
        "empty texts", "duplicates", "contradictions", "labels without rows", "uneven labels", "seen texts",
        "inexact spans",
    ]  # fmt: skip
    set: str = Field(description="part or set with the problem")
    rows: int = Field(description="affected rows; 0: no row has the label")
    message: str = Field(description="the problem, and how it is handled")
    examples: tuple[str, ...] = Field((), description="positions of the first affected rows")


class DataSummary(Frozen):
    """Summary of the data that a run was trained and tested on."""

    split: str
    synthetic: bool
    rows: dict[str, int] = Field(description="rows per set: train, validation, and each test set by name")
    label_rows: dict[str, dict[str, int]] = Field({}, description="classification: rows per label in each set")
    tokens: dict[str, int] = Field({}, description="language modelling: tokens per set, boundaries included")
    words: dict[str, int] = Field({}, description="language modelling: words per set, paragraph ends included")
    fingerprint: str = Field(description="sha256 over texts and labels of all sets, in order")
    fingerprints: dict[str, str] = Field({}, description="fingerprint of each set")
    overlap: tuple[OverlapCount, ...] = ()
    findings: tuple[DataFinding, ...] = Field((), description="data warnings")
    truncated_rows: dict[str, int] = Field({}, description="rows cut to data.max_length, per set")
    text_words: dict[str, Lengths] = Field({}, description="classification: words of each set's texts after cleaning")
    text_tokens: dict[str, Lengths] = Field({}, description="tokens of each set's texts, after truncation")


class AttentionUse(Frozen):
    """Attention implementation that ran, and the reason if it is not the requested one."""

    requested: str = "sdpa"
    used: str = Field("sdpa", description="sdpa, flash-attn or varlen_attn")
    reason: str | None = Field(None, description="why no flash kernel was used")
    unpadded: bool = Field(False, description="batches are computed without their padding where that is faster")


class Causality(Frozen):
    """Result of the causality probe: tokens after t are changed; outputs up to t must not change."""

    leaks: bool
    largest_change: dict[str, float] = Field(description="loop → largest change of an output up to t / its spread")
    reach: int = Field(description="most positions ahead that an output depends on, as observed")
    lengths: tuple[int, ...]
    trials: int
    tolerance: float


class ImportProof(Frozen):
    """Comparison of an imported model with the library that it came from, from text to answer, at import."""

    library: str | None = Field(None, description="name and version of the library; None: nothing was compared")
    texts: int = Field(0, description="number of compared texts")
    largest_difference: float | None = Field(None, description="largest absolute difference of a number of an answer")
    tolerance: float | None = None
    reason: str | None = Field(None, description="why the import is not proven; None: it is")


class MemoryUse(Frozen):
    """Peak memory of a training run in bytes: predicted and measured."""

    device: str = Field(description="device of the prediction: cpu or cuda")
    predicted_peak_bytes: int | None = None
    predicted_reserve_bytes: int | None = Field(None, description="predicted part outside of tensors (not measured)")
    measured_peak_bytes: int | None = None
    measured_as: str | None = Field(None, description="method of the measurement")
    budget_bytes: int | None = None


class RunManifest(Frozen):
    """run.json: the manifest of a training run."""

    format_version: Literal[1] = 1
    run: str
    status: RunStatus
    reason: str | None = None
    task: str
    recipe: str
    recipe_sha256: str
    started: str
    finished: str | None = None
    seconds: float = Field(0.0, description="wall time of training, over all resumptions")
    steps: int = 0
    epochs: int = 0
    samples_per_second: float | None = None
    parameters: int
    vocabulary: int
    precision: str = Field(description="training precision")
    attention: AttentionUse = AttentionUse()
    data: DataSummary
    tokenizer_fingerprint: str | None = Field(None, description="sha256 of the complete tokenizer")
    best_epoch: int | None = None
    validation: AnyScore | None = None
    test: AnyScore | None = None
    tests: dict[str, AnyScore] = Field({}, description="every test set by name; `test` is the first")
    leaks: bool = Field(False, description="language models: the model sees the predicted tokens; scores are void")
    causality: Causality | None = Field(None, description="language models: causality probe before training")
    proof: ImportProof | None = Field(None, description="imported models; None: trained here, or older versions")
    memory: MemoryUse | None = None
    effective_batch: int | None = Field(None, description="rows of an optimizer step")
    batch_size: int | None = Field(None, description="final micro-batch in rows; smaller than requested after an OOM")
    processes: int = Field(1, description="processes of data-parallel training")
    chosen: dict[str, float] | None = Field(
        None, description="linear models: values of section `training` that were chosen on the validation rows"
    )
    skipped_steps: int = Field(0, description="steps without update: fp16 gradient overflow")
    versions: dict[str, str]
    code_version: str
    host: dict[str, Any]

    @property
    def synthetic(self) -> bool:
        """Whether the run was trained and tested on generated text."""
        return self.data.synthetic


class Parity(Frozen):
    """Parity of an artifact's logits with torch FP32's on real inputs; wrapped graphs: with the FP32 graph's."""

    status: Literal["measured", "unavailable"]
    n: int = 0
    provider: str | None = Field(None, description="execution provider of the artifact")
    max_abs_error: float | None = None
    mean_abs_error: float | None = None
    relative_error: float | None = Field(None, description="max_abs_error / standard deviation of the logits")
    rms_error: float | None = Field(None, description="wrapped graphs: RMS error / standard deviation of `output`")
    output: str | None = Field(None, description="wrapped graphs: the output with the largest error")
    top1_agreement: float | None = None
    tolerance: float | None = Field(None, description="limit of the error; None: judged by the task score")
    tolerance_kind: Literal["absolute", "relative", "rms", "score"]
    reason: str | None = None


class Rounded(Frozen):
    """Results of an artifact on a provider that computes in fewer bits than the artifact's precision."""

    parity: Parity
    validation: AnyScore | None = None
    score: AnyScore | None = None
    reason: str | None = Field(None, description="reason for a missed target")


SMALLEST_RESIDENT_BYTES = 4 << 20  # weights of fewer bytes are less than the other buffers of an opened artifact


class Sharing(Frozen):
    """Sharing audit: parameters stored in the artifact's file, compared with the model's."""

    unique_parameters: int = Field(description="parameters of the model, each counted once")
    stored_parameters: int = Field(description="parameter elements that the file stores")
    constant_elements: int = Field(0, description="other stored numbers: rotary table, shapes, scalars")
    weight_bytes: int = Field(description="bytes of all stored tensors")
    resident_bytes: int | None = Field(
        None,
        description="memory of the opened artifact on the processor after one short call, without the runtime's "
        "library: anonymous, and pages mapped from its files; None: not measured",
    )
    mapped_bytes: int | None = Field(None, description="of `resident_bytes`, pages mapped from the artifact's files")

    @property
    def unique_bytes(self) -> float:
        """Bytes of the file's weights if each were stored once."""
        return self.weight_bytes * self.unique_parameters / max(1, self.stored_parameters)

    @property
    def resident_ratio(self) -> float | None:
        """Memory over :attr:`unique_bytes`; None: not measured, or so small that other buffers are most of it."""
        if self.resident_bytes is None or self.unique_bytes < SMALLEST_RESIDENT_BYTES:
            return None
        return self.resident_bytes / self.unique_bytes


class Vocabulary(Frozen):
    """Size of a trimmed vocabulary, and its effect on the validation text."""

    kept: int
    original: int
    coverage: float = Field(description="share of the validation text's tokens that were kept")
    unknown: float = Field(description="share of its tokens that became [UNK]")
    changed_rows: int = Field(description="validation rows whose tokens differ")
    rows: int


class EngineBuild(Frozen):
    """Build report of an engine or program. None or empty: this builder or machine does not report the value."""

    builder: str = Field(description="package and version")
    seconds: float = Field(description="build time, parsing included")
    checked_by: Literal["builder log", "inspector", "size"] = Field(
        description="source of layers and precisions; size: only the size of the weights is known; inspector: written "
        "by versions before 2026-11-25"
    )
    layers: int | None = Field(None, description="number of layers after fusion")
    layers_by_precision: dict[str, int] = Field({}, description="type of the outputs (FP16, INT64…) → layers")
    weight_elements: dict[str, int] = Field({}, description="precision → elements, once per layer that reads them")
    weight_bytes: int | None = Field(None, description="all weights, each counted once")
    activation_bytes: int | None = Field(None, description="device memory beside the weights, at the largest shape")
    delegated: int | None = Field(None, description="programs: operators that the accelerated kernels compute")
    not_delegated: dict[str, int] = Field({}, description="programs: operator → nodes that other kernels compute")
    graph_bytes: int = Field(description="source ONNX graph, weights included")
    shapes: dict[str, tuple[tuple[int, ...], ...]] = Field(description="input → min, opt and max shape")
    warnings: tuple[str, ...] = Field((), description="warnings of the parser and the builder")


class TextCalls(Frozen):
    """How a foreign text classifier is called whose graph differs from an exported one."""

    output: str = Field("logits", description="output with the logits")
    rows: int | None = Field(None, description="rows of every call, without padding if 1; None: any number")
    tokens: int | None = Field(None, description="tokens that every row is padded to; None: any number")
    pad_id: int


class ArtifactManifest(Frozen):
    """One deployable file of a bundle; a step artifact has several files, which run in turn."""

    id: str
    file: str | None = Field(description="relative to the bundle; None: nothing was built")
    role: Role = "full"
    exit: int | None = None
    parts: dict[str, str] = Field({}, description="step: embed, loop, readout… → file; `file` is the loop's")
    weights_file: str | None = Field(None, description="weights beside the graph, shared with the other graphs")
    format: str = Field(description="selects the runtime: onnx, tensorrt-rtx, tensorrt, torch-tensorrt…")
    precision: Precision
    trimmed: bool = False
    status: Literal["built", "rejected", "unavailable"]
    reason: str | None = None
    kept: bool = Field(False, description="not made by the last export: kept from an earlier one")
    size_bytes: int | None = Field(None, description="size with all parts and its share of external weights")
    sha256: str | None = None
    inputs: dict[str, str] = Field({}, description="name → type[shape]")
    outputs: dict[str, str] = Field({}, description="name → type[shape]")
    calls: TextCalls | None = Field(None, description="imported text classifiers; None: as exported graphs")
    opset: int | None = None
    ops_in_fp32: dict[str, int] = Field({}, description="FP16 graphs: operator → nodes that compute in FP32")
    parity: Parity | None = None
    score: AnyScore | None = Field(None, description="score on the golden inputs")
    validation: AnyScore | None = Field(None, description="score on the first `n` rows of the validation split")
    rounded: dict[str, Rounded] = Field({}, description="provider that computes in fewer bits → its results")
    sharing: Sharing | None = None
    parts_bytes: dict[str, int] = Field({}, description="ONNX: `size_bytes` of embeddings, block, heads, other")
    drift: Drift | None = Field(None, description="drift of looped models")
    guarantee: ExitGuarantee | None = Field(None, description="step: limit of the score drop (`edgeformer exits`)")
    portability: Portability | None = Field(None, description="ONNX: portability audit")
    tokenization: str | None = Field(None, description="GGUF: comparison of llama.cpp's tokenizer with the bundle's")
    quantized: dict[str, int] = Field({}, description="INT8 and INT4 graphs: operator → nodes with quantized weight")
    vocabulary: Vocabulary | None = Field(None, description="trimmed artifacts")
    engine: EngineBuild | None = Field(None, description="engines and programs, which take a range of shapes")
    built_for: dict[str, str] | None = Field(None, description="engines: the GPU and versions that they need")
    built_with: dict[str, str] = Field({}, description="library → version")

    @property
    def is_graph(self) -> bool:
        """Whether this is an ONNX graph, as export writes it; other formats are built from one for another runtime."""
        return self.format == ONNX

    @property
    def companions(self) -> str:
        """Folder with the artifact's tokenizer, configuration and golden inputs, relative to the bundle."""
        return "trimmed" if self.trimmed else "."


class BundleManifest(Frozen):
    """bundle.json: contents of a bundle. Deployment needs no other part of the run."""

    format_version: Literal[1] = 1
    run: str
    task: str
    created: str
    labels: tuple[str, ...] = Field((), description="classification: names of the classes")
    exits: tuple[int, ...] = Field((), description="language modelling: loops with a head")
    loops: int | None = Field(None, description="number of loops of the shared part; None: older bundles")
    leaks: bool = Field(False, description="language modelling: the model sees the tokens that it predicts")
    max_length: int
    max_positions: int | None = Field(description="longest input in tokens; None: any length, or no text")
    pad_id: int
    parameters: int
    synthetic: bool = Field(description="trained on generated text, not on real data")
    target: str | None = None
    data: AnyData = Field(description="data section, from which evaluate rebuilds the test split")
    data_fingerprints: dict[str, str] = Field(description="set → sha256 over its texts and labels, as in training")
    made_from: dict[str, str] = Field({}, description="file of the run → sha256, as exported. Empty: older bundles")
    wrapped: str | None = Field(None, description="ONNX file of `edgeformer import onnx`; None: exported from a run")
    proof: ImportProof | None = Field(None, description="imported models; None: trained here, or older versions")
    files: dict[str, str] = Field(description="every other file of the bundle → sha256")
    artifacts: tuple[ArtifactManifest, ...]
    notes: tuple[str, ...] = Field((), description="notes of export")
    code_version: str
    manifest_sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="sha256 of this file with 64 zeros here; None: older bundles"
    )


LEAKS = "LEAKS FUTURE TOKENS – scores are void"
"""Warning for a language model whose outputs depend on the tokens that it predicts."""

SYNTHETIC = "SYNTHETIC data"

UNPROVEN = "UNPROVEN import"
"""Warning for an imported model whose answers were not compared with its library's, or differ from them."""


def cautions(document: Any) -> list[str]:
    """Return warnings in capitals for the title of a manifest or report; empty for real text and no leaks."""
    proof = getattr(document, "proof", None)  # a row of a study has none
    is_unproven = proof is not None and proof.reason is not None
    warnings = {SYNTHETIC: document.synthetic, LEAKS: document.leaks, UNPROVEN: is_unproven}
    return [warning for warning, applies in warnings.items() if applies]
