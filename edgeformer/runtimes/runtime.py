"""Backend: everything that edgeformer must know of a runtime. One folder implements it; nothing else names runtimes.

Importing a backend must cost nothing: the runtime itself is imported where an artifact is opened or built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from edgeformer.artifacts.errors import ArtifactError, DataError, InputError
from edgeformer.runtimes.session import Array

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile
    from edgeformer.artifacts.manifest import ArtifactManifest, Precision
    from edgeformer.artifacts.progress import Progress
    from edgeformer.runtimes.decoder import Decoder
    from edgeformer.runtimes.session import Session
    from edgeformer.system.capability import Capability

Kind = Literal["cpu", "cuda"]
"""What computes on a device, as device profiles say it."""

ENGINES_FOLDER = "engines"
"""Where builders put their files, relative to the bundle."""

Calls = Sequence[Mapping[str, Array]]
"""Inputs of one call each."""

InputShapes = dict[str, tuple[tuple[int, ...], ...]]
"""Input → smallest, best and largest shape."""


@dataclass(frozen=True)
class ArtifactFiles:
    """An artifact's files, after they were compared with the manifest.

    Attributes:
        artifact: the manifest's entry.
        file: the artifact's own file; weights may lie beside it.
        parts: step artifacts: embed, loop, readout… → file.
        loops: step artifacts: how often the loop graph is run for the model's last answer.
        max_positions: longest text that the model takes, where that is known.
    """

    artifact: ArtifactManifest
    file: Path
    parts: Mapping[str, Path] = field(default_factory=dict)
    loops: int | None = None
    max_positions: int | None = None


@dataclass(frozen=True)
class OpenOptions:
    """How an artifact is opened.

    Attributes:
        provider: what shall compute, as the backend names it; it is used or refused, never replaced. None: the
            backend's choice for this machine.
        threads: of one operator; None: what this process may use.
        early: step artifacts of classifiers: loop → smallest top probability that lets a row answer there; at other
            loops nobody is asked, and after the last one everybody answers.
        exits: step artifacts: loops that all answer, each as ``logits_exitN``; empty: the last one, as ``logits``.
        repeated_shapes: calls repeat a few shapes many times, as in a measurement: a runtime may compile for each shape
            before its first answer.
        in_turns: other sessions of this process run in turn with this one, so its threads must not wait for work on
            their cores.
    """

    provider: str | None = None
    threads: int | None = None
    early: Mapping[int, float] | None = None
    exits: tuple[int, ...] = ()
    repeated_shapes: bool = False
    in_turns: bool = False


@dataclass(frozen=True)
class ProviderFacts:
    """What there is to know of a provider's name.

    Attributes:
        label: for tables, shorter than the name where that is long.
        kind: of the device that it computes on; None: another kind, or not known.
        counts_threads: it computes in the threads that a session is opened with; others bring their own.
        rounds_to: what it computes FP32 in, where that has fewer bits: its answers are others, and have scores of
            their own. None: an artifact's precision says it.
    """

    label: str
    kind: Kind | None = None
    counts_threads: bool = False
    rounds_to: str | None = None


@dataclass(frozen=True)
class Target:
    """A device that a builder can build for here.

    Attributes:
        format: of the artifacts that it will make.
        precision: of what it will make; None: that of the graphs it is given.
        device: the profile's name, a part of the files' names; None where the builder needs no device.
        compute_capability: NVIDIA GPUs: what the code is compiled for.
        note: a note for the export, e.g. that the choice of this format is a guess.
    """

    format: str
    device: str | None = None
    compute_capability: str | None = None
    precision: Precision | None = None
    note: str | None = None


@dataclass(frozen=True)
class Unavailable:
    """Nothing can be built here: the format that it would have had, and why not; ``precision`` as of a target."""

    format: str
    reason: str
    precision: Precision | None = None


@dataclass(frozen=True)
class BuildJob:
    """What a builder is given.

    Attributes:
        bundle: the bundle's folder, as far as it is written; files go to its folder ``ENGINES_FOLDER``.
        graphs: the ONNX artifacts that were written and passed, of every role and precision; take what fits.
        precision: of the graphs that were asked to be built from.
        max_length: tokens of the recipe's longest text.
        max_positions: tokens that the model can take.
        cache: folder for what builders learn about a device; None: learn it again.
        progress: where to say what is going on.
        note: adds a line to the bundle's notes.
        module: the torch module behind the full graph of ``precision``, in evaluation mode, for those who compile that.
        shapes: of what is no text; empty: of text, by its lengths.
        calibration: real rows of the training split; raises DataError where there are none.
        judge: of what runs here: runs it on the golden inputs and the validation split, counts what its ONNX file
            stores, and returns fields of its manifest entry, with a ``reason`` where it misses a bar.
    """

    bundle: Path
    graphs: tuple[ArtifactManifest, ...]
    precision: Precision
    max_length: int
    max_positions: int
    cache: Path | None
    progress: Progress
    note: Callable[[str], None]
    module: Callable[[], Any]
    shapes: InputShapes = field(default_factory=dict)
    calibration: Callable[[], Calls] = lambda: _unavailable("calibration")
    judge: Callable[[ArtifactManifest, Path, Session], dict[str, Any]] = lambda *_: _unavailable("judging")


def _unavailable(what: str) -> NoReturn:
    raise DataError(f"no data for {what} is at hand in this export")


class Builder(ABC):
    """Makes artifacts of a runtime's own format while a bundle is exported.

    Attributes:
        name: what ``export --build`` calls it.
        flag: what asks for it on the command line.
        formats: of the artifacts that it makes.
        needs_device: it builds for one device, whose profile it must be given.
        joins: a precision of ``export`` that also asks for it, where its packages are installed and the task has rows
            to calibrate with: ``int8``.
    """

    name: str
    formats: tuple[str, ...]
    needs_device: bool = False
    joins: Precision | None = None

    @property
    def flag(self) -> str:
        """What asks for it on the command line of ``export``."""
        return f"--build {self.name}"

    @abstractmethod
    def plan(self, device: DeviceProfile | None) -> Target | Unavailable:
        """What would be built for a device on this machine, or why nothing can be; asked before anything is built.

        Args:
            device: never None where ``needs_device``.
        """

    @abstractmethod
    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        """Build, and describe each artifact when it is done: ``built``, or ``rejected`` with the reason.

        Args:
            target: from :meth:`plan`.
            job: what to build from.
        """


class Runtime(ABC):
    """A runtime.

    Attributes:
        name: of its folder.
        formats: of the artifacts that it opens; empty: it opens none from a bundle.
        reads: formats of other backends that it opens, too, where one of its providers is asked for.
        distributions: packages whose versions a run, a bundle and a report record.
        builders: what it can make artifacts with.
    """

    name: str
    formats: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    builders: tuple[Builder, ...] = ()

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        """Why this machine cannot run the artifact: package, libraries, driver, GPU, version; None when it can."""
        opens = artifact.format in (*self.formats, *self.reads)
        return None if opens else f"{self.name} opens nothing of the format {artifact.format}"

    def open(self, files: ArtifactFiles, options: OpenOptions) -> Session:
        """Open an artifact of any role as if it were one graph. Every backend with ``formats`` has its own.

        Args:
            files: of an artifact in one of ``formats``; a step or decode artifact is run as often as it takes.
            options: how.

        Raises:
            ArtifactError: a file is missing, damaged or not runnable.
            InputError: the provider is not available here, or rows cannot leave this artifact early.
            MissingDependencyError: the runtime is not here.
        """
        raise ArtifactError(f"{files.file}: {self.name} opens nothing of the format {files.artifact.format}")

    def open_decoder(self, files: ArtifactFiles, exits: Collection[int] | None, options: OpenOptions) -> Decoder[Any]:
        """Open a language model's step or decode artifact to write token by token.

        Args:
            files: as :meth:`open` takes them.
            exits: loops that will be asked for logits; None: the last one.
            options: how.

        Raises:
            InputError: this runtime does not decode, or not this artifact; else as :meth:`open`.
        """
        raise InputError(f"{files.artifact.id}: {self.name} keeps nothing of earlier tokens here, so it cannot decode")

    def providers(self) -> tuple[str, ...]:
        """What its sessions may compute with on this machine; empty where there is no choice, or none is here."""
        return ()

    def offers(self, artifact: ArtifactManifest) -> tuple[str, ...]:
        """What an artifact is measured with where this runtime is asked for by name: what computes it by default.

        A runtime that computes in several precisions offers each of them, also one that is not here: opening says why.
        """
        return (self.provider(artifact),)

    def provider(self, artifact: ArtifactManifest, wanted: str | None = None, kind: Kind | None = None) -> str:
        """What computes an artifact, as a session's ``provider`` will say it.

        Args:
            artifact: in one of ``formats``.
            wanted: what the user asked for; only runtimes that have a choice look at it.
            kind: on a device of this kind; None: on this machine.
        """
        return artifact.format

    def provider_facts(self, provider: str) -> ProviderFacts | None:
        """What a provider is; None: not one of this runtime's."""
        return None

    def load(self, artifact: ArtifactManifest) -> None:
        """Import what opening ``artifact`` will import, opening nothing: a part of the baseline of its memory."""
        return

    @abstractmethod
    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        """Its lines of ``doctor``. Imports that can be dangerous run in child processes, each for ``timeout_s``."""

    def never_runs(self, artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
        """Why no device like this one can ever run the artifact, whatever is installed there; None: one could.

        Args:
            artifact: in one of ``formats``.
            device: facts of the device.
        """
        return None

    def estimable(self, artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
        """Why nothing can be estimated of an artifact for a device that is not here; None: it can be.

        Args:
            artifact: in one of ``formats``.
            device: facts of the device.
        """
        return f"edgeformer has no estimates for {self.name}; profile on the device itself"

    def fuses(self, artifact: ArtifactManifest) -> bool:
        """Whether it compiles the whole graph, so that estimates do not count a launch and a copy per node."""
        return False
