"""edgeformer profile: a bundle becomes a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from edgeformer.cli import gate
from edgeformer.cli.calibrate import Also, calibration_options, run_calibration
from edgeformer.cli.limits import limit_flags, limits_asked
from edgeformer.cli.options import Artifacts, Json, Ranges, RunOrGraph, Shapes, integers, print_json, stdout
from edgeformer.formats.errors import InputError, InterruptedRun

if TYPE_CHECKING:
    from edgeformer.formats.device import DeviceProfile
    from edgeformer.formats.manifest import BundleManifest
    from edgeformer.run import Location
    from edgeformer.stages.profiling.choosing import SearchOptions
    from edgeformer.stages.profiling.profile import ProfileOptions

Minimize = Literal["latency", "size", "memory", "energy"]


def command(
    run: RunOrGraph = None,
    device: Annotated[
        str | None, typer.Option(help="Hardware profile (see: edgeformer list devices). Default: the recipe's target.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,N…", help="Batch sizes to measure. Default: 1,16; of --validate 1,8.")
    ] = None,
    seq: Annotated[
        str | None,
        typer.Option(
            metavar="N,N…", help="Sequence lengths to measure. Default: the device budget's; of --validate 16,64,128."
        ),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(
            metavar="N,N…",
            help="Threads of one operator; several: each is measured. Default: the physical cores that this process "
            "may use.",
        ),
    ] = None,
    artifact: Annotated[list[str] | None, typer.Option(help="Profile only this artifact. May be repeated.")] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="onnxruntime, openvino (needs its extra) or all; or one provider by its name, e.g. openvino-cpu-bf16. "
            "Default: onnxruntime; of --search all.",
        ),
    ] = None,
    max_latency: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Fail above this p50, e.g. 5ms, at --batch × --seq; of language models: per decoded token.",
        ),
    ] = None,
    max_vram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Fail above this peak memory, e.g. 4GiB.")
    ] = None,
    max_size: Annotated[str | None, typer.Option(metavar="SIZE", help="Fail above this file size, e.g. 20MiB.")] = None,
    max_energy: Annotated[
        str | None, typer.Option(metavar="ENERGY", help="Fail above this energy per call, e.g. 10mJ.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Name the artifact to deploy: the cheapest that keeps every limit.")
    ] = False,
    min_accuracy: Annotated[
        float | None, typer.Option(metavar="SHARE", help="--search: lowest accuracy on validation, e.g. 0.91.")
    ] = None,
    max_perplexity: Annotated[
        float | None, typer.Option(metavar="X", help="--search: highest perplexity on validation, e.g. 25.")
    ] = None,
    min_similarity: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="--search: lowest similarity of an embedding model (rank correlation), e.g. 0.8."
        ),
    ] = None,
    min_f1: Annotated[
        float | None,
        typer.Option("--min-f1", metavar="X", help="--search, several labels at once: lowest micro F1, e.g. 0.8."),
    ] = None,
    min_cosine: Annotated[
        float | None,
        typer.Option(metavar="X", help="--search, wrapped ONNX files: lowest cosine with FP32's outputs, e.g. 0.999."),
    ] = None,
    minimize: Annotated[
        Minimize | None, typer.Option(help="--search: what the pick has least of. Default: latency.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Instead of judging: teach the estimator this host's processor, with this bundle."
        ),
    ] = False,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate", help="Instead of judging: measure on this host what the estimator says of it, and compare."
        ),
    ] = False,
    also: Also = None,
    judge: Annotated[
        Path | None,
        typer.Option(
            "--judge",
            metavar="REPORT",
            help="Measure nothing: judge a report that was measured on the device itself.",
        ),
    ] = None,
    against: gate.Against = None,
    max_slowdown: gate.MaxSlowdown = None,
    max_memory_growth: gate.MaxMemoryGrowth = None,
    max_size_growth: gate.MaxSizeGrowth = None,
    max_score_loss: gate.MaxScoreLoss = None,
    eval_data: gate.EvalData = None,
    junit: gate.JUnit = None,
    summary: gate.Summary = None,
    strict: Annotated[bool, typer.Option("--strict", help="Measure ≥ 60 s per row, for figures to publish.")] = False,
    allow_leak: Annotated[
        bool, typer.Option("--allow-leak", help="Profile a language model although it sees future tokens.")
    ] = False,
    shape: Shapes = None,
    value_range: Ranges = None,
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", metavar="FILE.npz", help="ONNX files: real inputs, instead of drawn ones."),
    ] = None,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Measure a bundle on this host and judge it for a [b]device[/b].

    Each artifact runs in a fresh process on real inputs. For a device that is not this host, times and memory are
    estimated as a range, marked as such, beside the host's own measurements: an estimate passes a limit only with its
    whole range. A budget is judged at its own shape, cut to the model's longest text; a limit that you give, at the
    shapes that you give. Exit code 3 when a budget fails, or an artifact that --artifact names was rejected at export;
    with --search, when nothing can be picked.

    --search compares all artifacts of the bundle (precisions, exits, trimmed vocabularies) at that shape, with every
    runtime here and every count of --threads, and prints the Pareto front of score, latency and size. The verdict is
    that of the pick.

    RUN can be any ONNX file: it becomes a bundle in DIR/wrapped, as edgeformer wrap makes it, and the reports go there;
    nothing is written beside the file. Sizes called batch or sequence take --batch and --seq, all others a --shape;
    inputs of whole numbers need a --range.

    --calibrate measures this processor and writes DIR/profiles/host.yaml, from which --device host estimates; how far
    off estimates of other models are it learns from three models and more (--also RUN --also RUN). --validate then says
    how wrong estimates of RUN are at --batch and --seq.

    --against measures the bundle and its baseline in turns, in fresh processes, until a sequential test is sure: it
    fails where the bundle is slower than --max-slowdown allows, or worse in memory, size, score or drift, or lacks an
    artifact. Both are scored on the same rows: the baseline's held-out ones that the candidate was not trained on, or
    those of --eval-data. Exit code 4 where a check cannot be decided: the machine is too noisy, or can run neither, or
    there are no rows to score both on.

    --judge takes a report that was measured elsewhere, on the device itself: what the page of edgeformer page offers
    for download. RUN is not needed; where it is given, the report must be of its files.

    Examples:

      edgeformer profile --device rtx4050

      edgeformer profile --device host --batch 1 --seq 16,128 --max-latency 10ms --threads 1,2

      edgeformer profile --device host --search --min-accuracy 0.91 --max-size 20MiB --minimize size

      edgeformer profile vad.onnx --device raspberry-pi-5 --shape input=1x512 --shape state=2x1x128 --range sr=16000

      edgeformer profile --calibrate --also other-run-001 --also third-run-001 --validate

      edgeformer profile --against main/reports/host.json --max-slowdown 5% --junit gate.xml

      edgeformer profile --judge browser.json --device raspberry-pi-5
    """
    from edgeformer.cli.judge import judge_elsewhere, refuse
    from edgeformer.cli.progress import show_progress
    from edgeformer.formats.documents import load_profile, own_profiles
    from edgeformer.stages.profiling.estimating.rates import known_error
    from edgeformer.stages.profiling.profile import ProfileOptions

    limits = limits_asked(max_latency, max_vram, max_size, max_energy)
    bounds = {"accuracy": min_accuracy, "perplexity": max_perplexity}
    bounds |= {"similarity": min_similarity, "f1": min_f1, "cosine": min_cosine}
    shares = (max_slowdown, max_memory_growth, max_size_growth, max_score_loss)
    gating = gate.Gating(against, shares, eval_data, junit, summary)
    if judge is not None:
        measuring = {"batch": batch, "seq": seq, "threads": threads, "strict": strict, "shape": shape, "inputs": inputs}
        measuring |= {"search": search, "calibrate": calibrate, "validate": validate, "range": value_range}
        measuring |= {"against": against, "allow-leak": allow_leak, "also": also}
        measuring |= {flag.lstrip("-"): value is not None for flag, value in _searching(bounds, minimize).items()}
        options = ProfileOptions(artifacts=tuple(artifact or ()), **limits)
        return judge_elsewhere(judge, (run, artifacts), device, options, {**measuring, "runtime": runtime}, as_json)
    location = _locate(run, artifacts, shape, value_range, inputs)
    manifest = location.open_bundle().manifest
    wanted = _search(search, bounds, minimize, manifest)
    counts, batches, seqs = integers(threads, "--threads"), integers(batch, "--batch"), integers(seq, "--seq")
    if calibrate or validate or also:
        judging = {"search": search, "against": against, "artifact": artifact, "runtime": runtime}
        refuse({**judging, **limit_flags(limits)}, "--calibrate and --validate judge nothing")
        asked = calibration_options((calibrate, validate), (batches, seqs), counts, strict, (also, artifacts))
        host = load_profile(device or "host", own_profiles(artifacts), show_progress().message)
        return run_calibration(location, host, asked, artifacts, as_json)
    profile = load_profile(device or manifest.target, own_profiles(artifacts), show_progress().message)
    error = known_error(profile, load_profile("host", own_profiles(artifacts)))
    how: dict[str, Any] = {"strict": strict, "threads": counts, "allow_leak": allow_leak, "search": wanted}
    how |= {"artifacts": tuple(artifact or ()), "runtime": runtime, "estimate_error": error}
    options = ProfileOptions(batches or None, seqs, **limits, **how)
    if against is not None:
        nothing = {"search": search, **limit_flags(limits), "strict": strict}
        refuse(nothing, "--against holds a bundle against another one")
        return gate.run_gate(gating, location, profile, options, (artifacts, as_json))
    return _judge(location, profile, options, as_json)


