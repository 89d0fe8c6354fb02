"""Command verify: check a bundle's files and its results on this machine."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Option

from edgeformer.cli import options as opt


def command(
    bundle: opt.Run = None,
    artifact: str | None = Option(None, metavar="ID", help="Verify only this artifact. Default: all."),
    runtime: str | None = Option(
        None, metavar="NAME", help="onnxruntime, openvino or all. Default: the usual runtime of each artifact."
    ),
    write: bool = Option(
        False,
        "--write",
        help="Also write this machine's parity and scores to targets.json in the bundle, for profile --search.",
    ),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Verify a copied bundle on its device: checksums of all files, and outputs on the golden inputs.

    Needs neither torch nor the data set, and writes nothing. Exit code 2: a file is missing, changed or unexpected. 3:
    an artifact computes different results here, or --artifact could not be checked.

    --write, on the GPU that an engine was built for, stores its scores in targets.json beside bundle.json. Copy the
    file into the original bundle for [b]profile --search[/b].

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
