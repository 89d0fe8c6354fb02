"""Judge exported artifacts: parity with the FP32 reference, task score, weights stored once, drift, rejection.

The reference is torch FP32 for a trained run, the FP32 graph for an imported one. Artifacts run on real golden inputs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from torch import nn

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.golden import Golden
from edgeformer.artifacts.manifest import (
    ONNX,
    ArtifactManifest,
    Drift,
    LoopDrift,
    Precision,
    Rounded,
    Sharing,
    Vocabulary,
)
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.scores import Score
from edgeformer.export.audit import audit_portability, audit_sharing, sum_counts, weight_parts
from edgeformer.export.fp16 import FP16_MAX
from edgeformer.export.graphs import LOOP, Written
from edgeformer.export.quantize import quantized_nodes, quantized_pairs
from edgeformer.export.variants import Variant
from edgeformer.models.adapter import ModelAdapter
from edgeformer.models.blocks.tracing import state_name
from edgeformer.runtimes import (
    ALL_RUNTIMES,
    ArtifactFiles,
    OpenOptions,
    library_versions,
    opener_of,
    provider_facts,
    requested_providers,
)
from edgeformer.runtimes.decoder import StepSession, decode_windows
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.runtime import stored_twice
from edgeformer.runtimes.session import Array, Session
from edgeformer.tasks import Run, Task
from edgeformer.tasks.metric import out_of_tolerance
from edgeformer.tasks.scoring import Validation, max_batch_rows, split_calls

DRIFT_TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-2, "int8": 1e-1, "int4": 3e-1}
"""Relative to the root mean square of torch FP32's state; fixed here like the tolerances of the logits."""

MAX_STORED_RATIO = 1.05
"""Largest ratio of stored numbers to parameters of a converted foreign graph: it may store small constants twice."""

