"""Command calibrate: fit the estimator to this host and compare its estimates with measurements."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from edgeformer.artifacts.errors import InputError
from edgeformer.cli.options import (
    ADVANCED,
    Artifacts,
    Inputs,
    Json,
    Ranges,
    RunOrGraph,
    Shapes,
    integers,
    locate_or_import,
    print_json,
    stdout,
)


def command(
    run: RunOrGraph = None,
    device: Annotated[
        str | None, typer.Option(help="Hardware profile to start from (see: edgeformer list devices). Default: host.")
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            metavar="RUN",
            help="Calibrate with this run, too. May be repeated. Of three models and more, each is left out once.",
        ),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(metavar="N", help="Threads of one operator. Default: the physical cores that it may use."),
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Then measure what the estimator says of this host, and compare.")
    ] = False,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Keep the calibration, and only compare as --validate does.")
    ] = False,
    batch: Annotated[str | None, typer.Option(metavar="N,N…", help="Batch sizes to compare at. Default: 1,8.")] = None,
    seq: Annotated[
        str | None, typer.Option(metavar="N,N…", help="Sequence lengths to compare at. Default: 16,64,128.")
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Compare with ≥ 60 s of measuring per row, for figures to publish.",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    shape: Shapes = None,
    value_range: Ranges = None,
    inputs: Inputs = None,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Calibrate the estimator for this host's processor, with a bundle.

    Writes DIR/profiles/host.yaml, from which --device host estimates. How far off estimates of other models are needs
    three models and more (--also RUN --also RUN). --validate then compares estimates of RUN with measurements at
    --batch and --seq. For a GPU that is in this host nothing is fitted: --validate-only --device NAME compares.

    Examples:

      edgeformer calibrate

      edgeformer calibrate --also other-run-001 --also third-run-001 --validate

      edgeformer calibrate --validate-only --device rtx4050
    """
    from edgeformer.artifacts.documents import load_profile, own_profiles
    from edgeformer.benchmark.measure import MeasureRules
    from edgeformer.cli.progress import show_progress
    from edgeformer.estimate.calibrate import CalibrationOptions, improve
    from edgeformer.report.tables import print_calibration
    from edgeformer.run import locate

    counts, batches, seqs = integers(threads, "--threads"), integers(batch, "--batch"), integers(seq, "--seq")
    if also and validate_only:
        raise InputError("--also: names runs to calibrate with; leave out --validate-only")
    if len(counts) > 1:
        raise InputError("--threads: a calibration is for one number of threads")
    if counts and validate_only:
        raise InputError("--threads: --validate-only takes those of the calibration; calibrate again to change them")
    bundle = locate_or_import(run, artifacts, shape, value_range, inputs).require_bundle()
    options = CalibrationOptions(
        calibrate=not validate_only,
        check=validate or validate_only,
        shapes=tuple(product(batches or (1, 8), seqs or (16, 64, 128))),
        threads=counts[0] if counts else None,
        rules=MeasureRules.strict() if strict else None,
        further=tuple(locate(name, artifacts).require_bundle() for name in also or ()),
    )
    profile = load_profile(device or "host", own_profiles(artifacts), show_progress().message)
    profile, written = improve(bundle, profile, options, own_profiles(artifacts), show_progress())
    assert profile.calibration is not None
    if as_json:
        print_json({"path": str(written), "profile": profile.model_dump(mode="json", by_alias=True)})
    else:
        print_calibration(profile.calibration, written, stdout())
