"""Judge exported artifacts: parity with the FP32 reference, task score, weights stored once, drift, rejection.

The reference is torch FP32 for a trained run (:class:`~edgeformer.export.run_source.Exportable`) and the FP32 graph for
an imported one (:class:`~edgeformer.export.graph_source.GraphReference`). Every artifact runs on real golden inputs.
"""

from __future__ import annotations

import timeit
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx

from edgeformer.artifacts.bundle_files import lacks_parity
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import sha256_of
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
from edgeformer.export.int8 import quantized_nodes, quantized_pairs
from edgeformer.export.variants import Variant
from edgeformer.models.tracing import OPSET, state_name
from edgeformer.runtimes import ArtifactFiles, OpenOptions, cannot_run, library_versions, opener_of, rounding_providers
from edgeformer.runtimes.onnxruntime.decode import StepSession, decode_windows
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.session import Array, Session
from edgeformer.tasks import Run, Task
from edgeformer.tasks.parity import out_of_tolerance
from edgeformer.tasks.scoring import Validation, max_batch_rows, split_calls

if TYPE_CHECKING:
    from edgeformer.export.run_source import Exportable

DRIFT_TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-2, "int8": 1e-1, "int4": 3e-1}
"""Relative to the root mean square of torch FP32's state; fixed here like the tolerances of the logits."""

MAX_STORED_RATIO = 1.05
"""Largest ratio of stored numbers to parameters of a converted foreign graph: it may store small constants twice."""

_ROUNDS, _CALLS = 7, 3
"""Repetitions when the step bundle is timed against the full graph."""

Baseline = dict[int, tuple[Score, Score | None]]
"""Exit → FP32's score on the golden inputs and on the validation split."""


class Reference(Protocol):
    """FP32 answers that artifacts are compared with.

    Attributes:
        last: exit of the full graph.
        needed: exit → parameters that its graph needs.
        loops: how often a step artifact runs its loop graph; None without step artifacts.
        max_positions: tokens that the model takes; None: any number.
        rejection_hint: appended to the reason where an artifact is out of tolerance.
    """

    @property
    def task(self) -> Task: ...
    @property
    def last(self) -> int: ...
    @property
    def needed(self) -> Mapping[int, int]: ...
    @property
    def loops(self) -> int | None: ...
    @property
    def max_positions(self) -> int | None: ...
    @property
    def rejection_hint(self) -> str: ...

    def golden_outputs(self, run: Run, max_rows: int | None = None) -> Any:
        """Run the golden inputs, at most ``max_rows`` per call (None: any number)."""

    def parity(self, exit_: int, outputs: Any, precision: Precision, provider: str) -> Parity:
        """Compare outputs on the golden inputs with the reference's."""

    def score(self, exit_: int, outputs: Any) -> Score:
        """Score outputs on the golden inputs."""


