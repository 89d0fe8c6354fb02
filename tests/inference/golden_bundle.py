"""Tiny bundles whose golden.npz holds what their graphs really answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeformer.artifacts.data_config import TextConfig
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.verification import Verification
from edgeformer.bundle import Bundle, seal
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from tests.runtimes.tiny_bundle import artifact_of, classifier_graph, write_bundle, write_manifest

WORDS = 60


def write_classifier(folder: Path) -> Path:
    """Two artifacts, ``model`` (FP32) and ``other`` (wider, FP16 by name), with golden logits of ``model``."""
    write_bundle(folder, {"model": classifier_graph(), "other": classifier_graph(width=16)})
    answers = run_golden(folder, "onnx/model.onnx")
    change_golden(folder, logits=answers, logits_exit1=answers + 1)
    # Of the second graph nothing is claimed: it only is a file that could be mistaken for the first.
    change(folder, "other", status="rejected", reason="not meant to be used")
    return folder


def run_golden(folder: Path, file: str) -> NDArray[np.float32]:
    """What a graph answers to the golden inputs."""
    with np.load(folder / "golden.npz") as golden, OnnxSession(folder / file) as session:
        answers: NDArray[np.float32] = session.run(dict(golden))["logits"]
    return answers


def change_golden(folder: Path, **arrays: NDArray[np.generic]) -> None:
    """Replace arrays of golden.npz, and its checksum in the manifest."""
    path = folder / "golden.npz"
    with np.load(path) as golden:
        kept = dict(golden)
    np.savez(path, **{**kept, **arrays})  # type: ignore[arg-type]
    update(folder, files={**Bundle.open(folder).manifest.files, "golden.npz": sha256_of(path)})


def update(folder: Path, **changes: object) -> BundleManifest:
    """Change fields of bundle.json."""
    return seal(folder, Bundle.open(folder).manifest.model_copy(update=changes))


def change(folder: Path, artifact: str, **changes: object) -> None:
    """Change fields of an artifact's entry."""
    entries = Bundle.open(folder).manifest.artifacts
    update(folder, artifacts=tuple(e.model_copy(update=changes) if e.id == artifact else e for e in entries))


def approve(folder: Path, artifact: str) -> None:
    """Make the manifest agree with the artifact's file as it is now."""
    entry = next(e for e in Bundle.open(folder).manifest.artifacts if e.id == artifact)
    fresh: ArtifactManifest = artifact_of(folder, str(entry.file))
    change(folder, artifact, sha256=fresh.sha256, size_bytes=fresh.size_bytes)


def write_language_model(folder: Path, *, exits: tuple[int, ...] = (1, 2)) -> Path:
    """One artifact per exit; golden.npz as export writes it for language models."""
    (folder / "onnx").mkdir(parents=True)
    ids = np.random.default_rng(0).integers(0, WORDS, (3, 7))
    arrays: dict[str, NDArray[np.generic]] = {"input_ids": ids, "targets": np.roll(ids, -1, axis=1)}
    np.savez(folder / "golden.npz", input_ids=ids)
    artifacts = []
    for exit_ in exits:
        name = "onnx/model.onnx" if exit_ == exits[-1] else f"onnx/model_exit{exit_}.onnx"
        onnx.save(_language_graph(exit_), folder / name)
        logits = run_golden(folder, name)
        order = np.argsort(-logits, axis=-1)[..., :32]
        arrays[f"top_indices_exit{exit_}"] = order
        arrays[f"top_values_exit{exit_}"] = np.take_along_axis(logits, order, axis=-1)
        arrays[f"log_sum_exp_exit{exit_}"] = np.log(np.exp(logits.astype(np.float64)).sum(-1)).astype(np.float32)
        arrays[f"logits_std_exit{exit_}"] = logits.std()
        role = {} if exit_ == exits[-1] else {"role": "exit", "exit": exit_}
        artifacts.append(artifact_of(folder, name, **role))
    np.savez(folder / "golden.npz", **arrays)  # type: ignore[arg-type]
    source = [{"kind": "synthetic-reviews", "rows": 10}]
    data = TextConfig.model_validate(
        {"parts": {"train": source, "validation": source}, "mode": "packed", "sequence_length": 16}
    )
    write_manifest(folder, artifacts, task="language-modeling", labels=(), exits=exits, data=data)
    return folder


def _language_graph(seed: int) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)

    def weights(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["state"]),
        helper.make_node("MatMul", ["state", "head"], ["logits"]),
    ]
    shape = ["batch", "sequence"]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*shape, "words"])],
        [weights("table", WORDS, 8), weights("head", 8, WORDS)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def status_of(found: Verification, artifact: str = "model") -> tuple[str, str]:
    """An artifact's status, and the reason that is given for it."""
    check = next(check for check in found.artifacts if check.artifact == artifact)
    return check.status, check.reason or ""


def damage(found: Verification) -> dict[str, str]:
    """File → what is wrong with it."""
    return {check.file: check.status for check in found.damaged}
