"""Command verify: check a bundle's files and its results on this machine."""

from pathlib import Path

import typer
from typer import Option

from edgeformer.cli import options as opt


def command(
    context: typer.Context,
    bundle: opt.Run = None,
    artifact: str | None = Option(None, metavar="ID", help="Verify only this artifact. Default: all."),
    runtime: str | None = Option(
        None,
        metavar="NAME",
        help="Runtime: onnxruntime, openvino, litert, executorch or all. Default: the usual one of each artifact.",
    ),
    write: bool = Option(
        False,
        "--write",
        help="Also write this machine's parity and scores to targets.json in the bundle, for profile --choose.",
    ),
    on: opt.OnOne = None,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Verify a copied bundle on its device: checksums of all files, and outputs on the golden inputs.

    Needs neither torch nor the data set, and writes nothing without --write. Exit code 2: a file is missing, changed or
    unexpected. 3: an artifact computes different results here, or --artifact could not be checked.

    --on sends the bundle to a machine over SSH, and verifies it there.

    --write is for the GPU that an engine was built for: it stores the scores of the engine in targets.json beside
    bundle.json. Copy this file into the original bundle for [b]profile --choose[/b]; with --on, it is written there.

    Examples:
      edgeformer verify path/to/bundle
      edgeformer verify path/to/bundle --artifact tensorrt-rtx-fp16 --json
      edgeformer verify path/to/bundle --write
      edgeformer verify --on pi@raspberrypi
    """
    from edgeformer.inference.verify import record, verify
    from edgeformer.report.tables import print_verification

    location = opt.locate(bundle, artifacts)
    opened, progress = location.open_bundle(), opt.show_progress()
    artifact = artifact or location.artifact
    if on is not None:
        from edgeformer.machines.commands import find_targets, verify_on

        options = opt.forward_options(context, ("runtime", "write"))
        options += [] if artifact is None else ["--artifact", opened.artifact(artifact).id]
        (target,) = find_targets([on], artifacts)
        verification = verify_on(target, opened, options, artifacts, progress)
    else:
        verification = verify(opened, artifact, progress, runtime)
        if write:
            verification = record(opened, verification, progress)
    if as_json:
        opt.print_json({**verification.model_dump(mode="json"), "exit_code": verification.exit_code})
    else:
        print_verification(verification, opened.manifest.task, opt.stdout())
        if not verification.exit_code:
            where, purpose = ("--device host", "on this machine") if on is None else (f"--on {on}", "there")
            opt.say_next(f"edgeformer profile {location.argument} {where}", f"measures it {purpose}")
    if verification.exit_code:
        raise typer.Exit(verification.exit_code)
