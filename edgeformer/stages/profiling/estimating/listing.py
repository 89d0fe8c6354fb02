"""The parent's side: have a child list, time or probe, and turn whatever happens to it into answers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from edgeformer.backends.onnxruntime.node_listing import ExecutedNode
from edgeformer.bundle import Bundle
from edgeformer.formats.errors import EdgeformerError
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.machine.capability import exit_text
from edgeformer.stages.profiling.estimating.messages import (
    ChildTask,
    Ended,
    Listed,
    ListSpec,
    Message,
    NotListed,
    Probed,
    ProbeSpec,
    parse_answer,
)
from edgeformer.stages.profiling.launch import child_environment
from edgeformer.stages.profiling.messages import Item

# A listing runs every item once; what is timed takes a minute per artifact. Beyond this the child hangs.
_LONGEST_S = 600.0


def child_command() -> list[str]:
    """How the listing process is started."""
    return [sys.executable, "-m", "edgeformer.stages.profiling.estimating.child"]


@dataclass
class Listing:
    """What a child has answered about one artifact."""

    items: dict[Item, Listed] = field(default_factory=dict)
    refused: dict[Item, str] = field(default_factory=dict)

    def nodes(self, item: Item) -> tuple[ExecutedNode, ...]:
        """All nodes of one call, a graph that runs several times repeated."""
        return tuple(node for graph in self.items[item].graphs for _ in range(graph.times) for node in graph.nodes)


def list_artifact(
    bundle: Path, manifest: BundleManifest, artifact: ArtifactManifest, items: Sequence[Item], threads: int = 1
) -> Listing:
    """The executed nodes of an ONNX artifact at ``items``; an item that fails has a reason instead."""
    spec = ListSpec(
        bundle=str(bundle.resolve()),
        artifact=artifact,
        loops=Bundle(bundle, manifest).loops if artifact.role == "step" else 1,
        items=tuple(items),
        threads=threads,
    )
    return run_listing(spec)


def run_listing(spec: ListSpec, heard: Callable[[], None] = lambda: None) -> Listing:
    """The same for a spec, which may also ask for times; ``heard`` is called after every piece of work."""
    listing = Listing()

    def take(message: Message) -> None:
        if isinstance(message, Listed):
            listing.items[message.item] = message
        elif isinstance(message, NotListed):
            listing.refused[message.item] = message.reason
        heard()

    ending = _run(ChildTask(task=spec), spec.threads, take)
    for item in spec.items:
        if item not in listing.items:
            listing.refused.setdefault(item, ending or "the listing process did not list it")
    return listing


def run_probe(threads: int) -> Probed:
    """What this host can do. Raises EdgeformerError when the child does not say."""
    found: list[Probed] = []

    def take(message: Message) -> None:
        if isinstance(message, Probed):
            found.append(message)

    ending = _run(ChildTask(task=ProbeSpec(threads=threads)), threads, take)
    if not found:
        raise EdgeformerError(f"this host's rates could not be measured: {ending or 'no answer'}")
    return found[0]


def _run(task: ChildTask, threads: int, take: Callable[[Message], None]) -> str | None:
    """Run the child to its end; why it ended without having done everything, or None."""
    ended: Ended | None = None
    with tempfile.TemporaryFile() as errors, _started(task, threads, errors) as process:
        # A child that hangs is ended; reading its output then ends as well.
        watchdog = threading.Timer(_LONGEST_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                message = parse_answer(line)
                if isinstance(message, Ended):
                    ended = message
                elif message is not None:
                    take(message)
            process.wait()
        finally:
            watchdog.cancel()
            process.kill()
        if ended is not None:
            return ended.reason
        return f"the listing process ended early: {exit_text(process.returncode)}{_last_words(errors)}"


def _started(task: ChildTask, threads: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        child_command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=child_environment(threads, None),
    )
    assert process.stdin is not None
    # A child that dies before it reads breaks the pipe; its exit code will say more than that.
    with contextlib.suppress(OSError):
        process.stdin.write(task.model_dump_json().encode())
    with contextlib.suppress(OSError):
        process.stdin.close()
    return process


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode("utf-8", errors="replace").strip().splitlines()
    return f"; its last words: {lines[-1].strip()[:300]}" if lines else ""
