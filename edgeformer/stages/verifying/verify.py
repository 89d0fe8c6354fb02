"""verify: checksums of a bundle's files, and the golden inputs through every artifact that can run here."""

from __future__ import annotations

from typing import Any

from edgeformer.backends import ALL_RUNTIMES, OpenOptions, library_versions, provider_facts, providers_asked
from edgeformer.bundle import Bundle
from edgeformer.formats.bundle_files import FileCheck
from edgeformer.formats.errors import ArtifactError, EdgeformerError, MissingDependencyError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.golden import GoldenError
from edgeformer.formats.manifest import ArtifactManifest, Parity, Precision
from edgeformer.formats.progress import SILENT, Progress, bar
from edgeformer.formats.target_record import TARGETS_FILE, lacks_parity
from edgeformer.formats.verification import ArtifactCheck, Verification
from edgeformer.formats.workspace import BUNDLE_FILE, REPORTS_FOLDER
from edgeformer.machine.capability import cpu_flags
from edgeformer.stages.verifying.scoring import golden_score, lost
from edgeformer.tasks.parity import FP16_RELATIVE, out_of_tolerance
from edgeformer.tasks.validation import most_rows

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
