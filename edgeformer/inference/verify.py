"""What export would have said of an artifact's answers, said where it runs: its score, and what it loses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from edgeformer.artifacts.bundle_files import TARGETS_FILE, FileCheck, TargetRecord, files_sha256, lacks_parity
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.artifacts.files import sha256_of, write_json
from edgeformer.artifacts.golden import GoldenError
from edgeformer.artifacts.manifest import ArtifactManifest, Parity, Precision
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.scores import Score
from edgeformer.artifacts.verification import ArtifactCheck, Recorded, Verification
from edgeformer.artifacts.workspace import BUNDLE_FILE, REPORTS_FOLDER
from edgeformer.bundle import Bundle
from edgeformer.runtimes import ALL_RUNTIMES, OpenOptions, library_versions, provider_facts, providers_asked, runtime_of
from edgeformer.runtimes.session import Session
from edgeformer.system import cuda_driver, nvidia
from edgeformer.system.capability import cpu_flags, installed_version
from edgeformer.system.host import code_version, cpu_name, now
from edgeformer.tasks import Origin
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.tasks.parity import FP16_RELATIVE, out_of_tolerance
from edgeformer.tasks.scoring import in_pieces, most_rows, open_validation


def answering_loop(bundle: Bundle, artifact: ArtifactManifest) -> int:
    """The loop that an artifact answers after; 0: there are none."""
    manifest = bundle.manifest
    return artifact.exit or (manifest.exits[-1] if manifest.exits else manifest.loops) or 0


def golden_score(bundle: Bundle, artifact: ArtifactManifest, outputs: Any) -> Score:
    """The score of what an artifact answers to the golden inputs; ``outputs``: as :meth:`Task.golden_outputs` has them.

    Raises:
        GoldenError: golden.npz does not hold what is needed.
    """
    task, loop = bundle.task, answering_loop(bundle, artifact)
    if not task.reads_text:
        return task.golden_score(loop, outputs, bundle.golden(artifact).answers)
    known = bundle.golden().arrays
    own = known.get(exit_logits(loop))
    right = {name: known[name] for name in task.golden_names[1] if name in known}
    answers = task.right_answers(right, {} if own is None else {loop: own})
    return task.golden_score(loop, outputs.reshape(-1, outputs.shape[-1]), answers, None, bundle.data)


def lost(bundle: Bundle, artifact: ArtifactManifest, scores: Mapping[str, Any]) -> str | None:
    """What it loses against the FP32 graph on the same rows beyond its bar; None: it is within, or nobody can tell.

    Args:
        scores: ``validation`` and ``score`` as in a manifest's entry, as far as they are known.
    """
    whole = [one for one in bundle.artifacts if one.is_graph and one.precision == "fp32" and not one.trimmed]
    base = next((one for one in whole if (one.role, one.exit) == (artifact.role, artifact.exit)), None)
    for name in ("validation", "score"):
        found: Score | None = scores.get(name)
        wanted: Score | None = getattr(base, name, None)
        if found is not None and not isfinite(found.loss):
            return f"its loss is not finite ({name})"
        if found is not None and wanted is not None:
            if found.n != wanted.n:
                continue  # not the same rows
            return bundle.task.lost(found, wanted, artifact.precision, trimmed=artifact.trimmed)
    return None


# verify --write: what this machine found of the artifacts that could not run where they were exported.
#
# Each is scored as export would have scored it: on the golden inputs, and on the validation split where that can be
# read
# here. What is then known of it is what is known of any other artifact.


def record(bundle: Bundle, found: Verification, cache: Path | None = None, progress: Progress = SILENT) -> Verification:
    """Score what ``found`` compared here for the first time, and add it to the bundle's targets.json.

    Args:
        bundle: that was verified.
        found: of it, on this machine.
        cache: where encoded sets are kept; None: nowhere.
        progress: is told of rows.

    Returns:
        ``found`` with what was written, or why nothing was.

    Raises:
        ArtifactError: targets.json is damaged.
        InputError: files of the bundle are not what was exported, or it is not to be written to.
    """
    if found.damaged:
        raise InputError(f"--write: {bundle.folder} is damaged ({found.damaged[0].file}); nothing was recorded")
    records = list(_records(bundle, found, cache, progress))
    if not records:
        why = "export compared every artifact that runs here" if not _left(bundle) else "none of them runs here"
        return found.model_copy(update={"recorded": Recorded(file=None, reason=f"nothing to record: {why}")})
    try:
        path = bundle.folder / TARGETS_FILE
        write_json(path, bundle.records.of(bundle.manifest).with_new(records))
    except OSError as error:
        raise InputError(f"--write: {bundle.folder / TARGETS_FILE} cannot be written: {error.strerror}") from None
    return found.model_copy(update={"recorded": Recorded(file=str(path), records=tuple(records))})


def _left(bundle: Bundle) -> bool:
    return any(map(lacks_parity, bundle.artifacts))


def _records(bundle: Bundle, found: Verification, cache: Path | None, progress: Progress) -> Iterator[TargetRecord]:
    for check in found.artifacts:
        artifact = bundle.artifact(check.artifact)
        if lacks_parity(artifact) and check.parity is not None and check.status in ("verified", "failed"):
            yield _record(bundle, artifact, check, cache, progress).signed()


def _record(
    bundle: Bundle, artifact: ArtifactManifest, check: ArtifactCheck, cache: Path | None, progress: Progress
) -> TargetRecord:
    parity, scores = check.parity, dict[str, Any]()
    assert parity is not None
    gpu = next(iter(cuda_driver.devices()), None) if provider_facts(str(parity.provider)).kind == "cuda" else None
    runtime = {name: installed_version(name) for name in runtime_of(artifact).distributions}
    runtime["driver"] = nvidia.driver_version() if gpu is not None else None
    reason = check.reason
    # Steps and decode graphs compute what the full graph computes, which is scored.
    if check.status == "verified" and artifact.role in ("full", "exit"):
        with bundle.session(artifact) as session:
            scores = _scores(bundle, artifact, session, cache, progress)
        reason = lost(bundle, artifact, scores)
    return TargetRecord(
        artifact=artifact.id,
        artifact_sha256=str(files_sha256(artifact, bundle.manifest.files)),
        device=gpu.name if gpu is not None else cpu_name(),
        compute_capability=gpu.compute_capability if gpu is not None else None,
        runtime={name: version for name, version in runtime.items() if version is not None},
        recorded=now(),
        code_version=code_version(),
        status="failed" if reason else "verified",
        reason=reason,
        parity=parity,
        **scores,
    )


def _scores(
    bundle: Bundle, artifact: ArtifactManifest, session: Session, cache: Path | None, progress: Progress
) -> dict[str, Any]:
    """Fields of a record: its score on the golden inputs, and on the validation split or why not on that."""
    task, manifest, most = bundle.task, bundle.manifest, most_rows(artifact)
    outputs = task.golden_outputs(bundle.golden(artifact), session.run, most)
    score = golden_score(bundle, artifact, outputs)
    if not task.reads_text:
        return {"score": score}
    # Of a model that was wrapped there is one set of labelled rows.
    split = "validation" if manifest.wrapped is None else "test"
    origin = Origin(cache, bundle.trained_on)
    validation, missing = open_validation(task, bundle.data, bundle.reader(artifact), origin, progress, split)
    if validation is None:
        return {"score": score, "unscored": missing}
    return {"score": score, "validation": validation(in_pieces(session.run, most), answering_loop(bundle, artifact))}


# verify: checksums of a bundle's files, and the golden inputs through every artifact that can run here.


INT8_ERROR_FACTOR = 2.0
"""INT8 kernels round differently on other processors: the largest error may be this many times export's, …"""

