"""edgeformer import: weights that were trained elsewhere become a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeformer.cli.options import Artifacts, Json, print_json, stdout
from edgeformer.formats.errors import needs_extra

app = typer.Typer(no_args_is_help=True, help="Turn weights that were trained elsewhere into a run.")


@app.callback()
def _group() -> None:
    pass


@app.command("crt")
def crt(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint: .pt, .pth, .bin or .safetensors.")],
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: crt_imported and a number.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its tokenizer.json. Default: gpt2 from the hub.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Text to check and score it on (train.txt, valid.txt …). Default: WikiText-103, read when scored.",
        ),
    ] = None,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Import a checkpoint of the public CRT code: a bare state dict, or one under model or model_state_dict.

    Nothing in the file is executed. The public model looks ahead, so the run is marked: it exports and profiles with
    --allow-leak only, and cannot generate.

    Examples:

      edgeformer import crt best_model.pt --tokenizer gpt2/tokenizer.json

      edgeformer export crt_imported-001 --allow-leak
    """
    from edgeformer.cli.progress import show_progress
    from edgeformer.reporting.tables import run_table
    from edgeformer.run import read_run

    with needs_extra("train", "importing a checkpoint"):
        from edgeformer.stages.importing.import_crt import ImportOptions, import_crt
    folder = import_crt(path, ImportOptions(artifacts, name, tokenizer, data), show_progress())
    manifest = read_run(folder)
    if as_json:
        keys = {"run", "status", "parameters", "leaks", "causality", "reason"}
        print_json({"path": str(folder), **manifest.model_dump(mode="json", include=keys)})
        return
    console = stdout()
    console.print(run_table(manifest))
    console.print(f"run   {folder}", soft_wrap=True, markup=False)
    console.print("next  edgeformer export --allow-leak")
