"""Runtime and Builder: the interfaces that each runtime package implements.

Importing a runtime package must be cheap: it imports the runtime's library only to open or build an artifact.
"""

from __future__ import annotations

import io
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, util
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from edgeformer.artifacts.errors import (
    ArtifactError,
    DataError,
    EdgeformerError,
    InputError,
    MissingDependencyError,
    install_hint,
)
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, Parity, Precision, Sharing
from edgeformer.runtimes.session import Array, Kind, reason_of
from edgeformer.tasks.metric import TOLERANCES

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile
    from edgeformer.artifacts.progress import Progress
    from edgeformer.runtimes.decoder import Decoder
    from edgeformer.runtimes.session import Graph, Session
    from edgeformer.system.capability import Capability

ENGINES_FOLDER = "engines"
"""Folder of built files, relative to the bundle."""

Calls = Sequence[Mapping[str, Array]]
"""One mapping of inputs per call."""

InputShapes = dict[str, tuple[tuple[int, ...], ...]]
"""Input → smallest, best and largest shape."""


@dataclass(frozen=True)
class ArtifactFiles:
    """An artifact's files, verified against the manifest.

    Attributes:
        file: the artifact's main file; external weights lie in the same folder.
        parts: step artifacts: embed, loop, readout… → file.
        loops: step and decode artifacts: the model's number of loops.
        max_positions: longest text that the model takes; None: not known.
        golden, task: to measure it: its golden inputs, and the task that turns them into calls.
        axes: to measure it: input → what sizes each of its axes; empty: text.
    """

    artifact: ArtifactManifest
    file: Path
    parts: Mapping[str, Path] = field(default_factory=dict)
    loops: int | None = None
    max_positions: int | None = None
    golden: Path | None = None
    task: str | None = None
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenOptions:
    """Options for opening an artifact.

    Attributes:
        provider: the runtime's name of the provider; None: its default. Opening fails if it is not available.
        threads: threads per operator; None: all that this process may use.
        early: step artifacts of classifiers: loop → smallest top probability at which a row exits there.
        exits: step artifacts: loops that return logits, each as ``logits_exitN``; empty: the last one, as ``logits``.
        repeated_shapes: calls repeat a few shapes, as in a measurement; a runtime may compile for each shape first.
        exact: compute without the rounding that the runtime's defaults bring, to judge a file by its own arithmetic.
        in_turns: this process alternates between this session and others, so idle threads must not spin on the cores.
    """

    provider: str | None = None
    threads: int | None = None
    early: Mapping[int, float] | None = None
    exits: tuple[int, ...] = ()
    repeated_shapes: bool = False
    in_turns: bool = False
    exact: bool = False


@dataclass(frozen=True)
class ProviderFacts:
    """Facts about a provider: short name for tables; kind of its device (None: another, or not known).

    ``counts_threads``: it computes in the session's threads. ``rounds_to``: narrower type in which it computes FP32.
    """

    label: str
    kind: Kind | None = None
    counts_threads: bool = False
    rounds_to: str | None = None


@dataclass(frozen=True)
class Target:
    """A device that a builder can build for on this system.

    ``device``: its profile's name, part of the file names. ``precision``: of the built artifacts; None: that of the
    source graphs. ``note``: for the export, e.g. that the choice of this format is a guess.
    """

    format: str
    device: str | None = None
    compute_capability: str | None = None
    precision: Precision | None = None
    note: str | None = None


@dataclass(frozen=True)
class Unavailable:
    """Why a format cannot be built on this system; ``precision`` as in :class:`Target`."""

    format: str
    reason: str
    precision: Precision | None = None


def _no_data(*_: object) -> NoReturn:
    raise DataError("an imported graph has no training rows")