def _judge(location: Location, profile: DeviceProfile, options: ProfileOptions, as_json: bool) -> None:
    from edgeformer.cli.progress import show_progress
    from edgeformer.reporting.report_files import write_interrupted, write_report
    from edgeformer.reporting.report_tables import print_report, print_search
    from edgeformer.runtime_choice import remember
    from edgeformer.stages.profiling.profile import ProfileInterrupted, profile_bundle

    try:
        report = profile_bundle(location, profile, options, show_progress())
    except ProfileInterrupted as error:
        if not error.report.rows:
            raise InterruptedRun("interrupted before anything was measured; nothing was written") from None
        path = write_interrupted(error.report, location)
        count = len(error.report.rows)
        names = ", ".join(dict.fromkeys(row.artifact for row in error.report.rows))
        what = f"{count} row{'' if count == 1 else 's'} of {names}"
        raise InterruptedRun(
            f"interrupted: {what} had been measured, see {path}; nothing was judged, and no other report was changed"
        ) from None
    written = write_report(report, location)
    remember(report, location)
    if as_json:
        print_json(report)
    else:
        print_report(report, written, stdout())
        if report.search is not None:
            print_search(report.search, stdout())
    # Of a search: nothing can be picked. Or a runtime was named that measured nothing: asked for, and not done.
    measured = any(row.latency_ms.status == "measured" for row in report.rows)
    bundle = location.open_bundle()
    not_built = any(bundle.artifact(name).status != "built" for name in options.artifacts)
    if report.verdict.status == "fail" or (options.runtime is not None and not measured) or not_built:
        raise typer.Exit(3)


