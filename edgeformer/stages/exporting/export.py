"""export: a run becomes a bundle."""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from edgeformer.models.build import load_encoder
from edgeformer.models.encoder import EncoderClassifier, count_parameters, half_for_export
from edgeformer.runtime.onnx_session import OnnxSession
from edgeformer.schema.errors import ArtifactError, EdgeformerError
from edgeformer.schema.files import replacing, replacing_folder, sha256_of, write_json
from edgeformer.schema.host import code_version, library_versions, now
from edgeformer.schema.manifest import ArtifactManifest, BundleManifest, Precision, RunManifest
from edgeformer.schema.progress import Progress, Silent
from edgeformer.schema.recipe import Recipe
from edgeformer.schema.shipped import load_recipe
from edgeformer.schema.workspace import BUNDLE_FILE, RECIPE_FILE, read_run
from edgeformer.stages.exporting.audit import audit_sharing, describe_io, float32_operators, open_graph
from edgeformer.stages.exporting.onnx_graph import OPSET, export_onnx
from edgeformer.stages.exporting.parity import FP16_LARGEST, largest_activation, measure_parity, why_rejected
from edgeformer.tasks.classification import score

FILES = {"fp32": "onnx/model.onnx", "fp16": "onnx/model_fp16.onnx"}
"""Where clients of Hugging Face ONNX repositories look for each precision."""


@dataclass(frozen=True)
class GoldenInputs:
    """Real validation inputs: input_ids, attention_mask int64 [n, S]; labels int64 [n]."""

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    labels: NDArray[np.int64]


def export(run: Path, *, fp16: bool = False, progress: Progress | None = None) -> BundleManifest:
    """Write ``run``'s bundle: FP32 ONNX always, FP16 when asked for, each checked against torch FP32.

    An artifact outside its tolerance is kept, marked ``rejected`` with the reason. The previous bundle is replaced
    only when the new one is complete.

    Raises:
        ArtifactError: the run is unfinished or damaged.
    """
    progress = progress or Silent()
    manifest, recipe = _finished(run), load_recipe(str(run / RECIPE_FILE))
    golden = _golden_inputs(run / "model" / "golden_inputs.npz")
    precisions: list[Precision] = ["fp32", "fp16"] if fp16 else ["fp32"]
    progress.start("Exporting", len(precisions), "artifacts")
    try:
        with replacing_folder(run / "bundle") as folder:
            (folder / "onnx").mkdir()
            model = _load(run, recipe)
            reference = _reference(model, golden)
            largest = largest_activation(model, golden.input_ids, golden.attention_mask)
            artifacts = []
            for precision in precisions:
                artifacts.append(_artifact(folder, run, recipe, precision, golden, (reference, largest)))
                progress.advance()
            _write_companions(folder, run, golden, reference)
            bundle = _manifest(folder, manifest, recipe, artifacts)
            write_json(folder / BUNDLE_FILE, bundle)
    finally:
        progress.finish()
    return bundle


def _finished(run: Path) -> RunManifest:
    manifest = read_run(run)
    if manifest.status != "finished":
        raise ArtifactError(f"{run}: is {manifest.status}, not finished; go on with edgeformer train … --resume")
    return manifest


def _load(run: Path, recipe: Recipe) -> EncoderClassifier:
    return load_encoder(recipe.model, recipe.classes, run / "model" / "model.safetensors")


def _golden_inputs(path: Path) -> GoldenInputs:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return GoldenInputs(arrays["input_ids"], arrays["attention_mask"], arrays["labels"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path}: missing or damaged ({error}); train the run again") from None


@torch.inference_mode()
def _reference(model: EncoderClassifier, golden: GoldenInputs) -> NDArray[np.float32]:
    logits = model(torch.from_numpy(golden.input_ids), torch.from_numpy(golden.attention_mask))
    result: NDArray[np.float32] = logits.numpy()
    return result


def _artifact(
    folder: Path,
    run: Path,
    recipe: Recipe,
    precision: Precision,
    golden: GoldenInputs,
    expected: tuple[NDArray[np.float32], float],
) -> ArtifactManifest:
    reference, largest = expected
    path = folder / FILES[precision]
    model = _load(run, recipe)
    parameters = count_parameters(model)
    export_onnx(
        half_for_export(model) if precision == "fp16" else model,
        path,
        max_positions=recipe.model.max_positions,
    )
    graph = open_graph(path)
    inputs, outputs = describe_io(graph)
    sharing = audit_sharing(graph, parameters)
    with OnnxSession(path) as session:
        logits = session.run({"input_ids": golden.input_ids, "attention_mask": golden.attention_mask})["logits"]
        provider = session.provider
    parity = measure_parity(logits, reference, precision, provider)
    reason = why_rejected(parity, logits)
    if reason is None and precision == "fp16" and largest > FP16_LARGEST:
        reason = f"an activation reaches {largest:.3g} on real inputs; FP16 ends at {FP16_LARGEST:.0f} (overflow)"
    if reason is None and sharing.stored_parameters != sharing.unique_parameters:
        reason = f"stores {sharing.stored_parameters:,} parameters for a model of {sharing.unique_parameters:,}"
    return ArtifactManifest(
        id=f"onnx-{precision}",
        file=FILES[precision],
        format="onnx",
        precision=precision,
        status="rejected" if reason else "built",
        reason=reason,
        size_bytes=path.stat().st_size,
        sha256=sha256_of(path),
        inputs=inputs,
        outputs=outputs,
        opset=OPSET,
        ops_in_fp32=float32_operators(graph) if precision == "fp16" else {},
        parity=parity,
        score=score(logits, golden.labels),
        sharing=sharing,
        built_with={k: v for k, v in library_versions().items() if k in ("torch", "onnx", "onnxscript", "onnxruntime")},
    )


def _write_companions(folder: Path, run: Path, golden: GoldenInputs, reference: NDArray[np.float32]) -> None:
    """Everything beside the graphs: tokenizer, configuration, golden inputs."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        source = run / "model" / name
        if not source.is_file():
            raise ArtifactError(f"{source}: missing; train the run again")
        shutil.copyfile(source, folder / name)
    card = run / "model" / "README.md"
    if card.is_file():
        shutil.copyfile(card, folder / "README.md")
    with replacing(folder / "golden.npz") as temporary:
        np.savez(
            temporary,
            input_ids=golden.input_ids,
            attention_mask=golden.attention_mask,
            labels=golden.labels,
            logits=reference,
        )


def _pad_id(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["pad_token_id"])


def _manifest(folder: Path, manifest: RunManifest, recipe: Recipe, artifacts: list[ArtifactManifest]) -> BundleManifest:
    graphs = {artifact.file for artifact in artifacts}
    others = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    unique = {a.sharing.unique_parameters for a in artifacts if a.sharing}
    if unique != {manifest.parameters}:
        raise EdgeformerError(f"{manifest.run}: the run has {manifest.parameters:,} parameters, its model {unique}")
    return BundleManifest(
        run=manifest.run,
        task=manifest.task,
        created=now(),
        labels=recipe.data.labels,
        max_length=recipe.data.max_length,
        max_positions=recipe.model.max_positions,
        pad_id=_pad_id(folder),
        parameters=manifest.parameters,
        synthetic=manifest.data.synthetic,
        target=recipe.target,
        data=recipe.data,
        data_fingerprints=manifest.data.fingerprints,
        files={name: sha256_of(folder / name) for name in others if name not in graphs},
        artifacts=tuple(artifacts),
        code_version=code_version(),
    )