INT8_AGREEMENT_LOSS = 0.02
"""… and top-1 agreement may be this much, or two rows, lower."""

_ROWS = 2.5  # two rows, whatever the division rounds to


def verify(
    bundle: Bundle, artifact: str | None = None, progress: Progress = SILENT, runtime: str | None = None
) -> Verification:
    """Check a bundle on this machine, without torch and without the data set. Nothing is written.

    Args:
        bundle: opened just now: what it has hashed already is not hashed again.
        artifact: run this artifact only; the files of all are checked in any case.
        progress: is told of files and artifacts.
        runtime: what ``--runtime`` names: a check for each of its providers; None: one with the usual one.

    Raises:
        ArtifactError: bundle.json names a file outside the bundle, or targets.json is damaged.
        InputError: no such artifact, or no such runtime.
    """
    stale = tuple(filter(None, (record.why_refused(bundle.manifest) for record in bundle.records.records)))
    chosen = bundle.artifacts if artifact is None else (bundle.artifact(artifact),)
    files = _check_files(bundle, progress)
    checks = []
    with bar(progress, "Running golden inputs", len(chosen), "artifacts"):
        for entry in chosen:
            checks += [_check_artifact(bundle, entry, provider) for provider in _providers(entry, runtime)]
            progress.advance()
    return Verification(
        bundle=str(bundle.folder),
        run=bundle.name,
        manifest_sha256=sha256_of(bundle.folder / BUNDLE_FILE),
        wrapped=bundle.manifest.wrapped,
        manifest_protected=bundle.manifest.manifest_sha256 is not None,
        files=files,
        artifacts=tuple(checks),
        asked=artifact is not None or runtime not in (None, ALL_RUNTIMES),
        stale=stale,
    )


