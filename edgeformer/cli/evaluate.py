"""edgeformer evaluate: scores of artifacts on a labelled set or a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeformer.cli.options import Artifacts, Json, Run


def command(
    run: Run = None,
    artifact: Annotated[
        str | None,
        typer.Option(
            metavar="ID|all",
            help="Which artifact; [b]torch[/b] for the run's own weights. Default: all of the bundle.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        str, typer.Option(help="test (the protocol's own), validation, or a test set by name (e.g. sst-test).")
    ] = "test",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Score a labelled TSV, CSV, JSONL or Parquet file instead; a language model also scores plain text.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            min=1, help="Rows per batch; ms per sample depends on it. Fewer where logits would grow too large."
        ),
    ] = 64,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Score artifacts: accuracy, precision, recall, F1, loss, and ms per sample over the whole set.

    Of a language model: loss and perplexity per predicted token, with [b]--artifact torch[/b] at every exit.

    Works without torch on exported artifacts, and from a bundle alone when --data names a file.

    Examples:

      edgeformer evaluate

      edgeformer evaluate --artifact all --split sst-test

      edgeformer evaluate path/to/bundle --data reviews.tsv
    """
    from edgeformer.cli.console import print_json, stdout
    from edgeformer.cli.progress import show_progress
    from edgeformer.reporting.tables import evaluation_table
    from edgeformer.run import locate
    from edgeformer.stages.evaluating.evaluate import EvaluateOptions, evaluate

    location = locate(run, artifacts)
    cache = artifacts / ".cache" / "tokens" if location.run is not None else None
    rows = evaluate(location, EvaluateOptions(artifact, split, data, batch, cache), show_progress())
    if as_json:
        print_json({"rows": [row.model_dump(mode="json") for row in rows]})
    else:
        console = stdout()
        console.print(evaluation_table(location.name, rows))
        if any(row.leaks for row in rows):
            leaks = "leaks future tokens: this model sees what it is asked to predict, so these scores are void"
            console.print(f"[yellow]{leaks}[/yellow]", soft_wrap=True)
