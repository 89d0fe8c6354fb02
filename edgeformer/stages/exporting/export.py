"""export: a run becomes a bundle."""

from __future__ import annotations

from pathlib import Path

from edgeformer.models.half import half_for_export
from edgeformer.runtime.onnx_session import OnnxSession
from edgeformer.schema.errors import ArtifactError, EdgeformerError
from edgeformer.schema.files import replacing_folder, sha256_of, write_json
from edgeformer.schema.host import code_version, library_versions, now
from edgeformer.schema.language_recipe import LanguageRecipe
from edgeformer.schema.manifest import ArtifactManifest, BundleManifest, Precision, RunManifest
from edgeformer.schema.progress import Progress, Silent
from edgeformer.schema.shipped import load_recipe
from edgeformer.schema.workspace import BUNDLE_FILE, RECIPE_FILE, read_run
from edgeformer.stages.exporting.audit import audit_sharing, describe_io, float32_operators, open_graph, stored_twice
from edgeformer.stages.exporting.classifier import open_classifier
from edgeformer.stages.exporting.exportable import Exportable, Logits, write_companions
from edgeformer.stages.exporting.language_model import open_language_model
from edgeformer.stages.exporting.onnx_graph import OPSET, export_onnx
from edgeformer.stages.exporting.parity import FP16_LARGEST, largest_activation, measure_parity, why_rejected

FILES = {"fp32": "onnx/model.onnx", "fp16": "onnx/model_fp16.onnx"}
"""Where clients of Hugging Face ONNX repositories look for each precision."""


def export(
    run: Path, *, fp16: bool = False, allow_leak: bool = False, progress: Progress | None = None
) -> BundleManifest:
    """Write ``run``'s bundle: FP32 ONNX always, FP16 when asked for, each checked against torch FP32.

    An artifact outside its tolerance is kept, marked ``rejected`` with the reason. The previous bundle is replaced
    only when the new one is complete.

    Args:
        allow_leak: also export a language model that looks ahead; its bundle says so.

    Raises:
        ArtifactError: the run is unfinished or damaged.
        InputError: the model leaks future tokens.
    """
    progress = progress or Silent()
    manifest = _finished(run)
    subject = _open(run, manifest, allow_leak)
    largest = largest_activation(subject.graph, *subject.inputs.values()) if fp16 else 0.0
    # FP16 last: it is made of the FP32 model in place, so that there is one copy of the weights, not two.
    precisions: list[Precision] = ["fp32", "fp16"] if fp16 else ["fp32"]
    progress.start("Exporting", len(precisions), "artifacts")
    try:
        with replacing_folder(run / "bundle") as folder:
            (folder / "onnx").mkdir()
            artifacts = []
            for precision in precisions:
                artifacts.append(_artifact(folder, subject, precision, largest))
                progress.advance()
            write_companions(folder, run, subject.golden)
            bundle = _manifest(folder, manifest, subject, artifacts)
            write_json(folder / BUNDLE_FILE, bundle)
    finally:
        progress.finish()
    return bundle


def _finished(run: Path) -> RunManifest:
    manifest = read_run(run)
    if manifest.status != "finished":
        raise ArtifactError(f"{run}: is {manifest.status}, not finished; go on with edgeformer train … --resume")
    return manifest


def _open(run: Path, manifest: RunManifest, allow_leak: bool) -> Exportable:
    recipe = load_recipe(str(run / RECIPE_FILE))
    if isinstance(recipe, LanguageRecipe):
        subject = open_language_model(run, recipe, manifest, allow_leak=allow_leak)
    else:
        subject = open_classifier(run, recipe)
    if subject.model_parameters != manifest.parameters:
        raise EdgeformerError(
            f"{run}: the run has {manifest.parameters:,} parameters, its model {subject.model_parameters:,}"
        )
    return subject


def _artifact(folder: Path, subject: Exportable, precision: Precision, largest: float) -> ArtifactManifest:
    path = folder / FILES[precision]
    model = half_for_export(subject.graph) if precision == "fp16" else subject.graph
    export_onnx(model, path, inputs=tuple(subject.inputs), max_positions=subject.recipe.model.max_positions)
    graph = open_graph(path)
    inputs, outputs = describe_io(graph)
    sharing = audit_sharing(graph, subject.graph_parameters)
    in_fp32 = float32_operators(graph) if precision == "fp16" else {}
    del graph
    with OnnxSession(path) as session:
        logits: Logits = subject.rows(session.run(subject.inputs)["logits"])
        provider = session.provider
    parity = measure_parity(logits, subject.reference, precision, provider)
    reason = why_rejected(parity, logits) or _overflow(precision, largest) or stored_twice(sharing)
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
        ops_in_fp32=in_fp32,
        parity=parity,
        score=subject.score(logits),
        sharing=sharing,
        built_with={k: v for k, v in library_versions().items() if k in ("torch", "onnx", "onnxscript", "onnxruntime")},
    )


def _overflow(precision: Precision, largest: float) -> str | None:
    if precision == "fp16" and largest > FP16_LARGEST:
        return f"an activation reaches {largest:.3g} on real inputs; FP16 ends at {FP16_LARGEST:.0f} (overflow)"
    return None


def _manifest(
    folder: Path, manifest: RunManifest, subject: Exportable, artifacts: list[ArtifactManifest]
) -> BundleManifest:
    recipe, graphs = subject.recipe, {artifact.file for artifact in artifacts}
    others = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return BundleManifest(
        run=manifest.run,
        task=manifest.task,
        created=now(),
        **subject.facts,
        max_positions=recipe.model.max_positions,
        parameters=manifest.parameters,
        synthetic=manifest.data.synthetic,
        target=recipe.target,
        data=recipe.data,
        data_fingerprints=manifest.data.fingerprints,
        files={name: sha256_of(folder / name) for name in others if name not in graphs},
        artifacts=tuple(artifacts),
        code_version=code_version(),
    )