def _check_files(bundle: Bundle, progress: Progress) -> tuple[FileCheck, ...]:
    """Hash all files that bundle.json names, and look for others.

    Hidden files and folders (``.git``, ``.DS_Store``) are passed over: tools leave them, and nothing opens them. So are
    the reports that ``profile`` writes into a bundle that was copied without its run, and what targets found of it.
    Raises ArtifactError.
    """
    needed = {name for artifact in bundle.built() for name in bundle.contents.needed_by(artifact)}
    expected = sorted({*bundle.contents.checksums, *needed})
    checks = []
    with bar(progress, "Checking files", len(expected), "files"):
        for name in expected:
            checks.append(bundle.contents.inspect(name))
            progress.advance()
    found = {path.relative_to(bundle.folder) for path in bundle.folder.rglob("*") if path.is_file()}
    others = [path for path in found if path.parts[0] not in (REPORTS_FOLDER, TARGETS_FILE)]
    extra = sorted(path.as_posix() for path in others if not any(part.startswith(".") for part in path.parts))
    unexpected = [name for name in extra if name not in expected and name != BUNDLE_FILE]
    return (*checks, *(FileCheck(file=name, status="unexpected", detail="not in bundle.json") for name in unexpected))


def _providers(artifact: ArtifactManifest, runtime: str | None) -> tuple[str | None, ...]:
    """What to run it with; in fewer bits only where export did so, too: else there is nothing to hold that to."""
    if artifact.status != "built" or runtime is None:
        return (None,)
    asked = providers_asked(artifact, runtime)
    return tuple(one for one in asked if provider_facts(one).rounds_to is None or one in artifact.rounded)


