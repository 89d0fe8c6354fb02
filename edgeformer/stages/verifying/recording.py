"""verify --write: what this machine found of the artifacts that could not run where they were exported.

Each is scored as export would have scored it: on the golden inputs, and on the validation split where that can be read
here. What is then known of it is what is known of any other artifact.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeformer.backends import backend_of, provider_facts
from edgeformer.backends.session import Session
from edgeformer.bundle import Bundle
from edgeformer.formats.errors import InputError
from edgeformer.formats.files import write_json
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.progress import SILENT, Progress
from edgeformer.formats.target_record import TARGETS_FILE, TargetRecord, files_sha256, lacks_parity
from edgeformer.formats.verification import ArtifactCheck, Recorded, Verification
from edgeformer.machine import cuda_driver, nvidia
from edgeformer.machine.capability import installed_version
from edgeformer.machine.host import code_version, cpu_name, now
from edgeformer.stages.verifying.scoring import answering_loop, golden_score, lost
from edgeformer.tasks import Origin
from edgeformer.tasks.validation import in_pieces, most_rows, open_validation


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
    runtime = {name: installed_version(name) for name in backend_of(artifact).distributions}
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
