"""Export of an imported ONNX graph: the FP32 graph in the bundle is the reference, and is converted to each precision.

The bundle was made by ``edgeformer import onnx``. Its graph stays unchanged, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, BundleManifest, Parity, Precision
from edgeformer.artifacts.onnx_outline import external_files
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.scores import Score
from edgeformer.artifacts.workspace import BUNDLE_FILE
from edgeformer.bundle import Bundle
from edgeformer.export import int4
from edgeformer.export.fp16 import convert_to_fp16, lifted, max_abs_values
from edgeformer.export.graphs import weights_file, write_graph
from edgeformer.export.int8 import quantize, quantized_nodes
from edgeformer.export.judging import Judge, describe_converted
from edgeformer.export.previous import PreviousBundle, Requested, link, own_files
from edgeformer.export.variants import ExportOptions, Variant
from edgeformer.runtimes import BuildJob
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.runtime import Target
from edgeformer.runtimes.session import Array, Session
from edgeformer.tasks import Origin, Run, Task
from edgeformer.tasks.scoring import Validation, open_validation

_MAX_ABS_CALLS = 2
"""Golden calls of which every value inside the graph is inspected before FP16 conversion."""

_FP16_NOTE = (
    "FP16: norms, softmax, powers, sums over an axis and whatever came near FP16's limits on the golden inputs stay "
    "FP32; a CPU computes the rest in FP32, too: `edgeformer verify` on the target shows what it does there"
)
_INT8_NOTE = "INT8: judged by its outputs alone; its cost in task accuracy needs labelled data"


@dataclass(frozen=True)
class GraphReference:
    """Golden inputs and answers of an imported bundle; see :class:`~edgeformer.export.judging.Reference`."""

    bundle: Bundle
    last: int = 0
    loops: None = None

    @property
    def task(self) -> Task:
        """Task of the bundle."""
        return self.bundle.task

    @property
    def base(self) -> ArtifactManifest:
        """Entry of the imported graph."""
        return self.bundle.artifacts[0]

    @property
    def needed(self) -> Mapping[int, int]:
        """Parameters of the graph, under its only exit."""
        return {0: self.base.sharing.unique_parameters if self.base.sharing else self.bundle.manifest.parameters}

    @property
    def max_positions(self) -> int | None:
        """Tokens that the graph takes; None: any number."""
        return self.bundle.manifest.max_positions

    @property
    def rejection_hint(self) -> str:
        """Remedy where the golden inputs are random numbers instead of real ones."""
        is_random = any("seed" in note for note in self.bundle.manifest.notes)
        return "; its golden inputs were drawn: import it with real ones (--inputs FILE.npz)" if is_random else ""

    def golden_outputs(self, run: Run, max_rows: int | None = None) -> Any:
        """Run the golden inputs."""
        return self.task.golden_outputs(self.bundle.golden(), run, max_rows)

    def parity(self, exit_: int, outputs: Any, precision: Precision, provider: str) -> Parity:
        """Compare outputs with the imported graph's."""
        return self.task.golden_parity(self.bundle.golden().arrays, outputs, None, precision, provider)

    def score(self, exit_: int, outputs: Any) -> Score:
        """Score outputs on the golden inputs."""
        return self.task.golden_score(0, outputs, self.bundle.golden().answers)


