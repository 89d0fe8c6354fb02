"""Command profile: measure a bundle, or judge a report again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from typer import Argument, Option

from edgeformer.artifacts.errors import InputError, InterruptedRun
from edgeformer.cli import options as opt

if TYPE_CHECKING:
    from edgeformer.artifacts.progress import Progress
    from edgeformer.artifacts.report import Report
    from edgeformer.run import Location

Minimize = Literal["latency", "size", "memory", "energy"]
_MEASURING = (
    "on", "batch", "seq", "threads", "runtime", "phase", "strict", "choose", "allow_leak", "shape",
    "value_range", "inputs", "no_host", "publish",
)  # fmt: skip
"""Parameters that have no effect on a report."""
_LIMITS = ("max_latency", "max_vram", "max_size", "max_energy")
_CHOOSING = ("min_score", "minimize")
_OF_DEVICE = "Default: the limit of the device."


def command(
    context: typer.Context,
    run: str | None = Argument(
        None,
        metavar="[RUN|REPORT.json]",
        help="A run's name or folder, a bundle's folder, an artifact file, any .onnx file, or a report to judge "
        "again. Default: the newest finished run.",
    ),
    device: opt.MeasuredDevice = None,
    on: opt.On = None,
    batch: opt.Batches = None,
    seq: opt.Lengths = None,
    threads: opt.Threads = None,
    artifact: opt.ArtifactIds = None,
    runtime: opt.MeasuredRuntime = None,
    phase: Literal["steady", "prefill", "decode"] | None = opt.advanced(
        None,
        help="Measure only whole inputs (steady), prompts (prefill), or the next token of a text (decode). Default: "
        "all that an artifact can do.",
    ),
    max_latency: str | None = Option(
        None, metavar="TIME", help=f"Limit of the median latency, e.g. 5ms; language models: per token. {_OF_DEVICE}"
    ),
    max_vram: str | None = Option(
        None, metavar="SIZE", help=f"Limit of the peak memory (RAM on CPUs), e.g. 4GiB. {_OF_DEVICE}"
    ),
    max_size: str | None = Option(None, metavar="SIZE", help=f"Limit of the file size, e.g. 20MiB. {_OF_DEVICE}"),
    max_energy: str | None = opt.advanced(
        None, metavar="ENERGY", help=f"Limit of the energy per call, e.g. 10mJ. {_OF_DEVICE}"
    ),
    choose: bool = Option(False, "--choose", help="Choose the artifact to deploy: the cheapest within all limits."),
    min_score: float | None = opt.advanced(
        None,
        metavar="SCORE",
        help="With --choose: worst accepted score on the validation split, in the metric of the model's task.",
    ),
    minimize: Minimize | None = Option(None, help="With --choose: quantity to minimize. Default: latency."),
    measured_bundle: str | None = opt.advanced(
        None, "--bundle", metavar="RUN", help="REPORT.json: the measured bundle, to compare checksums with."
    ),
    strict: opt.Strict = False,
    no_host: bool = opt.advanced(
        False, "--no-host", help="For a device that is not this host: estimate it within seconds, and measure nothing."
    ),
    publish: Path | None = opt.advanced(
        None,
        metavar="FILE.csv",
        help="Add the measured times to FILE, without names or paths, to contribute them to the estimates.",
    ),
    allow_leak: opt.AllowLeak = False,
    search: bool = Option(False, "--search", hidden=True),
    shape: opt.Shapes = None,
    value_range: opt.Ranges = None,
    inputs: opt.Inputs = None,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Measure a bundle on this host and judge it for a [b]device[/b].

    Each artifact runs in a fresh process on real inputs. For another device, times and memory are estimated as ranges
    and marked as estimates, and the verdict is printed before this host is measured (--no-host: not at all); an
    estimate passes a limit only with its whole range. The budget of a device states limits
    and a shape (batch size and tokens), which profile measures; --batch and --seq add shapes, at which the limits of
    the command line are judged. Exit code 3: a limit is not met, --artifact names an artifact that export rejected, or
    --choose finds nothing within the limits.

    --choose compares all artifacts (precisions, exits, trimmed vocabularies), runtimes and --threads, prints the Pareto
    front of score, latency and size, and chooses an artifact, which is then judged. The task decides what --min-score
    limits: the lowest accuracy, F1 (several labels, spans), rank correlation (embedding models: similarity; regression:
    Spearman) or cosine with FP32 (imported ONNX files), and the highest perplexity (language models).

    --on copies the bundle to a machine over SSH, installs edgeformer there in a folder of its own, verifies the bundle,
    measures it, and brings the report back. The next time only changed files are sent. After a lost connection, the
    same command fetches the results.

    RUN can be any ONNX file; profile then imports it. REPORT.json is a report that was measured on the device itself;
    profile judges its rows for --device.

    Examples:
      edgeformer profile --device rtx4050 --no-host
      edgeformer profile --device host --choose --min-score 0.91 --max-size 20MiB --minimize size
      edgeformer profile --on pi@raspberrypi --on local --max-latency 20ms
      edgeformer profile vad.onnx --device raspberry-pi-5 --shape input=1x512 --shape state=2x1x128 --range sr=16000
      edgeformer profile browser.json --device raspberry-pi-5
    """
    from edgeformer.artifacts.documents import load_profile, own_profiles
    from edgeformer.artifacts.files import write_json
    from edgeformer.artifacts.units import parse_bytes, parse_millijoules, parse_milliseconds
    from edgeformer.benchmark.choice import ChoiceOptions, check_options
    from edgeformer.benchmark.profile import ProfileInterrupted, ProfileOptions, judge_report, profile_bundle
    from edgeformer.estimate.roofline import known_error
    from edgeformer.measurement.target import resolve_device
    from edgeformer.report.documents import print_report, print_verdict, write_report

    # 1. The limits
    if search:
        raise InputError("--search: is called --choose for artifacts; give --choose instead")
    limits: dict[str, Any] = {}
    for field, option, text, parse in (
        ("max_latency_ms", "--max-latency", max_latency, parse_milliseconds),
        ("max_size_bytes", "--max-size", max_size, parse_bytes),
        ("max_memory_bytes", "--max-vram", max_vram, parse_bytes),
        ("max_energy_mj", "--max-energy", max_energy, parse_millijoules),
    ):
        limits[field] = opt.parse_value(option, text, parse) if text is not None else None

    # 2. A report is judged again
    profiles, progress, artifact_ids = own_profiles(artifacts), opt.show_progress(), tuple(artifact or ())
    folders = (Path(run), artifacts / run) if run is not None else ()
    if run is not None and run.endswith(".json") and not any(folder.is_dir() for folder in folders):
        reason = f"{run} is a report, so nothing is measured; leave it out"
        opt.refuse_options(context, (*_MEASURING, *_CHOOSING), reason)
        bundle = opt.locate(measured_bundle, artifacts).open_bundle() if measured_bundle is not None else None
        target = bundle.manifest.target if bundle is not None else None
        profile = load_profile(device or target, profiles, progress.message)
        judged = judge_report(Path(run), profile, ProfileOptions(artifacts=artifact_ids, **limits), bundle)
        if as_json:
            opt.print_json(judged)
        else:
            print_report(judged, [], opt.stdout())
            opt.say_next(f"edgeformer profile {run} --device NAME", "judges it for another device")
        if judged.verdict.status == "fail":
            raise typer.Exit(3)
        return

    # 3. A bundle is measured, on the machines of --on or here
    if measured_bundle is not None:
        raise InputError("--bundle: is for a report; give a REPORT.json as RUN, or leave it out")
    location = opt.locate_or_import(run, artifacts, shape, value_range, inputs)
    bundle, choice = location.open_bundle(), None
    if choose:
        choice = ChoiceOptions(min_score, minimize or "latency")
        check_options(choice, bundle.manifest)
    else:
        opt.refuse_options(context, _CHOOSING, "is an option of --choose; add --choose")
    if on:
        if no_host:
            raise InputError("--no-host, --on: contradict each other; give one of them")
        _profile_on_machines(context, on, location, artifact_ids)
        return
    profile = resolve_device(device or bundle.manifest.target or "host", profiles, progress.message)
    batches, seqs, counts = (
        opt.integers(text, option) for text, option in ((batch, "--batch"), (seq, "--seq"), (threads, "--threads"))
    )
    options = ProfileOptions(
        batches or None, seqs, **limits, strict=strict, threads=counts, artifacts=artifact_ids, runtime=runtime,
        phase=phase, allow_leak=allow_leak, choose=choice, no_host=no_host,
        estimate_error=known_error(profile, load_profile("host", profiles)),
    )  # fmt: skip
    shown = []

    def show(estimates: Report) -> None:
        if not as_json and not choose:
            print_verdict(estimates, opt.stdout())
            shown.append(estimates)
            progress.message("This host is measured now; Ctrl-C ends that, and --no-host leaves it out.")

    try:
        report = profile_bundle(location, profile, options, progress, show)
    except ProfileInterrupted as error:
        if not error.report.rows:
            raise InterruptedRun("interrupted before the first row was measured; nothing was written") from None
        names = ", ".join(dict.fromkeys(row.artifact for row in error.report.rows))
        path = location.reports / "interrupted" / f"{error.report.stem}.json"
        write_json(path, error.report)
        raise InterruptedRun(
            f"interrupted: {len(error.report.rows)} rows of {names} are in {path}, without a verdict; no other report "
            "was changed"
        ) from None

    # 4. The report is written and printed
    written = write_report(report, location)
    if publish is not None:
        _publish([report], location, publish, progress)
    if as_json:
        opt.print_json(report)
    else:
        print_report(report, written, opt.stdout(), has_verdict=bool(shown))
        opt.say_next(*_next_step(report, location))
    # Of a choice: nothing can be picked. Or a runtime was named that measured nothing: asked for, and not done.
    not_built = any(bundle.artifact(name).status != "built" for name in artifact_ids)
    if _has_failed(report, runtime) or not_built:
        raise typer.Exit(3)


