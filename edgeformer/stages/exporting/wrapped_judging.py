"""Graphs that were made of a wrapped one: what they store, how close their outputs are to its own, and their scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from edgeformer.backends import ArtifactFiles, OpenOptions, cannot_run, library_versions, opener_of
from edgeformer.backends.onnxruntime.session import OnnxSession
from edgeformer.backends.session import Session
from edgeformer.bundle import Bundle
from edgeformer.formats.errors import DataError, EdgeformerError, InputError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.manifest import ArtifactManifest, Precision, Sharing
from edgeformer.formats.onnx_outline import read_outline
from edgeformer.formats.progress import Progress, bar
from edgeformer.formats.scores import Score
from edgeformer.formats.target_record import lacks_parity
from edgeformer.stages.exporting.audit import audit_sharing, count_quantization_numbers, float32_operators
from edgeformer.stages.exporting.int8 import quantized_nodes
from edgeformer.tasks import Origin, Run
from edgeformer.tasks.parity import out_of_tolerance
from edgeformer.tasks.running import score_batches
from edgeformer.tasks.validation import in_pieces, most_rows

_LIBRARIES = ("onnx", "onnxruntime")
_MORE_STORED = 1.05
"""A graph may store that many times the numbers of the one that it was made of: small constants twice."""
_BATCH = 32


def describe_graph(path: Path, size_bytes: int, base: ArtifactManifest) -> dict[str, Any]:
    """What a graph's file says of itself, as fields of its entry; with a ``reason`` where it stores too much.

    Args:
        size_bytes: with weights beside it.
        base: the graph that it was made of.
    """
    outline, graph = read_outline(path), onnx.load(str(path), load_external_data=False)
    narrow = outline.stored["float16"] > 0
    unique = base.sharing.unique_parameters if base.sharing is not None else outline.parameters
    quantized, stored = quantized_nodes(graph), outline.parameters - count_quantization_numbers(graph)
    if "MatMulNBits" in quantized or "GatherBlockQuantized" in quantized:  # two numbers lie in a byte, scales beside
        stored = audit_sharing(graph, unique).stored_parameters
    sharing = Sharing(unique_parameters=unique, stored_parameters=stored, weight_bytes=outline.weight_bytes)
    versions = library_versions()
    facts: dict[str, Any] = {
        "sharing": sharing,
        "size_bytes": size_bytes,
        "sha256": sha256_of(path),
        "opset": outline.opsets.get(""),
        "ops_in_fp32": float32_operators(graph) if narrow else {},
        "quantized": quantized,
        "built_with": {name: versions[name] for name in _LIBRARIES if name in versions},
    }
    if stored > _MORE_STORED * unique:
        facts["reason"] = f"stores {stored:,} numbers, the graph that it was made of {unique:,}"
    return facts


def judge_graph(
    path: Path, precision: Precision, bundle: Bundle, notes: list[str], progress: Progress
) -> dict[str, Any]:
    """Parity and scores of a graph's file; see :func:`judge_session`."""
    with OnnxSession(path) as session:
        return judge_session(session, precision, bundle, notes, progress)


def judge_engine(
    made: ArtifactManifest, path: Path, bundle: Bundle, notes: list[str], progress: Progress
) -> ArtifactManifest:
    """What a builder made with parity and scores, rejected where it misses a bar; as it is where it cannot run here."""
    if not lacks_parity(made) or cannot_run(made) is not None:
        return made
    files = ArtifactFiles(made, path, max_positions=bundle.manifest.max_positions)
    try:
        with opener_of(made).open(files, OpenOptions()) as session:
            found = judge_session(session, made.precision, bundle, notes, progress, most_rows(made))
    except EdgeformerError as error:
        found = {"reason": str(error)}
    return made.model_copy(update={**found, "status": "rejected" if found["reason"] else "built"})


def judge_session(
    session: Session,
    precision: Precision,
    bundle: Bundle,
    notes: list[str],
    progress: Progress,
    most: int | None = None,
) -> dict[str, Any]:
    """Parity and scores, as fields of an entry, and the ``reason`` why it is rejected (None: it is not).

    Args:
        session: the opened artifact.
        bundle: holds the golden inputs and the graph that it was made of, which comes first.
        notes: gets what a reader of the scores must know.
        progress: is told of rows.
        most: rows that one call takes; None: any number.
    """
    task, golden, base = bundle.task, bundle.golden(), bundle.artifacts[0]
    outputs = task.golden_outputs(golden, session.run, most)
    parity = task.golden_parity(golden.arrays, outputs, None, precision, session.provider)
    reason = out_of_tolerance(parity)
    if parity.max_abs_error is None:
        return {"parity": parity, "reason": reason}
    run = in_pieces(session.run, most)
    validation = _validation(bundle, run, notes, progress) if reason is None else None
    score = task.golden_score(0, outputs, golden.answers)
    if reason is not None:
        return {"parity": parity, "score": score, "reason": reason + _drawn(bundle)}
    found, wanted = (validation, base.validation) if validation is not None else (score, base.score)
    lost = task.lost(found, wanted, precision, trimmed=False) if wanted is not None else None
    return {"parity": parity, "score": score, "validation": validation, "reason": lost}


def _validation(bundle: Bundle, run: Run, notes: list[str], progress: Progress) -> Score | None:
    """The score on the labelled data that the bundle was wrapped with; None: it had none, or it is not there now."""
    if bundle.artifacts[0].validation is None:
        return None
    task, reader = bundle.task, bundle.reader()
    try:
        rows = task.read_set(bundle.data, reader, "test", Origin())
    except (DataError, InputError) as error:
        notes.append(f"scores: the labelled data cannot be read ({error}), so they are of the golden inputs")
        return None
    meter, batches = task.meter(), task.call_batches(rows, _BATCH, reader.vocabulary)
    with bar(progress, "Scoring on the labelled file", len(rows), "rows"):
        arrays = (task.batch(rows, numbers, reader.pad) for numbers in batches)
        score_batches(run, arrays, meter, warm_up=False, advance=progress.advance)
    return meter.score()


def _drawn(bundle: Bundle) -> str:
    """What to do about a rejection on inputs that nobody has ever given to the model."""
    note = next((note for note in bundle.manifest.notes if "seed" in note), None)
    return "" if note is None else "; its golden inputs were drawn: wrap it with real ones (--inputs FILE.npz)"
