"""edgeformer doctor: what works on this machine, and what is missing for the rest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from edgeformer.cli.options import Artifacts, Json


def command(artifacts: Artifacts = Path("artifacts"), as_json: Json = False) -> None:
    """Show what works on this machine, in which version, and what to install for the rest."""
    from edgeformer.backends.environment import probe
    from edgeformer.cli.console import print_json, stdout
    from edgeformer.machine.host import describe_host
    from edgeformer.reporting.tables import capability_table

    found = [asdict(capability) for capability in probe()]
    if as_json:
        print_json({"host": describe_host(), "capabilities": found})
    else:
        stdout().print(capability_table(found))
