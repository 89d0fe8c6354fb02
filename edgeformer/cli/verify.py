"""Command verify: check a bundle's files and its results on this machine."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Option

from edgeformer.cli import options as opt


def command(
    bundle: opt.Run = None,
    artifact: str | None = Option(None, metavar="ID", help="Run this artifact only. Default: all."),
    runtime: str | None = Option(
        None, metavar="NAME", help="Run them in onnxruntime, openvino or all. Default: each in its usual one."
    ),
    write: bool = Option(False, "--write", help="Record this machine's results in targets.json."),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Check a copied bundle on the machine that it is for: every file's checksum, and golden inputs against answers.

    Needs neither torch nor the data set, and writes nothing. Exit code 2: a file is missing, changed or not of the
    bundle; 3: an artifact computes something else here, or the one that was asked for could not be checked.

    --write, on the GPU that an engine was built for, keeps its scores in targets.json beside bundle.json. Copied back
    into the origin's bundle, [b]profile --search[/b] uses them.

    Examples:
      edgeformer verify path/to/bundle
      edgeformer verify path/to/bundle --artifact tensorrt-rtx-fp16 --json
      edgeformer verify path/to/bundle --write
    """
    from edgeformer.cli.progress import show_progress
    from edgeformer.inference.verify import record, verify
    from edgeformer.report.tables import print_verification
    from edgeformer.run import locate

    location = locate(bundle, artifacts)
    opened, progress = location.open_bundle(), show_progress()
    verification = verify(opened, artifact or location.artifact, progress, runtime)
    if write:
        verification = record(opened, verification, progress)
    if as_json:
        opt.print_json({**verification.model_dump(mode="json"), "exit_code": verification.exit_code})
    else:
        print_verification(verification, opt.stdout())
    if verification.exit_code:
        raise typer.Exit(verification.exit_code)
