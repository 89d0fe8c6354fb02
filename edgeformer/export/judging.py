"""Judge exported artifacts: parity with the FP32 reference, task score, weights stored once, drift, rejection.

The reference is torch FP32 for a trained run (:class:`Exportable`) and the FP32 graph for an imported one
(:class:`Reference`). Every artifact runs on its real golden inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
    Parity,
    Precision,
    Rounded,
    Sharing,
    Vocabulary,
)
from edgeformer.artifacts.onnx_outline import read_outline
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.scores import Score
from edgeformer.export.audit import (
    audit_portability,
    audit_sharing,
    count_quantization_numbers,
    describe_io,
    float32_operators,
    stored_twice,
    sum_counts,
    weight_parts,
)
from edgeformer.export.fp16 import FP16_MAX
from edgeformer.export.graphs import LOOP, Written, probe_path
from edgeformer.export.quantize import quantized_nodes, quantized_pairs
from edgeformer.export.variants import Variant
from edgeformer.models import ModelSpec
from edgeformer.models.adapter import ModelAdapter
from edgeformer.models.tracing import state_name
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
from edgeformer.runtimes.session import Array, Session
from edgeformer.tasks import Run, Task
from edgeformer.tasks.metric import out_of_tolerance
from edgeformer.tasks.scoring import Validation, max_batch_rows, split_calls

DRIFT_TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-2, "int8": 1e-1, "int4": 3e-1}
"""Relative to the root mean square of torch FP32's state; fixed here like the tolerances of the logits."""

MAX_STORED_RATIO = 1.05
"""Largest ratio of stored numbers to parameters of a converted foreign graph: it may store small constants twice."""

Positions = NDArray[np.int64] | None
Baseline = dict[int, tuple[Score, Score | None]]
"""Exit → FP32's score on the golden inputs and on the validation split."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """FP32 answers on the golden inputs, which artifacts are compared with: those of an imported graph.

    Attributes:
        golden: golden inputs and answers.
        exits: loops that answer, in rising order; the last one is the full graph.
        needed: exit → parameters that its graph needs.
        loops: how often a step artifact runs its loop graph; None without step artifacts.
        max_positions: tokens that the model takes; None: any number.
        rejection_hint: appended to the reason where an artifact is out of tolerance.
    """

    task: Task
    golden: Golden
    needed: Mapping[int, int]
    exits: tuple[int, ...] = (0,)
    loops: int | None = None
    max_positions: int | None = None
    rejection_hint: str = ""

    @property
    def last(self) -> int:
        """Exit of the full graph."""
        return self.exits[-1]

    def golden_outputs(self, run: Run, max_rows: int | None = None) -> Any:
        """Run the golden inputs, at most ``max_rows`` per call (None: any number)."""
        return self.task.golden_outputs(self.golden, run, max_rows)

    def parity(
        self, exit_: int, outputs: Any, precision: Precision, provider: str, positions: Positions = None
    ) -> Parity:
        """Compare outputs on the golden inputs with the reference's; ``positions``: rows or tokens; None: all."""
        return self.task.golden_parity(self.golden.arrays, outputs, None, precision, provider)

    def score(self, exit_: int, outputs: Any, positions: Positions = None) -> Score:
        """Score outputs on the golden inputs, or on ``positions`` of them."""
        return self.task.golden_score(exit_, outputs, self.golden.answers)


@dataclass(frozen=True, kw_only=True)
class Exportable(Reference):
    """A trained model in evaluation mode on the CPU, with torch FP32's answers that its graphs are compared with.

    Attributes:
        parameters: of the full model, each counted once.
        inputs: real validation inputs, int64 [n, S] each.
        answers: right answers, as the task scores them.
        references: exit → torch FP32 logits of the inputs, float32 [rows or tokens, C].
        states: loop → torch FP32 hidden states, float32 [n, S, d].
        leaks: the model sees what it predicts.
    """

    recipe: Recipe
    model_spec: ModelSpec
    model: nn.Module
    parameters: int
    inputs: dict[str, NDArray[np.int64]]
    answers: Mapping[str, Array]
    references: dict[int, Array]
    states: dict[int, Array]
    leaks: bool

    @property
    def adapter(self) -> ModelAdapter:
        """The family's torch half."""
        return self.model_spec.adapter

    def golden_outputs(self, run: Run, max_rows: int | None = None) -> Any:
        """Return a session's logits of the golden inputs, [rows or tokens, C]."""
        logits = split_calls(run, max_rows)(self.inputs)["logits"]
        return logits.reshape(-1, logits.shape[-1])

    def parity(
        self, exit_: int, outputs: Any, precision: Precision, provider: str, positions: Positions = None
    ) -> Parity:
        reference = self.references[exit_]
        return self.task.parity(outputs, reference if positions is None else reference[positions], precision, provider)

    def score(self, exit_: int, outputs: Any, positions: Positions = None) -> Score:
        return self.task.golden_score(exit_, outputs, self.answers, positions, self.recipe.data)


