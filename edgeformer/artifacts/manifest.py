"""Manifests on disk: run.json, bundle.json, and the audits and guarantees that they record."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import AnyData
from edgeformer.artifacts.scores import AnyScore


class LoopDrift(Frozen):
    """How far the state after one loop is from torch FP32's, on the golden inputs. None where it is not finite."""

    loop: int
    rms_error: float | None = Field(description="root mean square of the difference over that of the reference")
    max_error: float | None = Field(description="largest difference over the reference's root mean square")


class Drift(Frozen):
    """How an artifact's error grows from loop to loop."""

    tolerance: float = Field(description="of rms_error")
    loops: tuple[LoopDrift, ...]
    first_beyond: int | None = Field(None, description="the first loop beyond the tolerance")


class Lengths(Frozen):
    """How many words, or tokens, texts have: of all texts of one set."""

    min: int
    median: float
    mean: float
    max: int
    edges: tuple[int, ...] = Field(description="bins from edges[i] up to edges[i + 1]; the last one is open")
    texts: tuple[int, ...] = Field(description="in each bin")


# Each release of ONNX Runtime reads all earlier opsets and formats; these are the first ones of each.
_FIRST_OPSET = {17: "1.12", 18: "1.14", 19: "1.15", 20: "1.17", 21: "1.18", 22: "1.21"}
_FIRST_FORMAT = {8: "1.10", 9: "1.16", 10: "1.18"}
_FIRST_OPERATOR = {"com.microsoft:MatMulNBits": "1.17", "com.microsoft:GatherBlockQuantized": "1.20"}
_MANY = 1e-4
"""Share of denormal numbers that is worth a word."""


class Denormals(Frozen):
    """Numbers below 1.2e-38, which many processors compute 10 to 100 times slower with."""

    weights: int = Field(description="stored FP32 numbers that are denormal")
    of_weights: int = Field(description="stored FP32 numbers")
    activations: int | None = Field(None, description="on some golden inputs, of up to 64 values; None: not looked at")
    of_activations: int | None = None


class Saturation(Frozen):
    """Sums of two products u8×s8, which x86 processors with AVX2 and without VNNI cut off at 16 bits."""

    pairs: int = Field(description="neighbouring weights of one sum, in all products of u8 with s8")
    at_risk: int = Field(description="predicted: of these, pairs that some activations take beyond 16 bits")
    sums: int | None = Field(None, description="measured: sums of pairs at risk on golden inputs; None: none are")
    saturated: int | None = Field(None, description="of these, sums that really are beyond")


class Portability(Frozen):
    """The facts, of all graphs of an artifact together."""

    opset: int = Field(description="highest of the standard operators")
    ir_version: int = Field(description="of the file format")
    other_operators: dict[str, int] = Field({}, description="operators that are not of the ONNX standard → nodes")
    control_flow: dict[str, int] = Field({}, description="Loop, If, Scan → nodes: runtimes differ most in these")
    dynamic: dict[str, tuple[str, ...]] = Field({}, description="input → axes of any size")
    fixed: tuple[str, ...] = Field((), description="inputs of one size only")
    denormals: Denormals
    saturation: Saturation | None = Field(None, description="None: it has no such products")

    @property
    def needs(self) -> str | None:
        """The oldest ONNX Runtime that reads it; None: it is older or newer than what is known here."""
        if self.opset not in _FIRST_OPSET or self.ir_version not in _FIRST_FORMAT:
            return None
        operators = [_FIRST_OPERATOR[name] for name in self.other_operators if name in _FIRST_OPERATOR]
        return max(_FIRST_OPSET[self.opset], _FIRST_FORMAT[self.ir_version], *operators, key=release)

    def notes(self) -> list[str]:
        """What its owner should know before shipping it; nothing of what is as usual."""
        risks, numbers, saturation = [], self.denormals, self.saturation
        for kind, count, total in (
            ("weights", numbers.weights, numbers.of_weights),
            ("activations on golden inputs", numbers.activations or 0, numbers.of_activations or 0),
        ):
            if count > _MANY * max(1, total):
                remedy = "where that is slow, set ONNX Runtime's session.set_denormal_as_zero to 1"
                risks.append(f"{count:,} of {total:,} FP32 {kind} are denormal; {remedy}")
        if saturation is not None and saturation.at_risk:
            at_risk = f"{saturation.at_risk:,} of {saturation.pairs:,} pairs of weights"
            measured = ""
            if saturation.sums is not None:
                measured = f"; on golden inputs {saturation.saturated or 0:,} of {saturation.sums:,} sums are"
            risks.append(f"{at_risk} can go beyond 16 bits on x86 processors with AVX2 and without VNNI{measured}")
        for problem, operators in (
            ("operators that are not of the ONNX standard, which other runtimes lack", self.other_operators),
            ("control flow, in which runtimes differ", self.control_flow),
        ):
            if operators:
                risks.append(f"{problem}: {', '.join(f'{name} ({count})' for name, count in operators.items())}")
        return risks

    def notes_here(self, onnxruntime: str, flags: frozenset[str] | None) -> list[str]:
        """What matters here, with this version of ONNX Runtime and these processor features (None: unknown)."""
        risks = []
        if self.needs is not None and release(onnxruntime) < release(self.needs):
            risks.append(
                f"needs ONNX Runtime {self.needs} (opset {self.opset}, IR {self.ir_version}"
                f"{', operators of its own' if self.other_operators else ''}), here {onnxruntime}"
            )
        if self.saturation is not None and self.saturation.at_risk:
            if flags is None:
                risks.append("INT8 sums can be cut off at 16 bits here: whether the processor has VNNI is not known")
            elif "avx2" in flags and not flags & {"avx_vnni", "avx512_vnni"}:
                risks.append("INT8 sums can be cut off at 16 bits here: the processor has AVX2 and no VNNI")
        return risks


