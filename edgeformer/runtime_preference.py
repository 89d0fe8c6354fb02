"""runtimes.json: the fastest runtime of each artifact that a search found on this machine.

The file lies among the reports. It holds for the processor, the files of the bundle, the number of threads and the
library versions of the measurement; with any of these changed it is ignored. Other changes of bundle.json, such as the
guarantee of `edgeformer exits`, do not affect it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.workspace import read_manifest
from edgeformer.run import Location
from edgeformer.runtimes import ALL_RUNTIMES, cannot_run, library_versions, provider_facts, requested_providers
from edgeformer.system.host import cpu_name, default_threads

if TYPE_CHECKING:
    from edgeformer.artifacts.report import Report
    from edgeformer.bundle import Bundle

FILE = "runtimes.json"
_NOISE = 0.975
"""A runtime that is less than 2.5% faster than the default one is not preferred."""


class FastestRuntimes(Frozen):
    """The fastest providers of a search.

    Attributes:
        bundle: sha256 over names and checksums of its files; earlier versions wrote the manifest's sha256.
        threads: of one operator, as inference uses them.
        versions: of the libraries. Earlier versions wrote neither threads nor versions; such a file is ignored.
        providers: artifact → provider.
    """

    format_version: Literal[1] = 1
    processor: str
    bundle: str | None
    device: str
    created: str
    threads: int | None = None
    versions: dict[str, str] | None = None
    providers: dict[str, str]


def save_fastest(report: Report, location: Location) -> None:
    """Save the fastest provider of each artifact that several runtimes were measured for on this machine.

    A provider that rounds is saved only for the pick of the search, whose score was checked. Candidates are ignored if
    their measurement was not stable, or used other threads than inference does.
    """
    search, bundle, threads = report.search, location.open_bundle(), default_threads()
    if search is None or search.basis == "estimated":
        return
    comparable = [candidate for candidate in search.candidates if candidate.threads in (None, threads)]
    measured = [c for c in comparable if c.feasible and c.latency_status == "measured" and c.stable]
    pick = None if search.pick is None else search.candidates[search.pick]
    providers = {}
    for artifact in bundle.built():
        candidates = [candidate for candidate in measured if candidate.artifact == artifact.id]
        if pick in comparable and pick.artifact == artifact.id:
            if pick in measured:
                providers[artifact.id] = pick.provider
        elif len({candidate.provider for candidate in candidates}) > 1:
            default = requested_providers(artifact, ALL_RUNTIMES)[0]
            costs = [
                ((candidate.latency_ms or 0.0) * (_NOISE if candidate.provider == default else 1), candidate.provider)
                for candidate in candidates
                if provider_facts(candidate.provider).rounds_to is None
            ]
            providers[artifact.id] = min(costs)[1]
    conditions = _conditions(bundle)
    choice = FastestRuntimes(**conditions, device=report.device, created=report.created, providers=providers)
    write_json(location.reports / FILE, choice)


def load_fastest(location: Location) -> dict[str, str]:
    """Return artifact → provider that a search on this machine found fastest and that still runs; empty: no search.

    Raises ArtifactError for a damaged file.
    """
    path = location.reports / FILE
    if not path.is_file():
        return {}
    choice = read_manifest(FastestRuntimes, path)
    bundle = location.open_bundle()
    if not _conditions(bundle).items() <= choice.model_dump().items():
        return {}
    return {
        artifact.id: provider
        for artifact in bundle.built()
        if (provider := choice.providers.get(artifact.id)) is not None
        and provider in requested_providers(artifact, ALL_RUNTIMES)
        and cannot_run(artifact, provider) is None
    }


def _conditions(bundle: Bundle) -> dict[str, Any]:
    """Return what the times of a search depend on."""
    listed = "".join(f"{sha256} {name}\n" for name, sha256 in sorted(bundle.contents.checksums.items()))
    fingerprint = hashlib.sha256(listed.encode()).hexdigest()
    return {
        "processor": cpu_name(), "bundle": fingerprint, "threads": default_threads(), "versions": library_versions()
    }  # fmt: skip
