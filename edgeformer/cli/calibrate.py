"""edgeformer profile --calibrate and --validate: the estimator, taught and checked on this host."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeformer.cli.options import print_json, stdout
from edgeformer.formats.errors import InputError

if TYPE_CHECKING:
    from edgeformer.formats.device import DeviceProfile
    from edgeformer.run import Location
    from edgeformer.stages.profiling.estimating.check import CalibrationOptions


Also = Annotated[
    list[str] | None,
    typer.Option(
        "--also",
        metavar="RUN",
        help="--calibrate: teach with this run, too; repeat it. Of three models and more, each is left out once.",
    ),
]


def run_calibration(
    location: Location, profile: DeviceProfile, options: CalibrationOptions, artifacts: Path, as_json: bool
) -> None:
    """Calibrate or validate, or both.

    Args:
        location: of the bundle that is measured.
        profile: to start from.
        options: what to do.
        artifacts: the folder of runs, which gets the profile.
        as_json: print one JSON document.
    """
    from edgeformer.cli.progress import show_progress
    from edgeformer.formats.documents import own_profiles
    from edgeformer.reporting.verification import print_calibration
    from edgeformer.stages.profiling.estimating.check import improve

    bundle = location.require_bundle()
    profile, written = improve(bundle, profile, options, own_profiles(artifacts), show_progress())
    assert profile.calibration is not None
    if as_json:
        print_json({"path": str(written), "profile": profile.model_dump(mode="json", by_alias=True)})
    else:
        print_calibration(profile.calibration, written, stdout())


def calibration_options(
    wanted: tuple[bool, bool],
    sizes: tuple[tuple[int, ...], tuple[int, ...]],
    threads: tuple[int, ...],
    strict: bool,
    also: tuple[list[str] | None, Path],
) -> CalibrationOptions:
    """What the options ask for.

    Args:
        wanted: to calibrate, to validate.
        sizes: batches and sequence lengths; empty: the usual ones.
        threads: as given.
        strict: by the rules for figures to publish.
        also: other runs to calibrate with, and the folder of runs.

    Raises:
        InputError: several numbers of threads, or one for a validation; other runs for one; a run without a bundle.
    """
    from edgeformer.run import locate
    from edgeformer.stages.profiling.estimating.check import CalibrationOptions
    from edgeformer.stages.profiling.measure import MeasureRules

    (calibrate, validate), (batches, seqs) = wanted, sizes
    shapes = tuple(product(batches or (1, 8), seqs or (16, 64, 128)))
    rules = MeasureRules.strict() if strict else None
    runs, artifacts = also
    if runs and not calibrate:
        raise InputError("--also: names runs to calibrate with; say --calibrate")
    others = tuple(locate(run, artifacts).require_bundle() for run in runs or ())
    return CalibrationOptions(calibrate, validate, shapes, _one_count(threads, calibrate), rules, others)


def _one_count(threads: tuple[int, ...], calibrate: bool) -> int | None:
    """The one number of threads that a calibration is for.

    Args:
        threads: as given.
        calibrate: it is not only to be validated.

    Raises:
        InputError: several were given, or one for a validation.
    """
    if len(threads) > 1:
        raise InputError("--threads: a calibration is for one number of threads")
    if threads and not calibrate:
        raise InputError("--threads: --validate takes those of the calibration; calibrate anew to change them")
    return threads[0] if threads else None
