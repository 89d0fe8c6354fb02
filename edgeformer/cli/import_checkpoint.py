"""edgeformer import: weights that were trained elsewhere become a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeformer.artifacts.errors import InputError, needs_extra
from edgeformer.cli.options import Artifacts, Json, print_json, stdout

app = typer.Typer(
    no_args_is_help=True, help="Turn weights that were trained elsewhere into a run, or an ONNX file into a bundle."
)


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
    from edgeformer.report.tables import run_table
    from edgeformer.run import read_run

    with needs_extra("train", "importing a checkpoint"):
        from edgeformer.export.import_crt import ImportOptions, import_crt
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


@app.command("hf")
def hf(
    source: Annotated[str, typer.Argument(metavar="PATH|NAME", help="A Hugging Face folder, or a model of the hub.")],
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: the model's, and a number.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="What to judge artifacts on: labelled rows, or pairs of texts with a score for an embedding model; a "
            "folder with test, validation and train (which --vocab-trim keeps the tokens of).",
        ),
    ] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="A,B…", help="Names of the classes, in order. Default: the model's own.")
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(metavar="cls|mean|max", help="How a text becomes one vector. Default: the model's own, or mean."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", help="Cut texts to N tokens. Default: the model's own, at most 512.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="The device profile that profile uses by default.")
    ] = None,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Import a text encoder: BERT, DistilBERT, RoBERTa, ELECTRA, MiniLM, ALBERT or ModernBERT.

    A sequence classifier becomes a classifier, a sentence-transformers folder or a bare encoder an embedding model.
    Weights are read from safetensors only; no code of the model is run.

    Examples:

      edgeformer import hf path/to/all-MiniLM-L6-v2 --name minilm

      edgeformer export minilm --fp16 --int8

      edgeformer profile minilm --device raspberry-pi-5
    """
    from edgeformer.cli.progress import show_progress
    from edgeformer.report.tables import run_table
    from edgeformer.run import read_run

    if pooling not in (None, "cls", "mean", "max"):
        raise InputError(f"--pooling {pooling!r}: must be cls, mean or max")
    with needs_extra("train", "importing a model"):
        from edgeformer.export.import_hf import HfOptions, import_hf
    named = tuple(label.strip() for label in labels.split(",")) if labels is not None else None
    options = HfOptions(artifacts, name, data, named, pooling, max_length, target)
    folder = import_hf(source, options, show_progress())
    manifest = read_run(folder)
    if as_json:
        keys = {"run", "task", "status", "parameters", "reason"}
        print_json({"path": str(folder), **manifest.model_dump(mode="json", include=keys)})
        return
    console = stdout()
    console.print(run_table(manifest))
    console.print(f"run   {folder}", soft_wrap=True, markup=False)
    console.print(f"next  edgeformer export {folder.name} --fp16 --int8", soft_wrap=True, markup=False)