@dataclass(frozen=True)
class BuildJob:
    """Input of a builder.

    Attributes:
        bundle: the bundle's folder; built files go to its folder ``ENGINES_FOLDER``.
        graphs: the ONNX artifacts that passed their checks, of every role and precision; the builder selects from them.
        precision: requested precision of the source graphs.
        max_length, max_positions: tokens of the recipe's longest text, and of the model's longest sequence.
        note: adds a line to the bundle's notes.
        module: returns the torch module that a full, exit or decode graph was traced from, in evaluation mode.
        shapes: input shapes; inputs that are missing get the shapes of texts.
        calibration: returns rows of the training split; raises DataError if there are none.
        texts: returns real texts of a language model, and where they come from.
    """

    bundle: Path
    graphs: tuple[ArtifactManifest, ...]
    precision: Precision
    max_length: int
    max_positions: int
    progress: Progress
    note: Callable[[str], None]
    module: Callable[[ArtifactManifest], Any]
    shapes: InputShapes = field(default_factory=dict)
    calibration: Callable[[], Calls] = _no_data
    texts: Callable[[], tuple[list[str], str]] = _no_data

    def full_text_graphs(self, precision: Precision) -> list[ArtifactManifest]:
        """Return the full and exit graphs of a precision with the full vocabulary."""
        graphs = [graph for graph in self.graphs if graph.role in ("full", "exit") and not graph.trimmed]
        return [graph for graph in graphs if graph.precision == precision and graph.is_graph]


class Builder(ABC):
    """Builds artifacts of a runtime's format during export.

    Attributes:
        name: name for ``export --build``.
        packages: distributions that must be installed, by ``extra`` of edgeformer.
        precision: of the first artifact; None: that of the source graphs.
        needs_device: it builds for one device and requires its profile.
        joins: a precision of ``export`` that also selects this builder, if it can build here and has calibration rows.
    """

    name: str
    formats: tuple[str, ...]
    packages: tuple[str, ...] = ()
    extra: str = ""
    precision: Precision | None = None
    needs_device: bool = False
    joins: Precision | None = None

    @property
    def flag(self) -> str:
        """Command-line option of ``export`` that selects it."""
        return f"--build {self.name}"

    def plan(self, device: DeviceProfile | None) -> Target | Unavailable:
        """Return what can be built for a device (never None if ``needs_device``) on this system, or why nothing can."""
        from edgeformer.system.capability import installed_version

        absent = [name for name in self.packages if installed_version(name) is None]
        if absent:
            reason = f"package: {' and '.join(absent)} not installed ({install_hint(self.extra)})"
            return Unavailable(self.formats[0], reason, self.precision)
        return Target(self.formats[0], precision=self.precision)

    @abstractmethod
    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        """Build the artifacts and yield each one's manifest entry: ``built``, or ``rejected`` with the reason."""

    def initial_entry(
        self, graph: ArtifactManifest, precision: Precision, format_: str = "", **fields: Any
    ) -> ArtifactManifest:
        """Return the manifest entry of an artifact that is to be built from a graph: rejected, without a file."""
        format_ = format_ or self.formats[0]
        return ArtifactManifest(
            id=graph.id.replace(ONNX, format_, 1).replace(graph.precision, precision, 1), file=None, role=graph.role,
            exit=graph.exit, format=format_, precision=precision, status="rejected", inputs=graph.inputs,
            outputs=graph.outputs, **fields,
        )  # fmt: skip

    @staticmethod
    def unmeasured_parity(graph: ArtifactManifest, reason: str, precision: Precision | None = None) -> Parity:
        """Return the parity of an artifact that was not run yet; ``precision``: of the artifact; None: its graph's."""
        kind, tolerance = TOLERANCES[precision or graph.precision]
        if graph.parity is not None and precision in (None, graph.precision):  # its task may define other tolerances
            kind, tolerance = graph.parity.tolerance_kind, graph.parity.tolerance
        return Parity(status="unavailable", tolerance=tolerance, tolerance_kind=kind, reason=reason)

    @staticmethod
    def built_entry(
        entry: ArtifactManifest, bundle: Path, file: str, packages: Sequence[str], **fields: Any
    ) -> ArtifactManifest:
        """Complete the entry of an artifact that was written to ``file`` with the installed versions of ``packages``.

        A ``reason`` in ``fields``, or a ``sharing`` with weights that are stored twice, keeps it rejected.
        """
        from edgeformer.system.capability import installed_version

        path, versions = bundle / file, {name: installed_version(name) for name in packages}
        sharing = fields.get("sharing")
        reason = fields.get("reason") or (stored_twice(sharing) if sharing is not None else None)
        update = {
            "file": file, "size_bytes": path.stat().st_size, "sha256": sha256_of(path),
            "status": "rejected" if reason else "built", "reason": reason,
            "built_with": {name: version for name, version in versions.items() if version is not None},
        }  # fmt: skip
        return entry.model_copy(update=fields | update)


