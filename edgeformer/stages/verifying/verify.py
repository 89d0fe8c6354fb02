"""verify: checksums of a bundle's files, and the golden inputs through every artifact that can run here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeformer.backends.opening import cannot_run, open_checked
from edgeformer.backends.session import Session
from edgeformer.bundle import read_bundle
from edgeformer.formats.errors import ArtifactError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.formats.progress import Progress, Silent
from edgeformer.formats.verification import ArtifactCheck, FileCheck, Verification
from edgeformer.formats.workspace import BUNDLE_FILE
from edgeformer.stages.verifying.golden import Golden, GoldenError, Logits, read_golden
from edgeformer.stages.verifying.intact import check_files, files_of, first_problem
from edgeformer.stages.verifying.judging import judge

GOLDEN = "golden.npz"


def verify(bundle: Path, artifact: str | None = None, progress: Progress | None = None) -> Verification:
    """Check a bundle on this machine, without torch and without the data set. Nothing is written.

    Args:
        bundle: the bundle's folder.
        artifact: run this artifact only; the files of all are checked in any case.

    Raises:
        ArtifactError: bundle.json itself is missing or damaged.
        InputError: no such artifact.
    """
    progress = progress or Silent()
    manifest = read_bundle(bundle)
    known = [entry.id for entry in manifest.artifacts]
    if artifact is not None and artifact not in known:
        raise InputError(f"--artifact {artifact}: {bundle} has {', '.join(known) or 'none'}")
    files = check_files(bundle, manifest, progress)
    chosen = [entry for entry in manifest.artifacts if artifact in (None, entry.id)]
    bench = _Bench(bundle, manifest, files)
    progress.start("Running golden inputs", len(chosen), "artifacts")
    checks = []
    try:
        for entry in chosen:
            checks.append(bench.check(entry))
            progress.advance()
    finally:
        progress.finish()
    return Verification(
        bundle=str(bundle),
        run=manifest.run,
        manifest_sha256=sha256_of(bundle / BUNDLE_FILE),
        files=files,
        artifacts=tuple(checks),
        asked=artifact is not None,
    )


@dataclass(frozen=True)
class _Bench:
    """Runs artifacts of one bundle, whose files were checked."""

    bundle: Path
    manifest: BundleManifest
    files: tuple[FileCheck, ...]
    golden: dict[str, Golden] = field(default_factory=dict)

    def check(self, artifact: ArtifactManifest) -> ArtifactCheck:
        """Never raises for what is wrong with the artifact: that is what it reports."""
        found = ArtifactCheck(
            artifact=artifact.id, role=artifact.role, precision=artifact.precision, status="unavailable"
        )
        golden = f"trimmed/{GOLDEN}" if artifact.trimmed else GOLDEN
        problem = first_problem(files_of(artifact), self.files)
        if problem is not None:
            return found.model_copy(update={"status": "damaged", "reason": problem})
        if artifact.status != "built" or artifact.file is None:
            return found.model_copy(update={"reason": f"{artifact.status} at export: {artifact.reason}"})
        refusal = cannot_run(artifact)
        if refusal is not None:
            return found.model_copy(update={"reason": refusal})
        problem = first_problem({golden}, self.files)
        if problem is not None:
            return found.model_copy(update={"reason": f"no answers to compare with: {problem}"})
        try:
            return found.model_copy(update=self._run(artifact, golden))
        except (MissingDependencyError, GoldenError) as error:
            return found.model_copy(update={"reason": str(error)})
        except ArtifactError as error:
            return found.model_copy(update={"status": "damaged", "reason": str(error)})
        except EdgeformerError as error:
            return found.model_copy(update={"status": "failed", "reason": str(error)})

    def _run(self, artifact: ArtifactManifest, name: str) -> dict[str, object]:
        golden = self.golden.get(name) or read_golden(self.bundle / name)
        self.golden[name] = golden
        assert artifact.file is not None
        with open_checked(self.bundle / artifact.file, artifact, self.manifest.max_positions) as session:
            logits = _logits(session, golden, artifact)
            last = self.manifest.exits[-1] if self.manifest.exits else None
            exit_ = last if artifact.exit is None else artifact.exit
            parity = golden.parity(logits, exit_, artifact.precision, session.provider)
        tolerance, problem = judge(parity, artifact)
        return {
            "parity": parity,
            "tolerance": tolerance,
            "status": "failed" if problem else "verified",
            "reason": problem,
        }


def _logits(session: Session, golden: Golden, artifact: ArtifactManifest) -> Logits:
    """Logits of all golden rows, in as few calls as the artifact takes.

    INT8 graphs scale their activations by the whole batch, so that another batch is another (if similar) answer.
    """
    inputs = golden.inputs
    rows = len(inputs["input_ids"])
    shapes = artifact.engine.shapes if artifact.engine is not None else {}
    most = min((shape[-1][0] for shape in shapes.values()), default=rows)
    pieces = []
    for start in range(0, rows, most):
        pieces.append(_answer(session, {name: array[start : start + most] for name, array in inputs.items()}))
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _answer(session: Session, inputs: dict[str, NDArray[np.int64]]) -> Logits:
    outputs = session.run(inputs)
    if "logits" not in outputs:
        raise ArtifactError(f"it has no output `logits`, but {', '.join(outputs) or 'none'}; export the run again")
    return outputs["logits"]