@dataclass(frozen=True)
class Judge:
    """Measures artifacts of one variant against a reference.

    Attributes:
        folder: of the new bundle.
        validation: scores a session on labelled data; None: there is none.
        baseline: FP32's scores per exit, filled in when FP32 is judged; all other artifacts are compared with it.
        max_activation: largest absolute activation of the FP32 model on the golden inputs, for FP16's range.
        sets_baseline: FP32's scores become the baseline. False for imported graphs, whose baseline is their own entry.
    """

    folder: Path
    reference: Reference
    variant: Variant
    validation: Validation | None
    baseline: Baseline
    max_activation: float = 0.0
    sets_baseline: bool = True

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

    def exit_of(self, entry: ArtifactManifest) -> int:
        """Exit that an artifact answers at."""
        return self.reference.last if entry.exit is None else entry.exit

    def judge_engine(self, entry: ArtifactManifest) -> ArtifactManifest:
        """Add parity and scores to the entry of a builder's artifact, or reject it.

        Unchanged: one that the builder compared already, and one that cannot run on this machine.
        """
        if not lacks_parity(entry) or cannot_run(entry) is not None:
            return entry
        parts = {part: self.folder / file for part, file in entry.parts.items()}
        loops = self.reference.loops if entry.role == "step" else None
        files = ArtifactFiles(entry, self.folder / str(entry.file), parts, loops, self.reference.max_positions)
        try:
            with opener_of(entry).open(files, OpenOptions()) as session:
                is_whole = entry.role in ("full", "exit")
                measured = self.measure(session, self.exit_of(entry), max_batch_rows(entry), validate=is_whole)
        except EdgeformerError as error:
            measured = {"reason": str(error)}
        return entry.model_copy(update={**measured, "status": "rejected" if measured["reason"] else "built"})

    def judge_built(self, entry: ArtifactManifest, path: Path, session: Session) -> dict[str, Any]:
        """Measure an ONNX file that a builder made of an FP32 graph, and audit it: fields of its entry."""
        exit_ = self.exit_of(entry)
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
        """Add scores under providers that compute in fewer bits (:func:`edgeformer.runtimes.rounding_providers`).

        They are compared by INT8's tolerance, the task score. Step, decode and rejected artifacts stay unchanged.
        """
        if entry.status != "built" or entry.role not in ("full", "exit"):
            return entry
        rounded: dict[str, Rounded] = {}
        for provider in rounding_providers(entry):
            files = ArtifactFiles(entry, self.folder / str(entry.file))
            try:
                session = opener_of(entry, provider).open(files, OpenOptions(provider))
            except InputError:
                continue  # the processor lacks the provider
            with session:
                measured = replace(self, variant=Variant("int8")).measure(session, self.exit_of(entry))
            rounded[provider] = Rounded.model_validate(measured)
        return entry.model_copy(update={"rounded": rounded})


