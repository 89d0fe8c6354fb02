"""Command gate: compare a candidate bundle with its baseline, for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeformer.artifacts.errors import InputError
from edgeformer.cli.options import (
    ADVANCED,
    AllowLeak,
    ArtifactIds,
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
    against: Annotated[
        str,
        typer.Option(
            metavar="BASELINE",
            help="The baseline: a run, a bundle, or a report (.json), whose bundle is the baseline.",
        ),
    ],
    run: RunOrGraph = None,
    device: Annotated[
        str | None,
        typer.Option(help="Hardware profile whose budget names the shape. Default: the recipe's target."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,N…", help="Batch sizes to measure. Default: the device budget's.")
    ] = None,
    seq: Annotated[
        str | None, typer.Option(metavar="N,N…", help="Sequence lengths to measure. Default: the device budget's.")
    ] = None,
    artifact: ArtifactIds = None,
    max_slowdown: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Slower by at most this. Default: 5%.")
    ] = None,
    max_memory_growth: Annotated[
        str | None, typer.Option(metavar="SHARE", help="More memory by at most this; off: not checked. Default: 10%.")
    ] = None,
    max_size_growth: Annotated[
        str | None, typer.Option(metavar="SHARE", help="A larger file by at most this; off: not checked. Default: 5%.")
    ] = None,
    max_score_loss: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Accuracy points (perplexity: its share) to lose; off: not checked. Default: 1%."
        ),
    ] = None,
    eval_data: Annotated[
        Path | None,
        typer.Option(
            "--eval-data",
            metavar="FILE",
            help="Score both on this labelled file (TSV, CSV, JSONL, Parquet). Default: the baseline's held-out rows.",
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE.xml", help="Write the checks as JUnit XML.")
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option("--summary", metavar="FILE.md", help="Append a Markdown summary, for a CI's job summary."),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Threads of one operator. Default: the physical cores that this process may use.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="onnxruntime, openvino (needs its extra) or all; or one provider by its name, e.g. openvino-cpu-bf16. "
            "Default: onnxruntime.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    allow_leak: AllowLeak = False,
    shape: Shapes = None,
    value_range: Ranges = None,
    inputs: Inputs = None,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Measure a bundle and its baseline in turns, and fail where the bundle is worse.

    Both are measured in fresh processes until a sequential test is sure. The gate fails where the bundle is slower than
    --max-slowdown allows, or worse in memory, size, score or drift, or lacks an artifact. Both are scored on the same
    rows: the baseline's held-out rows that the candidate was not trained on, or those of --eval-data.

    Exit code 3 where a check fails; 4 where a check cannot be decided: the machine is too noisy, or can run neither, or
    there are no rows to score both on.

    Examples:

      edgeformer gate --against main/reports/host.json --max-slowdown 5% --junit gate.xml

      edgeformer gate path/to/candidate --against path/to/baseline --device host --artifact onnx-int8
    """
    from edgeformer.artifacts.documents import load_profile, own_profiles
    from edgeformer.artifacts.units import parse_share
    from edgeformer.artifacts.workspace import require_writable
    from edgeformer.benchmark.gate import GateOptions, gate_bundles, named_baseline
    from edgeformer.benchmark.request import ProfileOptions
    from edgeformer.cli.progress import show_progress
    from edgeformer.report.gate import append_summary, print_gate, write_junit
    from edgeformer.run import locate

    texts = {"max_slowdown": max_slowdown, "max_memory_growth": max_memory_growth}
    texts |= {"max_size_growth": max_size_growth, "max_score_loss": max_score_loss}
    limits: dict[str, float | None] = {}
    for name, text in texts.items():
        if text == "off" and name != "max_slowdown":
            limits[name] = None
        elif text is not None:
            try:
                limits[name] = parse_share(text)
            except ValueError as error:
                raise InputError(f"--{name.replace('_', '-')}: {error}") from None
    if eval_data is not None and max_score_loss == "off":
        raise InputError("--eval-data: scores both on a file, but --max-score-loss off checks no score")
    for option, path in (("--junit", junit), ("--summary", summary)):
        if path is not None:
            require_writable(option, path)
    location = locate_or_import(run, artifacts, shape, value_range, inputs)
    profile = load_profile(
        device or location.open_bundle().manifest.target, own_profiles(artifacts), show_progress().message
    )
    if against.endswith(".json"):
        baseline, notes = named_baseline(Path(against))
    else:
        baseline, notes = locate(against, artifacts).open_bundle(), []
    options = ProfileOptions(
        integers(batch, "--batch") or None,
        integers(seq, "--seq"),
        threads=integers(threads, "--threads"),
        artifacts=tuple(artifact or ()),
        runtime=runtime,
        allow_leak=allow_leak,
    )
    gate_options = GateOptions(**limits, eval_data=eval_data)  # type: ignore[arg-type]
    gate = gate_bundles(location, baseline, profile, options, gate_options, show_progress(), notes)
    if as_json:
        print_json(gate)
    else:
        print_gate(gate, stdout())
    if junit is not None:
        write_junit(gate, junit)
    if summary is not None:
        append_summary(gate, summary)
    if gate.exit_code:
        raise typer.Exit(gate.exit_code)
