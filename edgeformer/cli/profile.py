"""Command profile: measure a bundle, or judge a report again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from edgeformer.artifacts.errors import InputError, InterruptedRun
from edgeformer.cli.options import (
    ADVANCED,
    AllowLeak,
    ArtifactIds,
    Artifacts,
    Inputs,
    Json,
    Ranges,
    Shapes,
    integers,
    locate_or_import,
    print_json,
    stdout,
)

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile
    from edgeformer.artifacts.manifest import BundleManifest
    from edgeformer.benchmark.profile import ProfileOptions
    from edgeformer.benchmark.search import SearchOptions
    from edgeformer.run import Location

Minimize = Literal["latency", "size", "memory", "energy"]


def command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|REPORT.json]",
            help="A run's name or folder, a bundle's folder, an artifact file, any .onnx file, or a report to judge "
            "again. Default: the newest finished run.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Hardware profile (see: edgeformer list devices). Default: the recipe's target.")
    ] = None,
    batch: Annotated[str | None, typer.Option(metavar="N,N…", help="Batch sizes to measure. Default: 1,16.")] = None,
    seq: Annotated[
        str | None,
        typer.Option(metavar="N,N…", help="Sequence lengths to measure. Default: the device budget's."),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(
            metavar="N,N…",
            help="Threads of one operator; several: each is measured. Default: the physical cores that this process "
            "may use.",
        ),
    ] = None,
    artifact: ArtifactIds = None,
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
        str | None,
        typer.Option(metavar="ENERGY", help="Fail above this energy per call, e.g. 10mJ.", rich_help_panel=ADVANCED),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Name the artifact to deploy: the cheapest that keeps every limit.")
    ] = False,
    min_accuracy: Annotated[
        float | None, typer.Option(metavar="SHARE", help="--search: lowest accuracy on validation, e.g. 0.91.")
    ] = None,
    max_perplexity: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="--search: highest perplexity on validation, e.g. 25.", rich_help_panel=ADVANCED
        ),
    ] = None,
    min_similarity: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="--search: lowest similarity of an embedding model (rank correlation), e.g. 0.8.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    min_f1: Annotated[
        float | None,
        typer.Option(
            "--min-f1",
            metavar="X",
            help="--search, several labels at once: lowest micro F1, e.g. 0.8.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    min_cosine: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="--search, imported ONNX files: lowest cosine with FP32's outputs, e.g. 0.999.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    minimize: Annotated[
        Minimize | None, typer.Option(help="--search: what the pick has least of. Default: latency.")
    ] = None,
    measured_bundle: Annotated[
        str | None,
        typer.Option(
            "--bundle",
            metavar="RUN",
            help="REPORT.json: the bundle that was measured, whose checksums must be those of the report.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Measure ≥ 60 s per row, for figures to publish.", rich_help_panel=ADVANCED),
    ] = False,
    allow_leak: AllowLeak = False,
    shape: Shapes = None,
    value_range: Ranges = None,
    inputs: Inputs = None,
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

    RUN can be any ONNX file: it becomes a bundle in DIR/wrapped, as edgeformer import onnx makes it, and the reports go
    there; nothing is written beside the file. Sizes called batch or sequence take --batch and --seq, all others a
    --shape; inputs of whole numbers need a --range.

    REPORT.json is a report that was measured on the device itself: by this command there, or by a page of edgeformer
    page. Nothing is measured; its rows are judged for --device. An edited report is refused, and with --bundle a report
    of other files than those of that bundle.

    Examples:

      edgeformer profile --device rtx4050

      edgeformer profile --device host --batch 1 --seq 16,128 --max-latency 10ms --threads 1,2

      edgeformer profile --device host --search --min-accuracy 0.91 --max-size 20MiB --minimize size

      edgeformer profile vad.onnx --device raspberry-pi-5 --shape input=1x512 --shape state=2x1x128 --range sr=16000

      edgeformer profile browser.json --device raspberry-pi-5
    """
    from edgeformer.artifacts.documents import load_profile, own_profiles
    from edgeformer.benchmark.profile import ProfileOptions
    from edgeformer.cli.progress import show_progress
    from edgeformer.estimate.roofline import known_error

    limits = _limits(max_latency, max_vram, max_size, max_energy)
    bounds = {"accuracy": min_accuracy, "perplexity": max_perplexity}
    bounds |= {"similarity": min_similarity, "f1": min_f1, "cosine": min_cosine}
    folders = (Path(run), artifacts / run) if run is not None else ()
    if run is not None and run.endswith(".json") and not any(folder.is_dir() for folder in folders):
        measuring: dict[str, object] = {
            "--batch": batch,
            "--seq": seq,
            "--threads": threads,
            "--runtime": runtime,
            "--strict": strict,
        }
        measuring |= {"--search": search, **_search_flags(bounds, minimize), "--allow-leak": allow_leak}
        measuring |= {"--shape": shape, "--range": value_range, "--inputs": inputs}
        for option, value in measuring.items():
            if value is not None and value is not False:
                raise InputError(f"{option}: nothing is measured, because {run} is a report; leave out {option}")
        options = ProfileOptions(artifacts=tuple(artifact or ()), **limits)
        return _judge_report(Path(run), measured_bundle, artifacts, device, options, as_json)
    if measured_bundle is not None:
        raise InputError("--bundle: belongs to a report; name a REPORT.json")
    location = locate_or_import(run, artifacts, shape, value_range, inputs)
    manifest = location.open_bundle().manifest
    search_options = _search_options(search, bounds, minimize, manifest)
    profile = load_profile(device or manifest.target, own_profiles(artifacts), show_progress().message)
    options = ProfileOptions(
        integers(batch, "--batch") or None,
        integers(seq, "--seq"),
        **limits,
        strict=strict,
        threads=integers(threads, "--threads"),
        artifacts=tuple(artifact or ()),
        runtime=runtime,
        allow_leak=allow_leak,
        search=search_options,
        estimate_error=known_error(profile, load_profile("host", own_profiles(artifacts))),
    )
    return _measure_and_judge(location, profile, options, as_json)


