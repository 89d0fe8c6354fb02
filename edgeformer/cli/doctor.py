"""Command doctor: which runtimes and extras work on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from edgeformer.cli import options as opt

if TYPE_CHECKING:
    from edgeformer.system.capability import Capability

_EXTRAS = ("hf", "serve")
"""Extras that belong to no runtime; each runtime reports its own."""


def command(artifacts: opt.Artifacts = Path("artifacts"), as_json: opt.Json = False) -> None:
    """Show which runtimes and extras work on this machine, and how to install the others."""
    from edgeformer.report.tables import capability_table
    from edgeformer.system.host import describe_host

    rows = [asdict(capability) for capability in capabilities()]
    if as_json:
        opt.print_json({"host": describe_host(), "capabilities": rows})
    else:
        opt.stdout().print(capability_table(rows))


def capabilities(timeout_s: float = 20.0) -> list[Capability]:
    """Return the capabilities of machine, runtimes and extras; an import that takes longer counts as unavailable."""
    from concurrent.futures import ThreadPoolExecutor

    from edgeformer.runtimes import all_runtimes
    from edgeformer.system.capability import describe_extra, machine_capabilities

    runtimes = all_runtimes()
    with ThreadPoolExecutor(len(runtimes)) as pool:
        per_runtime = list(pool.map(lambda runtime: runtime.capabilities(timeout_s), runtimes))
    packages = (capability for capabilities in per_runtime for capability in capabilities)
    return [*machine_capabilities(), *packages, *map(describe_extra, _EXTRAS)]
