"""edgeformer doctor: what works on this machine, and what is missing for the rest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from edgeformer.cli.options import Artifacts, Json, print_json, stdout

if TYPE_CHECKING:
    from edgeformer.system.capability import Capability

_EXTRAS = ("hf", "serve")
"""Extras that belong to no runtime; runtimes describe their own."""


def command(artifacts: Artifacts = Path("artifacts"), as_json: Json = False) -> None:
    """Show what works on this machine, in which version, and what to install for the rest."""
    from edgeformer.report.tables import capability_table
    from edgeformer.system.host import describe_host

    found = [asdict(capability) for capability in capabilities()]
    if as_json:
        print_json({"host": describe_host(), "capabilities": found})
    else:
        stdout().print(capability_table(found))


def capabilities(timeout_s: float = 20.0) -> list[Capability]:
    """What the machine says of itself, then what every runtime says; all runtimes are asked at once.

    Args:
        timeout_s: how long the slowest import may take before it counts as unavailable.
    """
    from concurrent.futures import ThreadPoolExecutor

    from edgeformer.runtimes import all_runtimes
    from edgeformer.system.capability import describe_extra, machine_capabilities

    runtimes = all_runtimes()
    with ThreadPoolExecutor(len(runtimes)) as pool:
        answers = list(pool.map(lambda runtime: runtime.capabilities(timeout_s), runtimes))
    packages = (capability for lines in answers for capability in lines)
    return [*machine_capabilities(), *packages, *map(describe_extra, _EXTRAS)]