def release(version: str) -> tuple[int, ...]:
    """``"1.18.0"`` → (1, 18): what versions are compared by."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


class ExitTime(Frozen):
    """Time of single texts, each in a call of its own, in turn with early exit and with all loops.

    All loops are run by the step artifact, and by the full graph of the same precision where the bundle has one.
    """

    provider: str = Field(description="what computed")
    host: str = Field(description="the processor")
    threads: int
    rows: int = Field(description="texts that were timed, drawn from the held-out ones")
    early_ms: dict[str, float] = Field(description="mean, p50, p90… as far as the texts can carry them")
    full_ms: dict[str, float] = Field(description="the same texts with all loops")
    ratio: float = Field(description="mean with early exit over mean with all loops of the step artifact")
    full_graph: str | None = Field(None, description="artifact id of the full graph; None: there was none to time")
    full_graph_ms: dict[str, float] = Field({}, description="the same texts through the full graph")
    quickest: str | None = Field(None, description="artifact that runs all loops fastest; None: not compared")
    quickest_ratio: float | None = Field(None, description="mean with early exit over the mean of `quickest`")
    ratio_low: float | None = Field(None, description="95 % interval of `quickest_ratio`, over the texts")
    ratio_high: float | None = None

    @property
    def pays(self) -> bool | None:
        """Whether early exit is faster than the fastest artifact with all loops; None: undecided."""
        if self.ratio_low is None or self.ratio_high is None or self.ratio_low < 1 <= self.ratio_high:
            return None
        return self.ratio_high < 1

    def sentence(self) -> str:
        """Return what early exit takes against all loops, for people."""
        if self.quickest_ratio is None or self.ratio_low is None or self.ratio_high is None:
            return "its time was not compared with the full graph; run edgeformer exits again"
        means = [self.full_ms["mean"], *([self.full_graph_ms["mean"]] if self.full_graph_ms else [])]
        verdict = {
            True: "early exit is faster",
            False: f"early exit is slower here; use {self.quickest}",
            None: f"whether early exit is faster cannot be told from {self.rows:,} texts",
        }[self.pays]
        return (
            f"one text takes {self.early_ms['mean']:.3g} ms with early exit, {min(means):.3g} ms with all loops of "
            f"{self.quickest} ({self.quickest_ratio:.2f}×, 95 % interval {self.ratio_low:.2f} to "
            f"{self.ratio_high:.2f}): {verdict}"
        )


class ExitGuarantee(Frozen):
    """The score falls by at most ``max_drop`` on texts like the held-out ones, with this confidence."""

    max_drop: float = Field(description="ε: of accuracy, early exit against all loops")
    confidence: float = Field(description="1 − δ: of so many draws of held-out rows, thresholds keep the promise")
    method: str = Field(description="what chose the thresholds")
    thresholds: dict[str, float] = Field(description="loop → smallest top probability that lets a text leave there")
    split: str = Field(description="the held-out set, or file")
    reused: bool | None = Field(
        None, description="whether the rows also chose weights or judged the artifact, so confidence is inexact"
    )
    rows: int = Field(description="held-out rows that the thresholds were chosen on")
    lost: int = Field(description="of these: right with all loops, wrong with early exit")
    won: int = Field(description="of these: wrong with all loops, right with early exit")
    p_value: float = Field(description="of these answers or better ones, if the score fell by more than max_drop")
    level: float = Field(description="that p_value had to reach: 1 − confidence over the number of sequences")
    accuracy: float = Field(description="of these rows with early exit")
    full_accuracy: float = Field(description="of these rows with all loops")
    mean_loops: float
    share: dict[str, float] = Field(description="loop → share of the held-out rows that leave there; sums to 1")
    time: ExitTime
    created: str

    def sentence(self) -> str:
        """What is promised, in words."""
        exit_shares = ", ".join(f"{share:.1%} after loop {loop}" for loop, share in self.share.items() if share)
        proof = "; the same rows chose the epoch or judged the artifact, so this is no independent proof"
        return (
            f"accuracy falls by at most {100 * self.max_drop:g} points with {100 * self.confidence:.4g} % confidence "
            f"on texts like the {self.rows:,} rows of {self.split} (they left: {exit_shares})"
            f"{proof if self.reused else ''}"
        )


RunStatus = Literal["running", "finished", "failed", "interrupted"]
Precision = Literal["fp32", "fp16", "int8", "int4"]
ONNX = "onnx"
"""The format of the graphs that export writes, and that everything else is built from."""


def client_dtype(precision: Precision) -> str:
    """How clients of Hugging Face ONNX repositories name a precision, in file names and options."""
    return "q4" if precision == "int4" else precision


class OverlapCount(Frozen):
    """Test texts that training has seen, counted after cleaning."""

    test_set: str
    test_rows: int
    duplicates: int = Field(description="test texts that are, word for word, a training text")
    contained: int = Field(description="further ones that are part of a training text, or contain one of 3+ words")


class DataFinding(Frozen):
    """Something that the owner of the data should know of."""

    kind: Literal["empty texts", "duplicates", "contradictions", "labels without rows", "uneven labels", "seen texts"]
    set: str = Field(description="the part or set that it was found in")
    rows: int = Field(description="that it is about; 0: none has the label")
    message: str = Field(description="what was found, and what happens with it")
    examples: tuple[str, ...] = Field((), description="where the first ones stand")


class DataSummary(Frozen):
    """What a run was trained and tested on."""

    split: str
    synthetic: bool
    rows: dict[str, int] = Field(description="rows per set: train, validation, and each test set by name")
    label_rows: dict[str, dict[str, int]] = Field({}, description="classification: rows per label in each set")
    tokens: dict[str, int] = Field({}, description="language modelling: tokens per set, boundaries included")
    words: dict[str, int] = Field({}, description="language modelling: words per set, paragraph ends included")
    fingerprint: str = Field(description="sha256 over texts and labels of all sets, in order")
    fingerprints: dict[str, str] = Field({}, description="the same for each set")
    overlap: tuple[OverlapCount, ...] = ()
    findings: tuple[DataFinding, ...] = Field((), description="what the owner of the data should know")
    truncated_rows: dict[str, int] = Field({}, description="rows cut to data.max_length, per set")
    text_words: dict[str, Lengths] = Field({}, description="classification: words of each set's texts, once cleaned")
    text_tokens: dict[str, Lengths] = Field({}, description="the same in tokens, as the model reads them: cut")


class AttentionUse(Frozen):
    """Which attention ran, and why not the one that was asked for."""

    requested: str
    used: str
    reason: str | None = None


class Causality(Frozen):
    """Does a language model look ahead? Tokens after t are changed; outputs up to t must stay as they are."""

    leaks: bool
    largest_change: dict[str, float] = Field(description="loop → largest change of an output up to t, over its spread")
    reach: int = Field(description="positions ahead that some output depends on, as far as the probe saw")
    lengths: tuple[int, ...]
    trials: int
    tolerance: float


class MemoryUse(Frozen):
    """Peak memory of a training run: what was predicted before it, and what was measured."""

    device: str = Field(description="what the prediction was made for: cpu or cuda")
    predicted_peak_bytes: int | None = None
    predicted_reserve_bytes: int | None = Field(None, description="of it, what no tensor accounts for (not measured)")
    measured_peak_bytes: int | None = None
    measured_as: str | None = Field(None, description="what the measured figure is")
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
    precision: str = Field(description="what training computed in")
    attention: AttentionUse
    data: DataSummary
    tokenizer_fingerprint: str | None = Field(None, description="sha256 of all that the tokenizer is")
    best_epoch: int | None = None
    validation: AnyScore | None = None
    test: AnyScore | None = None
    tests: dict[str, AnyScore] = Field({}, description="every test set by name, the first is `test`")
    leaks: bool = Field(False, description="language models: sees the tokens that it predicts; scores are void")
    causality: Causality | None = Field(None, description="language models: what the probe found before training")
    memory: MemoryUse | None = None
    effective_batch: int | None = Field(None, description="rows of an optimizer step, however many at a time")
    batch_size: int | None = Field(None, description="rows at a time at the end; smaller than asked for after an OOM")
    processes: int = Field(1, description="that trained it together, each a share of every step's rows")
    skipped_steps: int = Field(0, description="steps whose gradient fp16 could not hold; they changed no weight")
    versions: dict[str, str]
    code_version: str
    host: dict[str, Any]

    @property
    def synthetic(self) -> bool:
        """Was it trained and tested on generated text?"""
        return self.data.synthetic


class Parity(Frozen):
    """How close an artifact's logits are to torch FP32's on real inputs; wrapped graphs: to the FP32 graph's."""

    status: Literal["measured", "unavailable"]
    n: int = 0
    provider: str | None = Field(None, description="what computed the artifact's logits")
    max_abs_error: float | None = None
    mean_abs_error: float | None = None
    relative_error: float | None = Field(None, description="max_abs_error / standard deviation of the logits")
    rms_error: float | None = Field(None, description="wrapped graphs: RMS error / standard deviation of `output`")
    output: str | None = Field(None, description="wrapped graphs: the output with the largest error")
    top1_agreement: float | None = None
    tolerance: float | None = Field(None, description="None: judged by the task score")
    tolerance_kind: Literal["absolute", "relative", "rms", "score"]
    reason: str | None = None


