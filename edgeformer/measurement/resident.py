"""Resident memory of an artifact's weights: whether weights that are stored once are also held once.

Runtimes repack weights for their kernels, some of them once per operator that reads them: a block that is applied twice
then takes its memory twice, although the file stores it once.
"""

import os
from collections.abc import Sequence
from contextlib import closing
from typing import ClassVar

import psutil
from pydantic import BaseModel, Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.bundle import Bundle
from edgeformer.measurement.artifact import (
    check_artifact,
    input_buffers,
    items_of,
    load_runtime,
    open_workload,
    own_memory,
)
from edgeformer.runtimes import ArtifactFiles, cannot_run, on_gpu, opener_of
from edgeformer.system.child import end_with_parent, exit_text
from edgeformer.system.worker import Send, WorkerJob, run_job
from edgeformer.tasks import get_task

TOKENS = 16  # of the one text of the call: few, because its activations are counted with the weights


class Resident(Frozen):
    """Message: memory of one opened artifact, or the reason why it was not measured."""

    index: int
    provider: str | None = None
    anonymous_bytes: int = 0
    mapped_bytes: int = Field(0, description="resident pages of the artifact's files")
    reason: str | None = None

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.anonymous_bytes + self.mapped_bytes


class ResidentJob(WorkerJob):
    """Artifacts that one runtime opens on the processor, each in a process of its own."""

    name = "memory"
    messages: ClassVar[tuple[type[BaseModel], ...]] = (Resident,)
    files: tuple[ArtifactFiles, ...]
    provider: str | None = Field(None, description="None: the runtime's choice for this machine")


def measure_resident(
    bundle: Bundle, artifacts: Sequence[ArtifactManifest], provider: str | None = None
) -> dict[str, Resident]:
    """Return artifact → memory on this processor after one short call, without the runtime's own library.

    GPUs are left out, and systems other than Linux, which do not tell memory from mapped files. Raises ArtifactError
    if a file is damaged.
    """
    results: dict[str, Resident] = {}
    by_runtime: dict[str, list[ArtifactManifest]] = {}
    for artifact in artifacts:
        problem = cannot_run(artifact, provider)
        runtime = opener_of(artifact, provider)
        if problem is None and on_gpu(runtime.provider(artifact, provider)):
            problem = "it runs on a GPU"
        if problem is None and not psutil.LINUX:
            problem = "only Linux separates a process's own memory from files that it has mapped"
        if problem is None:
            by_runtime.setdefault(runtime.name, []).append(artifact)
        else:
            results[artifact.id] = Resident(index=-1, reason=problem)
    for group in by_runtime.values():
        files = tuple(check_artifact(bundle, artifact) for artifact in group)
        messages: list[Resident] = []
        end = run_job(ResidentJob(threads=1, files=files, provider=provider), messages.append)
        by_index = {message.index: message for message in messages}
        for index, artifact in enumerate(group):
            results[artifact.id] = by_index.get(
                index, Resident(index=index, reason=end.reason or "the process sent no result")
            )
    return results


def work(document: bytes, send: Send) -> None:
    """Import the runtime; let a copy of this process open each artifact, so that nothing of an earlier one is left."""
    job = ResidentJob.model_validate_json(document, strict=False)
    provider, worker = load_runtime(job.files[0], job.provider), os.getpid()
    for index, files in enumerate(job.files):
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code:
                send(Resident(index=index, provider=provider, reason=f"the process ended early: {exit_text(code)}"))
            continue
        end_with_parent(worker)
        try:
            item = items_of(files.artifact, get_task(str(files.task)), [(1, TOKENS)])[0]
            buffers, before = input_buffers(files, item[1:]), own_memory(files)
            with closing(open_workload(files, item, provider, 1, buffers)) as workload:
                workload.first()
                anonymous, mapped = own_memory(files, before)
            send(Resident(index=index, provider=provider, anonymous_bytes=anonymous, mapped_bytes=mapped))
        except EdgeformerError as error:
            send(Resident(index=index, provider=provider, reason=str(error)))
        os._exit(0)


def add_resident(bundle: Bundle, manifest: BundleManifest) -> BundleManifest:
    """Return the manifest with the memory of artifacts that run here and whose stored weights are counted.

    A note says why one of them was not measured.
    """
    runnable = [entry for entry in bundle.built() if entry.sharing is not None and cannot_run(entry) is None]
    measured, entries, notes = measure_resident(bundle, runnable), [], list(manifest.notes)
    for entry in manifest.artifacts:
        memory = measured.get(entry.id)
        if memory is not None and memory.reason is not None:
            notes.append(f"{entry.id}: memory was not measured: {memory.reason}")
        elif memory is not None and entry.sharing is not None:
            update = {"resident_bytes": memory.bytes, "mapped_bytes": memory.mapped_bytes}
            entry = entry.model_copy(update={"sharing": entry.sharing.model_copy(update=update)})
        entries.append(entry)
    return manifest.model_copy(update={"artifacts": tuple(entries), "notes": tuple(notes)})
