"""runtimes.json: which runtime a search found fastest on this machine, for what answers texts later on.

It lies among the reports, and holds for the processor and the very files that were measured, for the threads and the
libraries that they were measured with: elsewhere nothing is chosen by it. What else bundle.json says of these files
(what `edgeformer exits` promises) does not touch it.
"""

from __future__ import annotations

from typing import Literal

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.report import Candidate, Report
from edgeformer.artifacts.workspace import parse_manifest, read_json_bytes
from edgeformer.run import Location
from edgeformer.runtimes import ALL_RUNTIMES, cannot_run, library_versions, provider_facts, providers_asked
from edgeformer.system.host import cpu_name, default_threads

FILE = "runtimes.json"
_NOISE = 0.975
"""A runtime that is less than 2.5 % faster than the usual one is not."""


class RuntimeChoice(Frozen):
    """What a search found.

    ``bundle``: :attr:`BundleFiles.fingerprint` (of earlier versions the manifest's sha256). ``threads``: of one
    operator, those that whatever answers texts computes with. ``versions``: of the libraries. Earlier versions wrote
    neither, so what they found is not known to hold.
    """

    format_version: Literal[1] = 1
    processor: str
    bundle: str | None
    device: str
    created: str
    threads: int | None = None
    versions: dict[str, str] | None = None
    providers: dict[str, str]

    def holds_for(self, fingerprint: str | None) -> bool:
        """Whether it was found here, as things are now, of the files with this fingerprint."""
        found = self.processor, self.bundle, self.threads, self.versions
        return found == (cpu_name(), fingerprint, default_threads(), library_versions())


def remember(report: Report, location: Location) -> None:
    """Keep what a search found fastest of each artifact, where several runtimes were measured on this machine.

    Providers that round are kept of the pick alone: its score was held against what was asked for. What was not
    measured stably is not kept: the usual runtime answers then, as before any search. What was measured with other
    threads than will answer says nothing about these.

    Args:
        report: with or without a search.
        location: whose reports it is among.
    """
    search, bundle = report.search, location.open_bundle()
    if search is None or search.basis == "estimated":
        return
    pick = None if search.pick is None else search.candidates[search.pick]
    pick = pick if pick is not None and _answers_so(pick) else None
    measured = [one for one in search.candidates if one.feasible and one.latency_status == "measured" and one.stable]
    measured = [one for one in measured if _answers_so(one)]
    found = {}
    for artifact in bundle.built():
        own = [one for one in measured if one.artifact == artifact.id]
        if pick is not None and pick.artifact == artifact.id:
            if pick not in measured:
                continue
            found[artifact.id] = pick.provider
        elif len({one.provider for one in own}) > 1:
            usual = providers_asked(artifact, ALL_RUNTIMES)[0]
            exact = [one for one in own if provider_facts(one.provider).rounds_to is None]
            found[artifact.id] = min(exact, key=lambda one: _cost(one, usual)).provider
    choice = RuntimeChoice(
        processor=cpu_name(),
        bundle=bundle.contents.fingerprint,
        device=report.device,
        created=report.created,
        threads=default_threads(),
        versions=library_versions(),
        providers=found,
    )
    write_json(location.reports / FILE, choice)


def _answers_so(candidate: Candidate) -> bool:
    """It was measured with the threads that whatever answers texts computes with."""
    return candidate.threads in (None, default_threads())


def _cost(candidate: Candidate, usual: str) -> float:
    assert candidate.latency_ms is not None
    return candidate.latency_ms * (_NOISE if candidate.provider == usual else 1)


def fastest_here(location: Location) -> dict[str, str]:
    """Artifact → provider that a search on this machine found fastest, and that works here; empty: none was run.

    Args:
        location: with a bundle.

    Raises:
        ArtifactError: the file is damaged.
    """
    path = location.reports / FILE
    if not path.is_file():
        return {}
    choice = parse_manifest(RuntimeChoice, path, read_json_bytes(path))
    bundle = location.open_bundle()
    if not choice.holds_for(bundle.contents.fingerprint):
        return {}
    return {
        artifact.id: provider
        for artifact in bundle.built()
        if (provider := choice.providers.get(artifact.id)) is not None
        and provider in providers_asked(artifact, ALL_RUNTIMES)
        and cannot_run(artifact, provider) is None
    }
