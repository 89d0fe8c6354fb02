"""Command export: export a run as a bundle."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import typer
from typer import Option

from edgeformer.artifacts.errors import InputError, InterruptedRun, needs_extra
from edgeformer.cli import options as opt


def command(
    run: opt.Run = None,
    fp16: bool = Option(False, "--fp16", help="Also write FP16 graphs (half the size)."),
    int8: bool = Option(
        False,
        "--int8",
        help="Also write INT8 graphs (a quarter of the size); with the extra openvino installed also openvino-int8.",
    ),
    int4: bool = Option(False, "--int4", help="Also write graphs with 4-bit weights, which only ONNX Runtime opens."),
    trt: bool = Option(
        False, "--trt", help="Also build TensorRT engines for the target device, from FP16 graphs if --fp16 is set."
    ),
    trt_via: str = opt.advanced(
        "onnx", metavar="onnx|torch-tensorrt", help="With --trt: build from the ONNX graph, or with torch-tensorrt."
    ),
    gguf: bool = Option(
        False,
        "--gguf",
        help="Also write a language model (model.kind: decoder) as GGUF files for llama.cpp, in the same precisions.",
    ),
    litert: bool = Option(
        False, "--litert", help="Also write a text encoder as .tflite files for LiteRT: FP32, and INT8 with --int8."
    ),
    executorch: bool = Option(
        False, "--executorch", help="Also write programs for ExecuTorch on phones, in FP32 and, with --int8, in INT8."
    ),
    coreml: bool = Option(
        False, "--coreml", help="Also write Core ML models for Apple devices, in FP16 and, with --int8, in INT8."
    ),
    onnx_only: bool = opt.advanced(
        False, "--onnx-only", help="Write ONNX graphs alone: --int8 and --fp16 add no files of other runtimes."
    ),
    build: list[str] | None = opt.advanced(
        None, metavar="NAME", help="Also run this builder (edgeformer doctor lists them). May be repeated."
    ),
    exits: str | None = Option(
        None,
        "--exit",
        metavar="N|all",
        help="Also write a graph that stops after loop N; all: one for every exit, and the step artifact (below).",
    ),
    target: str | None = Option(None, help="With --trt: device profile to build for. Default: the recipe's target."),
    vocab_trim: bool = Option(
        False, "--vocab-trim", help="Also write graphs that keep only the tokens of the training text."
    ),
    vocab_keep: int | None = opt.advanced(
        None, min=0, metavar="N", help="With --vocab-trim: also keep the first N tokens of the vocabulary. Default: 0."
    ),
    vocab_max: int | None = opt.advanced(
        None, min=1, metavar="N", help="With --vocab-trim: keep only the N most frequent tokens. Default: all."
    ),
    replace: bool = Option(False, "--replace", help="Delete the existing bundle and write a new one."),
    keep_going: bool = opt.advanced(
        False, "--keep-going", help="Continue with the other artifacts after a rejected one."
    ),
    allow_leak: opt.AllowLeak = False,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Export a run as a [b]bundle[/b]: ONNX graphs, tokenizer, labels and golden inputs in one folder.

    Export always writes FP32 ONNX. It compares each artifact with torch FP32 on real inputs, scores it on the
    validation split, and counts the parameters stored in the file. An artifact that fails is rejected and left out
    (exit code 3); later artifacts are built only with --keep-going.

    Export keeps existing artifacts of the same model. If it would remove an artifact, it lists it, changes nothing and
    exits with code 2; --replace writes a new bundle.

    Looped models: --exit 2 writes a graph that stops after loop 2. --exit all adds the step artifact: separate graphs
    for embedding, one loop and head, so that the host can stop after any loop. A language model also gets a decode
    graph (one token per call), after a check that it does not see future tokens.

    For a bundle of [b]import onnx[/b], the reference is the imported graph.

    Examples:
      edgeformer export --fp16
      edgeformer export --fp16 --trt --target rtx4050
      edgeformer export recurrent_sst2_fast-001 --int8 --vocab-trim --json
    """
    from edgeformer.artifacts.documents import own_profiles
    from edgeformer.artifacts.files import whole
    from edgeformer.artifacts.workspace import BUNDLE_FOLDER

    # 1. The bundle to write, and the options
    location, progress = opt.locate(run, artifacts), opt.show_progress()
    is_graph_bundle = location.run is None and location.open_bundle().manifest.wrapped is not None
    folder = location.require_bundle() if is_graph_bundle else location.require_run() / BUNDLE_FOLDER
    if run is None:
        progress.message(f"Exporting {folder.parent}, the newest finished run")
    try:
        loops: tuple[int, ...] | Literal["all"]
        loops = "all" if exits == "all" else tuple(int(part) for part in exits.split(",")) if exits is not None else ()
    except ValueError:
        raise InputError(f"--exit {exits!r}: give the number of a loop, or all") from None
    # 2. Export
    with report_bundle_on_interrupt(folder):
        with needs_extra("train", "exporting"):
            from edgeformer.export.export import export
            from edgeformer.export.variants import ExportOptions
        flags = {"--gguf": gguf, "--litert": litert, "--executorch": executorch, "--coreml": coreml}
        options = ExportOptions(
            fp16=fp16, int8=int8, int4=int4, build=builder_names(trt, trt_via, build or [], flags), exits=loops,
            joining=not onnx_only, target=target, vocab_trim=vocab_trim, vocab_keep=vocab_keep, vocab_max=vocab_max,
            replace=replace, keep_going=keep_going, allow_leak=allow_leak, profiles=own_profiles(artifacts),
        )  # fmt: skip
        bundle = export(folder if is_graph_bundle else folder.parent, options, progress)
        from edgeformer.report.canvas import NO_PICTURE
        from edgeformer.report.plots import draw_bundle
        from edgeformer.report.tables import artifact_table

        picture = draw_bundle(bundle, (location.reports if is_graph_bundle else folder.parent / "plots") / "bundle.png")
    # 3. Print the result
    if as_json:
        facts = bundle.model_dump(mode="json", include={"leaks", "notes", "artifacts"})
        opt.print_json({"bundle": str(folder), **facts, "plot": str(picture) if picture is not None else None})
    else:
        console = opt.stdout()
        console.print(artifact_table(bundle))
        if bundle.leaks:
            console.print(f"[yellow]{opt.LEAKS}[/yellow]", soft_wrap=True)
        for note in bundle.notes:
            opt.say(f"note   {note}")
        if kept := [artifact.id for artifact in bundle.artifacts if artifact.kept]:
            opt.say(f"kept   {', '.join(kept)}   (of the previous export)")
        opt.say(f"bundle {folder}\nplot   {picture or NO_PICTURE}")
        name = folder if bundle.wrapped is not None else whole(folder).parent.name
        leak = " --allow-leak" if bundle.leaks else ""
        others = "" if bundle.target else "   (other devices: edgeformer list devices)"
        opt.say(f"next   edgeformer profile {name} --device {bundle.target or 'host'}{leak}{others}")
    # A kept artifact with a reason could not be built again; a kept one that is not built was not requested.
    failed = [a for a in bundle.artifacts if (a.reason is not None if a.status == "built" else not a.kept)]
    for artifact in failed:
        opt.say(f"{artifact.id}: {artifact.status}: {artifact.reason}", err=True)
    if failed:
        raise typer.Exit(3)


