"""Command import: trained weights become a run, an ONNX file becomes a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer
from typer import Argument, Option

from edgeformer.artifacts.errors import needs_extra
from edgeformer.cli import options as opt

app = typer.Typer(
    no_args_is_help=True, help="Turn weights that were trained elsewhere into a run, or an ONNX file into a bundle."
)


@app.command("crt")
def crt(
    path: Path = Argument(..., metavar="PATH", help="A checkpoint: .pt, .pth, .bin or .safetensors."),
    name: str | None = Option(None, help="Name of the run. Default: crt_imported and a number."),
    tokenizer: Path | None = Option(None, metavar="FILE", help="Its tokenizer.json. Default: gpt2 from the hub."),
    data: Path | None = Option(
        None,
        metavar="DIR",
        help="Text to check and score it on (train.txt, valid.txt …). Default: WikiText-103, read when scored.",
    ),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Import a checkpoint of the public CRT code: a bare state dict, or one under model or model_state_dict.

    Nothing in the file is executed. The public model looks ahead, so the run is marked: it exports and profiles with
    --allow-leak only, and cannot generate.

    Examples:
      edgeformer import crt best_model.pt --tokenizer gpt2/tokenizer.json
      edgeformer export crt_imported-001 --allow-leak
    """
    from edgeformer.cli.progress import show_progress

    with needs_extra("train", "importing a checkpoint"):
        from edgeformer.export.import_run import ImportOptions, import_crt
    folder = import_crt(path, ImportOptions(artifacts, name, tokenizer, data), show_progress())
    keys = {"run", "status", "parameters", "leaks", "causality", "reason"}
    _print_run(folder, keys, "edgeformer export --allow-leak", as_json=as_json)


@app.command("hf")
def hf(
    source: str = Argument(..., metavar="PATH|NAME", help="A Hugging Face folder, or a model of the hub."),
    name: str | None = Option(None, help="Name of the run. Default: the model's, and a number."),
    data: Path | None = Option(
        None,
        metavar="FILE|DIR",
        help="What to judge artifacts on: labelled rows, pairs with a score, or a folder of such files.",
    ),
    labels: str | None = Option(None, metavar="A,B…", help="Names of the classes, in order. Default: the model's own."),
    pooling: Literal["cls", "mean", "max"] | None = Option(
        None, metavar="cls|mean|max", help="How a text becomes one vector. Default: the model's own, or mean."
    ),
    max_length: int | None = Option(
        None, metavar="N", help="Cut texts to N tokens. Default: the model's own, at most 512."
    ),
    target: str | None = Option(None, metavar="PROFILE", help="The device profile that profile uses by default."),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
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

    with needs_extra("train", "importing a model"):
        from edgeformer.export.import_run import HfOptions, import_hf
    class_names = tuple(label.strip() for label in labels.split(",")) if labels is not None else None
    options = HfOptions(artifacts, name, data, class_names, pooling, max_length, target)
    folder = import_hf(source, options, show_progress())
    keys = {"run", "task", "status", "parameters", "reason"}
    _print_run(folder, keys, f"edgeformer export {folder.name} --fp16 --int8", as_json=as_json)


def _print_run(folder: Path, keys: set[str], following: str, *, as_json: bool) -> None:
    """Print an imported run; as JSON its path and the ``keys`` of its manifest."""
    from edgeformer.cli.console import say
    from edgeformer.report.tables import run_table
    from edgeformer.run import read_run

    manifest = read_run(folder)
    if as_json:
        opt.print_json({"path": str(folder), **manifest.model_dump(mode="json", include=keys)})
        return
    opt.stdout().print(run_table(manifest))
    say(f"run   {folder}\nnext  {following}")


@app.command("onnx")
def onnx(
    model: Path = Argument(..., metavar="MODEL.onnx", help="The file; external weights are in the same folder."),
    output: Path = Option(..., "--output", "-o", metavar="DIR", help="The bundle's folder."),
    inputs: opt.Inputs = None,
    shape: opt.Shapes = None,
    value_range: opt.Ranges = None,
    seed: int = Option(0, min=0, help="Of drawn inputs."),
    tokenizer: Path | None = Option(
        None, metavar="FILE", help="A tokenizer.json: with --labels, a classifier of texts."
    ),
    labels: str | None = Option(None, metavar="A,B…", help="Names of the classes, in the order of its logits."),
    data: Path | None = Option(
        None, metavar="FILE", help="Labelled texts: golden inputs are taken from it, and scores."
    ),
    max_length: int = Option(128, min=4, help="Tokens that a classifier's texts are cut to."),
    replace: bool = Option(False, "--replace", help="Replace a bundle that is there already."),
    as_json: opt.Json = False,
) -> None:
    """Make a [b]bundle[/b] of any ONNX file, with any inputs and outputs.

    The graph is copied bit for bit; verify, profile --search and export then work as for trained models.

    Golden inputs are those of --inputs (an array of each input's name), else they are drawn: floats from a standard
    normal distribution, or evenly from a --range; whole numbers need a --range, except token ids. Sizes called batch or
    sequence can differ from call to call; all others need a --shape. With --tokenizer and --labels, a graph from
    input_ids to logits is a classifier of texts; with --data every artifact is judged by its accuracy there.

    Examples:
      edgeformer import onnx vad.onnx -o vad-bundle --shape input=1x512 --shape state=2x1x128 --range sr=16000
      edgeformer import onnx sentiment.onnx -o sentiment --tokenizer tokenizer.json --labels bad,good --data dev.tsv
    """
    from edgeformer.cli.console import say
    from edgeformer.cli.progress import show_progress
    from edgeformer.export.import_onnx import import_onnx
    from edgeformer.report.tables import artifact_table

    names = tuple(name.strip() for name in labels.split(",")) if labels else ()
    of_text = {"tokenizer": tokenizer, "labels": names, "data": data, "max_length": max_length}
    options = opt.onnx_options(shape, value_range, inputs, seed=seed, replace=replace, **of_text)
    bundle = import_onnx(model, output, options, show_progress())
    if as_json:
        facts = bundle.model_dump(mode="json", include={"run", "task", "notes", "artifacts"})
        opt.print_json({"bundle": str(output), **facts})
        return
    opt.stdout().print(artifact_table(bundle))
    for note in bundle.notes:
        say(f"note   {note}")
    say(f"bundle {output}\nnext   edgeformer profile {output} --device rtx4050")