def _locate(
    run: str | None, artifacts: Path, shapes: list[str] | None, ranges: list[str] | None, inputs: Path | None
) -> Location:
    """What RUN stands for; an ONNX file that lies in no bundle is made one of."""
    from edgeformer.bundle import bundle_around
    from edgeformer.cli.progress import show_progress
    from edgeformer.cli.wrap import wrap_options
    from edgeformer.run import Location, locate

    path = Path(run or "")
    if run is not None and path.suffix == ".onnx" and path.is_file() and bundle_around(path) is None:
        from edgeformer.stages.wrapping.wrap import wrap_cached

        progress = show_progress()
        bundle = wrap_cached(path, artifacts, wrap_options(shapes, ranges, inputs), progress)
        progress.message(f"{run}: profiled as the bundle {bundle}")
        return Location(None, bundle)
    given = {"--shape": shapes, "--range": ranges, "--inputs": inputs}
    if asked := [option for option, value in given.items() if value]:
        raise InputError(f"{asked[0]}: is for an ONNX file; the inputs of a bundle are known")
    return locate(run, artifacts)


def _searching(bounds: dict[str, float | None], minimize: Minimize | None) -> dict[str, object]:
    """The flags that say what to search for, and their values as given; ``bounds``: metric → as given."""
    from edgeformer.tasks import all_tasks

    return {**{task.metric.flag: bounds.get(task.metric.name) for task in all_tasks()}, "--minimize": minimize}


def _search(
    wanted: bool, bounds: dict[str, float | None], minimize: Minimize | None, manifest: BundleManifest
) -> SearchOptions | None:
    """What to search for, checked against the bundle before minutes of measuring. ``bounds``: metric → as given."""
    from edgeformer.stages.profiling.choosing import SearchOptions, check_options

    if not wanted:
        if given := [flag for flag, value in _searching(bounds, minimize).items() if value is not None]:
            raise InputError(f"{given[0]}: says what to search for; add --search")
        return None
    options = SearchOptions({name: bound for name, bound in bounds.items() if bound is not None}, minimize or "latency")
    check_options(options, manifest)
    return options
