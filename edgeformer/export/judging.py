"""What a builder made, compared and scored like any other artifact, where this machine can run it."""

from __future__ import annotations

import timeit
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx

from edgeformer.artifacts.bundle_files import lacks_parity
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, Drift, Rounded, Sharing, Vocabulary
from edgeformer.artifacts.scores import Score
from edgeformer.export.audit import (
    added,
    audit_portability,
    audit_sharing,
    describe_io,
    float32_operators,
    stored_twice,
    weight_parts,
)
from edgeformer.export.exportable import FP16_LARGEST, Array, Exportable, Logits, measure_drift
from edgeformer.export.graphs import LOOP, Written, probe_path
from edgeformer.export.int8 import quantized_nodes, quantized_pairs
from edgeformer.export.variants import Variant
from edgeformer.models.tracing import OPSET, state_name
from edgeformer.runtimes import ArtifactFiles, OpenOptions, cannot_run, library_versions, opener_of, rounding_providers
from edgeformer.runtimes.onnxruntime.decode import StepSession, decode_windows
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.session import Session
from edgeformer.tasks import Run
from edgeformer.tasks.parity import out_of_tolerance
from edgeformer.tasks.scoring import Validation, in_pieces, most_rows


def judged_here(entry: ArtifactManifest, judge: Judge, max_positions: int) -> ArtifactManifest:
    """The entry with parity and scores, rejected where it misses a bar; as it is where it cannot run on this machine.

    Args:
        entry: of a builder. One that the builder compared already is left as it is.
        judge: of its variant.
        max_positions: tokens that the model can take.
    """
    if not lacks_parity(entry) or cannot_run(entry) is not None:
        return entry
    parts = {part: judge.bundle / file for part, file in entry.parts.items()}
    loops = len(judge.subject.states) if entry.role == "step" else None
    files = ArtifactFiles(entry, judge.bundle / str(entry.file), parts, loops, max_positions)
    exit_ = judge.subject.last if entry.exit is None else entry.exit
    try:
        with opener_of(entry).open(files, OpenOptions()) as session:
            found = judge.of_session(exit_, session, most_rows(entry), whole=entry.role in ("full", "exit"))
    except EdgeformerError as error:
        return entry.model_copy(update={"status": "rejected", "reason": str(error)})
    return entry.model_copy(update={**found, "status": "rejected" if found["reason"] else "built"})


# Running what was written, on real inputs: parity, task score, sharing, drift; and may it be deployed?


_ROUNDS, _CALLS = 7, 3  # of timing the step bundle against the full graph
_LIBRARIES = ("torch", "onnx", "onnxscript", "onnxruntime")


Baseline = dict[int, tuple[Score, Score | None]]
"""Exit → FP32's score on the golden inputs and on the validation split."""


