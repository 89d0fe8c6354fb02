"""runtimes.json: which runtime a search found fastest on this machine, for what answers texts later on.

It lies among the reports, and holds for the processor and the very files that were measured: elsewhere nothing is
chosen by it. What else bundle.json says of these files (what `edgeformer exits` promises) does not touch it.
"""

from __future__ import annotations

from typing import Literal

from edgeformer.backends import ALL_RUNTIMES, cannot_run, provider_facts, providers_asked
from edgeformer.formats.base import Frozen
from edgeformer.formats.files import write_json
from edgeformer.formats.report import Candidate, Report
from edgeformer.formats.workspace import parse_manifest, read_json_bytes
from edgeformer.machine.host import cpu_name
from edgeformer.run import Location

FILE = "runtimes.json"
_NOISE = 0.975
"""A runtime that is less than 2.5 % faster than the usual one is not."""


class RuntimeChoice(Frozen):
    """What a search found. ``bundle``: :attr:`BundleFiles.fingerprint` (of earlier versions the manifest's sha256)."""

    format_version: Literal[1] = 1
    processor: str
    bundle: str | None
    device: str
    created: str
    providers: dict[str, str]


def remember(report: Report, location: Location) -> None:
    """Keep what a search found fastest of each artifact, where several runtimes were measured on this machine.

    Providers that round are kept of the pick alone: its score was held against what was asked for. What was not
    measured stably is not kept: the usual runtime answers then, as before any search.

    Args:
        report: with or without a search.
        location: whose reports it is among.
    """
    search, bundle = report.search, location.open_bundle()
    if search is None or search.basis == "estimated":
        return
    pick = None if search.pick is None else search.candidates[search.pick]
    measured = [one for one in search.candidates if one.feasible and one.latency_status == "measured" and one.stable]
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
        providers=found,
    )
    write_json(location.reports / FILE, choice)


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
    if (choice.processor, choice.bundle) != (cpu_name(), bundle.contents.fingerprint):
        return {}
    return {
        artifact.id: provider
        for artifact in bundle.built()
        if (provider := choice.providers.get(artifact.id)) is not None
        and provider in providers_asked(artifact, ALL_RUNTIMES)
        and cannot_run(artifact, provider) is None
    }
