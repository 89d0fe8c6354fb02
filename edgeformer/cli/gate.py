"""Command gate: compare a candidate bundle with its baseline, for CI."""

from pathlib import Path

import typer
from typer import Option

from edgeformer.artifacts.errors import InputError
from edgeformer.cli import options as opt


def command(
    context: typer.Context,
    against: str = Option(
        ..., metavar="BASELINE", help="Baseline: a run, a bundle, or a report (.json), whose bundle is measured again."
    ),
    run: opt.RunOrGraph = None,
    device: opt.MeasuredDevice = None,
    on: opt.OnOne = None,
    batch: opt.Batches = None,
    seq: opt.Lengths = None,
    artifact: opt.ArtifactIds = None,
    max_slowdown: str | None = Option(
        None, metavar="SHARE", help="Largest acceptable growth of the median latency. Default: 5%."
    ),
    max_memory_growth: str | None = Option(
        None, metavar="SHARE", help="Largest acceptable growth of the peak memory; off: no check. Default: 10%."
    ),
    max_size_growth: str | None = opt.advanced(
        None, metavar="SHARE", help="Largest acceptable growth of a file; off: no check. Default: 5%."
    ),
    max_score_loss: str | None = Option(
        None,
        metavar="SHARE",
        help="Largest acceptable score loss (1% is one point of accuracy); off: no check. Default: 1%.",
    ),
    eval_data: Path | None = Option(
        None, metavar="FILE", help="File of labelled rows to score both bundles on. Default: the baseline's test set."
    ),
    junit: Path | None = Option(None, metavar="FILE.xml", help="Also write the checks as JUnit XML."),
    summary: Path | None = Option(
        None, metavar="FILE.md", help="Append a Markdown summary to this file, e.g. the job summary of CI."
    ),
    threads: opt.Threads = None,
    runtime: opt.MeasuredRuntime = None,
    allow_leak: opt.AllowLeak = False,
    shape: opt.Shapes = None,
    value_range: opt.Ranges = None,
    inputs: opt.Inputs = None,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Compare a bundle with its baseline, and fail if it is slower, larger or less accurate.

    Measures both alternately in fresh processes until a sequential test decides. The gate fails if the bundle is slower
    than --max-slowdown allows, or worse in memory, size, score or difference from torch, or lacks an artifact. Both are
    scored on the same rows: held-out rows of the baseline that the candidate was not trained on, or --eval-data.

    --on sends both bundles to a machine over SSH and compares them there. Its scores need --eval-data, or data that the
    device can read.

    Exit code 3: a check failed. 4: a check is undecided, because the machine is busy or rows are missing.

    Examples:
      edgeformer gate --against main/reports/host.json --max-slowdown 5% --junit gate.xml
      edgeformer gate path/to/candidate --against path/to/baseline --device host --artifact onnx-int8
      edgeformer gate path/to/candidate --against path/to/baseline --on pi@raspberrypi
    """
    from edgeformer.artifacts.documents import own_profiles
    from edgeformer.artifacts.files import write_text
    from edgeformer.artifacts.units import parse_share
    from edgeformer.artifacts.workspace import require_writable
    from edgeformer.benchmark.gate import GATE_LIMITS, GateOptions, gate_bundles, named_baseline
    from edgeformer.benchmark.limits import Limit
    from edgeformer.benchmark.request import ProfileOptions
    from edgeformer.measurement.target import resolve_device
    from edgeformer.report.gate import append_summary, junit_xml, print_gate

    # 1. The limits, and the files to write
    texts = {"max_slowdown": max_slowdown, "max_memory_growth": max_memory_growth}
    texts |= {"max_size_growth": max_size_growth, "max_score_loss": max_score_loss}
    values = {limit.quantity: limit.limit for limit in GATE_LIMITS}
    for quantity, (name, text) in zip([*values], texts.items(), strict=True):
        if text == "off" and quantity != "latency":
            del values[quantity]
        elif text is not None:
            values[quantity] = opt.parse_value(f"--{name.replace('_', '-')}", text, parse_share)
    if eval_data is not None and max_score_loss == "off":
        raise InputError("--eval-data: has no effect with --max-score-loss off; leave out one of them")
    for option, path in (("--junit", junit), ("--summary", summary)):
        if path is not None:
            require_writable(option, path)
    # 2. Compare the two bundles here, or on a machine
    progress = opt.show_progress()
    location = opt.locate_or_import(run, artifacts, shape, value_range, inputs)
    candidate = location.open_bundle()
    if against.endswith(".json"):
        baseline, notes = named_baseline(Path(against))
    else:
        baseline, notes = opt.locate(against, artifacts).open_bundle(), []
    options = ProfileOptions(
        opt.integers(batch, "--batch") or None, opt.integers(seq, "--seq"), threads=opt.integers(threads, "--threads"),
        artifacts=tuple(artifact or ()), runtime=runtime, allow_leak=allow_leak,
    )  # fmt: skip
    gate_options = GateOptions(tuple(Limit(*limit) for limit in values.items()), eval_data=eval_data)
    if on is None:
        name = device or candidate.manifest.target or "host"
        profile = resolve_device(name, own_profiles(artifacts), progress.message)
        gate = gate_bundles(location, baseline, profile, options, gate_options, progress, notes)
    else:
        from edgeformer.machines.commands import find_targets, gate_on, load_device

        (target,) = find_targets([on], artifacts)
        names = ("batch", "seq", "threads", "artifact", "runtime", "allow_leak", *texts)
        forwarded = opt.forward_options(context, names)
        if location.artifact is not None and not artifact:
            forwarded.append(f"--artifact={location.artifact}")
        remote_profile = load_device(device, artifacts, progress)
        gate = gate_on(target, (candidate, baseline), remote_profile, forwarded, eval_data, artifacts, progress)
        gate = gate.model_copy(update={"notes": (*notes, *gate.notes)})
    # 3. Print and write the checks
    if as_json:
        opt.print_json(gate)
    else:
        print_gate(gate, opt.stdout())
        undecided = {check.name for check in gate.checks if check.status == "undecided"}
        if gate.status == "pass" and on is None:
            opt.say_next(f"edgeformer verify {gate.candidate}", "checks a copy of the bundle on the device")
        elif gate.status in ("pass", "fail"):
            where = "--device host" if on is None else f"--on {on}"
            opt.say_next(f"edgeformer profile {gate.candidate} {where}", "shows time and memory of each artifact")
        elif undecided & {"latency", "memory"}:
            opt.say_next("run the same command again on an idle machine")
        else:
            command = f"edgeformer gate {gate.candidate} --against {against} --eval-data FILE"
            opt.say_next(command, "scores both on FILE")
    if junit is not None:
        write_text(junit, junit_xml(gate))
    if summary is not None:
        append_summary(gate, summary)
    if gate.exit_code:
        raise typer.Exit(gate.exit_code)
