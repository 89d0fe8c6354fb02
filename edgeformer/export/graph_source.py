"""Export of an imported ONNX graph: the FP32 graph in the bundle is the reference, and is converted to each precision.

The bundle was made by ``edgeformer import onnx``. Its graph stays unchanged, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.golden import OUTPUT
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, BundleManifest, Precision
from edgeformer.artifacts.onnx_outline import external_files
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.workspace import BUNDLE_FILE
from edgeformer.bundle import Bundle, checksum_files
from edgeformer.export.fp16 import convert_to_fp16, lifted, max_abs_values, operator_names
from edgeformer.export.graphs import weights_file, write_graph
from edgeformer.export.judging import Baseline, Judge, Reference, describe_converted
from edgeformer.export.previous import PreviousBundle, link, own_files
from edgeformer.export.quantize import SUPPORTED, quantize_int4, quantize_int8, quantized_nodes
from edgeformer.export.variants import ExportOptions, ExportSource, Variant, requested_variants
from edgeformer.runtimes import ArtifactFiles, BuildJob, OpenOptions, runtime_of
from edgeformer.runtimes.onnxruntime.providers import CPU
from edgeformer.tasks import Origin
from edgeformer.tasks.scoring import Validation, fit_calls, open_validation

_MAX_LISTED = 5
"""Weights that a message names."""
_MAX_ABS_CALLS = 2
"""Golden calls of which every value inside the graph is inspected before FP16 conversion."""

_FP16_NOTE = (
    "FP16: operators that need the range of FP32 stay FP32, and a CPU computes the others in FP32 too; run edgeformer "
    "verify on the device for its results"
)
_RANDOM_HINT = "; the golden inputs are random: import the graph again with real ones (--inputs FILE.npz)"
_INT8_NOTE = "INT8: judged by its outputs only; to judge it by accuracy, import the graph with --tokenizer and --data"


@dataclass(kw_only=True)
class GraphSource(ExportSource):
    """A bundle made by ``import onnx``: ``base`` is its graph, and ``names`` are the files that came with it."""

    bundle: Bundle
    unique_parameters: int

    @classmethod
    def open(cls, folder: Path, options: ExportOptions, progress: Progress) -> GraphSource:
        """Open the bundle and check its graph. Raises ArtifactError, InputError."""
        flags: dict[str, object] = {
            "--exit": options.exits, "--vocab-trim": options.vocab_trim, "--vocab-keep": options.vocab_keep is not None,
            "--vocab-max": options.vocab_max is not None, "--allow-leak": options.allow_leak,
        }  # fmt: skip
        if flag := next((flag for flag, is_set in flags.items() if is_set), None):
            raise InputError(f"{flag}: {folder} is an imported graph without known loops and vocabulary; leave it out")
        bundle = Bundle.open(folder)
        if bundle.manifest.wrapped is None:
            raise InputError(f"{folder}: was exported from a run; export that run again")
        base = bundle.artifacts[0]
        if (options.fp16 or options.int8 or options.int4) and base.precision != "fp32":
            raise InputError(f"{folder}: its graph is {base.precision.upper()} already; import the FP32 graph")
        bundle.check(base)
        unique = base.sharing.unique_parameters if base.sharing is not None else bundle.manifest.parameters
        return cls(
            bundle=bundle, options=options, progress=progress, folder=bundle.folder, base=(base,),
            unique_parameters=unique,
        )  # fmt: skip

    @cached_property
    def _validation(self) -> Validation | None:
        """Scores a session on the labelled data that was imported with the graph."""
        if self.base[0].validation is None:
            return None
        parts = self.bundle.task, self.bundle.data, self.bundle.reader(), Origin(), self.progress
        validation, problem = open_validation(*parts, split="test")
        if problem is not None:
            problem = problem.replace("validation split", "labelled data")
            self.notes.append(f"scores: on the golden inputs only, because {problem}")
        return validation

    def begin(self, new: Path) -> None:
        """Link everything but older conversions; copy the graph and its weights, as onnx_ir reads no linked weights."""
        graph = self.folder / str(self.base[0].file)
        copied = {graph, *(graph.parent / location for location in external_files(graph))}
        replaced = set[str]().union(*map(own_files, self.bundle.artifacts[1:])) | {BUNDLE_FILE}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if not path.is_file() or name in replaced:
                continue
            self.names.add(name)
            if path in copied:
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, new / name)
            else:
                link(path, new / name)

    def judge(self, folder: Path, entry: ArtifactManifest) -> Judge:
        base, bundle = self.base[0], self.bundle
        baseline: Baseline = {0: (base.score, base.validation)} if base.score is not None else {}
        is_random = any("seed" in note for note in bundle.manifest.notes)
        golden = bundle.golden()
        reference = Reference(
            task=bundle.task, golden=golden, answers=golden.cases(OUTPUT) or golden.arrays,
            needed={0: self.unique_parameters}, max_positions=bundle.manifest.max_positions,
            rejection_hint=_RANDOM_HINT if is_random else "",
        )  # fmt: skip
        return Judge(folder, reference, Variant(entry.precision), self._validation, baseline, sets_baseline=False)

    def make_graphs(self, folder: Path, previous: PreviousBundle) -> Iterator[ArtifactManifest]:
        base = self.base[0]
        for variant in requested_variants(self.options)[1:]:
            precision, name = variant.precision, variant.precision.upper()
            entry = ArtifactManifest(
                id=variant.id(), file=variant.file("model"), format=ONNX, precision=precision, status="rejected",
                inputs=base.inputs, outputs=base.outputs, calls=base.calls,
            )  # fmt: skip
            path = folder / variant.file("model")
            try:
                if clash := {variant.file("model"), variant.weights} & self.names:
                    raise EdgeformerError(
                        f"{name}: the imported graph keeps its weights in {min(clash)}, which this conversion would "
                        "overwrite; save the graph with another name for its weights file, and import it again"
                    )
                with bar(self.progress, f"Making the {name} graph", None):
                    model = self._convert(folder, precision)
                    has_shared = base.weights_file is not None
                    with weights_file(folder / variant.weights) if has_shared else nullcontext() as shared:
                        size_bytes = write_graph(model, path, shared)
                fields = describe_converted(path, size_bytes, self.unique_parameters)
                if has_shared:
                    fields["weights_file"] = variant.weights
                with runtime_of(entry).open(ArtifactFiles(entry, path), OpenOptions(CPU)) as session:
                    measured = self.judge(folder, entry).measure(session, 0)
                fields |= {**measured, "reason": measured["reason"] or fields.get("reason")}
            except EdgeformerError as error:
                fields = {"reason": str(error)}
            except (OSError, MemoryError):
                raise
            except Exception as error:  # converters raise any type for graphs that they were never tested with
                message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                fields = {"reason": f"{name}: the conversion failed: {message}"}
            yield entry.model_copy(update={**fields, "status": "rejected" if fields["reason"] else "built"})
        if self.options.fp16:
            self.notes.append(_FP16_NOTE)
        if self.options.int8 and base.validation is None:
            self.notes.append(_INT8_NOTE)

    def _convert(self, folder: Path, precision: Precision) -> onnx_ir.Model:
        """Convert the graph in ``folder``. Raises EdgeformerError if nothing in it can have this precision."""
        model = onnx_ir.load(folder / str(self.base[0].file))
        if precision == "fp16":
            golden, calls, task = self.bundle.golden().first(_MAX_ABS_CALLS), self.base[0].calls, self.bundle.task
            max_abs = max_abs_values(
                model, lambda run, _: task.golden_outputs(golden, fit_calls(run, calls) if calls else run, None), folder
            )
            return convert_to_fp16(model, max_abs)
        kept: list[str] = []
        if precision == "int8":
            model = quantize_int8(lifted(model), folder, kept=kept)
            RemoveUnusedNodesPass()(model)
        else:
            model = quantize_int4(lifted(model), kept=kept)
        listed = ", ".join([*kept[:_MAX_LISTED], *(["…"] if len(kept) > _MAX_LISTED else [])])
        remaining = f"weights that stay FP32, because only {SUPPORTED} can change: {listed}"
        if not quantized_nodes(onnx_ir.to_proto(model)):
            raise EdgeformerError(
                f"{precision.upper()}: the graph has no MatMul, Gemm or Gather with stored weights, and the weights of "
                f"other operators stay FP32 ({remaining if kept else operator_names(model)})"
            )
        if kept:
            self.notes.append(f"{Variant(precision).id()}: {remaining}")
        return model

    def build_job(self, folder: Path, graphs: tuple[ArtifactManifest, ...]) -> BuildJob:
        """Describe the build: shapes of 1 to 16 rows, lengths up to 512 or the golden inputs', which are the best."""
        manifest, task, data = self.bundle.manifest, self.bundle.task, self.bundle.data
        length = data.tokens_at_once
        best = task.input_shapes(data, 1, length)  # empty for text, whose shapes the builder knows
        smallest, largest = task.input_shapes(data, 1, 1), task.input_shapes(data, 16, max(512, length))

        def no_module(graph: ArtifactManifest) -> NoReturn:
            raise EdgeformerError("an imported graph has no torch module, from which this format is made; leave it out")

        return BuildJob(
            bundle=folder, graphs=graphs, precision="fp16" if self.options.fp16 else self.base[0].precision,
            max_length=manifest.max_length, max_positions=manifest.max_positions or manifest.max_length,
            progress=self.progress, note=self.notes.append, module=no_module,
            shapes={name: (smallest[name], shape, largest[name]) for name, shape in best.items()},
        )  # fmt: skip

    def manifest(self, folder: Path, artifacts: Sequence[ArtifactManifest], previous: PreviousBundle) -> BundleManifest:
        """Link what stays, and describe the new folder. Reports in it are not listed."""
        previous.link_kept(artifacts, folder)
        old = self.bundle.manifest
        kept_ids = {artifact.id for artifact in artifacts if artifact.kept}
        outdated = {note.partition(":")[0] for note in self.notes}
        outdated |= {"FP16", "INT8"} - {artifact.precision.upper() for artifact in artifacts}
        outdated |= {artifact.id for artifact in self.bundle.artifacts[1:]} - kept_ids
        notes = (*(note for note in old.notes if note.partition(":")[0] not in outdated), *self.notes)
        files = checksum_files(folder, artifacts, set(old.files).union(*map(own_files, artifacts)))
        update = {"artifacts": tuple(artifacts), "notes": notes, "files": files, "manifest_sha256": None}
        return old.model_copy(update=update)
