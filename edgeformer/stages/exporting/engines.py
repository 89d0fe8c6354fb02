"""The engines of a bundle: one for the full graph and each exit, for the device that the bundle is meant for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from edgeformer.backends.tensorrt.engine import build_engine
from edgeformer.backends.tensorrt.plan import (
    EngineRequest,
    Unavailable,
    plan_engine,
    plan_torch_tensorrt,
    text_shapes,
)
from edgeformer.backends.tensorrt.torch_tensorrt import compile_program
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.errors import EdgeformerError, InputError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.manifest import ArtifactManifest, Parity, Precision
from edgeformer.formats.progress import Progress
from edgeformer.formats.shipped import load_profile
from edgeformer.machine.host import library_versions
from edgeformer.stages.exporting.exportable import Exportable
from edgeformer.tasks.parity import TOLERANCES


def engine_device(target: str | None, recipe_target: str | None) -> DeviceProfile:
    """The device that engines are built for. Raises InputError where neither the command nor the recipe names one."""
    name = target or recipe_target
    if name is None:
        raise InputError("--trt: which device? Name its profile: --target rtx4050 (edgeformer list devices)")
    return load_profile(name)


def build_engines(
    bundle: Path,
    subject: Exportable,
    graphs: Sequence[ArtifactManifest],
    device: DeviceProfile,
    cache: Path | None,
    progress: Progress,
) -> Iterator[ArtifactManifest]:
    """An engine of every graph in ``graphs``, or one entry that says why there is none.

    What an engine answers is checked by ``edgeformer verify`` on its device: here is no GPU that could open it.

    Raises:
        EdgeformerError: TensorRT refuses a graph.
    """
    precision = graphs[0].precision
    target = plan_engine(device)
    if isinstance(target, Unavailable):
        yield ArtifactManifest(
            id=f"{target.builder}-{precision}",
            file=None,
            format=target.builder,
            precision=precision,
            status="unavailable",
            reason=target.reason,
        )
        return
    shapes = text_shapes(subject.recipe.data.tokens_at_once, subject.recipe.model.max_positions)
    request = EngineRequest(target, precision, shapes, cache)
    for graph in graphs:
        yield _engine(bundle, graph, request, progress)


def compile_in_torch(
    bundle: Path, subject: Exportable, graph: ArtifactManifest, device: DeviceProfile, progress: Progress
) -> ArtifactManifest:
    """``--trt-via torch-tensorrt``: the model, as it is now, compiled and saved for people who stay in torch.

    Args:
        graph: the ONNX graph of the same model in the same precision; inputs and outputs have its names.
    """
    precision = graph.precision
    about = {"id": f"torch-tensorrt-{precision}", "format": "torch-tensorrt", "precision": precision}
    target = plan_torch_tensorrt(device)
    if isinstance(target, Unavailable):
        unavailable = {"file": None, "status": "unavailable", "reason": target.reason}
        return ArtifactManifest.model_validate({**about, **unavailable})
    file = f"engines/model{'' if precision == 'fp32' else f'_{precision}'}.{device.name}.ep"
    (bundle / "engines").mkdir(exist_ok=True)
    shapes = text_shapes(subject.recipe.data.tokens_at_once, subject.recipe.model.max_positions)
    module = subject.network.whole(subject.model)
    progress.start("Compiling with torch-tensorrt", None)
    try:
        request = EngineRequest(target, precision, shapes)
        built_for = compile_program(module.eval(), tuple(subject.inputs), bundle / file, request)
    except EdgeformerError as error:
        return ArtifactManifest.model_validate({**about, "file": None, "status": "rejected", "reason": str(error)})
    finally:
        progress.finish()
    return ArtifactManifest.model_validate(
        {
            **about,
            "file": file,
            "status": "built",
            "size_bytes": (bundle / file).stat().st_size,
            "sha256": sha256_of(bundle / file),
            "inputs": graph.inputs,
            "outputs": graph.outputs,
            "parity": _unknown(precision, device.name),
            "built_for": built_for,
            "built_with": {k: v for k, v in library_versions().items() if k in ("torch", "torch-tensorrt")},
        }
    )


def _engine(bundle: Path, graph: ArtifactManifest, request: EngineRequest, progress: Progress) -> ArtifactManifest:
    assert graph.file is not None
    file = f"engines/{Path(graph.file).stem}.{request.target.device}.engine"
    (bundle / "engines").mkdir(exist_ok=True)
    builder = request.target.builder
    about = ArtifactManifest(
        id=graph.id.replace("onnx", builder, 1),
        file=None,
        role=graph.role,
        exit=graph.exit,
        format=builder,
        precision=graph.precision,
        status="rejected",
    )
    try:
        built = build_engine(bundle / graph.file, bundle / file, request, progress)
    except EdgeformerError as error:
        return about.model_copy(update={"reason": str(error)})
    return about.model_copy(
        update={
            "file": file,
            "status": "rejected" if built.reason else "built",
            "reason": built.reason,
            "size_bytes": (bundle / file).stat().st_size,
            "sha256": sha256_of(bundle / file),
            "inputs": graph.inputs,
            "outputs": graph.outputs,
            "parity": _unknown(graph.precision, request.target.device),
            "engine": built.engine,
            "built_for": built.built_for,
            "built_with": {k: v for k, v in library_versions().items() if k in ("torch", "onnx", "onnxscript")},
        }
    )


def _unknown(precision: Precision, device: str) -> Parity:
    kind, tolerance = TOLERANCES[precision]
    return Parity(
        status="unavailable",
        tolerance=tolerance,
        tolerance_kind=kind,
        reason=f"this machine cannot run an engine for {device}; on the device, run: edgeformer verify",
    )
