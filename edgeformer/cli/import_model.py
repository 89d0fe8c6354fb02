"""Command import: trained weights become a run, an ONNX file becomes a bundle."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from edgeformer.artifacts.errors import InputError, needs_extra
from edgeformer.cli import options as opt

_LANGUAGE_KEYS = {"run", "task", "status", "parameters", "causality", "reason", "proof"}
_TEXT_FOLDER = "Folder of text (train.txt, valid.txt …) for golden inputs and scores. Default: a built-in text"
_Unproven = Annotated[
    bool,
    Option(
        "--unproven",
        help="Import even if answers differ from those of the library that the model comes from; the run, its bundle "
        "and reports are marked as unproven.",
    ),
]

app = typer.Typer(no_args_is_help=True, help="Import a model that was trained elsewhere.")


@app.command("crt")
def crt(
    path: Path = Argument(..., metavar="PATH", help="Checkpoint file: .pt, .pth, .bin or .safetensors."),
    name: str | None = Option(None, help="Name of the run. Default: crt_imported and a number."),
    tokenizer: Path | None = Option(
        None, metavar="FILE", help="tokenizer.json of the model. Default: gpt2 from the hub."
    ),
    data: Path | None = Option(None, metavar="DIR", help=f"{_TEXT_FOLDER} for golden inputs, WikiText-103 for scores."),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Import a checkpoint of the public CRT code.

    The checkpoint is a state dict, or has one under model, model_state_dict or state_dict. Nothing in the file is
    executed. The public model sees future tokens, so its run needs --allow-leak to export and profile, and cannot
    generate.

    Examples:
      edgeformer import crt best_model.pt --tokenizer gpt2/tokenizer.json
      edgeformer export crt_imported-001 --allow-leak
    """
    with needs_extra("train", "importing a checkpoint"):
        from edgeformer.imports.crt import import_crt
        from edgeformer.imports.run import ImportOptions
    folder = import_crt(path, ImportOptions(artifacts, name, tokenizer, data), opt.show_progress())
    keys = {"run", "status", "parameters", "leaks", "causality", "reason"}
    _print_run(folder, keys, "edgeformer export --allow-leak", as_json=as_json)