@dataclass
class GraphSource:
    """A bundle made by ``import onnx``, as the source of an export."""

    bundle: Bundle
    options: ExportOptions
    progress: Progress
    notes: list[str] = field(default_factory=list)
    can_join = False
    usual_target = None

    @classmethod
    def open(cls, folder: Path, options: ExportOptions, progress: Progress) -> GraphSource:
        """Open the bundle and check its graph.

        Raises:
            ArtifactError: the bundle is damaged.
            InputError: it was exported from a run, or its graph is not FP32, so nothing can be converted.
        """
        source = cls(Bundle.open(folder), options, progress)
        if source.bundle.manifest.wrapped is None:
            raise InputError(f"{folder}: was exported from a run; export that run again")
        base = source.bundle.artifacts[0]
        if (options.fp16 or options.int8 or options.int4) and base.precision != "fp32":
            raise InputError(f"{folder}: its graph is {base.precision.upper()} already; import the FP32 one")
        source.bundle.check(base)
        return source

    @property
    def base(self) -> tuple[ArtifactManifest, ...]:
        """Artifacts that are in the bundle before the export: the imported graph."""
        return self.bundle.artifacts[:1]

    @property
    def folder(self) -> Path:
        """Of the bundle."""
        return self.bundle.folder

    @cached_property
    def _validation(self) -> Validation | None:
        """Scores a session on the labelled data that was imported with the graph."""
        if self.base[0].validation is None:
            return None
        validation, problem = open_validation(
            self.bundle.task, self.bundle.data, self.bundle.reader(), Origin(), self.progress, split="test"
        )
        if problem is not None:
            problem = problem.replace("validation split", "labelled data")
            self.notes.append(f"scores: {problem}, so they are of the golden inputs")
        return validation

    def previous(self, targets: Sequence[Target]) -> PreviousBundle:
        """Look at the artifacts that were made of the graph before."""
        requested = Requested(self.options, (), targets, self.base[0].precision)
        return PreviousBundle.of_imported(self.bundle, requested)

    def begin(self, new: Path) -> set[str]:
        """Bring everything but older conversions into the new folder; returns the names.

        The graph and its weights are copied, because onnx_ir reads no linked weights; other files are linked.
        """
        graph = self.folder / str(self.base[0].file)
        copied = {graph, *(graph.parent / location for location in external_files(graph))}
        replaced = set[str]().union(*map(own_files, self.bundle.artifacts[1:])) | {BUNDLE_FILE}
        names = set[str]()
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if not path.is_file() or name in replaced:
                continue
            names.add(name)
            if path in copied:
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, new / name)
            else:
                link(path, new / name)
        return names

    def judge(self, folder: Path, entry: ArtifactManifest) -> Judge:
        """Judge of an artifact with this entry's precision."""
        base = self.base[0]
        baseline = {0: (base.score, base.validation)} if base.score is not None else {}
        variant = Variant(entry.precision)
        return Judge(folder, GraphReference(self.bundle), variant, self._validation, baseline, sets_baseline=False)

    def make_graphs(self, folder: Path, previous: PreviousBundle) -> Iterator[ArtifactManifest]:
        """Convert the graph to every requested precision, and judge each one."""
        conversions: dict[Precision, Callable[[Path], onnx_ir.Model]] = {}
        if self.options.fp16:
            conversions["fp16"] = self._convert_fp16
        if self.options.int8:
            conversions["int8"] = self._quantize_int8
        if self.options.int4:
            conversions["int4"] = self._quantize_int4
        for precision, convert in conversions.items():
            yield self._make_graph(folder, precision, convert)
        if self.options.fp16:
            self.notes.append(_FP16_NOTE)
        if self.options.int8 and self.base[0].validation is None:
            self.notes.append(_INT8_NOTE)

    def _make_graph(
        self, folder: Path, precision: Precision, convert: Callable[[Path], onnx_ir.Model]
    ) -> ArtifactManifest:
        """Convert, write and judge the graph of one precision."""
        base, variant = self.base[0], Variant(precision)
        entry = ArtifactManifest(
            id=variant.id(), file=variant.file("model"), format=ONNX, precision=precision, status="rejected",
            inputs=base.inputs, outputs=base.outputs,
        )  # fmt: skip
        path = folder / variant.file("model")
        try:
            with bar(self.progress, f"Making the {precision.upper()} graph", None):
                model = convert(folder)
                has_shared = base.weights_file is not None
                with weights_file(folder / variant.weights) if has_shared else nullcontext() as shared:
                    size_bytes = write_graph(model, path, shared)
            fields = describe_converted(path, size_bytes, base)
            if has_shared:
                fields["weights_file"] = variant.weights
            with OnnxSession(path) as session:
                measured = self.judge(folder, entry).measure(session, 0)
            fields |= {**measured, "reason": measured["reason"] or fields.get("reason")}
        except EdgeformerError as error:
            fields = {"reason": str(error)}
        except (OSError, MemoryError):
            raise
        except Exception as error:  # converters raise any type for graphs that they were never tested with
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            fields = {"reason": f"{precision.upper()}: cannot be made: {message}"}
        return entry.model_copy(update={**fields, "status": "rejected" if fields["reason"] else "built"})

    def _convert_fp16(self, folder: Path) -> onnx_ir.Model:
        model = onnx_ir.load(folder / str(self.base[0].file))

        def run_golden(session: Session) -> list[dict[str, Array]]:
            calls: list[dict[str, Any]] = []

            def run(inputs: Any) -> Any:
                calls.append(session.run(inputs))
                return calls[-1]

            self.bundle.task.golden_outputs(self.bundle.golden().first(_MAX_ABS_CALLS), run, None)
            return calls

        return convert_to_fp16(model, max_abs_values(model, run_golden, folder))

    def _quantize_int8(self, folder: Path) -> onnx_ir.Model:
        model = quantize(lifted(onnx_ir.load(folder / str(self.base[0].file))), folder)
        RemoveUnusedNodesPass()(model)
        if not quantized_nodes(onnx_ir.to_proto(model)):
            raise EdgeformerError(
                "INT8: nothing in it can be stored in INT8: it has no product with a stored matrix and no table of "
                "rows (convolutions and recurrent operators stay FP32)"
            )
        return model

    def _quantize_int4(self, folder: Path) -> onnx_ir.Model:
        model = int4.quantize(lifted(onnx_ir.load(folder / str(self.base[0].file))))
        if not quantized_nodes(onnx_ir.to_proto(model)):
            raise EdgeformerError(
                "INT4: nothing in it can be stored in 4 bits: no product with a matrix, no table of rows"
            )
        return model

    def build_job(self, folder: Path, graphs: tuple[ArtifactManifest, ...]) -> BuildJob:
        """Describe the build: shapes of 1 to 16 rows, lengths up to 512 or the golden inputs', which are the best."""
        manifest, task, data = self.bundle.manifest, self.bundle.task, self.bundle.data
        length = data.tokens_at_once
        best = task.input_shapes(data, 1, length)  # empty for text, whose shapes the builder knows
        smallest, largest = task.input_shapes(data, 1, 1), task.input_shapes(data, 16, max(512, length))

        def no_module() -> NoReturn:
            raise EdgeformerError("an imported graph has no torch module; build its engine from the graph: --trt")

        return BuildJob(
            bundle=folder,
            graphs=graphs,
            precision="fp16" if self.options.fp16 else self.base[0].precision,
            max_length=manifest.max_length,
            max_positions=manifest.max_positions or manifest.max_length,
            cache=self.options.cache.parent if self.options.cache is not None else None,
            progress=self.progress,
            note=self.notes.append,
            module=no_module,
            shapes={name: (smallest[name], shape, largest[name]) for name, shape in best.items()},
        )

    def manifest(self, folder: Path, artifacts: Sequence[ArtifactManifest], previous: PreviousBundle) -> BundleManifest:
        """Link what stays, and describe the new folder: bundle.json. Reports in the folder are not listed."""
        previous.link_kept(artifacts, folder)
        old = self.bundle.manifest
        kept_ids = {artifact.id for artifact in artifacts if artifact.kept}
        outdated = {note.partition(":")[0] for note in self.notes}
        outdated |= {"FP16", "INT8"} - {artifact.precision.upper() for artifact in artifacts}
        outdated |= {artifact.id for artifact in self.bundle.artifacts[1:]} - kept_ids
        notes = (*(note for note in old.notes if note.partition(":")[0] not in outdated), *self.notes)
        graphs = {artifact.file for artifact in artifacts}
        listed = (set(old.files) | set[str]().union(*map(own_files, artifacts))) - graphs
        files = {name: sha256_of(folder / name) for name in sorted(listed) if (folder / name).is_file()}
        update = {"artifacts": tuple(artifacts), "notes": notes, "files": files, "manifest_sha256": None}
        return old.model_copy(update=update)
