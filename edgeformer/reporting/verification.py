"""What `verify` found, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from edgeformer.formats.report import ArtifactCheck, Verification
from edgeformer.reporting.tables import DASH, coloured, new_table


def verification_table(found: Verification) -> Table:
    """One row per artifact: what ran it, how far it is from torch FP32, what it was held to."""
    columns = ("artifact", "ran on", "n", "max error", "relative", "top-1 agreement", "held to", "status")
    table = new_table(f"{found.run}: golden inputs against torch FP32", *columns, right=columns[2:6])
    for check in found.artifacts:
        table.add_row(escape(check.artifact), *_figures(check), escape(check.tolerance or DASH), coloured(check.status))
    return table


def verification_lines(found: Verification) -> Iterator[str]:
    """Reasons, files that are not intact, and the conclusion."""
    for check in found.artifacts:
        if check.reason:
            yield f"{escape(check.artifact)}: {escape(check.reason)}"
    for file in found.damaged:
        detail = f" ({escape(file.detail)})" if file.detail else ""
        yield f"[red]{file.status}[/]: {escape(file.file)}{detail}"
    intact = len(found.files) - len(found.damaged)
    verified = sum(check.status == "verified" for check in found.artifacts)
    yield (
        f"{intact} of {len(found.files)} files intact, {verified} of {len(found.artifacts)} artifacts verified; "
        f"bundle.json is sha256 {found.manifest_sha256}"
    )


def _figures(check: ArtifactCheck) -> tuple[str, ...]:
    parity = check.parity
    if parity is None:
        return (DASH,) * 5
    provider = (parity.provider or DASH).removesuffix("ExecutionProvider")
    error, relative = (
        DASH if value is None else f"{value:.1e}" for value in (parity.max_abs_error, parity.relative_error)
    )
    agreement = DASH if parity.top1_agreement is None else f"{parity.top1_agreement:.1%}"
    return provider, f"{parity.n:,}", error, relative, agreement
