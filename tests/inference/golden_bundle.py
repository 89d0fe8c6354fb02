"""Tiny bundles whose golden.npz holds the answers of their graphs."""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from edgeformer.artifacts.data_config import TextConfig
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.bundle import Bundle, seal
from edgeformer.inference.verification import Verification
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from tests.runtimes.tiny_bundle import artifact_of, classifier_graph, parsed, write_bundle, write_manifest

WORDS = 60


def write_classifier(folder: Path) -> Path:
    """Write two artifacts, ``model`` (FP32) with golden logits and ``other`` (wider, rejected)."""
    write_bundle(folder, {"model": classifier_graph(), "other": classifier_graph(width=16)})
    logits = run_golden(folder, "onnx/model.onnx")
    change_golden(folder, logits=logits, logits_exit1=logits + 1)
    change(folder, "other", status="rejected", reason="not meant to be used")
    return folder


def run_golden(folder: Path, file: str) -> NDArray[np.float32]:
    """Return a graph's logits for the golden inputs."""
    with np.load(folder / "golden.npz") as golden, OnnxSession(folder / file) as session:
        return session.run(dict(golden))["logits"]


def change_golden(folder: Path, **arrays: NDArray[np.generic]) -> None:
    """Replace arrays of golden.npz, and its checksum in the manifest."""
    path = folder / "golden.npz"
    with np.load(path) as golden:
        merged = {**golden, **arrays}
    np.savez(path, **merged)  # type: ignore[arg-type]
    update(folder, files={**Bundle.open(folder).manifest.files, "golden.npz": sha256_of(path)})


def update(folder: Path, **changes: object) -> BundleManifest:
    """Change fields of bundle.json."""
    return seal(folder, Bundle.open(folder).manifest.model_copy(update=changes))


def change(folder: Path, artifact: str, **changes: object) -> None:
    """Change fields of an artifact's entry."""
    entries = Bundle.open(folder).manifest.artifacts
    update(folder, artifacts=tuple(e.model_copy(update=changes) if e.id == artifact else e for e in entries))


def approve(folder: Path, artifact: str) -> None:
    """Update the checksum of an artifact's changed file."""
    entry: ArtifactManifest = artifact_of(folder, str(Bundle.open(folder).artifact(artifact).file))
    change(folder, artifact, sha256=entry.sha256, size_bytes=entry.size_bytes)


def write_language_model(folder: Path, *, exits: tuple[int, ...] = (1, 2)) -> Path:
    """Write one artifact per exit, with golden.npz as export writes it for language models."""
    (folder / "onnx").mkdir(parents=True)
    ids = np.random.default_rng(0).integers(0, WORDS, (3, 7))
    arrays: dict[str, NDArray[np.generic]] = {"input_ids": ids, "targets": np.roll(ids, -1, axis=1)}
    np.savez(folder / "golden.npz", input_ids=ids)
    artifacts = []
    for loop in exits:
        is_last = loop == exits[-1]
        name = "onnx/model.onnx" if is_last else f"onnx/model_exit{loop}.onnx"
        rng = np.random.default_rng(loop)
        table, head = (rng.normal(size=shape).astype(np.float32) for shape in ((WORDS, 8), (8, WORDS)))
        ports = "(int64[batch, sequence] input_ids) => (float[batch, sequence, words] logits)"
        nodes = "{ state = Gather (table, input_ids) logits = MatMul (state, head) }"
        onnx.save(parsed(f"tiny {ports} {nodes}", table=table, head=head), folder / name)
        logits = run_golden(folder, name)
        order = np.argsort(-logits, axis=-1)[..., :32]
        arrays[f"top_indices_exit{loop}"] = order
        arrays[f"top_values_exit{loop}"] = np.take_along_axis(logits, order, axis=-1)
        arrays[f"log_sum_exp_exit{loop}"] = np.log(np.exp(logits.astype(np.float64)).sum(-1)).astype(np.float32)
        arrays[f"logits_std_exit{loop}"] = logits.std()
        role = {} if is_last else {"role": "exit", "exit": loop}
        artifacts.append(artifact_of(folder, name, **role))
    np.savez(folder / "golden.npz", **arrays)  # type: ignore[arg-type]
    source = [{"kind": "synthetic-reviews", "rows": 10}]
    data = TextConfig.model_validate(
        {"parts": {"train": source, "validation": source}, "mode": "packed", "sequence_length": 16}
    )
    write_manifest(folder, artifacts, task="language-modeling", labels=(), exits=exits, data=data)
    return folder


def status_of(verification: Verification, artifact: str = "model") -> tuple[str, str]:
    """Return an artifact's status and the reason for it."""
    check = next(check for check in verification.artifacts if check.artifact == artifact)
    return check.status, check.reason or ""


def damage(verification: Verification) -> dict[str, str]:
    """Return damaged file → status."""
    return {check.file: check.status for check in verification.damaged}
