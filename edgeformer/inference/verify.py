"""Verify: compare files with the checksums in bundle.json, and outputs on the golden inputs with the FP32 reference.

The reference outputs are torch FP32's (of an imported graph its own FP32 outputs). INT8 and INT4 are compared with the
error that export recorded.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from edgeformer.artifacts.bundle_files import TARGETS_FILE, FileCheck, TargetRecord, files_sha256, lacks_parity
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.artifacts.files import sha256_of, write_json
from edgeformer.artifacts.golden import GoldenError
from edgeformer.artifacts.manifest import ArtifactManifest, Precision
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.scores import Score
from edgeformer.artifacts.workspace import BUNDLE_FILE, REPORTS_FOLDER
from edgeformer.bundle import Bundle
from edgeformer.inference.verification import ArtifactCheck, Recorded, Verification
from edgeformer.measurement.resident import measure_resident
from edgeformer.report.sentences import portability_notes, portability_notes_here
from edgeformer.runtimes import (
    ALL_RUNTIMES,
    OpenOptions,
    cannot_run,
    library_versions,
    provider_facts,
    requested_providers,
    runtime_of,
)
from edgeformer.system import cuda_driver, nvidia
from edgeformer.system.capability import cpu_flags, installed_version
from edgeformer.system.host import code_version, cpu_name, now
from edgeformer.tasks import Origin, RowSource
from edgeformer.tasks.metric import FP16_RELATIVE, out_of_tolerance
from edgeformer.tasks.scoring import max_batch_rows, open_validation, split_calls

INT8_ERROR_FACTOR = 2.0
"""INT8 kernels round differently on other processors: the largest error may be this many times export's …"""

INT8_AGREEMENT_LOSS = 0.02  # … and the top-1 agreement may be lower by this much, or by two rows

_ALLOWED_ROWS = 2.5  # two rows, with a margin for rounding


def verify(
    bundle: Bundle, artifact: str | None = None, progress: Progress = SILENT, runtime: str | None = None
) -> Verification:
    """Check a bundle on this machine, without torch and without the data set. Raises ArtifactError, InputError.

    Args:
        bundle: opened just before: files that it has hashed are not hashed again.
        artifact: run this artifact only; the files of all artifacts are checked in any case.
        runtime: one check for each of its providers; None: one check with the default provider.
    """
    stale = tuple(filter(None, (record.why_refused(bundle.manifest) for record in bundle.records.records)))
    entries = bundle.artifacts if artifact is None else (bundle.artifact(artifact),)
    # All files that bundle.json names, and others, except hidden ones, targets.json and reports.
    needed = {name for artifact in bundle.built() for name in bundle.contents.needed_by(artifact)}
    expected = sorted({*bundle.contents.checksums, *needed})
    files, checks = list[FileCheck](), list[ArtifactCheck]()
    with bar(progress, "Checking files", len(expected), "files"):
        for name in expected:
            files.append(bundle.contents.inspect(name))
            progress.advance()
    for path in sorted(path.relative_to(bundle.folder) for path in bundle.folder.rglob("*") if path.is_file()):
        is_skipped = path.parts[0] in (REPORTS_FOLDER, TARGETS_FILE) or any(part.startswith(".") for part in path.parts)
        name = path.as_posix()
        if not is_skipped and name not in expected and name != BUNDLE_FILE:
            files.append(FileCheck(file=name, status="unexpected", detail="not in bundle.json"))
    with bar(progress, "Running golden inputs", len(entries), "artifacts"):
        for entry in entries:
            providers: tuple[str | None, ...] = (None,)
            if runtime is not None and entry.status == "built":
                # A provider that rounds is checked only if export ran it, too: else there is nothing to compare with.
                providers = tuple(
                    provider
                    for provider in requested_providers(entry, runtime)
                    if provider_facts(provider).rounds_to is None or provider in entry.rounded
                )
            checks += [_check_artifact(bundle, entry, provider) for provider in providers]
            progress.advance()
    return Verification(
        bundle=str(bundle.folder), run=bundle.name, manifest_sha256=sha256_of(bundle.folder / BUNDLE_FILE),
        wrapped=bundle.manifest.wrapped, manifest_protected=bundle.manifest.manifest_sha256 is not None,
        files=tuple(files), artifacts=tuple(checks), asked=artifact is not None or runtime not in (None, ALL_RUNTIMES),
        stale=stale,
    )  # fmt: skip