@dataclass(frozen=True)
class Judge:
    """Judges the artifacts of one variant.

    Attributes:
        bundle: folder of the new bundle.
        vocabulary: what trimming did; of a trimmed variant.
        largest: largest activation of the FP32 model on the golden inputs.
        baseline: FP32's scores per exit, which the judge of FP32 fills in; all other artifacts are held to it.
    """

    bundle: Path
    subject: Exportable
    variant: Variant
    validation: Validation | None
    vocabulary: Vocabulary | None
    largest: float
    baseline: Baseline

    def all(self, written: Written) -> Iterator[ArtifactManifest]:
        """Every artifact, the full graph first; each is run only when the one before it was taken."""
        drift, references = None, self.subject.states
        if len(references) > 1:
            with OnnxSession(probe_path(self.bundle, self.variant)) as session:
                states = session.run(self.subject.inputs)
            found = {loop: states[state_name(loop)] for loop in references}
            drift = measure_drift(found, references, self.variant.precision)
        for exit_ in written.exits:
            yield self.graph(written, exit_, drift if exit_ == self.subject.last else None)
        if written.steps:
            yield self.steps(written)
        if written.decode is not None:
            yield self.decode(written)

    def graph(self, written: Written, exit_: int, drift: Drift | None) -> ArtifactManifest:
        """The full graph, or the one up to an exit."""
        last = exit_ == self.subject.last
        file = written.exits[exit_]
        with OnnxSession(self.bundle / file) as session:
            seen = self.of_session(exit_, session)
        return self._manifest(
            self.variant.id("" if last else f"exit{exit_}"),
            {LOOP: file},
            (written, self.subject.needed[exit_]),
            {**seen, "drift": drift, "role": "full" if last else "exit", "exit": None if last else exit_},
        )

    def rounded(self, artifact: ArtifactManifest) -> ArtifactManifest:
        """The same, with what it answers in fewer bits; see :func:`edgeformer.runtimes.rounding_providers`.

        Such answers are held to the bar of INT8: by the task score. What was not built, and what is run in parts or
        token by token, stays as it is.
        """
        if artifact.status != "built" or artifact.role not in ("full", "exit"):
            return artifact
        exit_ = self.subject.last if artifact.exit is None else artifact.exit
        found: dict[str, Rounded] = {}
        for provider in rounding_providers(artifact):
            files = ArtifactFiles(artifact, self.bundle / str(artifact.file))
            try:
                session = opener_of(artifact, provider).open(files, OpenOptions(provider))
            except InputError:
                continue  # the processor cannot
            with session:
                seen = replace(self, variant=Variant("int8")).of_session(exit_, session)
            found[provider] = Rounded.model_validate(seen)
        return artifact.model_copy(update={"rounded": found})

    def built(self, entry: ArtifactManifest, path: Path, session: Session) -> dict[str, Any]:
        """Fields of the entry of what a builder made of an FP32 graph: an ONNX file that runs here.

        Args:
            entry: its role and exit.
            path: of the file.
            session: that it is opened with.
        """
        exit_ = self.subject.last if entry.exit is None else entry.exit
        graph = onnx.load(str(path))
        sharing = audit_sharing(graph, self.subject.needed[exit_])
        parts, seen = weight_parts(graph), self.of_session(exit_, session)
        return {
            **seen,
            "reason": seen.get("reason") or stored_twice(sharing),
            "sharing": sharing,
            "parts_bytes": {**parts, "other": max(0, path.stat().st_size - sum(parts.values()))},
            "quantized": dict(sorted(quantized_pairs(graph).items())),
        }

    def of_session(
        self, exit_: int, session: Session, most: int | None = None, *, whole: bool = True
    ) -> dict[str, Any]:
        """Parity and scores of an opened artifact, as fields of its entry, with a ``reason`` where it misses a bar.

        Args:
            most: rows that one of its calls takes; None: any number.
            whole: of a step or decode artifact False: the validation split is left to the full one.
        """
        run = in_pieces(session.run, most)
        logits = _rows(run(self.subject.inputs)["logits"])
        return self._judge(exit_, logits, run if whole else None, session.provider)

    def steps(self, written: Written) -> ArtifactManifest:
        """Embed, loop and readouts, run in turn through all loops."""
        last = self.subject.last
        with self._open_steps(written) as session:
            logits = _rows(session.run(self.subject.inputs)["logits"])
            # Its weights are those of the full graph, which is scored on the validation split.
            seen = self._judge(last, logits, None, session.provider)
        facts = {**seen, "role": "step", "parts": written.steps}
        return self._manifest(self.variant.id("step"), written.steps, (written, self.subject.parameters), facts)

    def step_note(self, written: Written) -> str:
        """Where the step bundle beats the full graph on this host, and where it does not."""
        with (
            # The three take turns on the same cores, so none may keep threads spinning when it is done.
            OnnxSession(self.bundle / written.exits[self.subject.last], in_turns=True) as full,
            self._open_steps(written, (1,)) as first,
            self._open_steps(written) as last,
        ):
            inputs = self.subject.inputs
            mask = inputs.get("attention_mask", np.ones_like(inputs["input_ids"]))
            longest = int(mask.sum(-1).argmax())
            row = {name: array[longest : longest + 1, : int(mask[longest].sum())] for name, array in inputs.items()}
            for session in (full, first, last):
                session.run(row)
            # All take turns, A B C A B C …; of each round the ratio of medians is taken, so that a slower moment of the
            # machine meets all of them.
            rounds = [
                [median(timeit.repeat(partial(one.run, row), number=1, repeat=_CALLS)) for one in (full, first, last)]
                for _ in range(_ROUNDS)
            ]
        loops, length = len(self.subject.states), row["input_ids"].shape[1]
        ratios = sorted(whole / direct for direct, _, whole in rounds)
        even = median(1 + (loops - 1) * (direct - one) / max(whole - one, 1e-12) for direct, one, whole in rounds)
        measured = (
            f"step bundle ({self.variant.precision}): {median(ratios):.2f}× the time of the full graph over all "
            f"{loops} loops ({ratios[0]:.2f}–{ratios[-1]:.2f}, 1×{length} tokens, this host)"
        )
        if even <= 1:
            return f"{measured}; even one loop takes longer than the full graph: deploy that, or an exit of its own"
        if even >= loops:
            return f"{measured}; it costs nothing extra, and every loop that an input does not need is time won"
        return (
            f"{measured}; it wins where inputs need fewer than {even:.1f} loops on average, the full graph above that"
        )

    def _open_steps(self, written: Written, exits: tuple[int, ...] = ()) -> StepSession:
        paths = {part: self.bundle / file for part, file in written.steps.items()}
        return StepSession(paths, len(self.subject.states), exits=exits)

    def decode(self, written: Written) -> ArtifactManifest:
        """The graph with caches: half of every golden window at once, then token by token."""
        assert written.decode is not None
        last, ids = self.subject.last, self.subject.inputs["input_ids"]
        half = ids.shape[1] // 2
        with OnnxSession(self.bundle / written.decode) as session:
            logits = decode_windows(session, ids, half)
            provider = session.provider
        # Flat positions of the tokens that it answers for: of every window, the second half's and the one before.
        rows = np.arange(ids.size).reshape(ids.shape)[:, half - 1 :].reshape(-1)
        found, reference = _rows(logits), self.subject.references[last][rows]
        parity = self.subject.task.parity(found, reference, self.variant.precision, provider)
        reason = out_of_tolerance(parity) or self._overflow()
        score = None if parity.max_abs_error is None else self.subject.score(last, found, rows)
        if reason is None and score is not None and self.variant.precision != "fp32":
            wanted = self.subject.score(last, reference, rows)
            reason = self.subject.task.lost(score, wanted, self.variant.precision, trimmed=self.variant.trimmed)
        facts: dict[str, object] = {"parity": parity, "score": score, "reason": reason, "role": "decode"}
        needed = self.subject.needed[last]
        return self._manifest(self.variant.id("decode"), {LOOP: written.decode}, (written, needed), facts)

    def _judge(self, exit_: int, logits: Logits, run: Run | None, provider: str) -> dict[str, Any]:
        """Parity and scores; ``run`` is left out where the golden inputs are enough."""
        reference = self.subject.references[exit_]
        parity = self.subject.task.parity(logits, reference, self.variant.precision, provider)
        reason = out_of_tolerance(parity) or self._overflow()
        if parity.max_abs_error is None:  # no score can be made of what is not a number
            return {"parity": parity, "reason": reason}
        golden = self.subject.score(exit_, logits)
        score = self.validation(run, exit_) if self.validation is not None and run is not None else None
        if score is not None and not isfinite(score.loss):
            return {"parity": parity, "score": golden, "reason": reason or "its loss is not finite on validation text"}
        if self.variant == Variant("fp32"):
            self.baseline.setdefault(exit_, (golden, score))
        elif reason is None and exit_ in self.baseline:  # a rejected FP32 graph may have no score
            wanted, on_validation = self.baseline[exit_]
            found = golden
            if score is not None and on_validation is not None:
                found, wanted = score, on_validation
            reason = self.subject.task.lost(found, wanted, self.variant.precision, trimmed=self.variant.trimmed)
        return {"parity": parity, "score": golden, "validation": score, "reason": reason}

    def _overflow(self) -> str | None:
        """Why FP16 cannot hold the model's activations; None when it can, or another precision is judged."""
        if self.variant.precision != "fp16" or self.largest <= FP16_LARGEST:
            return None
        return f"an activation reaches {self.largest:.3g} on real inputs; FP16 ends at {FP16_LARGEST:.0f} (overflow)"

    def _manifest(
        self, id_: str, files: Mapping[str, str], about: tuple[Written, int], facts: dict[str, object]
    ) -> ArtifactManifest:
        written, needed = about
        graphs = {part: onnx.load(str(self.bundle / file), load_external_data=False) for part, file in files.items()}
        # The parts of a step bundle hold different parameters; together they must hold each once.
        audits = [audit_sharing(graph, needed).model_dump(exclude={"unique_parameters"}) for graph in graphs.values()]
        sharing = Sharing(unique_parameters=needed, **added(audits))
        # The others are parts of the same, or the same numbers with weights rounded.
        paths = [self.bundle / name for name in files.values()]
        whole = facts.get("role") == "full" and self.variant.precision != "fp16"
        reason = facts.pop("reason", None) or stored_twice(sharing)
        inputs, outputs = describe_io(graphs[LOOP])
        file, precision = files[LOOP], self.variant.precision
        weights = self.bundle / self.variant.weights
        size_bytes = sum(written.size_bytes[name] for name in files.values())
        parts = added(map(weight_parts, graphs.values()))
        counted = added(map(float32_operators if precision == "fp16" else quantized_nodes, graphs.values()))
        return ArtifactManifest.model_validate(
            {
                "id": id_,
                "file": file,
                "format": ONNX,
                "precision": precision,
                "trimmed": self.variant.trimmed,
                "vocabulary": self.vocabulary,
                "status": "rejected" if reason else "built",
                "reason": reason,
                "size_bytes": size_bytes,
                "sha256": sha256_of(self.bundle / file),
                "weights_file": self.variant.weights if weights.is_file() else None,
                "inputs": inputs,
                "outputs": outputs,
                "opset": OPSET,
                "ops_in_fp32": dict(sorted(counted.items())) if precision == "fp16" else {},
                "quantized": dict(sorted(counted.items())) if precision in ("int8", "int4") else {},
                "sharing": sharing,
                "portability": audit_portability(paths, self.subject.inputs if whole else None),
                "parts_bytes": {**parts, "other": max(0, size_bytes - sum(parts.values()))},
                "built_with": {k: v for k, v in library_versions().items() if k in _LIBRARIES},
                **facts,
            }
        )


def _rows(logits: Array) -> Logits:
    """A session's logits in the shape of the references, [rows or tokens, C]."""
    return logits.reshape(-1, logits.shape[-1])
