"""Whether this machine can say anything about a row that was measured on another one, and what else may make a
difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgeformer.backends import cannot_run, library_versions, opener_of, provider_facts
from edgeformer.formats.claim import Environment
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.report import Report, Row
from edgeformer.machine import nvidia
from edgeformer.machine.capability import kernel_flags
from edgeformer.machine.host import describe_host
from edgeformer.stages.profiling import conditions

TIMES_ALONE = (
    "the report states {1} of {0} rows, which was not measured again and is neither confirmed nor contradicted: only "
    "times are. To see it here, profile the bundle on this machine and run edgeformer compare on the two reports"
)
_SAME_SYSTEM = ("system", "machine", "cores")
_SAME_CONDITIONS = ("power", "governor")


@dataclass(frozen=True)
class Machine:
    """This machine, as a report would describe it.

    Attributes:
        host: system, processor, cores, memory.
        cards: names of its NVIDIA cards, and their uuids.
        versions: library → version.
        flags: instructions by which kernels are chosen; None: not known.
    """

    host: Mapping[str, Any]
    cards: Mapping[str, str | None]
    versions: Mapping[str, str]
    flags: tuple[str, ...] | None

    @classmethod
    def here(cls) -> Machine:
        """Ask it."""
        cards = {card.name: card.uuid for card in nvidia.gpus()}
        return cls(describe_host(), cards, library_versions(), kernel_flags())

    def gpu_uuid(self, row: Row, claimed: Environment) -> str | None:
        """Of the card that a row is measured again on; None: on the processor."""
        if provider_facts(row.provider).kind != "cuda":
            return None
        return self.cards.get(str(claimed.host.get("gpu")))


def why_not_here(row: Row, artifact: ArtifactManifest, claimed: Environment, here: Machine) -> str | None:
    """Why this machine says nothing about a row; None: it is of the claimed kind, and can run it.

    Args:
        row: of the claim.
        artifact: what the row is about.
        claimed: what it was measured on.
        here: this machine.
    """
    kind, cpu, gpu = provider_facts(row.provider).kind, claimed.host.get("cpu"), claimed.host.get("gpu")
    if kind is None:
        return f"it was measured with {row.provider}, which this installation does not have"
    if kind == "cuda" and gpu not in here.cards:
        return f"it was measured on {gpu}, and here is {', '.join(here.cards) or 'no NVIDIA card'}"
    if kind == "cpu" and cpu != here.host["cpu"]:
        return f"it was measured on {cpu}, and this is {here.host['cpu']}"
    if row.threads is not None and row.threads > here.host["cores"]:
        return f"it was measured with {row.threads} threads, and this process may use {here.host['cores']} cores"
    return cannot_run(artifact, row.provider)


def differences(row: Row, artifact: ArtifactManifest, claimed: Environment, here: Machine) -> Iterator[str]:
    """What is not as it was, and may make another time of the same files on the same kind of machine.

    Args:
        row: of the claim.
        artifact: what the row is about.
        claimed: what it was measured on.
        here: this machine.
    """
    told = claimed.host.get("versions")
    versions = told if isinstance(told, Mapping) else {}
    for name in opener_of(artifact, row.provider).distributions:
        if versions.get(name) != here.versions.get(name):
            yield f"{name} was {versions.get(name, 'not there')} and is {here.versions.get(name, 'not there')} here"
    for name in _SAME_SYSTEM:
        if name in claimed.host and claimed.host[name] != here.host[name]:
            yield f"{name} was {claimed.host[name]} and is {here.host[name]} here"
    if claimed.cpu_flags is not None and here.flags is not None and set(claimed.cpu_flags) != set(here.flags):
        other = ", ".join(sorted(set(claimed.cpu_flags) ^ set(here.flags)))
        yield f"the processors do not offer the same instructions: {other}"
    now = conditions.describe(row.threads or 1, here.gpu_uuid(row, claimed))
    for name in _SAME_CONDITIONS:
        was, is_ = (_kind(one.get(name)) for one in (row.conditions, now))
        if was and is_ and was != is_:
            yield f"{name} was {was} and is {is_} here"


def _kind(condition: object) -> str:
    """``battery 83 %`` → ``battery``: how full it is makes no difference."""
    return str(condition or "").partition(" ")[0]


def not_measured_again(report: Report) -> dict[str, int]:
    """What the report states beside times → of how many rows that were measured there."""
    here = [row for row in report.rows if row.where == "host"]
    counts = {
        "memory": sum(row.memory_bytes.status == "measured" for row in here),
        "energy": sum(row.energy_mj.status == "measured" for row in here),
    }
    return {what: rows for what, rows in counts.items() if rows}