@app.command()
def gguf(
    path: Path = Argument(..., metavar="FILE.gguf", help="A Llama, Qwen2, Qwen3 or Nanbeige."),
    name: str | None = Option(None, help="Name of the run. Default: the file's name and a number."),
    tokenizer: Path | None = Option(None, metavar="FILE", help="tokenizer.json of the model. Default: the file's own."),
    data: Path | None = Option(None, metavar="DIR", help=f"{_TEXT_FOLDER} for golden inputs, WikiText-2 for scores."),
    unproven: _Unproven = False,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Import a language model from a GGUF file.

    Reads files in F32, F16, Q8_0, Q4_0 and Q4_1, and others that the package gguf can read. The weights become FP32, so
    that export can write them in any precision, as ONNX or as GGUF again. llama.cpp answers some forty texts with the
    file, if xllamacpp is installed: tokens must be equal, and logits within its rounding.

    Examples:
      edgeformer import gguf SmolLM2-135M-Instruct.Q4_1.gguf --name smollm
      edgeformer export smollm --int8 --int4 --gguf
    """
    with needs_extra("train", "importing a model"):
        from edgeformer.imports.language import import_gguf
        from edgeformer.imports.run import ImportOptions
    folder = import_gguf(path, ImportOptions(artifacts, name, tokenizer, data, unproven), opt.show_progress())
    _print_run(folder, _LANGUAGE_KEYS, f"edgeformer export {folder.name} --int8 --gguf", as_json=as_json)


@app.command("hf")
def hf(
    source: str = Argument(..., metavar="PATH|NAME", help="A Hugging Face model: a folder, or a name on the hub."),
    name: str | None = Option(None, help="Name of the run. Default: the model's name and a number."),
    data: Path | None = Option(
        None,
        metavar="FILE|DIR",
        help="Labelled data to score artifacts on: a file, or a folder with validation.tsv. Default: none.",
    ),
    labels: str | None = Option(
        None, metavar="A,B…", help="Names of the classes, in the order of the model. Default: the model's names."
    ),
    pooling: Literal["cls", "mean", "max"] | None = Option(
        None, metavar="cls|mean|max", help="Pooling of token states into one vector. Default: the model's, or mean."
    ),
    max_length: int | None = Option(
        None, metavar="N", help="Maximum length of a text in tokens. Default: the model's, at most 512."
    ),
    query_prompt: str | None = Option(
        None, metavar="TEXT", help="Embedding models: text in front of a query, e.g. 'query: '. Default: the model's."
    ),
    document_prompt: str | None = Option(
        None, metavar="TEXT", help="Embedding models: text in front of a document, e.g. 'passage: '."
    ),
    target: str | None = Option(None, metavar="PROFILE", help="Device profile that profile uses by default."),
    unproven: _Unproven = False,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Import a Hugging Face text encoder or language model.

    Supports BERT, DistilBERT, RoBERTa, XLM-R, ELECTRA, MiniLM, MPNet, DeBERTa-v3, ALBERT and ModernBERT, and the
    language models Llama, Qwen2, Qwen3 and Nanbeige. The task of an encoder follows from the model: classification or,
    with a single output, regression (cross-encoders); spans for a token classifier; embedding for a
    sentence-transformers folder or an encoder without a head. Reads safetensors only and never runs code of the model.

    Examples:
      edgeformer import hf path/to/all-MiniLM-L6-v2 --name minilm
      edgeformer export minilm --fp16 --int8
      edgeformer profile minilm --device raspberry-pi-5
    """
    with needs_extra("train", "importing a model"):
        from edgeformer.imports.encoder import HfOptions, import_hf
        from edgeformer.imports.language import import_causal_lm, is_language_model
        from edgeformer.imports.run import ImportOptions
    if is_language_model(source):
        given = {"--labels": labels, "--pooling": pooling, "--max-length": max_length, "--query-prompt": query_prompt}
        given |= {"--document-prompt": document_prompt, "--target": target}
        if unused := [flag for flag, value in given.items() if value is not None]:
            raise InputError(
                f"{', '.join(unused)}: {source} is a language model, which has no use for it; leave it out"
            )
        folder = import_causal_lm(source, ImportOptions(artifacts, name, None, data, unproven), opt.show_progress())
        _print_run(folder, _LANGUAGE_KEYS, f"edgeformer export {folder.name} --int8 --gguf", as_json=as_json)
        return
    class_names = tuple(label.strip() for label in labels.split(",")) if labels is not None else None
    options_of_prompts = {"query": query_prompt, "document": document_prompt}
    prompts = {kind: prompt for kind, prompt in options_of_prompts.items() if prompt}
    options = HfOptions(artifacts, name, data, class_names, pooling, max_length, target, prompts, unproven)
    folder = import_hf(source, options, opt.show_progress())
    keys = {"run", "task", "status", "parameters", "reason"}
    _print_run(folder, keys, f"edgeformer export {folder.name} --int8", as_json=as_json)


def _print_run(folder: Path, keys: set[str], following: str, *, as_json: bool) -> None:
    """Print an imported run; as JSON its path and the ``keys`` of its manifest."""
    from edgeformer.report.tables import run_table
    from edgeformer.run import read_run

    manifest = read_run(folder)
    if as_json:
        opt.print_json({"path": str(folder), **manifest.model_dump(mode="json", include=keys)})
        return
    opt.stdout().print(run_table(manifest))
    opt.say(f"run   {folder}\nnext  {following}")


@app.command("onnx")
def onnx(
    model: Path = Argument(..., metavar="MODEL.onnx", help="ONNX file. External weights must be in the same folder."),
    output: Path = Option(..., "--output", "-o", metavar="DIR", help="Folder to write the bundle to."),
    inputs: opt.Inputs = None,
    shape: opt.Shapes = None,
    value_range: opt.Ranges = None,
    seed: int = Option(0, min=0, help="Seed of random golden inputs."),
    tokenizer: Path | None = Option(
        None, metavar="FILE", help="tokenizer.json of the model; with --labels, the bundle is a text classifier."
    ),
    labels: str | None = Option(
        None, metavar="A,B…", help="Names of the classes, in the order of the logits, with commas between."
    ),
    data: Path | None = Option(
        None,
        metavar="FILE",
        help="Text classifiers: labelled texts for golden inputs and scores. Default: random tokens.",
    ),
    max_length: int | None = Option(
        None,
        min=4,
        help="Text classifiers: maximum length of a text in tokens. Default: as the graph and the tokenizer state.",
    ),
    unproven: bool = Option(
        False, "--unproven", help="Text classifiers: import although answers differ from ONNX Runtime's, and say so."
    ),
    replace: bool = Option(False, "--replace", help="Replace an existing bundle in DIR."),
    as_json: opt.Json = False,
) -> None:
    """Import an ONNX file as a [b]bundle[/b].

    Copies the graph bit for bit; verify, profile --choose and export then work as for trained models.

    Golden inputs come from --inputs (an array per input name) or are random: floats from a standard normal distribution
    or from a --range; integers need a --range, except token ids. Dimensions called batch or sequence may vary; all
    others need a --shape. With --tokenizer and --labels, a graph from input_ids to logits is a text classifier, whose
    answers to probe texts must be those of the tokenizer and ONNX Runtime alone; with --data its artifacts are judged
    by accuracy.

    Examples:
      edgeformer import onnx vad.onnx -o vad-bundle --shape input=1x512 --shape state=2x1x128 --range sr=16000
      edgeformer import onnx sentiment.onnx -o sentiment --tokenizer tokenizer.json --labels bad,good --data dev.tsv
    """
    from edgeformer.imports.onnx import import_onnx
    from edgeformer.report.tables import artifact_table

    names = tuple(name.strip() for name in labels.split(",")) if labels else ()
    of_text = {"tokenizer": tokenizer, "labels": names, "data": data, "max_length": max_length}
    of_text["unproven"] = unproven
    options = opt.onnx_options(shape, value_range, inputs, seed=seed, replace=replace, **of_text)
    bundle = import_onnx(model, output, options, opt.show_progress())
    if as_json:
        facts = bundle.model_dump(mode="json", include={"run", "task", "notes", "proof", "artifacts"})
        opt.print_json({"bundle": str(output), **facts})
        return
    opt.stdout().print(artifact_table(bundle))
    for note in bundle.notes:
        opt.say(f"note   {note}")
    opt.say(
        f"bundle {output}\nnext   edgeformer profile {output} --device host   (other devices: edgeformer list devices)"
    )