def _measure_and_judge(location: Location, profile: DeviceProfile, options: ProfileOptions, as_json: bool) -> None:
    from edgeformer.benchmark.profile import ProfileInterrupted, profile_bundle
    from edgeformer.cli.progress import show_progress
    from edgeformer.report.documents import print_report, print_search, write_interrupted, write_report
    from edgeformer.runtime_preference import save_fastest

    try:
        report = profile_bundle(location, profile, options, show_progress())
    except ProfileInterrupted as error:
        if not error.report.rows:
            raise InterruptedRun("interrupted before anything was measured; nothing was written") from None
        path = write_interrupted(error.report, location)
        count = len(error.report.rows)
        names = ", ".join(dict.fromkeys(row.artifact for row in error.report.rows))
        raise InterruptedRun(
            f"interrupted: {count} row{'' if count == 1 else 's'} of {names} had been measured, see {path}; nothing "
            "was judged, and no other report was changed"
        ) from None
    written = write_report(report, location)
    save_fastest(report, location)
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


def _judge_report(
    path: Path, run: str | None, artifacts: Path, device: str | None, options: ProfileOptions, as_json: bool
) -> None:
    """Judge a report for a device and print it; ``run``: the bundle that was measured, None: none is given.

    Raises:
        typer.Exit: 3, a budget failed.
    """
    from edgeformer.artifacts.documents import load_profile, own_profiles
    from edgeformer.benchmark.profile import judge_report
    from edgeformer.cli.progress import show_progress
    from edgeformer.report.documents import print_report
    from edgeformer.run import locate

    bundle = locate(run, artifacts).open_bundle() if run is not None else None
    target = bundle.manifest.target if bundle is not None else None
    profile = load_profile(device or target, own_profiles(artifacts), show_progress().message)
    judged = judge_report(path, profile, options, bundle)
    if as_json:
        print_json(judged)
    else:
        print_report(judged, [], stdout())
    if judged.verdict.status == "fail":
        raise typer.Exit(3)


def _limits(latency: str | None, vram: str | None, size: str | None, energy: str | None) -> dict[str, Any]:
    """Return the limits of the command line as fields of ProfileOptions. Raises InputError."""
    from edgeformer.artifacts.units import parse_bytes, parse_millijoules, parse_milliseconds

    limits: dict[str, tuple[str, str | None, Callable[[str], float]]] = {
        "max_latency_ms": ("--max-latency", latency, parse_milliseconds),
        "max_size_bytes": ("--max-size", size, parse_bytes),
        "max_memory_bytes": ("--max-vram", vram, parse_bytes),
        "max_energy_mj": ("--max-energy", energy, parse_millijoules),
    }
    parsed = {}
    for field, (option, text, parse) in limits.items():
        try:
            parsed[field] = None if text is None else parse(text)
        except ValueError as error:
            raise InputError(f"{option}: {error}") from None
    return parsed


def _search_flags(bounds: dict[str, float | None], minimize: Minimize | None) -> dict[str, object]:
    """Return the search flags with their values; ``bounds``: metric → bound."""
    from edgeformer.tasks import all_tasks

    return {**{task.metric.flag: bounds.get(task.metric.name) for task in all_tasks()}, "--minimize": minimize}


def _search_options(
    search: bool, bounds: dict[str, float | None], minimize: Minimize | None, manifest: BundleManifest
) -> SearchOptions | None:
    """Return the search options, checked against the bundle before measuring starts; ``bounds``: metric → bound."""
    from edgeformer.benchmark.search import SearchOptions, check_options

    if not search:
        for flag, value in _search_flags(bounds, minimize).items():
            if value is not None:
                raise InputError(f"{flag}: says what to search for; add --search")
        return None
    options = SearchOptions({name: bound for name, bound in bounds.items() if bound is not None}, minimize or "latency")
    check_options(options, manifest)
    return options
