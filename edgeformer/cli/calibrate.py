"""Command calibrate: fit the estimator to this host and compare its estimates with measurements."""

from itertools import product
from pathlib import Path

from typer import Option

from edgeformer.artifacts.errors import InputError
from edgeformer.cli import options as opt


def command(
    run: opt.RunOrGraph = None,
    device: str | None = Option(
        None, help="CPU profile that describes this machine (edgeformer list devices). Default: host."
    ),
    also: list[str] | None = Option(None, metavar="RUN", help="Also calibrate with this run. May be repeated."),
    threads: opt.Threads = None,
    validate: bool = Option(
        False, "--validate", help="After the calibration, compare its estimates with measurements on this host."
    ),
    validate_only: bool = Option(
        False, "--validate-only", help="Compare as --validate does, without a new calibration."
    ),
    batch: str | None = Option(None, metavar="N,N…", help="With --validate: batch sizes. Default: 1,8."),
    seq: str | None = Option(
        None, metavar="N,N…", help="With --validate: sequence lengths in tokens. Default: 16,64,128."
    ),
    strict: opt.Strict = False,
    allow_noise: opt.AllowNoise = False,
    shape: opt.Shapes = None,
    value_range: opt.Ranges = None,
    inputs: opt.Inputs = None,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Calibrate the estimator for this host's processor, with a bundle.

    Writes DIR/profiles/host.yaml, which --device host then uses. Takes 4 to 10 minutes on an idle machine. To know the
    error for other models, add at least two runs with --also: each model is estimated from a calibration without it.
    --validate also compares estimates of RUN with measurements at --batch and --seq. For a GPU in this host, only
    --validate-only --device NAME is available.

    Exit code 4: other programs disturbed the measurement, so nothing was written. Close them, or use --allow-noise.

    Examples:
      edgeformer calibrate
      edgeformer calibrate --also other-run-001 --also third-run-001 --validate
      edgeformer calibrate --validate-only --device rtx4050
    """
    from edgeformer.artifacts.documents import load_profile, own_profiles
    from edgeformer.artifacts.report import MeasureRules
    from edgeformer.estimate.calibrate import CalibrationOptions, improve
    from edgeformer.report.tables import print_calibration
    from edgeformer.system.host import describe_host

    counts, progress, profiles = opt.integers(threads, "--threads"), opt.show_progress(), own_profiles(artifacts)
    batches, seqs = opt.integers(batch, "--batch") or (1, 8), opt.integers(seq, "--seq") or (16, 64, 128)
    if also and validate_only:
        raise InputError("--also: adds runs to a calibration, and --validate-only makes none; leave out one of the two")
    if len(counts) > 1:
        raise InputError("--threads: a calibration has one number of threads; give one number")
    if counts and validate_only:
        uses = "--validate-only uses the threads of the calibration"
        raise InputError(f"--threads: {uses}; to change them, calibrate again")
    location = opt.locate_or_import(run, artifacts, shape, value_range, inputs)
    bundle = location.require_bundle()
    options = CalibrationOptions(
        calibrate=not validate_only, check=validate or validate_only, shapes=tuple(product(batches, seqs)),
        threads=counts[0] if counts else None, rules=MeasureRules.strict() if strict else None,
        further=tuple(opt.locate(name, artifacts).require_bundle() for name in also or ()), allow_noise=allow_noise,
    )  # fmt: skip
    profile = load_profile(device or "host", profiles, progress.message)
    profile, written = improve(bundle, profile, options, profiles, progress)
    assert profile.calibration is not None
    if as_json:
        document = {"path": str(written), "profile": profile.model_dump(mode="json", by_alias=True)}
        opt.print_json({**document, "host": describe_host()})
    else:
        print_calibration(profile.calibration, written, opt.stdout())
        opt.say_next(f"edgeformer profile {location.argument} --device {profile.name}", "uses this calibration")