def _check_artifact(bundle: Bundle, artifact: ArtifactManifest, provider: str | None) -> ArtifactCheck:
    """Run one artifact on the golden inputs. Errors are reported in the result, not raised."""
    audit, notes = artifact.portability, tuple[str, ...]()
    if audit is not None:
        version = library_versions().get("onnxruntime", "0")
        notes = (*portability_notes_here(audit, version, cpu_flags()), *portability_notes(audit))
    check = ArtifactCheck(
        artifact=artifact.id, role=artifact.role, precision=artifact.precision, status="unavailable", notes=notes
    )

    def because(reason: object, status: str = "unavailable") -> ArtifactCheck:
        return check.model_copy(update={"status": status, "reason": str(reason)})

    # 1. What it needs is there
    if artifact.status != "built" or artifact.file is None:
        return because(f"{artifact.status} at export: {artifact.reason}")
    for name in bundle.contents.needed_by(artifact):
        file = bundle.contents.inspect(name)
        if file.status != "intact":
            detail = f" ({file.detail})" if file.detail else ""
            return because(f"{name} is {file.status}{detail}", "damaged")
    refusal = cannot_run(artifact, provider)
    if refusal is not None:
        return because(refusal)
    try:
        golden = bundle.golden(artifact)
    except ArtifactError as error:
        return because(f"there are no golden outputs to compare with: {error}")
    # 2. Run it
    try:
        with bundle.session(artifact, OpenOptions(provider, exact=True)) as session:
            outputs = bundle.task.golden_outputs(golden, session.run, max_batch_rows(artifact))
            used_provider = session.provider
        exits = bundle.manifest.exits
        loop = (exits[-1] if exits else None) if artifact.exit is None else artifact.exit
        rounds = provider_facts(used_provider).rounds_to is not None
        precision: Precision = "int8" if rounds else artifact.precision  # the tolerance that export used
        parity = bundle.task.golden_parity(golden.arrays, outputs, loop, precision, used_provider)
    except (MissingDependencyError, GoldenError) as error:
        return because(error)
    except ArtifactError as error:
        return because(error, "damaged")
    except EdgeformerError as error:
        return because(error, "failed")
    # 3. Compare its outputs. Export judged INT8 by its task score, which needs the data set; here it must be about as
    # close to torch as there.
    rounded = artifact.rounded.get(used_provider) if rounds else None
    recorded = artifact.parity if rounded is None else rounded.parity
    tolerance: str | None = None
    problem = out_of_tolerance(parity)
    if parity.tolerance is not None:
        tolerance = f"{parity.tolerance_kind} error ≤ {parity.tolerance:.0e}"
    elif recorded is None or recorded.max_abs_error is None or recorded.top1_agreement is None:
        problem = problem or "bundle.json records no error from export; export the run again"
    elif parity.max_abs_error is not None and parity.top1_agreement is not None:
        spread = parity.max_abs_error / parity.relative_error if parity.relative_error else 0.0
        max_error = INT8_ERROR_FACTOR * recorded.max_abs_error + FP16_RELATIVE * spread
        min_agreement = recorded.top1_agreement - max(INT8_AGREEMENT_LOSS, _ALLOWED_ROWS / parity.n)
        tolerance, problem = f"error ≤ {max_error:.1e}, agreement ≥ {min_agreement:.1%}", None
        if parity.max_abs_error > max_error:
            at_export = f"({recorded.max_abs_error:.2g} at export)"
            problem = f"error {parity.max_abs_error:.2g} is above {max_error:.2g} {at_export}"
        elif parity.top1_agreement < min_agreement:
            problem = f"agreement {parity.top1_agreement:.1%} is below {min_agreement:.1%}"
    if parity.tolerance is None and lacks_parity(artifact):  # INT8 that export could not run: judged as export would
        tolerance = "score on the golden inputs"
        scores = {"score": golden_score(bundle, artifact, outputs)}
        problem = out_of_tolerance(parity) or score_drop(bundle, artifact, scores)
    update: dict[str, Any] = {
        "parity": parity, "tolerance": tolerance, "status": "failed" if problem else "verified", "reason": problem,
    }  # fmt: skip
    # 4. Measure its memory
    if artifact.sharing is not None:
        memory = measure_resident(bundle, [artifact], used_provider)[artifact.id]
        sharing = artifact.sharing.model_copy(update={"resident_bytes": memory.bytes})
        if memory.reason is None:
            update |= {"resident_bytes": memory.bytes, "resident_ratio": sharing.resident_ratio}
        else:
            update["notes"] = (*notes, f"memory was not measured: {memory.reason}")
    return check.model_copy(update=update)


def golden_score(bundle: Bundle, artifact: ArtifactManifest, outputs: Any) -> Score:
    """Return the score of an artifact's :meth:`Task.golden_outputs`. Raises GoldenError without right answers."""
    task, loop = bundle.task, _answering_loop(bundle, artifact)
    return task.stored_score(bundle.golden(), loop, outputs, bundle.data)