class Rounded(Frozen):
    """An artifact with a provider that computes in fewer bits than its precision says."""

    parity: Parity
    validation: AnyScore | None = None
    score: AnyScore | None = None
    reason: str | None = Field(None, description="why it misses its bar")


class Sharing(Frozen):
    """Parameters counted in the artifact's own file against those of the model."""

    unique_parameters: int = Field(description="parameters of the model, each counted once")
    stored_parameters: int = Field(description="parameter elements that the file stores")
    constant_elements: int = Field(0, description="other stored numbers: rotary table, shapes, scalars")
    weight_bytes: int = Field(description="bytes of all stored tensors")


class Vocabulary(Frozen):
    """What a trimmed vocabulary keeps, and what that does to the validation text."""

    kept: int
    original: int
    coverage: float = Field(description="share of the validation text's tokens that were kept")
    unknown: float = Field(description="share of its tokens that are [UNK] now and were not before")
    changed_rows: int = Field(description="validation rows that are cut into other tokens than before")
    rows: int


class Engine(Frozen):
    """What the builder says of a TensorRT engine. None or empty: this builder, or this machine, does not say it."""

    builder: str = Field(description="package and version")
    seconds: float = Field(description="building, parsing included")
    checked_by: Literal["builder log", "inspector", "size"] = Field(
        description="source of layers and precisions; inspector: versions before 2026-11-25; size: weights' size only"
    )
    layers: int | None = Field(None, description="after fusion")
    layers_by_precision: dict[str, int] = Field({}, description="of the layers' outputs: FP16, FP32, INT64…")
    weight_elements: dict[str, int] = Field({}, description="precision → elements, once per layer that reads them")
    weight_bytes: int | None = Field(None, description="of all weights, each counted once")
    activation_bytes: int | None = Field(None, description="device memory beside the weights, at the largest shape")
    graph_bytes: int = Field(description="the ONNX graph that it was built from, weights included")
    shapes: dict[str, tuple[tuple[int, ...], ...]] = Field(description="input → smallest, best and largest shape")
    warnings: tuple[str, ...] = Field((), description="of the parser and the builder")