def _has_failed(report: Report, runtime: str | None) -> bool:
    """Return whether a budget failed, or a runtime was named that measured nothing."""
    has_measured = any(row.latency_ms.status == "measured" for row in report.rows)
    return report.verdict.status == "fail" or (runtime is not None and not has_measured)


def _publish(reports: Iterable[Report], location: Location, path: Path, progress: Progress) -> None:
    """Add the measured times of reports to a file of --publish."""
    from edgeformer.report.publish import append_published

    count = sum(append_published(report, location.open_bundle(), path) for report in reports)
    progress.message(f"{path}: {count} measured times were added")


def _profile_on_machines(
    context: typer.Context, on: list[str], location: Location, artifact_ids: Sequence[str]
) -> None:
    """Profile on the devices of --on, print the reports, and exit with the code of the worst."""
    from edgeformer.machines.commands import RemoteError, find_targets, load_device, profile_on
    from edgeformer.report.devices import compare_devices, comparison_tables, write_comparison
    from edgeformer.report.documents import print_report, report_files

    device, artifacts, runtime = (context.params[name] for name in ("device", "artifacts", "runtime"))
    progress = opt.show_progress()
    profile = load_device(device, artifacts, progress)
    measuring = ("batch", "seq", "threads", "runtime", "phase", "strict", "choose", "allow_leak")
    options = opt.forward_options(context, (*measuring, *_LIMITS, *_CHOOSING))
    ids = artifact_ids or ([location.artifact] if location.artifact is not None else [])
    targets = find_targets(on, artifacts)
    reports, errors = profile_on(targets, location, profile, options, ids, artifacts, progress)
    if context.params["publish"] is not None:
        _publish(reports.values(), location, context.params["publish"], progress)
    if not reports:
        raise RemoteError("\n".join(map(str, errors.values())), max(error.exit_code for error in errors.values()))
    if len(targets) == 1:
        (report,) = reports.values()
        if context.params["as_json"]:
            opt.print_json(report)
        else:
            print_report(report, report_files(report, location), opt.stdout())
            opt.say_next(*_next_step(report, location, targets[0].name))
    else:
        comparison = compare_devices(reports, {name: str(error) for name, error in errors.items()})
        page = location.reports / "devices.html"
        write_comparison(comparison, page)
        if context.params["as_json"]:
            documents = {name: report.model_dump(mode="json", by_alias=True) for name, report in reports.items()}
            opt.print_json({**comparison, "reports": documents, "page": str(page)})
        else:
            for table in comparison_tables(comparison):
                opt.stdout().print(table)
            for report in reports.values():
                opt.say(f"report  {report_files(report, location)[0]}")
            opt.say(f"page    {page}")
    if errors:
        raise typer.Exit(max(error.exit_code for error in errors.values()))
    if any(_has_failed(report, runtime) for report in reports.values()):
        raise typer.Exit(3)


def _next_step(report: Report, location: Location, host: str | None = None) -> tuple[str, str]:
    """Return the most likely next command after a report, of ``host`` if it was measured with --on, and its purpose."""
    run, bundle = location.argument, location.open_bundle()
    if not report.on_target:
        return f"edgeformer profile {run} --device {report.device} --on HOST", "measures on the device, over SSH"
    artifacts = dict.fromkeys(check.artifact for check in report.verdict.checks)
    if report.search is None and len(artifacts) > 1 and not bundle.leaks:
        where = f"--device {report.device}" if host is None else f"--on {host}"
        return f"edgeformer profile {run} {where} --choose", "chooses the artifact to deploy"
    if report.verdict.status == "fail" and not any(artifact.precision == "int8" for artifact in bundle.artifacts):
        return f"edgeformer export {location.run_argument} --int8", "adds smaller and faster artifacts"
    if report.verdict.status == "fail":
        return "edgeformer list devices", "choose a larger device, or other limits"
    if host is None:
        return f"edgeformer verify {bundle.folder}", "checks a copy of the bundle on the device"
    return f"edgeformer gate {run} --against BASELINE --on {host}", "compares it with another model there"