@dataclass(frozen=True)
class Judge:
    """Measures artifacts of one variant against a reference.

    Attributes:
        folder: of the new bundle.
        validation: scores a session on labelled data; None: there is none.
        baseline: FP32's scores per exit, filled in when FP32 is judged; later artifacts are compared with it.
        max_activation: largest absolute activation of the FP32 model on the golden inputs, for FP16's range.
    """

    folder: Path
    reference: Reference
    variant: Variant
    validation: Validation | None
    baseline: Baseline
    max_activation: float = 0.0
    sets_baseline = False
    """Whether FP32's scores become the baseline; that of an imported graph is its own entry."""

    def measure(
        self, session: Session, exit_: int, max_rows: int | None = None, *, validate: bool = True
    ) -> dict[str, Any]:
        """Measure parity and scores of an opened artifact, as fields of its entry; ``reason``: why it is rejected.

        Args:
            max_rows: rows that one call of the artifact takes; None: any number.
            validate: also score the validation data; not for step and decode artifacts.
        """
        outputs = self.reference.golden_outputs(session.run, max_rows)
        run = split_calls(session.run, max_rows) if validate else None
        return self.compare(exit_, outputs, run, session.provider)

    def compare(self, exit_: int, outputs: Any, run: Run | None, provider: str) -> dict[str, Any]:
        """Compare outputs on the golden inputs with the reference; see :meth:`measure`. ``run``: to be validated."""
        precision, task = self.variant.precision, self.reference.task
        parity = self.reference.parity(exit_, outputs, precision, provider)
        reason = self.tolerance_problem(parity)
        if parity.max_abs_error is None:  # no score can be computed from NaN
            return {"parity": parity, "reason": reason}
        golden = self.reference.score(exit_, outputs)
        score = self.validation(run, exit_) if self.validation is not None and run is not None else None
        if score is not None and not isfinite(score.loss):
            return {"parity": parity, "score": golden, "reason": reason or "its loss is not finite on validation text"}
        if self.variant == Variant("fp32") and self.sets_baseline:
            self.baseline.setdefault(exit_, (golden, score))
        elif reason is None and exit_ in self.baseline:  # a rejected FP32 graph may have no score
            golden_baseline, validation_baseline = self.baseline[exit_]
            pair = golden, golden_baseline
            if score is not None and validation_baseline is not None:
                pair = score, validation_baseline
            reason = task.lost(*pair, precision, trimmed=self.variant.trimmed)
        return {"parity": parity, "score": golden, "validation": score, "reason": reason}

    def tolerance_problem(self, parity: Parity) -> str | None:
        """Return why outputs or activations are out of tolerance or of FP16's range, or None."""
        reason = out_of_tolerance(parity)
        if reason is not None:
            return reason + self.reference.rejection_hint
        if self.variant.precision == "fp16" and self.max_activation > FP16_MAX:
            reached = f"an activation reaches {self.max_activation:.3g} on real inputs"
            return f"{reached}; FP16 ends at {FP16_MAX:.0f} (overflow)"
        return None

    def judge_engine(self, entry: ArtifactManifest) -> ArtifactManifest:
        """Add parity and scores to the entry of a builder's artifact that this machine can run, or reject it."""
        parts = {part: self.folder / file for part, file in entry.parts.items()}
        loops = self.reference.loops if entry.role == "step" else None
        files = ArtifactFiles(entry, self.folder / str(entry.file), parts, loops, self.reference.max_positions)
        try:
            with opener_of(entry).open(files, OpenOptions()) as session:
                is_whole, exit_ = entry.role in ("full", "exit"), entry.exit or self.reference.last
                measured = self.measure(session, exit_, max_batch_rows(entry), validate=is_whole)
        except EdgeformerError as error:
            measured = {"reason": str(error)}
        return entry.model_copy(update={**measured, "status": "rejected" if measured["reason"] else "built"})

    def judge_built(self, entry: ArtifactManifest, path: Path, session: Session) -> dict[str, Any]:
        """Measure an ONNX file that a builder made of an FP32 graph, and audit it: fields of its entry."""
        exit_ = entry.exit or self.reference.last
        graph = onnx.load(str(path))
        sharing = audit_sharing(graph, self.reference.needed[exit_])
        parts, measured = weight_parts(graph), self.measure(session, exit_)
        return {
            **measured,
            "reason": measured.get("reason") or stored_twice(sharing),
            "sharing": sharing,
            "parts_bytes": {**parts, "other": max(0, path.stat().st_size - sum(parts.values()))},
            "quantized": dict(sorted(quantized_pairs(graph).items())),
        }

    def add_rounded(self, entry: ArtifactManifest) -> ArtifactManifest:
        """Add scores under providers that compute in fewer bits.

        They are compared by INT8's tolerance, the task score. Step, decode and rejected artifacts stay unchanged.
        """
        if entry.status != "built" or entry.role not in ("full", "exit"):
            return entry
        rounded: dict[str, Rounded] = {}
        for provider in requested_providers(entry, ALL_RUNTIMES):
            if provider_facts(provider).rounds_to is None:
                continue
            files = ArtifactFiles(entry, self.folder / str(entry.file))
            try:
                session = opener_of(entry, provider).open(files, OpenOptions(provider))
            except InputError:
                continue  # the processor lacks the provider
            with session:
                judge = replace(self, variant=Variant("int8"))
                measured = judge.measure(session, entry.exit or self.reference.last)
            rounded[provider] = Rounded.model_validate(measured)
        return entry.model_copy(update={"rounded": rounded})