class ArtifactManifest(Frozen):
    """One deployable file of a bundle; a step bundle is several that are run in turn."""

    id: str
    file: str | None = Field(description="relative to the bundle; None when nothing was built")
    role: Literal["full", "exit", "step", "decode"] = "full"
    exit: int | None = None
    parts: dict[str, str] = Field({}, description="step: embed, loop, readout… → file; `file` is the loop's")
    weights_file: str | None = Field(None, description="weights beside the graph, shared with the other graphs")
    format: str = Field(description="whoever opens it knows it: onnx, tensorrt-rtx, tensorrt, torch-tensorrt…")
    precision: Precision
    trimmed: bool = False
    status: Literal["built", "rejected", "unavailable"]
    reason: str | None = None
    kept: bool = Field(False, description="the last export did not make it: it was in the bundle before")
    size_bytes: int | None = Field(None, description="with all parts and its share of weights that lie beside them")
    sha256: str | None = None
    inputs: dict[str, str] = Field({}, description="name → type[shape]")
    outputs: dict[str, str] = Field({}, description="name → type[shape]")
    opset: int | None = None
    ops_in_fp32: dict[str, int] = Field({}, description="FP16 graphs: operator → nodes that compute in FP32")
    parity: Parity | None = None
    score: AnyScore | None = Field(None, description="on the golden inputs")
    validation: AnyScore | None = Field(None, description="on the first `n` rows of the validation split")
    rounded: dict[str, Rounded] = Field({}, description="provider that computes in fewer bits → what that costs")
    sharing: Sharing | None = None
    parts_bytes: dict[str, int] = Field({}, description="ONNX: `size_bytes` by embeddings, block, heads, other")
    drift: Drift | None = Field(None, description="looped models")
    guarantee: ExitGuarantee | None = Field(None, description="step: what early exit may cost (`edgeformer exits`)")
    portability: Portability | None = Field(None, description="ONNX: what other machines may take otherwise")
    quantized: dict[str, int] = Field({}, description="INT8 and INT4 graphs: operator → nodes with such a weight")
    vocabulary: Vocabulary | None = Field(None, description="trimmed artifacts")
    engine: Engine | None = Field(None, description="TensorRT engines")
    built_for: dict[str, str] | None = Field(None, description="engines: the GPU and versions they run on")
    built_with: dict[str, str] = Field({}, description="library → version")

    @property
    def is_graph(self) -> bool:
        """An ONNX graph, as export writes it; else something that was built of one for a runtime of its own."""
        return self.format == ONNX

    @property
    def companions(self) -> str:
        """Folder with the artifact's tokenizer, configuration and golden inputs, relative to the bundle."""
        return "trimmed" if self.trimmed else "."


