"""edgeformer export: a run becomes a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeformer.cli.options import Artifacts, Json, Run


def command(
    run: Run = None,
    fp16: Annotated[bool, typer.Option("--fp16", help="Also write the FP16 graph (half the size).")] = False,
    allow_leak: Annotated[
        bool, typer.Option("--allow-leak", help="Export a language model although it sees future tokens.")
    ] = False,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Export a run as a [b]bundle[/b]: ONNX graphs, tokenizer, labels and golden inputs in one folder.

    FP32 ONNX is always written. Each graph is run on real validation inputs and compared with torch FP32; the
    parameters that its file stores are counted. A graph outside its tolerance is marked rejected (exit code 3).

    A language model is first probed for causality; one that looks ahead is refused.

    Examples:

      edgeformer export --fp16

      edgeformer export recurrent_sst2_fast-001 --fp16 --json
    """
    from edgeformer.cli.console import print_json, stdout
    from edgeformer.cli.needs import needs_extra
    from edgeformer.cli.progress import show_progress
    from edgeformer.reporting.tables import artifact_table
    from edgeformer.schema.workspace import locate

    folder = locate(run, artifacts).require_run()
    with needs_extra("train", "exporting"):
        from edgeformer.stages.exporting.export import export
    bundle = export(folder, fp16=fp16, allow_leak=allow_leak, progress=show_progress())
    if as_json:
        rows = [artifact.model_dump(mode="json") for artifact in bundle.artifacts]
        print_json({"bundle": str(folder / "bundle"), "leaks": bundle.leaks, "artifacts": rows})
    else:
        console = stdout()
        console.print(artifact_table(bundle))
        if bundle.leaks:
            leaks = "leaks future tokens: this model sees what it is asked to predict, so its scores are void"
            console.print(f"[yellow]{leaks}[/yellow]", soft_wrap=True)
        console.print(f"bundle {folder / 'bundle'}", soft_wrap=True)
        leak = " --allow-leak" if bundle.leaks else ""
        console.print(f"next   edgeformer profile --device {bundle.target or 'cpu'}{leak}")
    rejected = [artifact for artifact in bundle.artifacts if artifact.status != "built"]
    for artifact in rejected:
        typer.echo(f"{artifact.id}: {artifact.status}: {artifact.reason}", err=True)
    if rejected:
        raise typer.Exit(3)