@dataclass(frozen=True)
class RunJudge(Judge):
    """Describes and judges the graphs that were traced from a trained run; ``vocabulary``: what trimming did."""

    reference: Exportable
    vocabulary: Vocabulary | None = None
    sets_baseline = True

    def judge_all(self, written: Written) -> Iterator[ArtifactManifest]:
        """Yield every artifact, the full graph first; each runs when the previous one was consumed."""
        drift, references = None, self.reference.states
        if len(references) > 1:
            with OnnxSession(probe_path(self.folder, self.variant)) as session:
                states = session.run(self.reference.inputs)
            by_loop = {loop: states[state_name(loop)] for loop in references}
            drift = measure_drift(by_loop, references, self.variant.precision)
        for exit_ in written.exits:
            yield self.judge_graph(written, exit_, drift if exit_ == self.reference.last else None)
        if written.steps:
            yield self.judge_steps(written)
        if written.decode is not None:
            yield self.judge_decode(written)

    def judge_graph(self, written: Written, exit_: int, drift: Drift | None) -> ArtifactManifest:
        """Judge the full graph, or the one up to an exit."""
        is_full = exit_ == self.reference.last
        file = written.exits[exit_]
        with OnnxSession(self.folder / file) as session:
            measured = self.measure(session, exit_)
        role = {"role": "full", "exit": None} if is_full else {"role": "exit", "exit": exit_}
        id_ = self.variant.id("" if is_full else f"exit{exit_}")
        return self._manifest(
            id_, {LOOP: file}, written, self.reference.needed[exit_], {**measured, **role, "drift": drift}
        )

    def judge_steps(self, written: Written) -> ArtifactManifest:
        """Judge embed, loop and readouts, run in turn through all loops, on the golden inputs."""
        paths = {part: self.folder / file for part, file in written.steps.items()}
        with StepSession(paths, len(self.reference.states)) as session:
            measured = self.measure(session, self.reference.last, validate=False)
        fields = {**measured, "role": "step", "parts": written.steps}
        return self._manifest(self.variant.id("step"), written.steps, written, self.reference.parameters, fields)

    def judge_decode(self, written: Written) -> ArtifactManifest:
        """Judge the graph with caches: half of every golden window in one call, then token by token."""
        last, ids, precision = self.reference.last, self.reference.inputs["input_ids"], self.variant.precision
        file, half = str(written.decode), ids.shape[1] // 2
        with OnnxSession(self.folder / file) as session:
            logits = decode_windows(session, ids, half)
            provider = session.provider
        # Flat positions of the answered tokens: of every window the second half, and the token before it.
        positions = np.arange(ids.size).reshape(ids.shape)[:, half - 1 :].reshape(-1)
        logits = logits.reshape(-1, logits.shape[-1])
        parity = self.reference.parity(last, logits, precision, provider, positions)
        reason = self.tolerance_problem(parity)
        score = None if parity.max_abs_error is None else self.reference.score(last, logits, positions)
        if reason is None and score is not None and precision != "fp32":
            expected = self.reference.score(last, self.reference.references[last][positions], positions)
            reason = self.reference.task.lost(score, expected, precision, trimmed=self.variant.trimmed)
        fields: dict[str, Any] = {"parity": parity, "score": score, "reason": reason, "role": "decode"}
        return self._manifest(self.variant.id("decode"), {LOOP: file}, written, self.reference.needed[last], fields)

    def _manifest(
        self, id_: str, files: Mapping[str, str], written: Written, needed: int, fields: dict[str, Any]
    ) -> ArtifactManifest:
        """Audit the files of one artifact (part → file) and combine that with what was measured."""
        paths = {part: self.folder / file for part, file in files.items()}
        graphs = {part: onnx.load(str(path), load_external_data=False) for part, path in paths.items()}
        # Activations are inspected once per precision: exits and parts compute the same ones, FP16 rounds FP32's.
        inspects_values = fields.get("role") == "full" and self.variant.precision != "fp16"
        audit = audit_graphs(paths, graphs, needed, self.reference.inputs if inspects_values else None)
        reason = fields.pop("reason", None) or stored_twice(audit["sharing"])
        inputs, outputs = describe_io(graphs[LOOP])
        size_bytes = sum(written.size_bytes[file] for file in files.values())
        parts = sum_counts(map(weight_parts, graphs.values()))
        return ArtifactManifest.model_validate(
            {
                "id": id_,
                "file": files[LOOP],
                "format": ONNX,
                "precision": self.variant.precision,
                "trimmed": self.variant.trimmed,
                "vocabulary": self.vocabulary,
                "status": "rejected" if reason else "built",
                "reason": reason,
                "size_bytes": size_bytes,
                "weights_file": self.variant.weights if (self.folder / self.variant.weights).is_file() else None,
                "inputs": inputs,
                "outputs": outputs,
                "parts_bytes": {**parts, "other": max(0, size_bytes - sum(parts.values()))},
                **audit,
                **fields,
            }
        )