def _answering_loop(bundle: Bundle, artifact: ArtifactManifest) -> int:
    """Return the loop that an artifact answers after; 0: a model without loops."""
    manifest = bundle.manifest
    return artifact.exit or (manifest.exits[-1] if manifest.exits else manifest.loops) or 0


def score_drop(bundle: Bundle, artifact: ArtifactManifest, scores: Mapping[str, Any]) -> str | None:
    """Return by how much an artifact's score is worse than the FP32 graph's on the same rows, if more than allowed."""
    references = [entry for entry in bundle.artifacts if entry.is_graph and entry.precision == "fp32"]
    same_exit = [entry for entry in references if (entry.role, entry.exit) == (artifact.role, artifact.exit)]
    reference = next((entry for entry in same_exit if not entry.trimmed), None)
    for name in ("validation", "score"):
        score: Score | None = scores.get(name)
        expected: Score | None = getattr(reference, name, None)
        if score is not None and not isfinite(score.loss):
            return f"its loss is not finite ({name})"
        if score is not None and expected is not None and score.n == expected.n:
            return bundle.task.lost(score, expected, artifact.precision, trimmed=artifact.trimmed)
    return None


def record(bundle: Bundle, verification: Verification, progress: Progress = SILENT) -> Verification:
    """Score the artifacts that ran here for the first time, as export would have, and add them to targets.json.

    Return the verification with the records that were written, or the reason why there are none. Raises ArtifactError
    for a damaged targets.json, InputError where the bundle is damaged or cannot be written to.
    """
    if verification.damaged:
        raise InputError(
            f"--write: {verification.damaged[0].file} in {bundle.folder} is damaged, so nothing was recorded; copy the "
            "whole bundle again"
        )
    records = []
    for check in verification.artifacts:
        artifact, parity, reason = bundle.artifact(check.artifact), check.parity, check.reason
        if not lacks_parity(artifact) or parity is None or check.status not in ("verified", "failed"):
            continue
        # 1. Its score on the golden inputs, and on the validation split where its data can be read
        scores: dict[str, Any] = {}
        # Step and decode graphs compute what the full graph computes, which is scored.
        if check.status == "verified" and artifact.role in ("full", "exit"):
            task, max_rows = bundle.task, max_batch_rows(artifact)
            with bundle.session(artifact) as session:
                outputs = task.golden_outputs(bundle.golden(artifact), session.run, max_rows)
                scores["score"] = golden_score(bundle, artifact, outputs)
                if isinstance(task, RowSource):
                    # An imported graph has one set of labelled rows, its test set.
                    split = "validation" if bundle.manifest.wrapped is None else "test"
                    reader, origin = bundle.reader(artifact), Origin(bundle.trained_on)
                    validate, missing = open_validation(task, bundle.data, reader, origin, progress, split)
                    if validate is None:
                        scores["unscored"] = missing
                    else:
                        run = split_calls(session.run, max_rows)
                        scores["validation"] = validate(run, _answering_loop(bundle, artifact))
            reason = score_drop(bundle, artifact, scores)
        # 2. The record, which names what computed it
        gpu = next(iter(cuda_driver.devices()), None) if provider_facts(str(parity.provider)).kind == "cuda" else None
        versions = {name: installed_version(name) for name in runtime_of(artifact).distributions}
        versions["driver"] = nvidia.driver_version() if gpu is not None else None
        target_record = TargetRecord(
            artifact=artifact.id, artifact_sha256=str(files_sha256(artifact, bundle.manifest.files)),
            device=gpu.name if gpu is not None else cpu_name(),
            compute_capability=gpu.compute_capability if gpu is not None else None,
            runtime={name: version for name, version in versions.items() if version is not None}, recorded=now(),
            code_version=code_version(), status="failed" if reason else "verified", reason=reason, parity=parity,
            **scores,
        )  # fmt: skip
        records.append(target_record.signed())
    if not records:
        is_pending = any(map(lacks_parity, bundle.artifacts))
        why = "no engine of the bundle runs here" if is_pending else "export already scored every artifact"
        return verification.model_copy(update={"recorded": Recorded(file=None, reason=f"nothing to record: {why}")})
    path = bundle.folder / TARGETS_FILE
    try:
        write_json(path, bundle.records.of(bundle.manifest).with_new(records))
    except OSError as error:
        raise InputError(f"--write: {path} cannot be written: {error.strerror}") from None
    return verification.model_copy(update={"recorded": Recorded(file=str(path), records=tuple(records))})