def _check_artifact(bundle: Bundle, artifact: ArtifactManifest, provider: str | None) -> ArtifactCheck:
    """Run one artifact on the golden inputs. Never raises for what is wrong with it: that is what it reports."""
    found = ArtifactCheck(artifact=artifact.id, role=artifact.role, precision=artifact.precision, status="unavailable")
    found = found.model_copy(update={"notes": _notes(artifact)})

    def because(reason: object, status: str = "unavailable") -> ArtifactCheck:
        return found.model_copy(update={"status": status, "reason": str(reason)})

    if artifact.status != "built" or artifact.file is None:
        return because(f"{artifact.status} at export: {artifact.reason}")
    for name in bundle.contents.needed_by(artifact):
        file = bundle.contents.inspect(name)
        if file.status != "intact":
            detail = f" ({file.detail})" if file.detail else ""
            return because(f"{name} is {file.status}{detail}", "damaged")
    refusal = bundle.cannot_run(artifact, provider)
    if refusal is not None:
        return because(refusal)
    try:
        golden = bundle.golden(artifact)
    except ArtifactError as error:
        return because(f"no answers to compare with: {error}")
    try:
        with bundle.session(artifact, OpenOptions(provider)) as session:
            outputs, used = bundle.task.golden_outputs(golden, session.run, most_rows(artifact)), session.provider
        last = bundle.manifest.exits[-1] if bundle.manifest.exits else None
        exit_ = last if artifact.exit is None else artifact.exit
        rounds = provider_facts(used).rounds_to is not None
        precision: Precision = "int8" if rounds else artifact.precision  # by the same bar as at export
        parity = bundle.task.golden_parity(golden.arrays, outputs, exit_, precision, used)
    except (MissingDependencyError, GoldenError) as error:
        return because(error)
    except ArtifactError as error:
        return because(error, "damaged")
    except EdgeformerError as error:
        return because(error, "failed")
    recorded = artifact.rounded[used].parity if rounds and used in artifact.rounded else artifact.parity
    tolerance, problem = _hold(parity, recorded)
    if parity.tolerance is None and lacks_parity(artifact):
        tolerance, problem = _hold_by_score(bundle, artifact, parity, outputs)
    status = "failed" if problem else "verified"
    return found.model_copy(update={"parity": parity, "tolerance": tolerance, "status": status, "reason": problem})


def _hold_by_score(bundle: Bundle, artifact: ArtifactManifest, parity: Parity, outputs: Any) -> tuple[str, str | None]:
    """As :func:`_hold`, of INT8 that never ran where it was exported: the bar that it would have had there."""
    problem = out_of_tolerance(parity) or lost(bundle, artifact, {"score": golden_score(bundle, artifact, outputs)})
    return "score on the golden inputs", problem


def _notes(artifact: ArtifactManifest) -> tuple[str, ...]:
    """What its portability audit says: of it anywhere, and of it on this machine."""
    audit = artifact.portability
    if audit is None:
        return ()
    return (*audit.notes_here(library_versions().get("onnxruntime", "0"), cpu_flags()), *audit.notes())


def _hold(parity: Parity, recorded: Parity | None) -> tuple[str | None, str | None]:
    """What an artifact is held to on this machine, and what is wrong with it (None: nothing); ``recorded``: at export.

    FP32 and FP16 have export's own tolerances. INT8 has none of its own: export judged it by its task score, which
    needs the data set; here it has to be about as close to torch as it was at export.
    """
    if parity.tolerance is not None:
        return f"{parity.tolerance_kind} error ≤ {parity.tolerance:.0e}", out_of_tolerance(parity)
    if recorded is None or recorded.max_abs_error is None or recorded.top1_agreement is None:
        return None, out_of_tolerance(parity) or "bundle.json does not say how close it was at export"
    if parity.max_abs_error is None or parity.top1_agreement is None:
        return None, out_of_tolerance(parity)
    spread = parity.max_abs_error / parity.relative_error if parity.relative_error else 0.0
    error = INT8_ERROR_FACTOR * recorded.max_abs_error + FP16_RELATIVE * spread
    agreement = recorded.top1_agreement - max(INT8_AGREEMENT_LOSS, _ROWS / parity.n)
    held = f"error ≤ {error:.1e}, agreement ≥ {agreement:.1%}"
    if parity.max_abs_error > error:
        return held, f"error {parity.max_abs_error:.2g} is above {error:.2g} ({recorded.max_abs_error:.2g} at export)"
    if parity.top1_agreement < agreement:
        return held, f"top-1 agreement {parity.top1_agreement:.1%} is below {agreement:.1%}"
    return held, None
