"""edgeformer import onnx: an ONNX file becomes a bundle; other commands take an ONNX file in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeformer.artifacts.errors import InputError
from edgeformer.cli.options import Json, print_json, stdout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgeformer.export.import_onnx import WrapOptions
    from edgeformer.run import Location


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The file; weights may lie beside it.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The bundle's folder.")],
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs",
            metavar="FILE.npz",
            help="Real inputs, an array of each name: one call, or several with an axis in front. Default: drawn.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="INPUT=1x512",
            help="Sizes of an input; B stands for the batch size, S for the sequence length. May be repeated.",
        ),
    ] = None,
    value_range: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="INPUT=LOW:HIGH",
            help="Draw an input's golden numbers evenly from these, both included. May be repeated.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of drawn inputs.")] = 0,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json: with --labels, a classifier of texts."),
    ] = None,
    labels: Annotated[
        str | None, typer.Option("--labels", metavar="A,B…", help="Names of the classes, in the order of its logits.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="Labelled texts: golden inputs are taken from it, and scores."),
    ] = None,
    max_length: Annotated[
        int, typer.Option("--max-length", min=4, help="Tokens that a classifier's texts are cut to.")
    ] = 128,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a bundle that is there already.")] = False,
    as_json: Json = False,
) -> None:
    """Make a [b]bundle[/b] of an ONNX file that somebody else made: any inputs, any outputs.

    The graph is copied bit for bit. Beside it come checksums, golden inputs, and what ONNX Runtime answers to them in
    FP32 on the CPU; then verify, profile --search and export --fp16 --int8 --trt work on it as on one's own models.

    Golden inputs are real ones with --inputs, else they are drawn: floats from a standard normal distribution, or
    evenly from a --range; whole numbers need a --range, except token ids whose table is in the graph. Sizes that are
    called batch or sequence (batch_size, N, seq_len, …) can differ from call to call; all others need a --shape.

    With --tokenizer and --labels, a graph from input_ids (and attention_mask) to logits is a classifier, which predict
    and evaluate --data FILE understand; with --data every artifact is judged by its accuracy there.

    Nothing of the file is run before it was looked at: what a runtime would read elsewhere, operators that nobody
    knows, and inputs or outputs that are no tensors of numbers are refused with exit code 2.

    Examples:

      edgeformer import onnx model.onnx -o bundle

      edgeformer import onnx vad.onnx -o vad-bundle --shape input=1x512 --shape state=2x1x128 --range sr=16000

      edgeformer import onnx detector.onnx -o detector --shape x=Bx3x320x320 --inputs pictures.npz

      edgeformer import onnx sentiment.onnx -o sentiment --tokenizer tokenizer.json --labels bad,good --data dev.tsv
    """
    from edgeformer.cli.progress import show_progress
    from edgeformer.export.import_onnx import wrap
    from edgeformer.report.tables import artifact_table

    names = tuple(name.strip() for name in labels.split(",")) if labels else ()
    of_text = {"tokenizer": tokenizer, "labels": names, "data": data, "max_length": max_length}
    options = wrap_options(shape, value_range, inputs, seed=seed, replace=replace, **of_text)
    made = wrap(model, output, options, show_progress())
    if as_json:
        told = made.model_dump(mode="json", include={"run", "task", "notes", "artifacts"})
        print_json({"bundle": str(output), **told})
        return
    console = stdout()
    console.print(artifact_table(made))
    for note in made.notes:
        console.print(f"note   {note}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"bundle {output}", soft_wrap=True, markup=False)
    console.print(f"next   edgeformer profile {output} --device rtx4050", soft_wrap=True, markup=False)


def wrap_options(
    shapes: Sequence[str] | None, ranges: Sequence[str] | None, inputs: Path | None, **others: Any
) -> WrapOptions:
    """What --shape, --range and the others say together. Raises InputError."""
    from edgeformer.export.foreign_graph import parse_range, parse_shape
    from edgeformer.export.import_onnx import WrapOptions

    return WrapOptions(
        shapes=dict(map(parse_shape, shapes or ())),
        ranges=dict(map(parse_range, ranges or ())),
        inputs=inputs,
        **others,
    )


def locate_or_import(
    run: str | None, artifacts: Path, shapes: list[str] | None, ranges: list[str] | None, inputs: Path | None
) -> Location:
    """Return the location of RUN; an ONNX file outside of a bundle becomes a bundle below ``artifacts``.

    Raises:
        InputError: options of ONNX files for a RUN that is none; or RUN cannot be used.
    """
    from edgeformer.bundle import bundle_around
    from edgeformer.cli.progress import show_progress
    from edgeformer.run import Location, locate

    path = Path(run or "")
    if run is not None and path.suffix == ".onnx" and path.is_file() and bundle_around(path) is None:
        from edgeformer.export.import_onnx import wrap_cached

        progress = show_progress()
        bundle = wrap_cached(path, artifacts, wrap_options(shapes, ranges, inputs), progress)
        progress.message(f"{run}: measured as the bundle {bundle}")
        return Location(None, bundle)
    for option, value in {"--shape": shapes, "--range": ranges, "--inputs": inputs}.items():
        if value:
            raise InputError(f"{option}: is for an ONNX file; the inputs of a bundle are known")
    return locate(run, artifacts)