Baseline = dict[int, tuple[Score, Score | None]]
"""Exit → FP32's score on the golden inputs and on the validation split."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """FP32 answers on the golden inputs, which artifacts are compared with.

    Attributes:
        answers: right answers, as the task scores them.
        logits: exit → torch FP32 logits of the golden inputs, float32 [rows or tokens, C]; empty for an imported graph,
            whose answers are in ``golden``.
        exits: loops that answer, in rising order; the last one is the full graph.
        needed: exit → parameters that its graph needs.
        loops: how often a step or decode artifact runs its loop; None without such artifacts.
        max_positions: tokens that the model takes; None: any number.
        rejection_hint: appended to the reason where an artifact is out of tolerance.
    """

    task: Task
    golden: Golden
    answers: Mapping[str, Array]
    needed: Mapping[int, int]
    logits: Mapping[int, Array] = field(default_factory=dict)
    data: Any = None
    exits: tuple[int, ...] = (0,)
    loops: int | None = None
    max_positions: int | None = None
    rejection_hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Exportable(Reference):
    """A trained model in evaluation mode on the CPU, with torch FP32's answers.

    Attributes:
        parameters: of the full model, each counted once.
        inputs: real validation inputs, int64 [n, S] each.
        states: loop → torch FP32 hidden states, float32 [n, S, d].
        leaks: the model sees what it predicts.
    """

    recipe: Recipe
    adapter: ModelAdapter
    model: nn.Module
    parameters: int
    inputs: dict[str, NDArray[np.int64]]
    states: dict[int, Array]
    leaks: bool


@dataclass(frozen=True)
class Judge:
    """Measures artifacts of one variant against a reference: the graphs of a run (:meth:`judge_all`), and engines.

    Attributes:
        validation: scores a session on labelled data; None: there is none.
        baseline: FP32's scores per exit, which later artifacts are compared with.
        sets_baseline: whether FP32's scores become the baseline; that of an imported graph is its own entry.
        max_activation: largest absolute activation of the FP32 model on the golden inputs, for FP16's range.
    """

    folder: Path
    reference: Reference
    variant: Variant
    validation: Validation | None
    baseline: Baseline
    sets_baseline: bool = True
    max_activation: float = 0.0
    vocabulary: Vocabulary | None = None

    def measure(
        self, session: Session, exit_: int, max_rows: int | None = None, *, validate: bool = True
    ) -> dict[str, Any]:
        """Measure parity and scores of an opened artifact, as fields of its entry; ``reason``: why it is rejected.

        ``validate``: also score the validation data; not for step and decode artifacts.
        """
        outputs = self.reference.task.golden_outputs(self.reference.golden, session.run, max_rows)
        run = split_calls(session.run, max_rows) if validate else None
        return self.compare(exit_, outputs, run, session.provider)

    def compare(
        self, exit_: int, outputs: Any, run: Run | None, provider: str, positions: NDArray[np.int64] | None = None
    ) -> dict[str, Any]:
        """Compare outputs on the golden inputs with the reference; see :meth:`measure`.

        Args:
            run: scored on the validation data; None: not.
            positions: rows or tokens of the outputs, whose score is compared with the reference's own; None: all.
        """
        precision, reference = self.variant.precision, self.reference
        task, expected = reference.task, reference.logits.get(exit_)
        if expected is None:
            parity = task.golden_parity(reference.golden.arrays, outputs, None, precision, provider)
        else:
            expected = expected if positions is None else expected[positions]
            outputs = outputs.reshape(-1, outputs.shape[-1])
            parity = task.parity(outputs, expected, precision, provider)
        reason = out_of_tolerance(parity)
        if reason is not None:
            reason += reference.rejection_hint
        elif precision == "fp16" and self.max_activation > FP16_MAX:
            reached = f"an activation reaches {self.max_activation:.3g} on real inputs"
            reason = f"{reached}, above the FP16 maximum of {FP16_MAX:.0f} (overflow)"
        if parity.max_abs_error is None:  # no score can be computed from NaN
            return {"parity": parity, "reason": reason}
        golden = task.golden_score(exit_, outputs, reference.answers, positions, reference.data)
        score = self.validation(run, exit_) if self.validation is not None and run is not None else None
        if score is not None and not isfinite(score.loss):
            reason = reason or "its loss on the validation text is not finite"
            return {"parity": parity, "score": golden, "reason": reason}
        baseline = self.baseline.get(exit_)  # a rejected FP32 graph may have no score
        if positions is not None:
            baseline = None
            if precision != "fp32":
                own_score = task.golden_score(exit_, expected, reference.answers, positions, reference.data)
                baseline = own_score, None
        elif self.variant == Variant("fp32") and self.sets_baseline:
            self.baseline.setdefault(exit_, (golden, score))
            baseline = None
        if reason is None and baseline is not None:
            pair = golden, baseline[0]
            if score is not None and baseline[1] is not None:
                pair = score, baseline[1]
            reason = task.lost(*pair, precision, trimmed=self.variant.trimmed)
        return {"parity": parity, "score": golden, "validation": score, "reason": reason}

    def judge_engine(self, entry: ArtifactManifest) -> ArtifactManifest:
        """Add parity and scores to the entry of a builder's artifact that this machine can run, or reject it.

        An ONNX file is audited, too.
        """
        is_whole, exit_ = entry.role in ("full", "exit"), entry.exit or self.reference.exits[-1]
        parts = {part: self.folder / file for part, file in entry.parts.items()}
        loops = self.reference.loops if entry.role in ("step", "decode") else None
        files = ArtifactFiles(entry, self.folder / str(entry.file), parts, loops, self.reference.max_positions)
        try:
            with opener_of(entry).open(files, OpenOptions(exact=True)) as session:
                measured = self.measure(session, exit_, max_batch_rows(entry), validate=is_whole)
            if files.file.suffix == ".onnx":
                graph = onnx.load(str(files.file))
                sharing, parts_bytes = audit_sharing(graph, self.reference.needed[exit_]), weight_parts(graph)
                other_bytes = max(0, files.file.stat().st_size - sum(parts_bytes.values()))
                measured |= {
                    "reason": measured["reason"] or stored_twice(sharing),
                    "sharing": sharing,
                    "parts_bytes": {**parts_bytes, "other": other_bytes},
                    "quantized": dict(sorted(quantized_pairs(graph).items())),
                }
        except EdgeformerError as error:
            measured = {"reason": str(error)}
        return entry.model_copy(update={**measured, "status": "rejected" if measured["reason"] else "built"})

    def add_rounded(self, entry: ArtifactManifest) -> ArtifactManifest:
        """Add scores under providers that compute in fewer bits, compared by INT8's tolerance.

        Step, decode and rejected artifacts stay unchanged.
        """
        if entry.status != "built" or entry.role not in ("full", "exit"):
            return entry
        rounded: dict[str, Rounded] = {}
        judge, files = replace(self, variant=Variant("int8")), ArtifactFiles(entry, self.folder / str(entry.file))
        for provider in requested_providers(entry, ALL_RUNTIMES):
            if provider_facts(provider).rounds_to is None:
                continue
            try:
                session = opener_of(entry, provider).open(files, OpenOptions(provider))
            except InputError:
                continue  # the processor lacks the provider
            with session:
                measured = judge.measure(session, entry.exit or self.reference.exits[-1])
            rounded[provider] = Rounded.model_validate(measured)
        return entry.model_copy(update={"rounded": rounded})

    def judge_all(self, written: Written) -> Iterator[ArtifactManifest]:
        """Yield every traced artifact of a run, the full graph first; each runs when the previous one was consumed."""
        reference: Any = self.reference  # Exportable
        last, states, drift = reference.exits[-1], reference.states, None
        if len(states) > 1:
            with OnnxSession(self.folder / written.states) as probe:
                outputs = probe.run(reference.inputs)
            drift = measure_drift({loop: outputs[state_name(loop)] for loop in states}, states, self.variant.precision)
        for exit_, file in written.exits.items():
            with OnnxSession(self.folder / file) as session:
                measured = self.measure(session, exit_)
            name = "" if exit_ == last else f"exit{exit_}"
            role = {"role": "exit", "exit": exit_} if name else {"role": "full", "drift": drift}
            yield self._describe(name, {LOOP: file}, written, reference.needed[exit_], {**measured, **role})
        if written.steps:  # embed, loop and readouts, run in turn through all loops
            with StepSession({part: self.folder / file for part, file in written.steps.items()}, len(states)) as steps:
                measured = self.measure(steps, last, validate=False)
            fields = {**measured, "role": "step", "parts": written.steps}
            needed = max(reference.parameters, *reference.needed.values())
            yield self._describe("step", written.steps, written, needed, fields)
        if written.decode is not None:  # half of every golden window in one call, then token by token
            ids = reference.inputs["input_ids"]
            half = ids.shape[1] // 2
            with OnnxSession(self.folder / written.decode) as session:
                logits, provider = decode_windows(session, ids, half), session.provider
            # Flat positions of the answered tokens: of every window the second half, and the token before it.
            positions = np.arange(ids.size).reshape(ids.shape)[:, half - 1 :].reshape(-1)
            measured = self.compare(last, logits, None, provider, positions)
            fields = {**measured, "role": "decode"}
            yield self._describe("decode", {LOOP: written.decode}, written, reference.needed[last], fields)

    def _describe(
        self, name: str, files: Mapping[str, str], written: Written, needed: int, fields: dict[str, Any]
    ) -> ArtifactManifest:
        """Audit the files of one artifact (part → file) and combine that with what was measured."""
        paths = {part: self.folder / file for part, file in files.items()}
        graphs = {part: onnx.load(str(path), load_external_data=False) for part, path in paths.items()}
        audit = audit_graphs(paths, graphs, needed)
        reason = fields["reason"] or stored_twice(audit["sharing"])
        main = graphs[LOOP].graph
        size_bytes = sum(written.size_bytes[file] for file in files.values())
        parts = sum_counts(map(weight_parts, graphs.values()))
        ports: dict[str, str] = {}  # input or output → type and shape, e.g. ``int64[batch, sequence]``
        for value in (*main.input, *main.output):
            tensor = value.type.tensor_type
            shape = ", ".join(dim.dim_param or str(dim.dim_value) for dim in tensor.shape.dim)
            ports[value.name] = f"{onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name}[{shape}]"
        variant = self.variant
        return ArtifactManifest(
            **{**audit, **fields, "status": "rejected" if reason else "built", "reason": reason},
            id=variant.id(name), file=files[LOOP], format=ONNX, precision=variant.precision, trimmed=variant.trimmed,
            vocabulary=self.vocabulary, size_bytes=size_bytes,
            inputs={value.name: ports[value.name] for value in main.input},
            outputs={value.name: ports[value.name] for value in main.output},
            weights_file=variant.weights if (self.folder / variant.weights).is_file() else None,
            parts_bytes={**parts, "other": max(0, size_bytes - sum(parts.values()))},
        )  # fmt: skip


def audit_graphs(paths: Mapping[str, Path], graphs: Mapping[str, onnx.ModelProto], needed: int) -> dict[str, Any]:
    """Audit the graphs of one artifact, part → graph: fields of its entry. See :func:`audit_portability`."""
    # The parts of a step artifact hold different parameters; together they must hold each once.
    uncounted = {"unique_parameters", "resident_bytes", "mapped_bytes"}
    audits = [audit_sharing(graph, needed).model_dump(exclude=uncounted) for graph in graphs.values()]
    portability = audit_portability(list(paths.values()))
    tensors = [tensor for graph in graphs.values() for tensor in graph.graph.initializer]
    float32 = Counter[str]()  # nodes with an FP32 result, by type inference over the files
    is_fp16 = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in tensors)
    for graph in graphs.values() if is_fp16 else ():
        inferred = onnx.shape_inference.infer_shapes(graph, strict_mode=False).graph
        types = {value.name: value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.output)}
        float32.update(
            node.op_type
            for node in inferred.node
            if node.op_type != "Cast" and any(types.get(name) == onnx.TensorProto.FLOAT for name in node.output)
        )
    libraries = ("torch", "onnx", "onnxscript", "onnxruntime")
    return {
        "sharing": Sharing(unique_parameters=needed, **sum_counts(audits)),
        "sha256": sha256_of(paths[LOOP]),
        "opset": portability.opset,
        "ops_in_fp32": dict(sorted(float32.items())),
        "quantized": dict(sorted(sum_counts(map(quantized_nodes, graphs.values())).items())),
        "portability": portability,
        "built_with": {name: version for name, version in library_versions().items() if name in libraries},
    }


def describe_converted(path: Path, size_bytes: int, unique_parameters: int) -> dict[str, Any]:
    """Audit a converted foreign graph: fields of its entry, with a ``reason`` where it stores too many numbers.

    ``size_bytes`` includes weights beside the graph; ``unique_parameters`` are of the graph that it was made of.
    """
    graph = onnx.load(str(path), load_external_data=False)
    fields = {**audit_graphs({LOOP: path}, {LOOP: graph}, unique_parameters), "size_bytes": size_bytes}
    stored = fields["sharing"].stored_parameters
    if stored > MAX_STORED_RATIO * unique_parameters:
        fields["reason"] = f"stores {stored:,} numbers, and the imported graph has {unique_parameters:,}"
    return fields


BOOTSTRAPS = 1000
"""Samples of the golden inputs behind the interval of a drift."""


def measure_drift(states: Mapping[int, Array], references: Mapping[int, Array], precision: Precision) -> Drift:
    """Compare states of the golden inputs, loop → float32 [B, S, C], with those of torch FP32."""
    tolerance, rng = DRIFT_TOLERANCE[precision], np.random.default_rng(0)
    loops = []
    for loop, reference in sorted(references.items()):
        error = states[loop].astype(np.float64) - reference
        squares = np.stack([np.square(a, dtype=np.float64).mean(tuple(range(1, a.ndim))) for a in (error, reference)])
        rms, scale = np.sqrt(squares.mean(1)).tolist()
        if np.isfinite(error).all() and scale > 0:
            sample = squares[:, rng.integers(0, len(error), (BOOTSTRAPS, len(error)))].mean(2)
            low, high = np.quantile(np.sqrt(sample[0] / sample[1]), (0.025, 0.975)).tolist()
            max_error = float(np.abs(error).max()) / scale
            loops.append(LoopDrift(loop=loop, rms_error=rms / scale, max_error=max_error, rms_interval=(low, high)))
        else:
            loops.append(LoopDrift(loop=loop, rms_error=None, max_error=None))
    beyond = [row.loop for row in loops if row.rms_error is None or row.rms_error > tolerance]
    return Drift(tolerance=tolerance, loops=tuple(loops), first_beyond=beyond[0] if beyond else None)