@dataclass(frozen=True)
class RunJudge(Judge):
    """Describes and judges the graphs that were traced from a trained run.

    Attributes:
        vocabulary: what trimming did; of a trimmed variant.
    """

    reference: Exportable
    vocabulary: Vocabulary | None = None

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
        with self._open_steps(written) as session:
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

    def step_note(self, written: Written) -> str:
        """Time the step bundle against the full graph on this host, and say from how many loops on which one wins."""
        with (
            # The sessions take turns on the same cores, so none may keep threads spinning between its calls.
            OnnxSession(self.folder / written.exits[self.reference.last], in_turns=True) as full,
            self._open_steps(written, (1,)) as one_loop,
            self._open_steps(written) as all_loops,
        ):
            inputs, sessions = self.reference.inputs, (full, one_loop, all_loops)
            mask = inputs.get("attention_mask", np.ones_like(inputs["input_ids"]))
            longest = int(mask.sum(-1).argmax())
            row = {name: array[longest : longest + 1, : int(mask[longest].sum())] for name, array in inputs.items()}
            for session in sessions:
                session.run(row)
            # Interleaved A B C A B C; the ratio of medians is taken per round, so a slow moment affects all three.
            rounds = [
                [median(timeit.repeat(partial(session.run, row), number=1, repeat=_CALLS)) for session in sessions]
                for _ in range(_ROUNDS)
            ]
        loops, length = len(self.reference.states), row["input_ids"].shape[1]
        ratios = sorted(all_s / full_s for full_s, _, all_s in rounds)
        break_even = median(
            1 + (loops - 1) * (full_s - one_s) / max(all_s - one_s, 1e-12) for full_s, one_s, all_s in rounds
        )
        measured = (
            f"step bundle ({self.variant.precision}): {median(ratios):.2f}× the time of the full graph over all "
            f"{loops} loops ({ratios[0]:.2f}–{ratios[-1]:.2f}, 1×{length} tokens, this host)"
        )
        if break_even <= 1:
            return f"{measured}; even one loop takes longer than the full graph: deploy that, or an exit of its own"
        if break_even >= loops:
            return f"{measured}; it costs nothing extra, and every loop that an input does not need is time won"
        return (
            f"{measured}; it wins where inputs need fewer than {break_even:.1f} loops on average, "
            "the full graph above that"
        )

    def _open_steps(self, written: Written, exits: tuple[int, ...] = ()) -> StepSession:
        paths = {part: self.folder / file for part, file in written.steps.items()}
        return StepSession(paths, len(self.reference.states), exits=exits)

    def _manifest(
        self, id_: str, files: Mapping[str, str], written: Written, needed: int, fields: dict[str, Any]
    ) -> ArtifactManifest:
        """Audit the files of one artifact (part → file) and combine that with what was measured."""
        paths = {part: self.folder / file for part, file in files.items()}
        graphs = {part: onnx.load(str(path), load_external_data=False) for part, path in paths.items()}
        # The parts of a step bundle hold different parameters; together they must hold each once.
        audits = [audit_sharing(graph, needed).model_dump(exclude={"unique_parameters"}) for graph in graphs.values()]
        sharing = Sharing(unique_parameters=needed, **sum_counts(audits))
        precision = self.variant.precision
        # Activations are inspected once per precision: exits and parts compute the same ones, FP16 rounds FP32's.
        inspects_values = fields.get("role") == "full" and precision != "fp16"
        reason = fields.pop("reason", None) or stored_twice(sharing)
        inputs, outputs = describe_io(graphs[LOOP])
        size_bytes = sum(written.size_bytes[file] for file in files.values())
        parts = sum_counts(map(weight_parts, graphs.values()))
        counts = sum_counts(map(float32_operators if precision == "fp16" else quantized_nodes, graphs.values()))
        operators = dict(sorted(counts.items()))
        return ArtifactManifest.model_validate(
            {
                "id": id_,
                "file": files[LOOP],
                "format": ONNX,
                "precision": precision,
                "trimmed": self.variant.trimmed,
                "vocabulary": self.vocabulary,
                "status": "rejected" if reason else "built",
                "reason": reason,
                "size_bytes": size_bytes,
                "sha256": sha256_of(paths[LOOP]),
                "weights_file": self.variant.weights if (self.folder / self.variant.weights).is_file() else None,
                "inputs": inputs,
                "outputs": outputs,
                "opset": OPSET,
                "ops_in_fp32": operators if precision == "fp16" else {},
                "quantized": operators if precision in ("int8", "int4") else {},
                "sharing": sharing,
                "portability": audit_portability(
                    list(paths.values()), self.reference.inputs if inspects_values else None
                ),
                "parts_bytes": {**parts, "other": max(0, size_bytes - sum(parts.values()))},
                "built_with": _versions("torch", "onnx", "onnxscript", "onnxruntime"),
                **fields,
            }
        )


def _versions(*libraries: str) -> dict[str, str]:
    return {name: version for name, version in library_versions().items() if name in libraries}


def describe_converted(path: Path, size_bytes: int, base: ArtifactManifest) -> dict[str, Any]:
    """Audit a converted foreign graph: fields of its entry, with a ``reason`` where it stores too many numbers.

    Args:
        size_bytes: including weights beside the graph.
        base: entry of the graph that it was converted from.
    """
    outline, graph = read_outline(path), onnx.load(str(path), load_external_data=False)
    unique = base.sharing.unique_parameters if base.sharing is not None else outline.parameters
    quantized, stored = quantized_nodes(graph), outline.parameters - count_quantization_numbers(graph)
    if "MatMulNBits" in quantized or "GatherBlockQuantized" in quantized:  # two numbers in a byte, scales beside them
        stored = audit_sharing(graph, unique).stored_parameters
    fields: dict[str, Any] = {
        "sharing": Sharing(unique_parameters=unique, stored_parameters=stored, weight_bytes=outline.weight_bytes),
        "size_bytes": size_bytes,
        "sha256": sha256_of(path),
        "opset": outline.opsets.get(""),
        "ops_in_fp32": float32_operators(graph) if outline.stored["float16"] > 0 else {},
        "quantized": quantized,
        "portability": audit_portability([path]),
        "built_with": _versions("onnx", "onnxruntime"),
    }
    if stored > MAX_STORED_RATIO * unique:
        fields["reason"] = f"stores {stored:,} numbers, the graph that it was made of {unique:,}"
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
