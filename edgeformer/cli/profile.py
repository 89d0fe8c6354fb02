"""edgeformer profile: a bundle becomes a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeformer.cli.options import Artifacts, Json, Run, integers
from edgeformer.schema.errors import InputError


def command(
    run: Run = None,
    device: Annotated[
        str | None,
        typer.Option(help="Hardware profile (see: edgeformer list devices). Default: the recipe's target."),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N,N…", help="Batch sizes to measure.")] = "1,16",
    seq: Annotated[
        str | None,
        typer.Option(
            metavar="N,N…", help="Sequence lengths to measure. Default: the device budget's.", show_default=False
        ),
    ] = None,
    artifact: Annotated[
        list[str] | None, typer.Option(help="Profile only this artifact. May be repeated.", show_default=False)
    ] = None,
    max_latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="Fail above this p50, e.g. 5ms.", show_default=False)
    ] = None,
    max_vram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Fail above this peak memory, e.g. 4GiB.", show_default=False)
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Fail above this file size, e.g. 20MiB.", show_default=False)
    ] = None,
    allow_leak: Annotated[
        bool, typer.Option("--allow-leak", help="Profile a language model although it sees future tokens.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Measure ≥ 60 s per row, for figures to publish.")] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads of one operator. Default: the physical cores that this process may use.",
            show_default=False,
        ),
    ] = None,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Measure a bundle on this host and judge it for a [b]device[/b].

    Each artifact runs in a fresh process on real inputs. For a device that is not this host, sizes are judged and
    times are this host's own: nothing measured elsewhere is passed off as the device's. Exit code 3 when a budget
    fails.

    Examples:

      edgeformer profile --device rtx4050

      edgeformer profile --device host --batch 1 --seq 16,128 --max-latency 10ms
    """
    from edgeformer.cli.console import print_json, stdout
    from edgeformer.cli.progress import show_progress
    from edgeformer.reporting.report_files import write_report
    from edgeformer.reporting.report_tables import print_report
    from edgeformer.schema.shipped import load_profile
    from edgeformer.schema.workspace import locate, read_bundle
    from edgeformer.stages.profiling.profile import ProfileOptions, profile_bundle

    location = locate(run, artifacts)
    chosen = device or read_bundle(location.require_bundle()).target
    if chosen is None:
        raise InputError("--device: name a hardware profile; the recipe has no target (see: edgeformer list devices)")
    options = ProfileOptions(
        batches=integers(batch, "--batch"),
        seqs=integers(seq, "--seq") if seq else (),
        max_latency_ms=_quantity(max_latency, "--max-latency", "ms"),
        max_size_bytes=_whole(_quantity(max_size, "--max-size", "bytes")),
        max_memory_bytes=_whole(_quantity(max_vram, "--max-vram", "bytes")),
        strict=strict,
        threads=threads,
        artifacts=tuple(artifact or ()),
        allow_leak=allow_leak,
    )
    report = profile_bundle(location, load_profile(chosen), options, show_progress())
    written = write_report(report, location)
    if as_json:
        print_json(report)
    else:
        print_report(report, written, stdout())
    if report.verdict.status == "fail":
        raise typer.Exit(3)


def _quantity(text: str | None, option: str, kind: str) -> float | None:
    from edgeformer.schema.units import parse_bytes, parse_milliseconds

    if text is None:
        return None
    try:
        return parse_milliseconds(text) if kind == "ms" else float(parse_bytes(text))
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