def audit_graphs(
    paths: Mapping[str, Path], graphs: Mapping[str, onnx.ModelProto], needed: int,
    feed: Mapping[str, Array] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Audit the graphs of one artifact, part → graph: fields of its entry. See :func:`audit_portability`."""
    # The parts of a step bundle hold different parameters; together they must hold each once.
    audits = [audit_sharing(graph, needed).model_dump(exclude={"unique_parameters"}) for graph in graphs.values()]
    portability = audit_portability(list(paths.values()), feed)
    tensors = [tensor for graph in graphs.values() for tensor in graph.graph.initializer]
    is_fp16 = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in tensors)
    float32 = sum_counts(map(float32_operators, graphs.values())) if is_fp16 else {}
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

    Args:
        size_bytes: including weights beside the graph.
        unique_parameters: of the graph that it was converted from.
    """
    graph = onnx.load(str(path), load_external_data=False)
    fields = {**audit_graphs({LOOP: path}, {LOOP: graph}, unique_parameters), "size_bytes": size_bytes}
    stored = fields["sharing"].stored_parameters
    if not {"MatMulNBits", "GatherBlockQuantized"} & fields["quantized"].keys():  # two numbers in a byte
        stored = read_outline(path).parameters - count_quantization_numbers(graph)
        fields["sharing"] = fields["sharing"].model_copy(update={"stored_parameters": stored})
    if stored > MAX_STORED_RATIO * unique_parameters:
        fields["reason"] = f"stores {stored:,} numbers, the graph that it was made of {unique_parameters:,}"
    return fields


def measure_drift(states: Mapping[int, Array], references: Mapping[int, Array], precision: Precision) -> Drift:
    """Compare states of the golden inputs, loop → float32 [B, S, C], with those of torch FP32."""
    tolerance = DRIFT_TOLERANCE[precision]
    loops = []
    for loop, reference in sorted(references.items()):
        error = states[loop].astype(np.float64) - reference
        scale, rms = (float(np.sqrt(np.square(array, dtype=np.float64).mean())) for array in (reference, error))
        if np.isfinite(error).all() and scale > 0:
            max_error = float(np.abs(error).max()) / scale
            loops.append(LoopDrift(loop=loop, rms_error=rms / scale, max_error=max_error))
        else:
            loops.append(LoopDrift(loop=loop, rms_error=None, max_error=None))
    beyond = [row.loop for row in loops if row.rms_error is None or row.rms_error > tolerance]
    return Drift(tolerance=tolerance, loops=tuple(loops), first_beyond=beyond[0] if beyond else None)