class BundleManifest(Frozen):
    """bundle.json: what a bundle holds. With it, no other part of the run is needed to deploy."""

    format_version: Literal[1] = 1
    run: str
    task: str
    created: str
    labels: tuple[str, ...] = Field((), description="classification: names of the classes")
    exits: tuple[int, ...] = Field((), description="language modelling: loops with a head")
    loops: int | None = Field(None, description="how often the shared part runs; None: older bundles")
    leaks: bool = Field(False, description="language modelling: sees the tokens that it predicts")
    max_length: int
    max_positions: int | None = Field(description="tokens that the model takes; None: any number, or it takes no text")
    pad_id: int
    parameters: int
    synthetic: bool = Field(description="trained on generated text, not on real data")
    target: str | None = None
    data: AnyData = Field(description="how to find the test split again (evaluate)")
    data_fingerprints: dict[str, str] = Field(description="set → sha256 over its texts and labels, as in training")
    made_from: dict[str, str] = Field({}, description="file of the run → sha256, as exported. Empty: older bundles")
    wrapped: str | None = Field(None, description="ONNX file of `edgeformer import onnx`; None: exported from a run")
    files: dict[str, str] = Field(description="every other file of the bundle → sha256")
    artifacts: tuple[ArtifactManifest, ...]
    notes: tuple[str, ...] = Field((), description="what export found worth saying")
    code_version: str
    manifest_sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="of this file with 64 zeros in its place; None: older bundles"
    )


LEAKS = "LEAKS FUTURE TOKENS – scores are void"
"""Warning for a language model whose outputs depend on the tokens that it predicts."""

SYNTHETIC = "SYNTHETIC data"


def cautions(document: Any) -> list[str]:
    """Warnings for the title of a manifest or report, in capitals; empty for an honest run on real text."""
    return [*([SYNTHETIC] if document.synthetic else []), *([LEAKS] if document.leaks else [])]
