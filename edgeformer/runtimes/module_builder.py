"""Builders that convert a graph's torch module with any batch and length: Core ML and ExecuTorch differ in how."""

import itertools
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest, EngineBuild, Precision, Sharing
from edgeformer.artifacts.progress import bar
from edgeformer.runtimes.runtime import ENGINES_FOLDER, Builder, BuildJob, Target
from edgeformer.system.capability import installed_version

MAX_BATCH = 16
_EXAMPLE_LENGTH = 7


@dataclass(frozen=True)
class StoredModel:
    """Contents of a model's file, counted in it.

    ``quantized``: kind of weight → number in INT8. ``engine``: further fields of :class:`EngineBuild`.
    """

    parameters: int
    constants: int
    weight_bytes: int
    quantized: dict[str, int]
    engine: Mapping[str, Any] = field(default_factory=dict)


class ModuleBuilder(Builder):
    """Builds a file of each full and exit graph with the full vocabulary; with ``--int8`` also one in INT8.

    The first of ``packages`` converts.

    Attributes:
        distributions: whose versions an artifact records.
        endings: precision without ``--int8``, then ``int8`` → end of the file names.
        step: text of the progress bar, with the artifact's id.
        not_run: why parity is not measured on a machine that cannot run the files.
        no_caches: why decode graphs are refused.
        fp16_note: note for an export with ``--fp16``; None: the files are in FP16.
    """

    precision: Precision
    distributions: tuple[str, ...]
    endings: ClassVar[Mapping[Precision, str]]
    step: str
    not_run: str
    no_caches: str
    fp16_note: str | None = None

    @abstractmethod
    def write(
        self, module: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], length: int, path: Path,
        precision: Precision,
    ) -> StoredModel:  # fmt: skip
        """Write a file that takes 1 to ``MAX_BATCH`` rows of 1 to ``length`` tokens.

        ``module``: in evaluation mode, from ``inputs``, int64 [batch, sequence] each, to ``outputs``, float32.
        Raises EdgeformerError if it cannot be converted.
        """

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        if self.fp16_note is not None and any(graph.precision == "fp16" for graph in job.graphs):
            job.note(self.fp16_note)
        graphs, has_int8 = job.full_text_graphs("fp32"), any(graph.precision == "int8" for graph in job.graphs)
        length = min(job.max_length, job.max_positions)
        precisions = [precision for precision in self.endings if precision != "int8" or has_int8]
        for precision, graph in itertools.product(precisions, graphs):
            parity = self.unmeasured_parity(graph, self.not_run, precision)
            entry = self.initial_entry(graph, precision, parity=parity)
            try:
                module = job.module(graph)
            except EdgeformerError as error:
                yield entry.model_copy(update={"status": "unavailable", "reason": str(error), "parity": None})
                continue
            file = f"{ENGINES_FOLDER}/{Path(str(graph.file)).stem}{self.endings[precision]}"
            start_s = time.perf_counter()
            try:
                with bar(job.progress, self.step.format(entry.id), None):
                    names = tuple(graph.inputs), tuple(graph.outputs) or ("logits",)
                    stored = self.write(module, *names, length, job.bundle / file, precision)
            except EdgeformerError as error:
                yield entry.model_copy(update={"reason": str(error)})
                continue
            unique = sum(parameter.numel() for parameter in module.parameters())
            if graph.sharing is not None:  # an exit does not need every parameter of the model
                unique = graph.sharing.unique_parameters
            engine = EngineBuild(
                builder=f"{self.packages[0]} {installed_version(self.packages[0])}", checked_by="size",
                seconds=round(time.perf_counter() - start_s, 2), weight_bytes=stored.weight_bytes,
                graph_bytes=(job.bundle / str(graph.file)).stat().st_size,
                shapes=dict.fromkeys(graph.inputs, ((1, 1), (1, min(_EXAMPLE_LENGTH, length)), (MAX_BATCH, length))),
                **stored.engine,
            )  # fmt: skip
            sharing = Sharing(
                unique_parameters=unique, stored_parameters=stored.parameters, constant_elements=stored.constants,
                weight_bytes=stored.weight_bytes,
            )  # fmt: skip
            fields = {"engine": engine, "quantized": stored.quantized, "sharing": sharing}
            yield self.built_entry(entry, job.bundle, file, self.distributions, **fields)
        for graph in job.graphs:
            if graph.role == "decode" and graph.precision == "fp32" and not graph.trimmed:
                yield self.initial_entry(graph, self.precision, reason=self.no_caches)


def export_program(module: Any, inputs: Sequence[str], length: int) -> Any:
    """Export a module as a ``torch.export.ExportedProgram`` of 1 to ``MAX_BATCH`` rows of 1 to ``length`` tokens.

    ``module``: in evaluation mode; its arguments are ``inputs``, int64 [batch, sequence] each.
    """
    import torch

    class Source(torch.nn.Module):
        source: torch.nn.Module

        def forward(self, *arrays: torch.Tensor) -> Any:
            return self.source(*arrays)

    root = Source()
    root.source = module
    example = tuple(torch.ones(2, min(_EXAMPLE_LENGTH, length), dtype=torch.int64) for _ in inputs)
    sizes = {0: torch.export.Dim("batch", max=MAX_BATCH), 1: torch.export.Dim("sequence", max=length)}
    shapes = ((sizes,) * len(inputs),)  # of forward's only argument, which takes all inputs
    return torch.export.export(root, example, dynamic_shapes=shapes)
