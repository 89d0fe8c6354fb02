"""edgeformer profile --judge: a report that was measured elsewhere, against a device's budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgeformer.cli.options import print_json, stdout
from edgeformer.formats.errors import InputError

if TYPE_CHECKING:
    from edgeformer.stages.profiling.profile import ProfileOptions


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raises InputError for an option that would do nothing.

    Args:
        options: name → as given.
        why: it would not.
    """
    if given := [name for name, value in options.items() if value]:
        raise InputError(f"--{given[0]}: {why}; run it by itself")


def judge_elsewhere(
    report: Path,
    where: tuple[str | None, Path],
    device: str | None,
    options: ProfileOptions,
    measuring: Mapping[str, object],
    as_json: bool,
) -> None:
    """Judge, and print what came of it.

    Args:
        report: the file.
        where: the RUN that was measured, None: the report tells what it needs to; and the folder of runs.
        device: the profile's name; None: the run's target.
        options: limits and artifacts.
        measuring: options that say how to measure, which nothing is; name → as given.
        as_json: print one JSON document.

    Raises:
        InputError: one of ``measuring`` is given; and what :func:`judge_report` raises.
        typer.Exit: 3, a budget failed.
    """
    from edgeformer.cli.progress import show_progress
    from edgeformer.formats.documents import load_profile, own_profiles
    from edgeformer.reporting.report_tables import print_report
    from edgeformer.run import locate
    from edgeformer.stages.profiling.elsewhere import judge_report

    refuse(measuring, "--judge measures nothing; the report is what it is")
    run, artifacts = where
    bundle = locate(run, artifacts).open_bundle() if run is not None else None
    target = bundle.manifest.target if bundle is not None else None
    profile = load_profile(device or target, own_profiles(artifacts), show_progress().message)
    judged = judge_report(report, profile, options, bundle)
    if as_json:
        print_json(judged)
    else:
        print_report(judged, [], stdout())
    if judged.verdict.status == "fail":
        raise typer.Exit(3)
