"""Command doctor: which runtimes and extras work on this machine."""

from dataclasses import asdict
from pathlib import Path

from edgeformer.cli import options as opt

_EXTRAS = ("hf", "serve")  # extras that belong to no runtime; each runtime reports its own
_IMPORT_TIMEOUT_S = 20.0  # a package whose import takes longer counts as unavailable


def command(artifacts: opt.Artifacts = Path("artifacts"), as_json: opt.Json = False) -> None:
    """Show which runtimes and extras work on this machine, and how to install the others."""
    from concurrent.futures import ThreadPoolExecutor

    from edgeformer.report.tables import capability_table
    from edgeformer.runtimes import all_runtimes
    from edgeformer.system.capability import describe_extra, machine_capabilities
    from edgeformer.system.host import describe_host

    runtimes = all_runtimes()
    with ThreadPoolExecutor(len(runtimes)) as pool:
        per_runtime = list(pool.map(lambda runtime: runtime.capabilities(_IMPORT_TIMEOUT_S), runtimes))
    packages = (capability for capabilities in per_runtime for capability in capabilities)
    rows = [*map(asdict, (*machine_capabilities(), *packages, *map(describe_extra, _EXTRAS)))]
    if as_json:
        opt.print_json({"host": describe_host(), "capabilities": rows})
    else:
        opt.stdout().print(capability_table(rows))
