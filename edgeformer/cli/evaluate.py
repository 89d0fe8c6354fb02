"""edgeformer evaluate: scores of artifacts on a labelled set or a text."""

from pathlib import Path

from typer import Option

from edgeformer.cli import options as opt


def command(
    run: opt.Run = None,
    artifact: str | None = Option(
        None, metavar="ID|all", help="Artifact to score; torch: the run's own weights. Default: all."
    ),
    split: str = Option("test", help="Set to score: test, validation, or the name of a test set (e.g. sst-test)."),
    data: Path | None = Option(
        None, metavar="FILE", help="File to score instead of --split: labelled rows; language models: plain text."
    ),
    batch: int = Option(64, min=1, help="Rows per batch; the time per sample depends on it."),
    threshold: float | None = Option(
        None, min=0.0, max=1.0, metavar="P", help="Also score early exit at this confidence, from 0 to 1."
    ),
    text: opt.TextColumn = None,
    label: opt.LabelColumn = None,
    pair: opt.PairColumn = None,
    encoding: opt.Encoding = None,
    runtime: opt.Runtime = None,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Score artifacts on a data set.

    Prints accuracy, precision, recall, F1, loss and time per sample; for a language model loss and perplexity per
    token. The run's own weights ([b]torch[/b]) and step artifacts (export --exit all) are scored at each exit and for a
    range of early-exit thresholds.

    Examples:
      edgeformer evaluate
      edgeformer evaluate --artifact all --split sst-test
      edgeformer evaluate path/to/bundle --data reviews.tsv --text comment --label stars
      edgeformer evaluate --artifact onnx-fp32-step --threshold 0.9
    """
    from edgeformer.inference.evaluate import EvaluateOptions, evaluate
    from edgeformer.report.tables import early_exit_table, evaluation_table

    location = opt.locate(run, artifacts)
    options = EvaluateOptions(artifact, split, data, batch, threshold, text, label, pair, runtime, encoding)
    evaluation = evaluate(location, options, opt.show_progress())
    if as_json:
        opt.print_json(evaluation)
        return
    console = opt.stdout()
    console.print(evaluation_table(location.name, location.open_model().task, evaluation.rows))
    if evaluation.early_exit:
        console.print(early_exit_table(location.name, evaluation.early_exit))
    if any(row.leaks for row in evaluation.rows):
        console.print(f"[yellow]{opt.LEAKS}[/yellow]", soft_wrap=True)
    if location.bundle is None:
        opt.say_next(f"edgeformer export {location.argument} --int8")
    else:
        opt.say_next(f"edgeformer profile {location.argument} --choose", "compares score, latency and size")