@contextmanager
def converting(problem: str) -> Iterator[None]:
    """Hide what a converter prints, logs and warns of.

    Raises EdgeformerError with ``problem`` and the converter's reason.
    """
    disabled = logging.root.manager.disable
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            yield
    except (OSError, MemoryError, EdgeformerError):
        raise
    except Exception as error:  # errors of torch.export and of converters share no base class
        raise EdgeformerError(f"{problem}: {type(error).__name__}: {reason_of(error)}") from error
    finally:
        logging.disable(disabled)


def stored_twice(sharing: Sharing) -> str | None:
    """Return the problem of a file that stores more parameters than its graph needs, or None.

    Fewer are no problem: parameters with equal numbers, such as untrained zeros, are stored once.
    """
    if sharing.stored_parameters > sharing.unique_parameters:
        return f"stores {sharing.stored_parameters:,} parameters for a model of {sharing.unique_parameters:,}"
    return None


class Runtime(ABC):
    """A runtime that opens artifacts.

    Attributes:
        formats: artifact formats that it opens by default; empty: it opens no artifact of a bundle.
        reads: formats of other runtimes that it also opens, if one of its providers is requested.
        distributions: packages whose versions a run, a bundle and a report record.
        fuses: it compiles the whole graph, so that estimates count no launch and copy per node.
        session_modules: modules that opening an artifact imports.
        experimental: its artifacts were measured on few devices, or on none; ``list runtimes`` says so.
    """

    name: str
    formats: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    builders: tuple[Builder, ...] = ()
    facts: ClassVar[Mapping[str, ProviderFacts]] = MappingProxyType({})
    fuses: bool = False
    session_modules: tuple[str, ...] = ()
    experimental: bool = False

    def also_opens(self, artifact: ArtifactManifest) -> bool:
        """Return whether it opens an artifact of another runtime's format."""
        return artifact.format in self.reads

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        """Return why this system cannot run the artifact (package, libraries, driver, GPU, version), or None."""
        opens = artifact.format in self.formats or self.also_opens(artifact)
        return None if opens else f"{self.name} does not open the format {artifact.format}"

    def open_graph(self, path: Path, files: ArtifactFiles, options: OpenOptions) -> Graph:
        """Open one file of an artifact. Runtimes with ``formats`` override this, or :meth:`open`, and raise as that."""
        raise ArtifactError(f"{path}: {self.name} does not open the format {files.artifact.format}")

    def open(self, files: ArtifactFiles, options: OpenOptions) -> Session:
        """Open an artifact of any role as one session; step and decode artifacts run once per loop or token.

        Raises ArtifactError: a file is missing, damaged or not runnable; InputError: the provider is not available
        here, or the artifact does not support early exit; MissingDependencyError: the runtime is not installed.
        """
        from edgeformer.runtimes.decoder import DecodeSession, StepSession

        open_part = partial(self.open_graph, files=files, options=options)
        if files.artifact.role == "step":
            return StepSession(files.parts, files.loops, open_part, early=options.early, exits=options.exits)
        if options.early is not None or options.exits:
            raise InputError(
                f"artifact {files.artifact.id!r} always runs all loops; early exit needs a step artifact (export "
                "--exit all)"
            )
        graph = open_part(files.file)
        if files.artifact.calls is not None:
            from edgeformer.tasks.scoring import fit_calls

            graph.run = fit_calls(graph.run, files.artifact.calls)  # type: ignore[method-assign, assignment]
        return DecodeSession({"": graph}) if files.artifact.role == "decode" else graph

    def open_decoder(self, files: ArtifactFiles, exits: Collection[int] | None, options: OpenOptions) -> Decoder[Any]:
        """Open a language model's step or decode artifact for generation; ``exits``: loops whose logits are needed.

        Raises InputError if the artifact does not support decoding; otherwise as :meth:`open`.
        """
        from edgeformer.runtimes.decoder import Decoder, FullDepthEngine, StepEngine, StepSession

        open_part = partial(self.open_graph, files=files, options=options)
        if files.artifact.role == "decode":
            assert files.loops is not None
            return Decoder(FullDepthEngine(open_part(files.file), files.loops))
        if files.artifact.role != "step":
            raise InputError(f"artifact {files.artifact.id!r} reads whole texts and cannot write token by token")
        return Decoder(StepEngine(StepSession(files.parts, files.loops, open_part, exits=exits or ())))

    def offers(self, artifact: ArtifactManifest) -> tuple[str, ...]:
        """Return the providers to measure an artifact with if this runtime is requested by name.

        Opening raises the reason if one is not supported on this system.
        """
        return (self.provider(artifact),)

    def provider(self, artifact: ArtifactManifest, requested: str | None = None, kind: Kind | None = None) -> str:
        """Return the ``provider`` of a session of an artifact on a kind of device (None: this system).

        Runtimes without a choice of providers ignore ``requested``, the user's choice. Other ones use the first of
        their ``facts`` by default.
        """
        if artifact.format in self.facts or not self.facts:
            return artifact.format
        return requested if requested is not None and requested in self.facts else next(iter(self.facts))

    def provider_facts(self, provider: str) -> ProviderFacts | None:
        """Return the facts about a provider, or None if it is not one of this runtime's."""
        return self.facts.get(provider)

    def load(self, artifact: ArtifactManifest) -> None:
        """Import the modules that opening ``artifact`` needs, for the baseline of memory measurements."""
        for name in self.session_modules:
            import_module(name)

    @abstractmethod
    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        """Return its lines of ``doctor``. Imports that may crash run in child processes, each for ``timeout_s``."""

    def never_runs(self, artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
        """Return why such a device can never run the artifact, whatever is installed there, or None."""
        return None

    def estimable(self, artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
        """Return why an artifact's latency cannot be estimated for such a device, or None."""
        return self.never_runs(artifact, device)


@dataclass(frozen=True)
class OptionalPackage:
    """A package that comes with an extra of edgeformer; ``purpose`` is for the remedy of ``doctor``.

    ``modules`` must be installed; the first is the package's own. ``script`` is a probe for
    :func:`~edgeformer.system.capability.ask_installed`; empty: of the installed version only.
    """

    name: str
    extra: str
    purpose: str
    modules: tuple[str, ...]
    script: str = ""

    def missing(self) -> str | None:
        """Return why the package cannot be used, or None if it is installed."""
        if all(util.find_spec(module) is not None for module in self.modules):
            return None
        return f"package: {self.name} is not installed ({install_hint(self.extra)})"

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Wrap imports of the package. Raises MissingDependencyError if it is missing or does not load."""
        if (problem := self.missing()) is not None:
            raise MissingDependencyError(problem)
        try:
            yield
        except Exception as error:  # its libraries raise any class
            hint = install_hint(self.extra, reinstall=True)
            raise MissingDependencyError(f"{self.name} is installed, but cannot be imported: {error}; {hint}") from None


class OptionalRuntime(Runtime):
    """A runtime whose packages come with an extra; the first of ``packages`` runs the artifacts."""

    packages: tuple[OptionalPackage, ...]

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        return super().cannot_run(artifact) or self.packages[0].missing()

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        from edgeformer.system.capability import ask_installed, describe_extra, describe_package

        version = "import importlib.metadata\nsay(version=importlib.metadata.version({!r}))\n"
        scripts = {package.modules[0]: package.script or version.format(package.name) for package in self.packages}
        answers = ask_installed(scripts, timeout_s)
        lines = [
            describe_package(
                package.name, answers[package.modules[0]], f"{package.purpose}: {install_hint(package.extra)}"
            )
            for package in self.packages
        ]
        return [*lines, describe_extra(self.packages[0].extra)]