@contextmanager
def report_bundle_on_interrupt(bundle: Path) -> Iterator[None]:
    """Convert Ctrl-C, SIGTERM and a closed terminal into InterruptedRun with the state of the bundle."""
    from edgeformer.artifacts.files import sha256_of
    from edgeformer.artifacts.workspace import BUNDLE_FILE
    from edgeformer.system.signals import handle_signals

    file = bundle / BUNDLE_FILE
    previous = sha256_of(file) if file.is_file() else None
    try:
        with handle_signals(("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"), signal.default_int_handler):
            yield
    except KeyboardInterrupt:
        state = f"{bundle} is unchanged" if previous is not None else f"{bundle} was not written"
        if file.is_file() and sha256_of(file) != previous:
            state = f"{bundle} was already complete"
        raise InterruptedRun(f"interrupted; {state}") from None


def builder_names(trt: bool, via: str, names: list[str], flags: Mapping[str, bool]) -> tuple[str, ...]:
    """Return the builders selected by --trt, --trt-via, ``flags`` (flag → is set) and --build, each once.

    Raises InputError.
    """
    from edgeformer.artifacts.manifest import ONNX
    from edgeformer.runtimes import all_builders

    by_flag = {builder.flag: builder.name for builder in all_builders()}
    prefix = "--trt --trt-via "
    vias = {ONNX: None, **{flag.removeprefix(prefix): flag for flag in by_flag if flag.startswith(prefix)}}
    if via not in vias:
        raise InputError(f"--trt-via {via!r}: give {' or '.join(vias)}")
    if vias[via] is not None and not trt:
        raise InputError("--trt-via: has no effect without --trt; add --trt")
    # torch-tensorrt is built in addition to TensorRT's own engine, so that profile can compare the two.
    requested = (vias[via], "--trt" if trt else None, *(flag for flag, is_set in flags.items() if is_set))
    selected = [flag for flag in requested if flag is not None]
    return tuple(dict.fromkeys([*(by_flag[flag] for flag in selected), *names]))
